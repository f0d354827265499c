"""Multi-label metrics: average precision, precision, recall and F1, per class and overall.

N examples, C classes; an entry is one class of one example. With tp_c true positives, n_c predicted positives and m_c
positives of class c at a threshold on the probability:

- C-P = mean_c tp_c / n_c, C-R = mean_c tp_c / m_c, C-F1 = 2 C-P C-R / (C-P + C-R): the harmonic mean of the two means,
  not the mean of the classes' F1;
- O-P = sum_c tp_c / sum_c n_c, O-R = sum_c tp_c / sum_c m_c, O-F1 likewise, over all entries at once;
- C-AP = mean_c AP_c, and O-AP is the AP of all entries as one class, where

      AP = sum_t (R_t - R_{t-1}) P_t

  over the distinct scores t from the largest down, P_t and R_t counting entries whose score is at least t. This is the
  non-interpolated form (Zhu, "Recall, precision and average precision", 2004), and scikit-learn's.

These are the conventions of FedLGT's released evaluation, which follows Lanchantin et al., "General multi-label image
classification with transformers" (CVPR 2021); :data:`Undefined` says what becomes of classes without positives.
FLAIR's own benchmark (Song et al., "FLAIR: Federated learning annotated image repository", NeurIPS 2022) uses the same
F1 but takes AP from counts at 200 thresholds: :mod:`confed.metrics.binned_precision`. Such counts add up over
batches, clients and processes; exact AP needs all scores in one place.

A ``mask`` (N, C) restricts everything to the entries where it is true: those whose label the model was not told.
All results are fractions in [0, 1].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Float64, Int64, Integer, Shaped

from confed.metrics.label_arrays import BLOCK, Array, arrays, blocks, ratio, wide

Undefined = Literal["zero", "omit"]
"""Classes without positives count as 0 in every mean over classes ("zero", as in scikit-learn and FLAIR's benchmark),
or are left out of every such mean ("omit"). A class with positives that is never predicted has precision 0 in both."""


@dataclass(frozen=True)
class LabelCounts:
    """Counts for precision and recall per class; those of disjoint examples add up.

    Attributes:
        true_positives: entries that are predicted and positive, int64, shape (C,).
        predicted: entries that are predicted, int64, shape (C,).
        positives: entries that are positive, int64, shape (C,).
    """

    true_positives: Int64[np.ndarray, "C"]
    predicted: Int64[np.ndarray, "C"]
    positives: Int64[np.ndarray, "C"]

    def __add__(self, other: "LabelCounts") -> "LabelCounts":
        """The counts of both sets of examples."""
        hits, predicted = self.true_positives + other.true_positives, self.predicted + other.predicted
        return LabelCounts(hits, predicted, self.positives + other.positives)

    @property
    def precision(self) -> Float64[np.ndarray, "C"]:
        """Share of a class's predictions that are right, 0 without predictions, shape (C,)."""
        return ratio(self.true_positives, self.predicted)

    @property
    def recall(self) -> Float64[np.ndarray, "C"]:
        """Share of a class's positives that are found, 0 without positives, shape (C,)."""
        return ratio(self.true_positives, self.positives)

    @property
    def f1(self) -> Float64[np.ndarray, "C"]:
        """F1 of each class, 0 with neither predictions nor positives, shape (C,)."""
        return ratio(2 * self.true_positives, self.predicted + self.positives)

    def summary(self, undefined: Undefined = "zero") -> dict[str, float]:
        """``C-P``, ``C-R``, ``C-F1``, ``O-P``, ``O-R`` and ``O-F1``; what has nothing to count is 0."""
        per_class = [mean_over_classes(values, self.positives, undefined) for values in (self.precision, self.recall)]
        hits = self.true_positives.sum()
        overall = [float(ratio(hits, counts.sum())) for counts in (self.predicted, self.positives)]
        result: dict[str, float] = {}
        for kind, (p, r) in (("C", per_class), ("O", overall)):
            for name, value in (("P", p), ("R", r), ("F1", float(ratio(2 * p * r, p + r)))):
                result[f"{kind}-{name}"] = value
        return result


def mean_over_classes(
    values: Float[np.ndarray, "C"], positives: Integer[np.ndarray, "C"], undefined: Undefined = "zero"
) -> float:
    """Mean over classes of one value per class."""
    if undefined not in get_args(Undefined):
        raise ValueError(f"undefined must be one of {', '.join(get_args(Undefined))}, got {undefined!r}")
    if undefined == "omit":
        counted = values[positives > 0]
        return float(counted.mean()) if len(counted) else 0.0
    return float(np.where(positives > 0, values, 0.0).mean())


def label_counts(
    probabilities: Shaped[Array, "N C"],
    truth: Shaped[Array, "N C"],
    mask: Shaped[Array, "N C"] | None = None,
    *,
    threshold: float = 0.5,
    top: int | None = None,
    strict: bool = False,
) -> LabelCounts:
    """Counts of predictions at a threshold; with ``strict`` only above it, as FLAIR's benchmark has it.

    With ``top`` an entry must also be among its example's largest probabilities, all that tie with the last of them
    included (the top-3 metrics of COCO and Visual Genome).
    """
    scores, positive, counted = arrays(probabilities, truth, mask)
    n, c = scores.shape
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    total = LabelCounts(*(np.zeros(c, np.int64) for _ in range(3)))
    for rows in blocks(n, c):
        values, real = wide(scores[rows]), positive[rows].astype(bool)
        if np.isnan(values).any():
            raise ValueError("probabilities must be numbers, got NaN")
        inside = None if counted is None else counted[rows].astype(bool)
        predicted = values > threshold if strict else values >= threshold
        if inside is not None:
            predicted, real, values = predicted & inside, real & inside, np.where(inside, values, -np.inf)
        if top is not None and top < c:
            predicted &= values >= np.partition(values, c - top, axis=1)[:, c - top, None]
        total += LabelCounts(*(x.sum(0, dtype=np.int64) for x in (predicted & real, predicted, real)))
    return total


def class_average_precision(
    scores: Shaped[Array, "N C"], truth: Shaped[Array, "N C"], mask: Shaped[Array, "N C"] | None = None
) -> Float64[np.ndarray, "C"]:
    """Average precision (AP) of every class; NaN for one without positives among the entries that count."""
    values, positive, counted = arrays(scores, truth, mask)
    n, c = values.shape
    result = np.empty(c)
    # A class is a column; columns are read in blocks, since one alone would touch a cache line per entry.
    for columns in blocks(c, n):
        block, real = wide(values[:, columns].T), positive[:, columns].T.astype(bool)
        inside = None if counted is None else counted[:, columns].T.astype(bool)
        for i, (column, hit) in enumerate(zip(block, real, strict=True)):
            rows = slice(None) if inside is None else inside[i]
            result[columns.start + i] = _average_precision(column[rows], hit[rows])
    return result


def overall_average_precision(
    scores: Shaped[Array, "N C"], truth: Shaped[Array, "N C"], mask: Shaped[Array, "N C"] | None = None
) -> float:
    """Average precision (AP) of all entries as one class; otherwise as :func:`class_average_precision`.

    Exact: all scores are sorted once, in a copy of their own size. 0 without positives.
    """
    values, positive, counted = arrays(scores, truth, mask)
    flat, hits = values.reshape(-1), positive.reshape(-1).astype(bool, copy=False)
    if counted is not None:
        entries = counted.reshape(-1).astype(bool, copy=False)
        flat, hits = flat[entries], hits[entries]
    precision = _average_precision(wide(flat), hits)
    return 0.0 if np.isnan(precision) else precision


def multilabel_metrics(
    probabilities: Shaped[Array, "N C"],
    truth: Shaped[Array, "N C"],
    mask: Shaped[Array, "N C"] | None = None,
    *,
    threshold: float = 0.5,
    top: int | None = None,
    undefined: Undefined = "zero",
) -> dict[str, float]:
    """``C-AP``, ``C-P``, ``C-R``, ``C-F1``, ``O-AP``, ``O-P``, ``O-R`` and ``O-F1``.

    FedLGT's released evaluation is ``undefined="zero"`` without a mask. Where it knows some labels it takes the mean AP
    over the classes that have positives among the unknown entries (``undefined="omit"`` with a mask) but everything
    else over all entries; here the mask holds for all eight.
    """
    counts = label_counts(probabilities, truth, mask, threshold=threshold, top=top)
    values = counts.summary(undefined)
    per_class = class_average_precision(probabilities, truth, mask)
    values["C-AP"] = mean_over_classes(per_class, counts.positives, undefined)
    values["O-AP"] = overall_average_precision(probabilities, truth, mask)
    return in_order(values)


def in_order(values: Mapping[str, float]) -> dict[str, float]:
    """The eight metrics in the order of tables."""
    return {name: values[name] for name in map("-".join, product("CO", ("AP", "P", "R", "F1")))}


def _average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """AP of scores (M,), NaN without positives.

    A threshold at which k positives lie raises recall by k over the number of positives, so that AP is the mean over
    the positives of the precision at their own scores: only they have to be looked up among the sorted scores.
    """
    hits = np.sort(scores[positive])
    ranked = np.sort(scores)
    if len(ranked) and np.isnan(ranked[-1]):
        raise ValueError("scores must be numbers, got NaN")
    if not len(hits):
        return float("nan")
    total = 0.0
    for start in range(0, len(hits), BLOCK):
        block_hits = hits[start : start + BLOCK]
        above = len(hits) - np.searchsorted(hits, block_hits)
        total += float((above / (len(ranked) - np.searchsorted(ranked, block_hits))).sum())
    return total / len(hits)
