"""Bayes accuracy of readers that see each fact of an example through modalities that err independently."""

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

__all__ = ["bayes_ceilings"]


def bayes_ceilings(
    errors: Mapping[str, np.ndarray], owned: Mapping[str, Sequence[str]], shares: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Accuracy of the most probable answer at each place, by enumeration of all that can be told.

    A picture or a sound tells each of F binary facts wrongly with its error rate e; a caption leaves its word out with
    rate 2e. With P the places' probabilities of the 2^F answers a and o what is told of all facts, the accuracy is

        sum over o of max over a of P(a) p(o | a),    p(o | a) = product over facts f of p(o_f | a_f).

    Args:
        errors: modality -> e of every fact, (F,).
        owned: place -> the modalities that it has.
        shares: place -> P, (2^F,), the first fact being the most significant bit.

    Returns:
        Place -> accuracy in [0, 1].
    """
    return {place: _ceiling([_told(name, errors[name]) for name in owned[place]], shares[place]) for place in owned}


def _told(modality: str, errors: np.ndarray) -> np.ndarray:
    """Probability of what one modality tells, by fact and its value, (F, 2, outcomes)."""
    right, none = 1 - errors, np.zeros_like(errors)
    if modality == "text":
        right = 1 - 2 * errors
        values = [[right, none, 2 * errors], [none, right, 2 * errors]]
    else:
        values = [[right, errors], [errors, right]]
    return np.moveaxis(np.array(values), 2, 0)


def _ceiling(told: Sequence[np.ndarray], shares: np.ndarray) -> float:
    """The sum of the formula above for one place.

    Args:
        told: of each of its modalities (F, 2, outcomes).
        shares: P, (2^F,).
    """
    facts = len(told[0])
    # What all modalities tell of one fact together, (2, outcomes); outcomes with equal ratios are one.
    joint = [_merged(reduce(_both, (each[fact] for each in told))) for fact in range(facts)]
    # p(o | a) for all pairs of answers and outcomes, built fact by fact: (2^F, outcomes).
    likelihood = reduce(np.kron, joint)
    return float((np.asarray(shares, np.float64)[:, None] * likelihood).max(axis=0).sum())


def _both(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Probabilities of pairs of independent outcomes, (2, outcomes of the one times those of the other)."""
    return (one[:, :, None] * other[:, None, :]).reshape(2, -1)


def _merged(outcomes: np.ndarray) -> np.ndarray:
    """Outcomes that say the same about a fact as one, so that there are few; impossible ones left out."""
    total = outcomes.sum(axis=0)
    possible = outcomes[:, total > 0]
    ratio = np.round(possible[0] / possible.sum(axis=0), 12)
    return np.stack([possible[:, ratio == value].sum(axis=1) for value in np.unique(ratio)], axis=1)
