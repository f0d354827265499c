r"""ROC curve of an attack's scores, with intervals that keep records of one picture together.

    AUC = P(score(member) > score(other)) + 1/2 P(score(member) = score(other)),

and the share of members above the threshold that at most a share f of the others exceeds (Carlini, Chien, Nasr, Song,
Terzis and Tramèr 2022, "Membership inference attacks from first principles", section III). Intervals and the standard
error are of a bootstrap over groups, such as all questions about one picture.
"""

from dataclasses import dataclass

import numpy as np

from confed.federation.randomness import derive

DRAWS = 400


@dataclass(frozen=True)
class Scored:
    """Scores of records and the group of each, both (N,)."""

    scores: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Curve:
    """Figures of an attack; interval ends are 2.5 % and 97.5 % of bootstrap draws."""

    auc: float
    auc_low: float
    auc_high: float
    p: float  # one-sided, of an AUC of 1/2, by the bootstrap's standard error
    rates: dict[float, tuple[float, float, float]]  # false positives -> true positives, low, high


def auc_of(members: np.ndarray, others: np.ndarray) -> float:
    """Area under the ROC curve, ties counted half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, members, "left")
    level = np.searchsorted(ordered, members, "right") - below
    return float((below + level / 2).mean() / len(others))


def rate_at(members: np.ndarray, others: np.ndarray, share: float) -> float:
    """True positives where at most a share of the others is named wrongly."""
    allowed = int(share * len(others))
    threshold = np.sort(others)[::-1][allowed]
    return float((members > threshold).mean())


def curve_of(members: Scored, others: Scored, seed: int = 0) -> Curve:
    """An attack's figures; a rate is given where the others allow at least one false positive."""
    from scipy.stats import norm

    for name, sample in (("members", members), ("others", others)):
        if len(sample.scores) < 2 or not np.isfinite(sample.scores).all():
            raise ValueError(f"{name} must have at least two finite scores, got {len(sample.scores)}")
    rng = np.random.default_rng(derive(seed, 0, "", "bootstrap of a curve"))
    shares = [share for share in (0.01, 0.001) if share * len(others.scores) >= 1]
    draws: list[list[float]] = []
    for drawn_members, drawn_others in zip(_draws(members, rng), _draws(others, rng), strict=True):
        rates = [rate_at(drawn_members, drawn_others, share) for share in shares]
        draws.append([auc_of(drawn_members, drawn_others), *rates])
    low, high = np.quantile(np.array(draws), [0.025, 0.975], axis=0)
    auc = auc_of(members.scores, others.scores)
    error = max(float(np.std([draw[0] for draw in draws])), 1e-12)
    rates = {
        share: (rate_at(members.scores, others.scores, share), float(low[number]), float(high[number]))
        for number, share in enumerate(shares, 1)
    }
    return Curve(auc, float(low[0]), float(high[0]), float(norm.sf((auc - 0.5) / error)), rates)


def _draws(sample: Scored, rng: np.random.Generator) -> list[np.ndarray]:
    """Bootstrap samples of whole groups."""
    order = np.argsort(sample.groups, kind="stable")
    _, starts = np.unique(sample.groups[order], return_index=True)
    of_group = np.split(sample.scores[order], starts[1:])
    samples: list[np.ndarray] = []
    for _ in range(DRAWS):
        chosen = rng.integers(len(of_group), size=len(of_group))
        samples.append(np.concatenate([of_group[number] for number in chosen]))
    return samples
