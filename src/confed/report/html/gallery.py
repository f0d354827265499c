"""HTML gallery of samples: a card per sample and method, and a table of all methods side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from confed.report.html.answer_cards import AnswerCards
from confed.report.html.image_store import ImageStore
from confed.report.html.label_cards import LabelCards
from confed.report.html.page import Tabs, component
from confed.results.runs import Study

Sample = Mapping[str, Any]
Cards = AnswerCards | LabelCards


def gallery(study: Study, tabs: Tabs, store: ImageStore, *, labels: bool = False) -> str:
    """Cards of all samples, one tab per method, and first a table of all methods."""
    cards: Cards = LabelCards(store) if labels else AnswerCards(store)
    each = {m: [[s for s in run.gallery() if cards.takes(s)] for run in study.of(m)] for m in study.methods}
    samples = {m: found for m, runs in each.items() if (found := next(filter(None, runs), None))}
    if not samples:
        return ""
    # Sounds are in the first panel.
    panels = [("All methods", _glance(cards, samples, study.labels))] if len(samples) > 1 else []
    again = "to be heard under “All methods”" if panels else "to be heard further up"
    panels += [
        (study.labels[m], component("cards", cards.style, [cards.card(s, again) for s in found], template="gallery"))
        for m, found in samples.items()
    ]
    shown = cards.shown(study, samples) if len(panels) > 1 else 0
    return cards.introduction([s for found in samples.values() for s in found]) + tabs(panels, shown)


def _glance(cards: Cards, samples: Mapping[str, Sequence[Sample]], labels: Mapping[str, str]) -> str:
    """A row per sample, a column per method."""
    keyed = {m: {cards.key(sample): sample for sample in found} for m, found in samples.items()}
    rows: list[tuple[str, str, list[str]]] = []
    for key in dict.fromkeys(key for found in keyed.values() for key in found):
        sample = next(found[key] for found in keyed.values() if key in found)
        rows.append((*cards.row(sample), [cards.cell(found[key]) if key in found else "" for found in keyed.values()]))
    heading = cards.heading([sample for found in samples.values() for sample in found])
    return component("glance", heading, [labels[m] for m in keyed], rows, cards.note, template="gallery")
