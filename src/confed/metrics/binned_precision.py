"""Average precision of labels from counts per bin of probability, which add up over batches, clients and processes.

Of FLAIR's benchmark (Song et al., "FLAIR: Federated learning annotated image repository", NeurIPS 2022), which takes
200 thresholds. Terms and shapes are those of :mod:`confed.metrics.multilabel`, whose average precision needs all scores
in one place.
"""

import numpy as np
from jaxtyping import Float64, Int, Int64, Shaped

from confed.metrics.label_arrays import Array, arrays, blocks, ratio, wide
from confed.metrics.multilabel import in_order, label_counts


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
