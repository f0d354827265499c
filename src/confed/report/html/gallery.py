"""HTML gallery of samples: a card per sample and method, and a table of all methods side by side."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from confed.report.html.answer_cards import AnswerCards
from confed.report.html.image_store import ImageStore
from confed.report.html.label_cards import LabelCards
from confed.report.html.page import Tabs, component
from confed.results.runs import StudyResults

Sample = Mapping[str, Any]
Cards = AnswerCards | LabelCards


def gallery(study: StudyResults, tabs: Tabs, store: ImageStore, *, labels: bool = False) -> str:
    """Cards of all samples, one tab per method, and first a table of all methods."""
    cards: Cards = LabelCards(store) if labels else AnswerCards(store)
    each: dict[str, list[list[Mapping[str, Any]]]] = {}
    for m in study.methods:
        each[m] = [[s for s in run.gallery() if cards.takes(s)] for run in study.of(m)]
    samples = {m: method_samples for m, runs in each.items() if (method_samples := next(filter(None, runs), None))}
    if not samples:
        return ""
    # Sounds are in the first panel.
    panels = [("All methods", _glance(cards, samples, study.labels))] if len(samples) > 1 else []
    again = "to be heard under “All methods”" if panels else "to be heard further up"
    panels += [
        (
            study.labels[m],
            component("cards", cards.style, [cards.card(s, again) for s in method_samples], template="gallery"),
        )
        for m, method_samples in samples.items()
    ]
    shown = cards.shown(study, samples) if len(panels) > 1 else 0
    return cards.introduction(list(chain.from_iterable(samples.values()))) + tabs(panels, shown)


def _glance(cards: Cards, samples: Mapping[str, Sequence[Sample]], labels: Mapping[str, str]) -> str:
    """A row per sample, a column per method."""
    keyed: dict[str, dict[tuple[str, ...], Mapping[str, Any]]] = {}
    for m, method_samples in samples.items():
        keyed[m] = {cards.key(sample): sample for sample in method_samples}
    rows: list[tuple[str, str, list[str]]] = []
    for key in dict.fromkeys(chain.from_iterable(keyed.values())):
        sample = next(method_samples[key] for method_samples in keyed.values() if key in method_samples)
        rows.append(
            (
                *cards.row(sample),
                [cards.cell(method_samples[key]) if key in method_samples else "" for method_samples in keyed.values()],
            )
        )
    heading = cards.heading(list(chain.from_iterable(samples.values())))
    return component("glance", heading, [labels[m] for m in keyed], rows, cards.note, template="gallery")
