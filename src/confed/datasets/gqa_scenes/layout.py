"""Format and digests of the prepared GQA files."""

import hashlib
from pathlib import Path
from typing import Any

FORMAT = "confed gqa-scenes 1"


def digest(file: Path) -> dict[str, Any]:
    """A file's size and SHA-256."""
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}
