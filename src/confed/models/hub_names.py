"""Distinction of hub names from local paths, which prevents requests to a hub for a missing folder.

``owner/name`` is a name on the Hugging Face hub only if both parts are such names, nothing of it ends like a file, and
``owner`` is neither a folder here nor a usual name of one (``weights/mistyped`` is a path). ``hub:owner/name`` is
always one.
"""

import re
from pathlib import Path

__all__ = ["FOLDERS", "hub_name"]

FOLDERS = frozenset(
    ["checkpoint", "checkpoints", "data", "export", "exports", "model", "models", "out", "output", "pretrained", "runs",
     "tmp", "weights"]
)  # fmt: skip
"""Names that people give to folders: what begins with one of them is a path."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILES = (".safetensors", ".json", ".txt", ".bin", ".pt", ".pth", ".tar", ".zip", ".h5", ".npz", ".toml")


def hub_name(source: Path | str, *, short: bool = False) -> str | None:
    """The name on the hub that is meant, without the prefix ``hub:``; None where it is a path.

    Args:
        source: what a recipe gives.
        short: whether names without an owner, such as ``bert-base-uncased``, are meant too.
    """
    name = str(source)
    if name.startswith("hub:"):
        parts = name.removeprefix("hub:").split("/")
        return "/".join(parts) if len(parts) <= 2 and all(map(_PART.fullmatch, parts)) else None
    parts = name.split("/")
    if isinstance(source, Path) or not (len(parts) == 2 or (short and len(parts) == 1)):
        return None
    if not all(map(_PART.fullmatch, parts)) or name.lower().endswith(_FILES) or Path(name).exists():
        return None
    return None if len(parts) == 2 and (parts[0].lower() in FOLDERS or Path(parts[0]).is_dir()) else name
