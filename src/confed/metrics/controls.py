"""Test of whether a model uses its input: stratified sign-flip test against control conditions.

Models of multi-label data are judged by their mean average precision (C-AP) and a paired bootstrap over examples.

A model that ignores pictures is right as often when every example is shown another one's picture. This module holds the
criterion by which tables and reports mark such models, and nothing else decides it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from confed.metrics.label_resampling import resampled_class_precision
from confed.metrics.multilabel import Undefined, class_average_precision, mean_over_classes
from confed.metrics.stratified import sign_flip

LEVEL = 0.05
"""One-sided level of the test against permuted inputs, over all modalities that are permuted."""

_RESAMPLES = 200
"""Of C-AP under each permuted control: enough for a level of 5 %, and seconds on thousands of examples."""

Places = Mapping[str, np.ndarray]
"""Place -> one score per example, shape (N,)."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a model against its control conditions."""

    passed: bool  # it does, or there was nothing to compare it with
    p: Mapping[str, float]  # control -> one-sided p-value against it
    reasons: tuple[str, ...]  # why it does not, each the end of a sentence


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
    """
    p = {name: no_better(right, scores) for name, scores in permuted.items() if scores}
    reasons = _against_permuted(p, decisive, level)
    means = {name: mean_over_places(scores) for name, scores in floors.items() if scores.keys() >= right.keys()}
    if means and right:
        best = max(means, key=lambda name: means[name])
        accuracy = mean_over_places(right)
        if accuracy <= means[best]:
            reasons.append(f"no better than {_words(best)} ({100 * accuracy:.1f} % against {100 * means[best]:.1f} %)")
    return Verdict(not reasons, p, tuple(reasons))


@dataclass(frozen=True)
class LabelVerdict(Verdict):
    """Whether a multi-label model beats its controls, and C-AP under every condition."""

    values: Mapping[str, float]  # condition -> C-AP; first "right"


def label_verdict(
    right: Float[np.ndarray, "N C"],
    conditions: Mapping[str, Float[np.ndarray, "N C"]],
    truth: Shaped[np.ndarray, "N C"],
    undefined: Undefined = "zero",
    decisive: Sequence[str] = (),
    level: float = LEVEL,
) -> LabelVerdict:
    """Whether a model sorts examples by their labels better with its own inputs than with others', and than a constant.

    As :func:`verdict`, of C-AP over all examples together. A threshold has no part in it: probabilities that sort well
    count although none reaches one half. The one-sided p-value against a permuted control is the share of bootstrap
    resamples of the examples, the same for both, in which own inputs are no better; one is added to both counts.
    """
    positives = (truth != 0).sum(0)
    values = {
        name: mean_over_classes(class_average_precision(scores, truth), positives, undefined)
        for name, scores in {"right": right, **conditions}.items()
    }
    permuted = [name for name in conditions if name.startswith("permuted_")]
    p: dict[str, float] = {}
    if permuted and len(truth):
        precision = resampled_class_precision(right, truth, undefined, _RESAMPLES)
        for name in permuted:
            other = resampled_class_precision(conditions[name], truth, undefined, _RESAMPLES)
            # Without a positive example both are 0 in every resample: level is no better.
            p[name] = float((1 + (precision <= other).sum()) / (1 + len(precision)))
    reasons = _against_permuted(p, decisive, level)
    if "constant" in values and values["right"] <= values["constant"]:
        both = f"C-AP {100 * values['right']:.1f} % against {100 * values['constant']:.1f} %"
        reasons.append(f"no better than {_words('constant')} ({both})")
    return LabelVerdict(not reasons, p, tuple(reasons), values)


def _against_permuted(p: Mapping[str, float], decisive: Sequence[str], level: float) -> list[str]:
    """Why a model is no better than with permuted inputs, where it is not; Bonferroni over those that decide."""
    chosen = [name for name in decisive if name in p] or list(p)
    if not chosen or min(p[name] for name in chosen) <= level / len(chosen):
        return []
    smallest = min(chosen, key=lambda name: p[name])
    return [f"not better by more than chance than with {_words(smallest)} (one-sided p = {p[smallest]:.2g})"]


def no_better(a: Places, b: Places) -> float:
    """One-sided p-value against ``a`` being no better than ``b`` on the same examples, as a mean over places.

    Half of the two-sided p-value of :func:`confed.metrics.stratified.sign_flip`, whose distribution is symmetric, where
    ``a`` is better; 1 where it is level, and the rest to 1 where it is worse.
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
    test = sign_flip(strata)
    if test.difference > 0:
        return test.p / 2
    return 1 - test.p / 2 if test.difference < 0 else 1.0


def mean_over_places(scores: Places) -> float:
    """The mean over places of the means of their examples; places without examples are left out; NaN without any."""
    means = [float(np.mean(place_scores)) for place_scores in scores.values() if len(place_scores)]
    return sum(means) / len(means) if means else float("nan")


def _words(name: str) -> str:
    """A control as a sentence names it."""
    description_of = {
        "constant": "the most frequent training answer",
        "words": "an answer from the question's words alone",
    }
    kind, _, modality = name.partition("_")
    things = {"image": "pictures", "text": "texts", "audio": "sounds", "series": "sensor values"}
    return description_of.get(name) or f"{kind} {things.get(modality, modality)}"
