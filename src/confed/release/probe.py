"""Form of every probe: what the attacker knows, what is measured with intervals, and whether it applies to a run."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from confed.analysis.case import Case
from confed.metrics.stratified import flip_interval, sign_flip
from confed.report.figures.style import Drawing


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval."""

    name: str  # as programs read it
    title: str
    value: float
    low: float | None = None  # 95 % interval
    high: float | None = None
    chance: float | None = None  # of an attacker who sees nothing of the run
    p: float | None = None  # one-sided, against chance; None where nothing is tested
    count: int = 0  # what it is a figure of: records, sites or classes
    limit: str = ""  # field of Release that it is held against
    weak: bool = False  # whether the attack is so weak that a figure within its limit settles nothing


@dataclass(frozen=True)
class Finding:
    """What a probe found; notes say what the figures show and what they do not."""

    measures: Sequence[Estimate]
    notes: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()


@dataclass(frozen=True)
class Probe:
    """An attack on a run."""

    name: str
    title: str
    attacker: str  # what the attacker knows, a sentence
    excluded: Callable[[Case], str]  # why it has nothing to attack in this run; "" where it has
    seconds: Callable[[Case], float]  # what it will take at least
    look: Callable[[Case, float], Finding]  # the attack, within so many seconds


@cache
def probes() -> tuple[Probe, ...]:
    """All probes, in the order of their modules."""
    package = importlib.import_module("confed.release.probes")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(importlib.import_module(f"{package.__name__}.{name}").PROBE for name in names)


def mean_estimate(name: str, title: str, values: Sequence[float], limit: str = "") -> Estimate:
    """Mean of differences from an attacker who sees nothing, with an interval and a one-sided test by sign flips."""
    strata = [np.asarray(values, dtype=np.float64)[None]]
    interval, test = flip_interval(strata), sign_flip(strata)
    p = test.p / 2 if test.difference > 0 else 1 - test.p / 2
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return Estimate(name, title, test.difference, low, high, 0.0, p, len(values), limit)
