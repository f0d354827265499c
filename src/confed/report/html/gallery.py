"""HTML gallery of samples: a card per sample and method, and a table of all methods side by side.

Cards are of questions with the models' answers and attention maps, of pictures with their captions, or of examples with
labels and the attention of each label. What a card says is read here; how it looks is in ``templates/gallery.html``.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from confed.report.html.media import ImageStore, attention_overlay, modalities_line, player, read, series_plot
from confed.report.html.page import Tabs, component
from confed.results.runs import StudyResults
from confed.results.summary import number

Sample = Mapping[str, Any]  # an entry of `gallery.json`
Card = dict[str, Any]

_STRIP = 6  # labels whose attention is drawn below an example


def gallery(study: StudyResults, tabs: Tabs, store: ImageStore, *, labels: bool = False) -> str:
    """Cards of all samples, one tab per method, and first a table of all methods."""
    card_of = _labelled if labels else _asked
    cards: dict[str, list[Card]] = {}
    for run in study.runs:
        if run.method not in cards and (samples := [sample for sample in run.gallery() if _is_shown(sample, labels)]):
            cards[run.method] = [card_of(sample, store) for sample in samples]
    if not cards:
        return ""
    every, several = list(chain.from_iterable(cards.values())), len(cards) > 1
    again = "to be heard under “All methods”" if several else "to be heard further up"
    panels: list[tuple[str, str]] = []
    if several:  # sounds are in the first panel
        names, captioned = [study.labels[method] for method in cards], any(card.get("captioned") for card in every)
        panels.append(("All methods", component("glance", labels, captioned, names, _rows(cards), template="gallery")))
    for method, of_method in cards.items():
        panels.append((study.labels[method], component("cards", labels, of_method, again, template="gallery")))
    head = component("label_marks", any(card["strips"] for card in every), template="gallery") if labels else ""
    return head + tabs(panels, _shown(study, cards, labels) if several else 0)


def _is_shown(sample: Sample, labels: bool) -> bool:
    """Whether a sample has labels, or is a test question; a filter's training questions have a section of their own."""
    return isinstance(sample.get("labels"), list) if labels else "forgotten" not in sample


def _rows(cards: Mapping[str, Sequence[Card]]) -> list[tuple[Card, list[Card | None]]]:
    """Each sample, and its card of every method."""
    keyed: list[dict[tuple[str, ...], Card]] = []
    for of_method in cards.values():
        keyed.append({card["key"]: card for card in of_method})
    rows: list[tuple[Card, list[Card | None]]] = []
    for key in dict.fromkeys(chain.from_iterable(keyed)):
        of_methods = [by_key.get(key) for by_key in keyed]
        rows.append((next(card for card in of_methods if card), of_methods))
    return rows


def _shown(study: StudyResults, cards: Mapping[str, Sequence[Card]], labels: bool) -> int:
    """The tab in front: of labels the first method that is no bound, else the last whose cards are of both models."""
    if labels:
        return 1 + next((i for i, method in enumerate(cards) if not study.of(method)[0].summary.is_bound), 0)
    last = 0
    for tab, of_method in enumerate(cards.values(), 1):
        if any(len(card["views"]) > 1 for card in of_method):
            last = tab
    return last


def _place(sample: Sample) -> str:
    """Place of a sample, with a remark where it is unseen."""
    return f"{sample.get('place', '')}{'' if sample.get('seen', True) else ' (unseen)'}"


def _views(sample: Sample) -> dict[str, Sample]:
    """What the global and the personal model say of a sample, of those that there are."""
    return {view: sample[view] for view in ("global", "personal") if isinstance(sample.get(view), Mapping)}


# Test questions with answers, or captions ---------------------------------------------------------------------


def _asked(sample: Sample, store: ImageStore) -> Card:
    """One question to one method's two models."""
    has, captions, choices = sample.get("has"), sample.get("captions"), sample.get("choices")
    captioned = isinstance(captions, list)
    truth = " · ".join(map(str, captions)) if captioned else str(sample.get("answer", ""))
    picture, second = store.add(sample.get("image")), store.add(sample.get("image2"))
    inputs = ("place", "question", "answer", "image", "sound", "series")
    return {
        "key": tuple(str(sample.get(name, "")) for name in inputs),
        "place": _place(sample),
        "type": str(sample.get("type", "")),
        "question": str(sample.get("question", "")),
        "picture": picture,
        "second": second,
        "modal": isinstance(has, list),
        "pictured": not (isinstance(has, list) and "image" not in has),
        "others": partial(_others, sample, store),
        "choices": [str(choice) for choice in choices] if isinstance(choices, list) else None,
        "captioned": captioned,
        "truth": truth,
        "views": {view: _answer(given, truth) for view, given in _views(sample).items()},
    }


def _others(sample: Sample, store: ImageStore, again: str) -> str:
    """The sound and the values of sensors, and which modalities there are; ``again`` says where a sound is heard."""
    html = modalities_line(sample.get("has"), sample.get("lacks"))
    recording = read(sample.get("sound"))
    if recording is not None:
        seconds = number(sample["sound"].get("seconds"))
        html = player(recording, seconds, "" if store.first(recording) else again) + html
    return series_plot(sample.get("series")) + html


def _answer(given: Sample, truth: str) -> dict[str, Any]:
    """One model's answer, its probability and whether it is right; of a caption its CIDEr; where the model looked."""
    answer, cider = str(given.get("answer", "")), number(given.get("cider"))
    probability = number(given.get("probability"))
    return {
        "answer": answer,
        "right": answer == truth,
        "cider": None if cider is None else f"{100 * cider:.0f}",
        "percent": None if probability is None else f"{100 * probability:.0f}",
        "layer_html": attention_overlay(given.get("attention"), given.get("boxes")),
    }


# Examples with labels -----------------------------------------------------------------------------------------


def _labelled(sample: Sample, store: ImageStore) -> Card:
    """One example, what the method's two models say of it, and where labels looked."""
    stated = number(sample.get("threshold"))
    threshold, picture = 0.5 if stated is None else stated, store.add(sample.get("image"))
    views: dict[str, dict[str, Any]] = {}
    for view, given in _views(sample).items():
        entries = given.get("labels")
        listed = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
        told = [(_name(e), bool(e.get("there")), _probability(e) >= threshold) for e in listed]
        views[view] = {
            "entries": listed,
            "told": [entry for entry in told if entry[1] or entry[2]],
            "rows_html": "".join(bar(_name(e), _probability(e), threshold, bool(e.get("there"))) for e in listed),
            "others": int(number(given.get("others")) or 0),
        }
    return {
        "key": (str(sample.get("place", "")), str(sample.get("name", ""))),
        "place": _place(sample),
        "type": sample.get("type"),
        "text": str(sample["text"]) if "text" in sample else None,
        "picture": picture,
        "second": "",
        "truth": ", ".join(map(str, sample["labels"])),
        "views": views,
        "words": isinstance(sample.get("words"), list),
        "strips": _strips([view["entries"] for view in views.values()], sample.get("words"), picture, threshold),
    }


def _strips(views: Sequence[Sequence[Sample]], tokens: object, picture: str, threshold: float) -> list[tuple[str, str]]:
    """Labels of the first model that says where it looked, those predicted or there first, each with its attention."""
    for listed in views:
        looked = [entry for entry in listed if entry.get("attention") is not None]
        if looked:
            looked.sort(key=lambda entry: not (entry.get("there") or _probability(entry) >= threshold))
            strips: list[tuple[str, str]] = []
            for entry in looked[:_STRIP]:
                weights = entry["attention"]
                if not isinstance(tokens, list):
                    strips.append((_name(entry), attention(picture, weights)))
                elif isinstance(weights, list):
                    strips.append((_name(entry), words(tokens, weights)))
            return strips
    return []


def _name(entry: Sample) -> str:
    return str(entry.get("label", ""))


def _probability(entry: Sample) -> float:
    return number(entry.get("probability")) or 0.0


def bar(label: str, probability: float, threshold: float, present: bool | None, beside: str = "") -> str:
    """A label as a row: its name, marked right or wrong where the truth is known, and its probability as a bar."""
    values = {
        "label": label,
        "there": present,
        "predicted": probability >= threshold,
        "width": f"{100 * min(max(probability, 0.0), 1.0):.0f}",
        "mark": f"{100 * threshold:.0f}",
        "percent": f"{100 * probability:.0f} %" if np.isfinite(probability) else "–",
    }
    return component("bar", values, beside, template="gallery")


def attention(picture: str, weights: object, size: str = "p112") -> str:
    """A picture under the attention of one label; nothing without a usable map."""
    layer = attention_overlay(weights)
    return f'<div class="picture {size} {picture}">{layer}</div>' if layer and picture else ""


def words(tokens: Sequence[str], weights: Sequence[float]) -> str:
    """A text whose words are shaded by attention; marks of beginning and end are left out."""
    cells = [
        (
            not token.startswith("##"),
            "(unknown)" if token == "[UNK]" else token.removeprefix("##"),
            f"{0.6 * min(max(weight, 0.0), 1.0):.2f}",
        )
        for token, weight in zip(tokens, weights, strict=False)
        if token not in ("[CLS]", "[SEP]", "[PAD]")
    ]
    return component("words", cells, template="gallery")
