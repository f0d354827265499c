"""Measured speed of actors, and which calls a slow one should leave to faster ones."""

import heapq
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from confed.federation.messages import Call
from confed.system.packages import code_digest, version
from confed.system.processor import machine
from confed.system.release import VERSION

# Fingerprints of processes: versions that must agree ----------------------------------------------------------

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
"""Libraries whose versions must be the same in all processes of a run."""

HARDWARE = ("processor", "instructions", "system", "threads", "device")
"""What may differ; numbers then need not be those of one process, to the last digit."""


def fingerprint(threads: int) -> dict[str, str]:
    """Versions and hardware of this process."""
    import torch

    facts = {"confed": VERSION, "source": code_digest()[:16], "python": platform.python_version()}
    facts |= {name: version(name) for name in LIBRARIES}
    # Of PyTorch the build too: those for CUDA and for processors have the same version number.
    facts["torch"] = str(torch.__version__)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {**facts, **machine(), "threads": str(threads), "device": device}


def version_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Difference of versions with which two processes cannot work on one run; empty if there is none."""
    for name in ("confed", *LIBRARIES):
        if ours[name] != theirs.get(name):
            return f"has {name} {theirs.get(name)}, this process {ours[name]}"
    if ours["source"] != theirs.get("source"):
        return f"has confed {theirs['confed']} with other source files than this process"
    return ""


def hardware_differences(processes: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """What differs between processes in ways that last digits depend on: name -> the different values."""
    differences: dict[str, list[str]] = {}
    for name in HARDWARE:
        values = list(dict.fromkeys(process.get(name, "") for process in processes))
        if len(values) > 1:
            differences[name] = values
    return differences


# Measured speed of actors -------------------------------------------------------------------------------------

_RECENT = 0.3  # weight of the newest measurement in the running mean


@dataclass
class Pace:
    """Seconds that an actor takes per example, action by action, as a running mean."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def note(self, call: Call, seconds: float) -> None:
        now, before = seconds / max(call.client.num_examples, 1), self.seconds.get(call.action)
        self.seconds[call.action] = now if before is None else (1 - _RECENT) * before + _RECENT * now

    def of(self, call: Call) -> float | None:
        """Seconds that a call will take; None if the action was not measured yet."""
        pace = self.seconds.get(call.action)
        return None if pace is None else pace * max(call.client.num_examples, 1)


def better_left(
    mine: Pace, waiting: Sequence[Call], others: Mapping[int, Pace], busy_until: Mapping[int, float]
) -> bool:
    """Whether a free actor should leave the first waiting call to others, as all would be done earlier without it."""
    if not busy_until or len(waiting) > len(others):
        return False
    first = mine.of(waiting[0])
    paces: dict[int, list[float]] = {}
    for number, pace in others.items():
        seconds = [pace.of(call) for call in waiting]
        paces[number] = [value for value in seconds if value is not None]
        if len(paces[number]) < len(seconds):
            return False
    if first is None:
        return False
    without = _makespan(paces, busy_until, range(len(waiting)))
    return without < max(first, _makespan(paces, busy_until, range(1, len(waiting))))


def _makespan(seconds: Mapping[int, Sequence[float]], busy_until: Mapping[int, float], calls: Sequence[int]) -> float:
    """Seconds until calls are done, each given to the actor that is free first."""
    free = [(busy_until.get(number, 0.0), number) for number in seconds]
    heapq.heapify(free)
    end = 0.0
    for call in calls:
        at, number = heapq.heappop(free)
        end = max(end, at + seconds[number][call])
        heapq.heappush(free, (at + seconds[number][call], number))
    return end
