"""HTML gallery of sample questions with the models' answers and attention maps.

Each picture is in the page once, as a CSS rule, however many methods were asked about it. Attention is drawn
as a dark veil that is thin where the model looks: a veil leaves the colours, which many questions are about,
as they are. A model that reads regions has its veil drawn box by box, with a line around the box that counted most.
A sound, too, is in the page once: where it is shown again there is its waveform only.
"""

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from confed.report.html.media import Recording, modalities_line, player, read, series_plot
from confed.report.html.page import Tabs
from confed.results.runs import Run, Study, number

__all__ = ["ImageStore", "attention_overlay", "gallery"]

_VEIL = 0.7
_SIDE = 112
"""Pixels of a veil of boxes; the picture below has as many."""

_PNG = b"\x89PNG\r\n\x1a\n"

Sample = Mapping[str, Any]


class ImageStore:
    """Pictures and sounds of a page, each stored once.

    Attributes:
        css: rules of the pictures added so far.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._rules: list[str] = []
        self._heard: set[str] = set()

    @property
    def css(self) -> str:
        """Rules of the pictures added so far."""
        return "\n".join(self._rules)

    def add(self, image: object) -> str:
        """The CSS class of a picture, empty if it is no base64 PNG."""
        if not isinstance(image, str):
            return ""
        if image not in self._names:
            try:
                content = base64.b64decode(image, validate=True)
            except (binascii.Error, ValueError):
                return ""
            if not content.startswith(_PNG):
                return ""
            name = "g" + hashlib.sha256(content).hexdigest()[:12]
            self._names[image] = name
            self._rules.append(f".{name}{{background-image:url(data:image/png;base64,{image})}}")
        return self._names[image]

    def first(self, recording: Recording) -> bool:
        """Whether a recording was not asked about before: then it is put into the page."""
        known = recording.text in self._heard
        self._heard.add(recording.text)
        return not known


def gallery(study: Study, tabs: Tabs, store: ImageStore) -> str:
    """Cards of all samples, one tab per method, and first a table of all methods.

    Args:
        study: gives the samples of each method's first seed.
        tabs: makes the tabs.
        store: takes the pictures; its rules must be put into the page.

    Returns:
        HTML, empty if there are no samples.
    """
    samples = {m: next((found for run in study.of(m) if (found := _asked(run))), []) for m in study.methods}
    samples = {m: found for m, found in samples.items() if found}
    if not samples:
        return ""
    labels = study.labels
    # Sounds are in the first panel.
    panels = [("All methods", _glance(samples, labels, store))] if len(samples) > 1 else []
    again = "to be heard under “All methods”" if panels else "to be heard further up"
    panels += [
        (labels[m], f"<div class=cards>{''.join(_card(sample, store, again) for sample in found)}</div>")
        for m, found in samples.items()
    ]
    if len(panels) == 1:
        return tabs(panels)
    # First the cards, which show where a model looked: those of the last method whose clients have models of their own.
    own = [
        k for k, found in enumerate(samples.values(), 1) if any(s.get("global") and s.get("personal") for s in found)
    ]
    return tabs(panels, own[-1] if own else 0)


def _asked(run: Run) -> list[Sample]:
    """A run's test questions; what a filter picks for training questions has a section of its own."""
    return [sample for sample in run.gallery() if "forgotten" not in sample]


def _card(sample: Sample, store: ImageStore, again: str) -> str:
    """One question to one method's two models; ``again`` says where a sound is that was shown before."""
    picture, second = store.add(sample.get("image")), store.add(sample.get("image2"))
    truth = str(sample.get("answer", ""))
    place = f"{sample.get('place', '')}{'' if sample.get('seen', True) else ' (unseen)'}"
    answers = "".join(
        _answer(title, given, truth, picture)
        for title, given in (
            ("global", sample.get("global")),
            ("personal", sample.get("personal")),
        )
        if isinstance(given, Mapping)
    )
    answers = answers or "<small>There is no model to be asked here.</small>"
    shown = f"{_shown(sample, picture, second)}{_others(sample, store, again)}"
    return (
        f"<div class=card><h3><small>{escape(place)} · {escape(str(sample.get('type', '')))}</small>"
        f"{escape(str(sample.get('question', '')))}</h3>"
        f"<div>{shown}</div>{_offered(sample)}"
        f"<div class=answers>{_truth(sample)}{answers}</div></div>"
    )


def _shown(sample: Sample, picture: str, second: str) -> str:
    """The pictures; where the sample has none, nothing, and what else it has follows."""
    has = sample.get("has")
    return "" if isinstance(has, list) and "image" not in has else _pictures(picture, second)


def _others(sample: Sample, store: ImageStore, again: str) -> str:
    """The sound and the values of sensors, and which modalities there are."""
    html = modalities_line(sample.get("has"), sample.get("lacks"))
    recording = read(sample.get("sound"))
    if recording is not None:
        seconds = number(sample["sound"].get("seconds"))
        html = player(recording, seconds, "" if store.first(recording) else again) + html
    return series_plot(sample.get("series")) + html


def _truth(sample: Sample) -> str:
    """The right answer; of a picture to be described, what people say about it."""
    if isinstance(sample.get("captions"), list):
        return f"<div class=truth>People say: <b>{escape(_right(sample))}</b></div>"
    return f"<div class=truth>Correct answer: <b>{escape(str(sample.get('answer', '')))}</b></div>"


def _right(sample: Sample) -> str:
    """The right answer, or all captions."""
    said = sample.get("captions")
    return " · ".join(map(str, said)) if isinstance(said, list) else str(sample.get("answer", ""))


def _pictures(first: str, second: str) -> str:
    """The picture, or both of a pair side by side."""
    if not first:
        return "<small>The data have features of this picture and not the picture.</small>"
    if not second:
        return f'<div class="picture p256 {first}"></div>'
    pair = "".join(f'<div class="picture p112 {name}" style="margin-right:8px"></div>' for name in (first, second))
    return f'<div style="display:flex">{pair}</div>'


def _offered(sample: Sample) -> str:
    """The texts offered with a question, where it comes with some."""
    choices = sample.get("choices")
    if not isinstance(choices, list):
        return ""
    return f"<small>to choose from: {escape(' · '.join(map(str, choices)))}</small>"


def _answer(title: str, given: Sample, truth: str, picture: str) -> str:
    """One model's answer, its probability, and the picture under its attention."""
    probability = number(given.get("probability"))
    certainty = "" if probability is None else f"{100 * probability:.0f} % sure"
    bar = "" if probability is None else f'<div class=bar><i style="width:{100 * probability:.0f}%"></i></div>'
    layer = attention_overlay(given.get("attention"), given.get("boxes"))
    words = f"<div><strong>{title}</strong>{_verdict(given, truth)}{bar}{certainty}</div>"
    if number(given.get("cider")) is not None:  # a caption needs the room, and has no map of attention
        return f'<div class="answer whole">{words}</div>'
    view = f'<div class="picture p112 {picture}">{layer}</div>' if layer else "<div></div>"
    return f"<div class=answer>{view}{words}</div>"


def _glance(samples: Mapping[str, Sequence[Sample]], labels: Mapping[str, str], store: ImageStore) -> str:
    """A row per question, a column per method: the answers of its personal and its global model."""
    keyed = {m: {_key(sample): sample for sample in found} for m, found in samples.items()}
    order = list(dict.fromkeys(key for found in keyed.values() for key in found))
    head = "".join(f"<th scope=col>{escape(labels[m])}</th>" for m in keyed)
    captioned = any("captions" in sample for found in samples.values() for sample in found)
    title = "what people say" if captioned else "question and correct answer"
    rows = ""
    for key in order:
        sample = next(found[key] for found in keyed.values() if key in found)
        picture, truth = store.add(sample.get("image")), _right(sample)
        place = f"{sample.get('place', '')}{'' if sample.get('seen', True) else ' (unseen)'}"
        cells = ""
        for found in keyed.values():
            pairs = "".join(
                f"<div class=pair><em>{letter}</em>{_verdict(given, truth)}</div>"
                for letter, view in (("P", "personal"), ("G", "global"))
                if isinstance(given := found.get(key, {}).get(view), Mapping)
            )
            cells += f"<td>{pairs or '–'}</td>"
        second = store.add(sample.get("image2"))
        pair = f'<div class="picture p64 {second}" style="margin-top:4px"></div>' if second else ""
        bare = not picture and isinstance(sample.get("has"), list)
        view = "" if bare else f'<div class="picture p64 {picture}"></div>'
        rows += (
            f"<tr><td>{view}{pair}</td><td>"
            f"{escape(str(sample.get('question', '')))}"
            f" <b>{escape(truth)}</b><br><small>{escape(place)}</small>"
            f"{_others(sample, store, 'to be heard further up')}</td>{cells}</tr>"
        )
    return (
        '<div class="scroll wide"><table class=glance><thead><tr><td></td>'
        f"<th scope=col class=left>{title}</th>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
        "<p class=note>P: the personal model of the place's client; G: the global model. An unseen place "
        "has no client, so only the global model is asked.</p>"
    )


def _key(sample: Sample) -> tuple[str, ...]:
    return tuple(str(sample.get(part, "")) for part in ("place", "question", "answer", "image", "sound", "series"))


def _verdict(given: Sample, truth: str) -> str:
    """The answer, green with a tick or red with a cross; a caption with its CIDEr, which says how near it is."""
    answer, cider = str(given.get("answer", "")), number(given.get("cider"))
    if cider is not None:
        return f"<span>{escape(answer)}</span> <small>CIDEr {100 * cider:.0f}</small>"
    right = answer == truth
    return f"<span class={'right' if right else 'wrong'}>{'✓' if right else '✗'} {escape(answer)}</span>"


def attention_overlay(attention: object, boxes: object = None) -> str:
    """A layer that darkens what the model does not look at; empty without a usable map.

    Args:
        attention: (rows, columns) weights with maximum 1; or one of R regions each, (R,).
        boxes: where these are, (R, 4): left, top, right and bottom in [0, 1] of the picture.
    """
    try:
        weights = np.asarray(attention, dtype=np.float64)
        places = None if boxes is None else np.asarray(boxes, dtype=np.float64)
    except (TypeError, ValueError):
        return ""
    if weights.ndim == 1 and places is not None:
        return _boxed(weights, places)
    if weights.ndim != 2 or not weights.size or not np.isfinite(weights).all():
        return ""
    if not math.isclose(weights.max(), 0, abs_tol=1e-12):
        weights = weights / weights.max()
    # Enlarged here and not by the browser, so that the edges do not fade.
    return _layer(Image.fromarray(_dark(weights)).resize((28, 28), Image.Resampling.BICUBIC))


def _boxed(weights: np.ndarray, boxes: np.ndarray) -> str:
    """The veil of regions: where boxes overlap the one that counts most decides; what no box covers is dark."""
    sound = boxes.shape == (*weights.shape, 4) and len(weights) and np.isfinite(boxes).all()
    if not sound or not np.isfinite(weights).all() or weights.max() <= 0:
        return ""
    weights = (weights / weights.max()).clip(0, 1)
    corners = (_SIDE * boxes.clip(0, 1)).round().astype(int)
    corners[:, 2:] = np.maximum(corners[:, 2:], corners[:, :2] + 1)  # a box of no extent is still a point
    light = np.zeros((_SIDE, _SIDE))
    for weight, (left, top, right, bottom) in zip(weights, corners, strict=True):
        part = light[top:bottom, left:right]
        np.maximum(part, weight, out=part)
    pixels = _dark(light)
    left, top, right, bottom = corners[int(weights.argmax())]
    frame = np.zeros((_SIDE, _SIDE), dtype=bool)
    frame[top:bottom, left:right] = True
    frame[top + 2 : bottom - 2, left + 2 : right - 2] = False
    pixels[frame] = (255, 214, 64, 255)
    return _layer(Image.fromarray(pixels))


def _dark(weights: np.ndarray) -> np.ndarray:
    """Pixels of a veil, (rows, columns, 4), thin where weights are 1 and thick where they are 0."""
    # The root keeps places visible that get a tenth of the most looked-at one's weight.
    alpha = (255 * _VEIL * (1 - np.sqrt(weights.clip(0, 1)))).round().astype(np.uint8)
    return np.stack([np.full_like(alpha, shade) for shade in (8, 10, 16)] + [alpha], axis=-1)


def _layer(layer: Image.Image) -> str:
    """A picture laid over another one."""
    buffer = io.BytesIO()
    layer.save(buffer, format="PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<i style="background-image:url(data:image/png;base64,{data})"></i>'
