"""Records: what one run of one method measured, in the form that comparisons take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Examples:
    """Test examples of one place, a row each, in any order.

    Attributes:
        scores: the measure's score of each example, float64, shape (N,); of an outcome that is no mean what its
            ``combine`` reads, (N,) or (N, K).
        names: hashes of their names, int64, shape (N,), by which examples of two runs are paired; None where unknown.
        truth: positions of the right answers, int64, shape (N,); None where they were not kept.
        answers: hashes of the right answers' texts, int64, shape (N,); None where they were not kept.
    """

    scores: np.ndarray
    names: np.ndarray | None = None
    truth: np.ndarray | None = None
    answers: np.ndarray | None = None


@dataclass(frozen=True)
class Resampled:
    """A value of all test examples together that is no mean of scores, and the same of every bootstrap resample.

    Attributes:
        values: shape (R,); two runs with the same ``test_set`` have the same draws.
        examples: number of test examples.
        test_set: digest of the examples' right answers.
        names: digest of the examples' names in order; empty where unknown.
        members: digest of the sorted names.
    """

    value: float
    values: np.ndarray
    examples: int
    test_set: int
    names: bytes = b""
    members: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """A number that methods are compared by.

    Attributes:
        words: its name as people read it.
        is_mean: whether it is the mean over places of means over their examples.
        combine: where it is the mean over places of something else: scores of a place's examples -> its value. Without,
            what is no mean is of all examples together, and records have it resampled.
        is_share: whether it is a share, so that differences within a margin of points are tested to be none. Values in
            another unit are given in hundredths of it.
    """

    words: str
    is_mean: bool = True
    combine: Callable[[np.ndarray], float] | None = None
    is_share: bool = True


@dataclass(frozen=True)
class Role:
    """What a method is among others.

    Attributes:
        reference: rank among the methods that others are compared with, from 1; 0 for none.
        bound: whether it is a bound on what the others could reach, which is not ranked.
        alone: whether every client trains alone.
        trainable: which part of the model is trained.
        algorithm: name of the algorithm; the row that is called so stands for it.
    """

    reference: int = 0
    bound: bool = False
    alone: bool = False
    trainable: str = ""
    algorithm: str = ""


def nothing(measure: str) -> None:
    """What a record without resampled values has."""


@dataclass(frozen=True, eq=False)
class Record:
    """What one run of one method measured.

    Attributes:
        examples: measure -> place -> its test examples; may be read when it is asked for.
        values: measure -> value; where none are given, the means over places.
        places: measure -> place -> value; where none are given, the means of the examples' scores.
        resampled: measure -> its resampled values, where it is no mean over places.
        label: the method's name as people write it.
        metrics: place -> name of the headline metric.
        several: whether places have several metrics.
        data: settings of the data, where they are known.
        reordered: whether rows of examples stand in another order for another seed.
        order: places in the order of tables.
        clients: the clients that took part.
        blind: measure -> whether its model was not shown to use its input; without those where that was not tried.
        are_strict: whether all scores of the headline metric are 0 or 1; by default of all measures.
    """

    method: str
    seed: int = 0
    examples: Mapping[str, Mapping[str, Examples]] = field(default_factory=dict[str, Mapping[str, Examples]])
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    places: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    resampled: Callable[[str], Resampled | None] = nothing
    label: str = ""
    role: Role = Role()
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    several: bool = False
    data: Mapping[str, Any] | None = None
    reordered: bool = False
    order: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    blind: Mapping[str, bool] = field(default_factory=dict[str, bool])
    are_strict: Callable[[], bool] | None = None

    def of_places(self, measure: str) -> Mapping[str, float]:
        """Place -> value."""
        if self.places:
            return self.places.get(measure, {})
        examples = self.examples.get(measure, {})
        return {place: float(rows.scores.mean()) for place, rows in examples.items() if len(rows.scores)}

    def value(self, measure: str) -> float | None:
        """The measure's value; None where it has none."""
        if self.values:
            return self.values.get(measure)
        places = self.of_places(measure)
        return sum(places.values()) / len(places) if places else None

    def strict(self) -> bool:
        """Whether all scores of test examples are known and 0 or 1."""
        if self.are_strict is not None:
            return self.are_strict()
        every = list(chain.from_iterable(places.values() for places in self.examples.values()))
        return bool(every) and all(bool(np.isin(rows.scores, (0, 1)).all()) for rows in every)


Methods = Mapping[str, Mapping[int, Record]]  # method -> seed -> record


def distinct_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Method -> its name as people write it; methods that share one are told apart by their keys."""
    names = list(labels.values())
    distinct: dict[str, str] = {}
    for method, label in labels.items():
        distinct[method] = label if names.count(label) == 1 or label == method else f"{label} ({method})"
    return distinct
