"""Processor, instruction set and library versions of a run, and one instruction set for several machines.

Sums of floating-point numbers depend on how many are added at a time, so that the same run differs in its last digits
between AVX2 and AVX-512. The environment variable ``CONFED_CPU`` (``default``, ``avx2`` or ``avx512``) makes PyTorch,
MKL and oneDNN use one of them on every machine that has it; they read it once, when PyTorch is imported.
"""

import os
import platform
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

CHOICES: Mapping[str, Mapping[str, str]] = {
    "default": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
}  # fmt: skip
"""Value of ``CONFED_CPU`` -> what the libraries are told."""

VARIABLE = "CONFED_CPU"


def pin(environment: MutableMapping[str, str] | None = None) -> None:
    """Instruction set that ``CONFED_CPU`` allows the libraries; settings made by hand stay."""
    environment = os.environ if environment is None else environment
    for name, value in CHOICES.get(environment.get(VARIABLE, "").lower(), {}).items():
        environment.setdefault(name, value)


def check_pinned() -> None:
    """Check that the instruction set of ``CONFED_CPU`` is the one in use."""
    wanted = os.environ.get(VARIABLE, "").lower()
    if not wanted:
        return
    if wanted not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {wanted[:40]!r}")
    used = _instructions()
    if used.lower() != wanted:
        raise ValueError(
            f"{VARIABLE}={wanted}, and PyTorch uses {used}: the processor lacks these instructions, or torch was "
            "imported before confed; set the variable before Python starts"
        )


def machine() -> dict[str, str]:
    """Description of all that decides the last digits of a run: processor, instruction set and system."""
    return {"processor": _processor(), "instructions": _instructions(), "system": platform.system()}


def machine_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Differences of two runs' machines and libraries in what decides the last digits."""
    differences: dict[str, str] = {}
    for section, names in (
        ("machine", ("instructions", "system")),
        ("versions", ("torch", "transformers", "tokenizers")),
    ):
        mine, other = before.get(section), now.get(section)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            for name in names:
                one, two = mine.get(name), other.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                if one is not None and two is not None and one != two:
                    differences[name] = f"{one}, not {two}"
    return differences


def _instructions() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if "torch" not in sys.modules:
    pin()
