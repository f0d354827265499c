"""The states of labels in label-mask training, and which of them a global model takes back.

A label's state is -1 unknown, 0 known to be absent, 1 known to be present. Lanchantin, Wang, Ordonez and Qi, "General
multi-label image classification with transformers" (C-Tran, CVPR 2021), train with a random part of the labels known;
FedLGT's client-aware masked label embedding (CA-MLE) sets those back to unknown of which the global model is unsure.
"""

import math

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

UNKNOWN = -1  # the state of a label that the model is not told

# The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
# in two's complement: int64 products wrap around, equally on every device.
_STEP, _MIX_1, _MIX_2 = (v - (1 << 64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def label_states(
    labels: Shaped[Tensor, "B C"], index: Int[Tensor, "B"], key: int, at_most: float = 0.75
) -> Int8[Tensor, "B C"]:
    """States for label-mask training: a random number of each example's labels is known, which ones is random too.

    The number is uniform in {0, ..., floor(at_most C)}, the labels a uniform subset of that size (C-Tran's
    training). Counter-based: an example's row is a function of ``key``, its number and C alone, whatever batch it is
    in, on every device. ``key`` carries the rest, such as ``derive(seed, round, client, f"label states/{epoch}")`` of
    :mod:`confed.federation.randomness`, or a number drawn from the generator that an epoch's order comes from.

    Args:
        labels: 0 or 1, shape (B, C).
        index: the examples' numbers, int64, shape (B,).
        key: the random stream, at least 0 and below 2^63.
        at_most: the largest share of known labels, in [0, 1].

    Returns:
        -1 unknown, else the label itself, int8, shape (B, C).

    A wrong shape, or a key or share outside its range, is a ValueError.
    """
    number, rank = _draw(labels, index, key, at_most)
    # The upper 31 bits times the number of choices: no choice is likelier than another by more than 2^-31.
    number = (number * (math.floor(at_most * labels.shape[1]) + 1)) >> 31
    return labels.to(torch.int8).where(rank < number.unsqueeze(1), UNKNOWN)


def share_of_states(
    labels: Shaped[Tensor, "B C"], index: Int[Tensor, "B"], key: int, share: float
) -> Int8[Tensor, "B C"]:
    """States where the same number of labels of each example is known, floor(share C), a uniform subset.

    C-Tran's inference with known labels. Counter-based as :func:`label_states`: with a larger share of the same key,
    what was known before is known still.

    Args:
        labels: 0 or 1, shape (B, C).
        index: the examples' numbers, int64, shape (B,).
        key: the random stream, at least 0 and below 2^63.
        share: of the labels, in [0, 1].

    Returns:
        -1 unknown, else the label itself, int8, shape (B, C).

    Faulty arguments are a ValueError as for :func:`label_states`.
    """
    _, rank = _draw(labels, index, key, share)
    return labels.to(torch.int8).where(rank < math.floor(share * labels.shape[1]), UNKNOWN)


def uncertain(probabilities: Float[Tensor, "*any"], tau: float = 0.5, eps: float = 0.02) -> Bool[Tensor, "*any"]:
    """Which labels CA-MLE sets to unknown: those whose probability is in [tau - eps, tau + eps].

    Args:
        probabilities: the global model's, with all labels unknown, any shape.
        tau: the threshold between absent and present.
        eps: the margin around it.

    Raises:
        ValueError: tau is not in [0, 1], or eps is negative.
    """
    if not 0 <= tau <= 1:
        raise ValueError(f"tau must lie in [0, 1], got {tau}")
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    # In double precision: in single precision 0.48 itself would be rounded.
    wide = probabilities.double()
    return (wide >= tau - eps) & (wide <= tau + eps)


def _draw(labels: Tensor, index: Tensor, key: int, share: float) -> tuple[Tensor, Tensor]:
    """31 random bits per example (B,), and a random order of its labels (B, C): each label's place in it."""
    if labels.ndim != 2 or index.shape != labels.shape[:1]:
        raise ValueError(
            f"labels and index must have the shapes (B, C) and (B,), got {tuple(labels.shape)} and {tuple(index.shape)}"
        )
    if not 0 <= share <= 1:
        raise ValueError(f"the share of known labels must lie in [0, 1], got {share}")
    if not 0 <= key < 1 << 63:
        raise ValueError(f"key must lie in [0, 2^63), got {key}")
    c = labels.shape[1]
    example = _mixed(_mixed(index.long() + 1) + key)
    draws = _mixed(example.unsqueeze(1) + torch.arange(c + 1, device=labels.device))
    order = draws[:, 1:].argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(c, device=labels.device).expand_as(order))
    return _shifted(draws[:, 0], 33), rank


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64's output for counters, int64 in and out."""
    x = values * _STEP
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros; int64 itself would fill with the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
