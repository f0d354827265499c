"""Whether a model uses its input: its scores against those under control conditions, by a stratified sign-flip test.

A model that ignores pictures is right as often when every example is shown another one's picture. This module holds the
criterion by which tables and reports mark such models, and nothing else decides it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from confed.metrics.stratified import sign_flip

__all__ = ["LEVEL", "Verdict", "mean_over_places", "no_better", "verdict"]

LEVEL = 0.05
"""One-sided level of the test against permuted inputs, over all modalities that are permuted."""

Places = Mapping[str, np.ndarray]
"""Place -> one score per example, shape (N,)."""


@dataclass(frozen=True)
class Verdict:
    """Whether a model beats its controls.

    Attributes:
        passed: it does, or there was nothing to compare it with.
        p: control -> one-sided p-value against it.
        reasons: why it does not, each the end of a sentence.
    """

    passed: bool
    p: Mapping[str, float]
    reasons: tuple[str, ...]


def verdict(
    right: Places,
    permuted: Mapping[str, Places],
    floors: Mapping[str, Places],
    decisive: Sequence[str] = (),
    level: float = LEVEL,
) -> Verdict:
    """Whether a model answers better with its own inputs than with others', and than without any.

    It does not pass if no decisive control has a p-value of :func:`no_better` up to ``level`` divided by the number of
    decisive controls (Bonferroni), or if its mean over places is not above the largest of the floors' means over the
    same places.

    Args:
        right: scores with the examples' own inputs.
        permuted: control -> scores with the inputs of other examples, in the same order.
        floors: answers that look at nothing, or at the question only -> their scores.
        decisive: which of ``permuted`` decide; all if empty.
        level: of the test.
    """
    p = {name: no_better(right, scores) for name, scores in permuted.items() if scores}
    chosen = [name for name in decisive if name in p] or list(p)
    reasons: list[str] = []
    if chosen and min(p[name] for name in chosen) > level / len(chosen):
        smallest = min(chosen, key=lambda name: p[name])
        reasons.append(f"no better than with {_words(smallest)} (one-sided p = {p[smallest]:.2g})")
    means = {name: mean_over_places(scores) for name, scores in floors.items() if scores.keys() >= right.keys()}
    if means and right:
        best = max(means, key=lambda name: means[name])
        own = mean_over_places(right)
        if own <= means[best]:
            reasons.append(f"no better than {_words(best)} ({100 * own:.1f} % against {100 * means[best]:.1f} %)")
    return Verdict(not reasons, p, tuple(reasons))


def no_better(a: Places, b: Places) -> float:
    """One-sided p-value against ``a`` being no better than ``b`` on the same examples, as a mean over places.

    Half of the two-sided p-value of :func:`confed.metrics.stratified.sign_flip`, whose distribution is symmetric, where
    ``a`` is better; 1 where it is level, and the rest to 1 where it is worse.

    Args:
        a: place -> scores.
        b: the same examples' other scores; places that it lacks are left out.

    Raises:
        ValueError: a place has another number of examples in ``b``, or the two have no place in common.
    """
    strata: list[np.ndarray] = []
    for place in a:
        if place not in b:
            continue
        x, y = (np.asarray(scores[place], dtype=np.float64) for scores in (a, b))
        if x.shape != y.shape:
            raise ValueError(f"{place!r} must have as many examples in both, got {len(x)} and {len(y)}")
        strata += [(x - y)[None]] if len(x) else []
    if not strata:
        raise ValueError(f"the scores must have a place with examples in common, got {sorted(a)} and {sorted(b)}")
    found = sign_flip(strata)
    if found.difference > 0:
        return found.p / 2
    return 1 - found.p / 2 if found.difference < 0 else 1.0


def mean_over_places(scores: Places) -> float:
    """The mean over places of the means of their examples; places without examples are left out; NaN without any."""
    means = [float(np.mean(own)) for own in scores.values() if len(own)]
    return sum(means) / len(means) if means else float("nan")


def _words(name: str) -> str:
    """A control as a sentence names it."""
    known = {"constant": "the most frequent training answer", "words": "an answer from the question's words alone"}
    kind, _, modality = name.partition("_")
    things = {"image": "pictures", "text": "texts", "audio": "sounds", "series": "sensor values"}
    return known.get(name) or f"{kind} {things.get(modality, modality)}"
