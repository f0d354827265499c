"""Pictures, attention over them, sounds and sensor series of a page.

Pictures and sounds are in the page once, however often they are shown: a picture is a CSS rule; a sound, kept as a WAV
file, has a player that needs no network where it is shown first, and its waveform only where it is shown again. Series
are kept as some of their steps and shown as lines.

Attention over a picture is a dark veil that is thin where the model looks: it leaves the colours, which many questions
are about, as they are. A model that reads regions has its veil drawn box by box, with a line around the box that
counted most.
"""

import base64
import binascii
import hashlib
import io
import math
import wave
from collections.abc import Mapping

import numpy as np
from PIL import Image

from confed.report.html.page import component
from confed.results.summary import mapping, number

WIDTH, HEIGHT = 256, 64  # units of a drawing
COLUMNS = 128  # vertical strokes of a waveform

_PNG = b"\x89PNG\r\n\x1a\n"
_VEIL = 0.7
_SIDE = 112  # pixels of a veil of boxes; the picture below has as many

# Sounds and series --------------------------------------------------------------------------------------------


class Recording:
    """A WAV file of 16 bits and one channel, read back."""

    def __init__(self, text: str) -> None:
        """Reader of a WAV file."""
        try:
            with wave.open(io.BytesIO(base64.b64decode(text, validate=True))) as file:
                if file.getnchannels() != 1 or file.getsampwidth() != 2:
                    raise ValueError("a sample's sound must be a WAV file of one channel and 16 bits")
                self.samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
                self.rate = file.getframerate()
        except (binascii.Error, wave.Error, EOFError) as error:
            raise ValueError(f"a sample's sound must be a WAV file: {error}") from error
        if not len(self.samples) or self.rate < 1:
            raise ValueError("a sample's sound must have at least one sample and a rate")
        self.text = text


def read(entry: object) -> Recording | None:
    """The recording that a gallery kept; None where there is none, or something else."""
    text = entry.get("wav") if isinstance(entry, Mapping) else None  # pyright: ignore
    try:
        return Recording(text) if isinstance(text, str) else None
    except ValueError:
        return None


def player(recording: Recording, seconds: float | None = None, elsewhere: str = "") -> str:
    """A waveform with controls to play it below, as HTML."""
    played = len(recording.samples) / recording.rate
    cut = seconds is not None and seconds > played + 0.01
    length = f"the first {played:.1f} s of {seconds:.1f} s" if cut else f"{played:.1f} s"
    text = f"sound, {length}" + (f"; {elsewhere}" if elsewhere else "")
    size = {"width": WIDTH, "height": HEIGHT}
    wav = "" if elsewhere else recording.text
    return component("sound", size, _waveform(recording.samples), wav, text, template="gallery")


def _waveform(samples: np.ndarray) -> str:
    """Path of strokes from the lowest to the highest value of each part, drawn as loud as the loudest sample."""
    parts = np.array_split(samples.astype(np.int64), min(COLUMNS, len(samples)))
    loudest = max(1, int(np.abs(samples.astype(np.int64)).max()))
    middle, scale, step = HEIGHT / 2, (HEIGHT / 2 - 2) / loudest, WIDTH / len(parts)
    path = ""
    for i, values in enumerate(parts):
        low, high = middle - scale * int(values.min()), middle - scale * int(values.max())
        path += f"M{step * (i + 0.5):.1f} {low + 0.5:.1f}V{high - 0.5:.1f}"
    return path


def series_plot(entry: object) -> str:
    """A line per channel on one scale, with their names below, as HTML; empty without usable values."""
    fields = mapping(entry)
    names, steps = fields.get("channels"), number(fields.get("steps"))
    try:
        values = np.asarray(fields.get("values"), dtype=np.float64)
    except (TypeError, ValueError):
        return ""
    usable = values.ndim == 2 and values.size and np.isfinite(values).all()
    if not usable or not isinstance(names, list) or len(names) < len(values):
        return ""
    low, high = float(values.min()), float(values.max())
    scale = (HEIGHT - 4) / (high - low) if high > low else 0.0
    across = (WIDTH - 4) / max(1, values.shape[1] - 1)
    lines: list[tuple[str, str]] = []
    for name, channel in zip(names, values.tolist(), strict=False):
        points = [f"{2 + across * i:.1f},{HEIGHT - 2 - scale * (v - low):.1f}" for i, v in enumerate(channel)]
        lines.append((str(name), " ".join(points)))
    words = f"{low:.3g} to {high:.3g}" + ("" if steps is None else f", {steps:.0f} steps")
    size = {"width": WIDTH, "height": HEIGHT}
    return component("series", size, lines, len(names) - len(lines), words, template="gallery")


def modalities_line(has: object, lacks: object) -> str:
    """Present and missing modalities of a sample as HTML; empty where unknown."""
    said = {"has": has, "lacks": lacks}
    parts = [
        f"{word} {', '.join(map(str, names))}" for word, names in said.items() if isinstance(names, list) and names
    ]
    return component("modalities", "; ".join(parts), template="gallery")


# Pictures -----------------------------------------------------------------------------------------------------


class ImageStore:
    """Pictures and sounds of a page, each stored once."""

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
        heard_before = recording.text in self._heard
        self._heard.add(recording.text)
        return not heard_before


def attention_overlay(attention: object, boxes: object = None) -> str:
    """A layer that darkens what the model does not look at; empty without a usable map."""
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
        region = light[top:bottom, left:right]
        np.maximum(region, weight, out=region)
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
