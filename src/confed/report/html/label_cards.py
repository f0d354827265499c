"""Cards of samples with labels: the models' predictions, and the attention of each label."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from confed.report.html.answer_cards import place_of
from confed.report.html.attention_maps import attention_overlay
from confed.report.html.image_store import ImageStore
from confed.report.html.page import component
from confed.results.runs import StudyResults
from confed.results.summary import number

_STRIP = 6
"""Labels whose attention is drawn below an example."""

Sample = Mapping[str, Any]


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
            "views": [(view, *_bars(given, _threshold(sample))) for view, given in _views(sample)],
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
        if not (views := _views(given)):
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


def bar(label: str, probability: float, threshold: float, there: bool | None, beside: str = "") -> str:
    """A label as a row: its name, marked right or wrong where the truth is known, and its probability as a bar."""
    values = {
        "label": label,
        "there": there,
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


def _views(sample: Sample) -> list[tuple[str, Sample]]:
    return [(view, given) for view in ("global", "personal") if isinstance(given := sample.get(view), Mapping)]


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
    for _, given in _views(sample):
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
