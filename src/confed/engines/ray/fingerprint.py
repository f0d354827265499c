"""Fingerprints of processes: versions that must agree, and hardware on which the last digits depend."""

import platform
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from confed.system.processor import machine
from confed.system.release import VERSION

__all__ = ["LIBRARIES", "fingerprint", "hardware_differences", "version_difference"]

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
"""Libraries whose versions must be the same in all processes of a run."""

HARDWARE = ("processor", "instructions", "system", "threads", "device")
"""What may differ; numbers then need not be those of one process, to the last digit."""


def fingerprint(threads: int) -> dict[str, str]:
    """Versions and hardware of this process.

    Args:
        threads: with which it computes.
    """
    import torch

    found = {"confed": VERSION, "source": _source(), "python": platform.python_version()}
    found |= {name: version(name) for name in LIBRARIES}
    # Of PyTorch the build too: those for CUDA and for processors have the same version number.
    found["torch"] = str(torch.__version__)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {**found, **machine(), "threads": str(threads), "device": device}


def version_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Difference of versions with which two processes cannot work on one run; empty if there is none.

    Args:
        ours: fingerprint of the process that asks.
        theirs: of an actor.
    """
    for name in ("confed", *LIBRARIES):
        if ours[name] != theirs.get(name):
            return f"has {name} {theirs.get(name)}, this process {ours[name]}"
    if ours["source"] != theirs.get("source"):
        return f"has confed {theirs['confed']} with other source files than this process"
    return ""


def hardware_differences(found: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """What differs between processes in ways that last digits depend on: name -> the different values.

    Args:
        found: their fingerprints.
    """
    values = {name: list(dict.fromkeys(one.get(name, "") for one in found)) for name in HARDWARE}
    return {name: different for name, different in values.items() if len(different) > 1}


def _source() -> str:
    """Digest of the package's source files: a checkout changes without its version."""
    root, digest = Path(__file__).parents[2], sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
