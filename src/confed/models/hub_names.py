"""Distinction of hub names from local paths, which prevents requests to a hub for a missing folder.

``owner/name`` is a name on the Hugging Face hub only if both parts are such names, nothing of it ends like a file, and
``owner`` is neither a folder here nor a usual name of one (``weights/mistyped`` is a path). ``hub:owner/name`` is
always one.
"""

import re
from pathlib import Path

FOLDERS = frozenset(
    ["checkpoint", "checkpoints", "data", "export", "exports", "model", "models", "out", "output", "pretrained", "runs",
     "tmp", "weights"]
)  # fmt: skip
"""Names that people give to folders: what begins with one of them is a path."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILES = (".safetensors", ".json", ".txt", ".bin", ".pt", ".pth", ".tar", ".zip", ".h5", ".npz", ".toml")


def hub_name(source: Path | str, *, short: bool = False) -> str | None:
    """The name on the hub that is meant, without the prefix ``hub:``; None where it is a path."""
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


# Commit that a name on the Hugging Face hub stands for now ----------------------------------------------------


def commit_of(source: str) -> str:
    """The commit, 40 hex digits, of a hub name's default branch, from the hub or from what was fetched before."""
    name = hub_name(source)
    if name is None:
        return ""
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        return extract_commit_hash(cached_file(name, "config.json"), None) or ""
    except OSError:
        return ""


def gated(source: str, error: BaseException) -> str:
    """What to do about a model whose licence was not accepted; empty where the error is about something else."""
    from huggingface_hub.errors import GatedRepoError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GatedRepoError):
        cause = cause.__cause__
    if cause is None:
        return ""
    return (
        f"the model {source!r} is gated: accept its licence at https://huggingface.co/{hub_name(source)} and log in "
        "with `hf auth login`, or give a folder that has its files"
    )
