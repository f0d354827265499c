"""HTML gallery of samples: a card per sample and method, and a table of all methods side by side.

Cards are of questions with the models' answers and attention maps, of pictures with their captions, or of examples with
labels and the attention of each label.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from confed.report.html.media import ImageStore, attention_overlay, modalities_line, player, read, series_plot
from confed.report.html.page import Tabs, component
from confed.results.runs import StudyResults
from confed.results.summary import number

Sample = Mapping[str, Any]

_STRIP = 6  # labels whose attention is drawn below an example


def place_of(sample: Sample) -> str:
    """Place of a sample, with a remark where it is unseen."""
    return f"{sample.get('place', '')}{'' if sample.get('seen', True) else ' (unseen)'}"


def views_of(sample: Sample) -> list[tuple[str, Sample]]:
    """What the global and the personal model say of a sample, of those that there are."""
    return [(view, given) for view in ("global", "personal") if isinstance(given := sample.get(view), Mapping)]


class AnswerCards:
    """Test questions with answers, or captions."""

    style = ""
    note = (
        "P: the personal model of the place's client; G: the global model. An unseen place has no client, so only the "
        "global model is asked."
    )

    def __init__(self, store: ImageStore) -> None:
        self._store = store

    def takes(self, sample: Sample) -> bool:
        """Whether a sample is a test question; what a filter picks for training questions has a section of its own."""
        return "forgotten" not in sample

    def key(self, sample: Sample) -> tuple[str, ...]:
        """Place, question, right answer and inputs."""
        return tuple(
            str(sample.get(field, "")) for field in ("place", "question", "answer", "image", "sound", "series")
        )

    def introduction(self, samples: Sequence[Sample]) -> str:
        """Nothing."""
        del samples
        return ""

    def card(self, sample: Sample, again: str) -> str:
        """One question to one method's two models; ``again`` says where a sound is that was shown before."""
        picture, second = self._store.add(sample.get("image")), self._store.add(sample.get("image2"))
        has, captions, choices = sample.get("has"), sample.get("captions"), sample.get("choices")
        answers = [_answer(view, given, str(sample.get("answer", "")), picture) for view, given in views_of(sample)]
        values = {
            "place": place_of(sample),
            "type": str(sample.get("type", "")),
            "question": str(sample.get("question", "")),
            "pictured": not (isinstance(has, list) and "image" not in has),
            "pictures": [name for name in (picture, second) if name] if picture else [],
            "others_html": self._others(sample, again),
            "choices": [str(choice) for choice in choices] if isinstance(choices, list) else None,
            "captioned": isinstance(captions, list),
            "truth": _right(sample),
            "answers": answers,
        }
        return component("question", values, template="gallery")

    def heading(self, samples: Sequence[Sample]) -> str:
        """What the second column holds."""
        captioned = any("captions" in sample for sample in samples)
        return "what people say" if captioned else "question and correct answer"

    def row(self, sample: Sample) -> tuple[str, str]:
        """Picture, or pair, and question with its right answer."""
        picture = self._store.add(sample.get("image"))
        second = self._store.add(sample.get("image2"))
        bare = not picture and isinstance(sample.get("has"), list)
        text = component(
            "asked", str(sample.get("question", "")), _right(sample), place_of(sample),
            self._others(sample, "to be heard further up"), template="gallery",
        )  # fmt: skip
        return component("small_pictures", None if bare else picture, second, template="gallery"), text

    def cell(self, given: Sample) -> str:
        """The answers of a method's personal and its global model."""
        truth = _right(given)
        answers = [(view[0].upper(), _verdict(answer, truth)) for view, answer in reversed(views_of(given))]
        return component("answer_pairs", answers, template="gallery")

    def shown(self, study: StudyResults, samples: Mapping[str, Sequence[Sample]]) -> int:
        """The last method whose clients have models of their own: its cards show where a model looked."""
        del study
        last = 0
        for panel, method_samples in enumerate(samples.values(), 1):
            if any(sample.get("global") and sample.get("personal") for sample in method_samples):
                last = panel
        return last

    def _others(self, sample: Sample, again: str) -> str:
        """The sound and the values of sensors, and which modalities there are."""
        html = modalities_line(sample.get("has"), sample.get("lacks"))
        recording = read(sample.get("sound"))
        if recording is not None:
            seconds = number(sample["sound"].get("seconds"))
            html = player(recording, seconds, "" if self._store.first(recording) else again) + html
        return series_plot(sample.get("series")) + html


def _right(sample: Sample) -> str:
    """The right answer, or all captions."""
    captions = sample.get("captions")
    return " · ".join(map(str, captions)) if isinstance(captions, list) else str(sample.get("answer", ""))


def _verdict(given: Sample, truth: str) -> dict[str, Any]:
    """The answer and whether it is right; of a caption its CIDEr, which says how near it is."""
    answer, cider = str(given.get("answer", "")), number(given.get("cider"))
    return {"answer": answer, "cider": None if cider is None else f"{100 * cider:.0f}", "right": answer == truth}


def _answer(view: str, given: Sample, truth: str, picture: str) -> dict[str, Any]:
    """One model's answer, its probability, and the picture under its attention."""
    probability = number(given.get("probability"))
    return {
        "view": view,
        "verdict": _verdict(given, truth),
        "percent": None if probability is None else f"{100 * probability:.0f}",
        "picture": picture,
        "layer_html": attention_overlay(given.get("attention"), given.get("boxes")),
    }


class LabelCards:
    """Samples with labels."""

    style = "labels"
    note = "What the global model predicts or misses (the personal one where there is no global one)."

    def __init__(self, store: ImageStore) -> None:
        self._store = store

    def takes(self, sample: Sample) -> bool:
        """Whether a sample has labels."""
        return isinstance(sample.get("labels"), list)

    def key(self, sample: Sample) -> tuple[str, ...]:
        """Place and name."""
        return str(sample.get("place", "")), str(sample.get("name", ""))

    def introduction(self, samples: Sequence[Sample]) -> str:
        """What the marks mean."""
        return component("label_marks", any(_strips(sample) for sample in samples), template="gallery")

    def card(self, sample: Sample, again: str) -> str:
        """One example, what the method's two models say of it, and where labels looked."""
        del again
        picture = self._store.add(sample.get("image"))
        values = {
            "place": place_of(sample) + (f" · {sample['type']}" if sample.get("type") else ""),
            "text": str(sample["text"]) if "text" in sample else None,
            "picture": picture,
            "truth": ", ".join(map(str, sample["labels"])) or "none",
            "views": [(view, *_bars(given, _threshold(sample))) for view, given in views_of(sample)],
            "strips_html": _strip(sample, picture),
        }
        return component("labelled", values, template="gallery")

    def heading(self, samples: Sequence[Sample]) -> str:
        """What the second column holds."""
        del samples
        return "labels that are there"

    def row(self, sample: Sample) -> tuple[str, str]:
        """Picture, and text with the right labels."""
        picture, text = self._store.add(sample.get("image")), str(sample["text"]) if "text" in sample else None
        truth = ", ".join(map(str, sample["labels"])) or "no label"
        return (
            component("small_pictures", picture, "", template="gallery"),
            component("truth", text, truth, place_of(sample), template="gallery"),
        )

    def cell(self, given: Sample) -> str:
        """What a method's global model predicts, or the personal one without such."""
        if not (views := views_of(given)):
            return ""
        threshold, (_, view_samples) = _threshold(given), views[0]
        entries = [
            (str(e.get("label", "")), bool(e.get("there")), (number(e.get("probability")) or 0.0) >= threshold)
            for e in _entries(view_samples)
        ]
        entries = [entry for entry in entries if entry[1] or entry[2]]
        return component("predicted", entries, int(number(view_samples.get("others")) or 0), template="gallery")

    def shown(self, study: StudyResults, samples: Mapping[str, Sequence[Sample]]) -> int:
        """The first method that is no bound."""
        return 1 + next((i for i, m in enumerate(samples) if not study.of(m)[0].summary.is_bound), 0)


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


def _entries(given: Sample) -> list[Sample]:
    labels = given.get("labels")
    return [entry for entry in labels if isinstance(entry, Mapping)] if isinstance(labels, list) else []


def _bars(given: Sample, threshold: float) -> tuple[str, int]:
    """HTML of the labels that a model was asked for, and how many more there are."""
    rows = "".join(
        bar(str(entry.get("label", "")), number(entry.get("probability")) or 0.0, threshold, bool(entry.get("there")))
        for entry in _entries(given)
    )
    return rows, int(number(given.get("others")) or 0)


def _strips(sample: Sample) -> list[Sample]:
    """The labels of the first model that says where it looked: those predicted or there before the others."""
    for _, given in views_of(sample):
        entries = [entry for entry in _entries(given) if entry.get("attention") is not None]
        if entries:
            threshold = _threshold(sample)
            return sorted(entries, key=lambda e: not (e.get("there") or e.get("probability", 0) >= threshold))[:_STRIP]
    return []


def _strip(sample: Sample, picture: str) -> str:
    """HTML of the attention of labels to the example."""
    tokens, strips = sample.get("words"), _strips(sample)
    if isinstance(tokens, list):
        shown = [e for e in strips if isinstance(e.get("attention"), list)]
        rows = [(str(e.get("label", "")), words(tokens, e["attention"])) for e in shown]  # pyright: ignore[reportUnknownArgumentType]
        return component("looks", rows, template="gallery")
    cells = [(str(e.get("label", "")), attention(picture, e["attention"])) for e in strips]
    return component("strip", [cell for cell in cells if cell[1]], template="gallery")


def _threshold(sample: Sample) -> float:
    threshold = number(sample.get("threshold"))
    return 0.5 if threshold is None else threshold


def gallery(study: StudyResults, tabs: Tabs, store: ImageStore, *, labels: bool = False) -> str:
    """Cards of all samples, one tab per method, and first a table of all methods."""
    cards = LabelCards(store) if labels else AnswerCards(store)
    samples: dict[str, list[Sample]] = {}
    for run in study.runs:
        if run.method not in samples and (taken := [sample for sample in run.gallery() if cards.takes(sample)]):
            samples[run.method] = taken
    if not samples:
        return ""
    # Sounds are in the first panel.
    panels = [("All methods", _glance(cards, samples, study.labels))] if len(samples) > 1 else []
    again = "to be heard under “All methods”" if panels else "to be heard further up"
    for method, method_samples in samples.items():
        of_method = [cards.card(sample, again) for sample in method_samples]
        panels.append((study.labels[method], component("cards", cards.style, of_method, template="gallery")))
    shown = cards.shown(study, samples) if len(panels) > 1 else 0
    return cards.introduction(list(chain.from_iterable(samples.values()))) + tabs(panels, shown)


def _glance(cards: AnswerCards | LabelCards, samples: Mapping[str, Sequence[Sample]], labels: Mapping[str, str]) -> str:
    """A row per sample, a column per method."""
    keyed: dict[str, dict[tuple[str, ...], Mapping[str, Any]]] = {}
    for m, method_samples in samples.items():
        keyed[m] = {cards.key(sample): sample for sample in method_samples}
    rows: list[tuple[str, str, list[str]]] = []
    for key in dict.fromkeys(chain.from_iterable(keyed.values())):
        of_methods = [of_method.get(key) for of_method in keyed.values()]
        first = next(sample for sample in of_methods if sample is not None)
        cells = ["" if sample is None else cards.cell(sample) for sample in of_methods]
        rows.append((*cards.row(first), cells))
    heading = cards.heading(list(chain.from_iterable(samples.values())))
    return component("glance", heading, [labels[m] for m in keyed], rows, cards.note, template="gallery")
