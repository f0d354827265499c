"""What all benchmarks share: the machine, side-by-side timing, and one line of JSON."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """Processor, cores and versions, so that a figure can be placed."""
    model = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def side_by_side(
    plain: Callable[[], object],
    ours: Callable[[], object],
    repeats: int = 5,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Times both in turn, after one warm-up each.

    Args:
        plain: the yardstick.
        ours: what is measured.
        repeats: how often each is timed.
        clock: processor time by default: on a busy machine it varies less than wall-clock time.

    Returns:
        The median of each, seconds, and the median of the paired ratios with its range.
    """
    plain(), ours()
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        a = clock()
        plain()
        b = clock()
        ours()
        times.append((b - a, clock() - b))
    ratios = sorted(o / p for p, o in times)
    return {
        "plain_seconds": statistics.median(p for p, _ in times),
        "ours_seconds": statistics.median(o for _, o in times),
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def finish(name: str, target: float, **figures: Any) -> None:
    """Prints a benchmark's result: JSON with ``--json``, else readable lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    arguments, _ = parser.parse_known_args()
    result = {"name": name, "target": target, **figures, "machine": machine()}
    if "ratio" in figures:
        result["met"] = figures["ratio"] <= target
    if arguments.json:
        # Strict JSON has no infinity: no target is null.
        plain = {
            k: None if v == float("inf") else round(v, 4) if isinstance(v, float) else v for k, v in result.items()
        }
        print(json.dumps(plain))
        return
    for key, value in result.items():
        print(f"{key:>22}: {value:.4g}" if isinstance(value, float) else f"{key:>22}: {value}")
