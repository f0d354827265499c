r"""ROC curve of an attack's scores, with intervals that keep records of one picture together.

    AUC = P(score(member) > score(other)) + 1/2 P(score(member) = score(other)),

and the share of members above the threshold that at most a share f of the others exceeds (Carlini, Chien, Nasr, Song,
Terzis and Tramèr 2022, "Membership inference attacks from first principles", section III). Intervals and the standard
error are of a bootstrap over groups, such as all questions about one picture.
"""

from dataclasses import dataclass

import numpy as np

from confed.federation.randomness import derive
from confed.privacy.membership import auc_of

DRAWS = 400


@dataclass(frozen=True)
class Scored:
    """Scores of records and the group of each, both (N,)."""

    scores: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Curve:
    """Figures of an attack, each with the ends of its interval, 2.5 % and 97.5 % of bootstrap draws."""

    auc: tuple[float, float, float]
    p: float  # one-sided, of an AUC of 1/2, by the bootstrap's standard error
    rates: dict[float, tuple[float, float, float]]  # by share of false positives, where at least one is allowed


def rate_at(members: np.ndarray, others: np.ndarray, share: float) -> float:
    """True positives where at most a share of the others is named wrongly."""
    threshold = np.sort(others)[::-1][int(share * len(others))]
    return float((members > threshold).mean())


def curve_of(members: Scored, others: Scored, seed: int = 0) -> Curve:
    """An attack's figures."""
    from scipy.stats import norm

    if min(len(members.scores), len(others.scores)) < 2:
        raise ValueError(f"an attack needs two members and two others, got {len(members.scores)}, {len(others.scores)}")
    rng = np.random.default_rng(derive(seed, 0, "", "bootstrap of a curve"))
    shares = [share for share in (0.01, 0.001) if share * len(others.scores) >= 1]

    def figures(drawn: np.ndarray, drawn_others: np.ndarray) -> list[float]:
        return [auc_of(drawn, drawn_others), *(rate_at(drawn, drawn_others, share) for share in shares)]

    draws = np.array([figures(*pair) for pair in zip(_draws(members, rng), _draws(others, rng), strict=True)])
    low, high = np.quantile(draws, [0.025, 0.975], axis=0).tolist()
    values = figures(members.scores, others.scores)
    triples = list(zip(values, low, high, strict=True))
    p = float(norm.sf((values[0] - 0.5) / max(float(draws[:, 0].std()), 1e-12)))
    return Curve(triples[0], p, dict(zip(shares, triples[1:], strict=True)))


def _draws(sample: Scored, rng: np.random.Generator) -> list[np.ndarray]:
    """Bootstrap samples of whole groups."""
    order = np.argsort(sample.groups, kind="stable")
    _, starts = np.unique(sample.groups[order], return_index=True)
    of_group = np.split(sample.scores[order], starts[1:])
    samples: list[np.ndarray] = []
    for numbers in rng.integers(len(of_group), size=(DRAWS, len(of_group))):
        samples.append(np.concatenate([of_group[number] for number in numbers]))
    return samples
