"""Paired tests between finished models on new data: sign flips within places and their interval, corrected by Holm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from confed.metrics.statistics import holm
from confed.metrics.stratified import flip_interval, sign_flip
from confed.report.tables.control_marks import SIGN
from confed.results.records import is_blind
from confed.results.summary import Summary
from confed.results.views import View

_NAMED = 5
"""Places that a note names."""


@dataclass(frozen=True)
class Tried:
    """One model on one place's test examples.

    Attributes:
        run: the run's folder, as it was given.
        place: client or unseen place of the new data.
        metric: name of the headline metric.
        correct: each example's score, float32 (N,).
        prediction: what was answered, as the run's predictions have it.
        names: hashes of the examples' names, int64 (N,).
        truth: positions of the right answers, -1 for one that the model cannot give, int64 (N,); None of labels.
    """

    run: str
    model: str
    place: str
    metric: str
    values: Mapping[str, float]
    correct: Tensor
    prediction: Tensor
    names: Tensor
    truth: Tensor | None


Pairs = Sequence[tuple[Sequence[Tried], Sequence[Tried]]]


def by_model(tried: Sequence[Tried]) -> dict[str, list[Tried]]:
    """Results in groups of one model, in order."""
    tried_by_model: dict[str, list[Tried]] = {}
    for one in tried:
        tried_by_model.setdefault(one.model, []).append(one)
    return tried_by_model


def comparable_pairs(tried: Sequence[Tried]) -> int:
    """The number of pairs of models, of all runs, that a test could compare: the family of tests of an evaluation."""
    groups: dict[tuple[str, str], list[Tried]] = {}
    for one in tried:
        groups.setdefault((one.run, one.model), []).append(one)
    return sum(bool(_common(a, b)) for a, b in combinations(groups.values(), 2))


def corrected_tests(tests: Sequence[Mapping[str, Any]], family: int) -> list[dict[str, Any]]:
    """The tests with ``p_holm`` beside ``p``, corrected for the choice of the smallest of a family of so many."""
    adjusted = holm({str(i): test["p"] for i, test in enumerate(tests)}, tests=family).adjusted if tests else {}
    return [{**test, "p_holm": adjusted[str(i)]} for i, test in enumerate(tests)]


def blind_notes(summaries: tuple[Summary, Summary], models: Sequence[str]) -> list[str]:
    """A warning where, in both runs, models of a kind did not beat their controls on the runs' own data."""
    views = {View.SEEN if model == "global" else View.PERSONAL for model in models}
    notes: list[str] = []
    for view in sorted(views):
        if all(is_blind(summary, view) for summary in summaries):
            why = "neither model is shown to use its input (their own controls); their difference says little"
            notes.append(f"{SIGN} The {view.evaluated} models of the two runs: {why}")
    return notes


def _unpaired(a: "Tried", b: "Tried") -> str:
    """Why two models' scores at a place are no pairs; "" where they are."""
    if a.metric != b.metric:
        return f"the metrics differ ({a.metric}, not {b.metric})"
    if not len(a.names) or not len(b.names):
        return "a model saw only some of the examples"
    return "" if a.names.equal(b.names) else "the examples differ"


def left_out(pairs: Pairs) -> list[str]:
    """Notes on places and on whole pairs of models that are in no test."""
    notes: list[str] = []
    apart = 0
    for a, b in pairs:
        other = {t.place: t for t in b}
        common = [(t, other[t.place]) for t in a if t.place in other]
        apart += not common
        why = {x.place: text for x, y in common if (text := _unpaired(x, y))}
        for text in sorted({*why.values()}):
            places = [place for place, reason in why.items() if reason == text]
            more = f" and {len(places) - _NAMED} more places" if len(places) > _NAMED else ""
            names = " and ".join(_pair_names(a, b))
            notes.append(f"{names} are not compared on {', '.join(map(repr, places[:_NAMED]))}{more}: {text}")
    if apart:
        notes.append(f"{apart} of {len(pairs)} pairs of models have no place in common and are not compared")
    return notes


def _pair_names(a: Sequence[Tried], b: Sequence[Tried]) -> list[str]:
    return [f"{t.model} of {t.run}" if a[0].run != b[0].run else t.model for t in (a[0], b[0])]


def _common(a: Sequence[Tried], b: Sequence[Tried]) -> list[tuple[Tried, Tried]]:
    """Results of two models on the places where both have the same examples."""
    other = {t.place: t for t in b}
    return [(t, other[t.place]) for t in a if t.place in other and not _unpaired(t, other[t.place])]


def paired_test(a: Sequence[Tried], b: Sequence[Tried]) -> dict[str, Any]:
    """One model against another on the places that both were tried on; empty without any."""
    pairs = _common(a, b)
    if not pairs:
        return {}
    strata = [(x.correct.double() - y.correct.double()).numpy()[None] for x, y in pairs]
    interval, signs = flip_interval(strata), sign_flip(strata)
    names = _pair_names(a, b)
    return {
        "a": names[0], "b": names[1], "places": [x.place for x, _ in pairs], "difference": signs.difference,
        "low": interval and interval.low, "high": interval and interval.high, "p": signs.p, "won": signs.won,
        "lost": signs.lost,
    }  # fmt: skip
