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
F1 but takes AP from counts at 200 thresholds: :mod:`confed.metrics.multilabel`. Such counts add up over
batches, clients and processes; exact AP needs all scores in one place.

A ``mask`` (N, C) restricts everything to the entries where it is true: those whose label the model was not told.
All results are fractions in [0, 1].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Float64, Int, Int64, Integer, Shaped
from torch import Tensor

# Scores and labels as NumPy arrays, which metrics read block by block -----------------------------------------

Array = np.ndarray | Tensor
"""A NumPy array, or a tensor of any precision on any device."""

BLOCK = 1 << 22
"""Entries handled at once: 16 MiB in single precision."""


def arrays(
    scores: Array, truth: Array, mask: Array | None, dimensions: int = 2
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """All three as NumPy arrays of one shape, without copies where possible."""
    first, second = _array(scores), _array(truth)
    third = None if mask is None else _array(mask)
    if first.ndim != dimensions or not first.shape[-1]:
        shape = "(N, C)" if dimensions == 2 else "(N,)"
        raise ValueError(f"scores must have shape {shape} and not be empty, got {first.shape}")
    for name, other in (("truth", second), ("mask", third)):
        if other is not None and other.shape != first.shape:
            raise ValueError(f"{name} must have the shape of the scores, {first.shape}, got {other.shape}")
    return first, second, third


def _array(values: Array) -> np.ndarray:
    if isinstance(values, Tensor):
        host = values.detach().cpu()
        # NumPy has no bfloat16; whatever is below single precision is exact in it.
        return (host.float() if host.is_floating_point() and host.dtype.itemsize < 4 else host).numpy()
    return np.asarray(values)


def wide(values: np.ndarray) -> np.ndarray:
    """In single precision at least, contiguous."""
    is_wide = values.dtype in (np.float32, np.float64)
    return np.ascontiguousarray(values if is_wide else values.astype(np.float32 if values.itemsize < 4 else np.float64))


def blocks(count: int, width: int) -> Iterator[slice]:
    """Slices of at most :data:`BLOCK` entries each, at least one row."""
    step = max(1, BLOCK // max(width, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def ratio(share: np.ndarray | np.integer | float, whole: np.ndarray | np.integer | float) -> np.ndarray:
    """Ratio of share and whole in double precision, 0 where whole is 0."""
    a, b = np.broadcast_arrays(np.asarray(share, np.float64), np.asarray(whole, np.float64))
    return np.divide(a, b, out=np.zeros(a.shape), where=b != 0)


Undefined = Literal["zero", "omit"]
"""Classes without positives count as 0 in every mean over classes ("zero", as in scikit-learn and FLAIR's benchmark),
or are left out of every such mean ("omit"). A class with positives that is never predicted has precision 0 in both."""


@dataclass(frozen=True)
class LabelCounts:
    """Counts for precision and recall per class; those of disjoint examples add up."""

    true_positives: Int64[np.ndarray, "C"]  # entries that are predicted and positive, int64, shape (C,)
    predicted: Int64[np.ndarray, "C"]  # entries that are predicted, int64, shape (C,)
    positives: Int64[np.ndarray, "C"]  # entries that are positive, int64, shape (C,)

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


# Average precision from counts per bin of probability (FLAIR's benchmark, Song et al., NeurIPS 2022) ----------


def bin_counts(
    probabilities: Shaped[Array, "N C"],
    truth: Shaped[Array, "N C"],
    mask: Shaped[Array, "N C"] | None = None,
    *,
    thresholds: int = 200,
) -> Int64[np.ndarray, "2 C {thresholds}-1"]:
    """Entries per bin of probability, for AP from counts that add up.

    The T thresholds are one below 0, then i / (T - 1) for i = 1 .. T - 2, then one above 1. Bin i holds the
    probabilities in (i / (T - 1), (i + 1) / (T - 1)], and 0 lies in bin 0: an entry is predicted where its probability
    is above the threshold.
    """
    scores, positive, counted = arrays(probabilities, truth, mask)
    if thresholds < 2:
        raise ValueError(f"thresholds must be at least 2, got {thresholds}")
    n, c = scores.shape
    bins = thresholds - 1
    result = np.zeros((2, c * bins), np.int64)
    offset = np.arange(c, dtype=np.int64) * bins
    for rows in blocks(n, c):
        values = wide(scores[rows])
        outside = values[~((values >= 0) & (values <= 1))]
        if len(outside):
            raise ValueError(f"probabilities must lie in [0, 1], got {outside[0]}")
        place = np.maximum(np.ceil(values * values.dtype.type(bins)).astype(np.int64) - 1, 0) + offset
        real = positive[rows].astype(bool)
        if counted is not None:
            inside = counted[rows].astype(bool)
            place, real = place[inside], real[inside]
        result[0] += np.bincount(place.reshape(-1), minlength=c * bins)
        result[1] += np.bincount(place[real], minlength=c * bins)
    return result.reshape(2, c, bins)


def binned_average_precision(bins: Int[np.ndarray, "2 C bins"]) -> Float64[np.ndarray, "C"]:
    """AP from counts, as FLAIR's benchmark takes it.

    With precision P_i and recall R_i at threshold i, ``AP = sum_i (R_i - R_{i+1}) P_i``; 0 where undefined. Scores that
    share a bin are as if equal, so that it is exact where no two distinct scores do.
    """
    if bins.ndim != 3 or len(bins) != 2:
        raise ValueError(f"bins must have shape (2, C, T - 1), got {bins.shape}")
    predicted, hits = bins[:, :, ::-1].cumsum(2)[:, :, ::-1]
    recall = ratio(bins[1], hits[:, :1])  # R_i - R_{i+1}: the share of the positives in bin i
    return (recall * ratio(hits, predicted)).sum(1)


def flair_metrics(
    probabilities: Shaped[Array, "N C"],
    truth: Shaped[Array, "N C"],
    mask: Shaped[Array, "N C"] | None = None,
    *,
    thresholds: int = 200,
) -> dict[str, float]:
    """The eight metrics as FLAIR's benchmark takes them.

    AP is that of :func:`binned_average_precision`; an entry is predicted where its probability is above one half;
    every class counts, those without positives with 0.
    """
    bins = bin_counts(probabilities, truth, mask, thresholds=thresholds)
    values = label_counts(probabilities, truth, mask, strict=True).summary("zero")
    values["C-AP"] = float(binned_average_precision(bins).mean())
    values["O-AP"] = float(binned_average_precision(bins.sum(1, keepdims=True))[0])
    return in_order(values)
