"""Settings of keeping features of frozen layers, and counts of what that saved."""

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FeatureCounts", "FeatureSettings"]


@dataclass(frozen=True)
class FeatureSettings:
    """How features of frozen layers are kept.

    Attributes:
        memory: bytes in the memory of one process.
        folder: cache folder on disk; None for memory alone.
        disk: bytes that the cache folder may hold.
        tolerance: relative difference between features from batches of different sizes that counts as none.
    """

    memory: int
    folder: Path | None = None
    disk: int = 0
    tolerance: float = 0.0


@dataclass
class FeatureCounts:
    """What was computed and what was saved, by one process.

    Attributes:
        stage: the last frozen stage; empty where nothing is kept.
        computed: examples that went through the frozen stages.
        reused: examples that did not have to.
        held: bytes in memory.
        exact: whether all that was used had the very bits that would have been computed.
        difference: largest relative difference that was accepted.
        reason: why nothing is kept, or no longer.
        notes: what was found on the way.
    """

    stage: str = ""
    computed: int = 0
    reused: int = 0
    held: int = 0
    exact: bool = True
    difference: float = 0.0
    reason: str = ""
    notes: list[str] = field(default_factory=list[str])
