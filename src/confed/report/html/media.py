"""Sounds and sensor series in gallery cards.

A recording is kept as a WAV file and shown as its waveform over a player that needs no network. Series are kept as some
of their steps and shown as lines.
"""

import base64
import binascii
import io
import math
import wave
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from confed.results.summary import number

WIDTH, HEIGHT = 256, 64
"""Units of a drawing."""
COLUMNS = 128
"""Vertical strokes of a waveform."""


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
    own = len(recording.samples) / recording.rate
    cut = seconds is not None and seconds > own + 0.01
    length = f"the first {own:.1f} s of {seconds:.1f} s" if cut else f"{own:.1f} s"
    text = escape(f"sound, {length}" + (f"; {elsewhere}" if elsewhere else ""))
    source = f"data:audio/wav;base64,{recording.text}"
    controls = f'<audio controls preload=none src="{source}"></audio>' if not elsewhere else ""
    return f"<div class=sound>{_waveform(recording.samples)}{controls}<small>{text}</small></div>"


def _waveform(samples: np.ndarray) -> str:
    """Strokes from the lowest to the highest value of each part, drawn as loud as the loudest sample."""
    parts = np.array_split(samples.astype(np.int64), min(COLUMNS, len(samples)))
    loudest = max(1, int(np.abs(samples.astype(np.int64)).max()))
    middle, scale, step = HEIGHT / 2, (HEIGHT / 2 - 2) / loudest, WIDTH / len(parts)
    path = ""
    for i, part in enumerate(parts):
        low, high = middle - scale * int(part.min()), middle - scale * int(part.max())
        path += f"M{step * (i + 0.5):.1f} {low + 0.5:.1f}V{high - 0.5:.1f}"
    return _drawing(f'<path d="{path}" stroke="var(--m1)" stroke-width="1.5"/>', "waveform")


def series_plot(entry: object) -> str:
    """A line per channel on one scale, with their names below, as HTML; empty without usable values."""
    if not isinstance(entry, Mapping):
        return ""
    fields: Mapping[str, Any] = entry  # pyright: ignore[reportUnknownVariableType]
    try:
        values = np.asarray(fields.get("values"), dtype=np.float64)
    except (TypeError, ValueError):
        return ""
    names = fields.get("channels")
    usable = values.ndim == 2 and values.size and np.isfinite(values).all()
    if not usable or not isinstance(names, list) or len(names) < len(values):  # pyright: ignore
        return ""
    shown = [str(name) for name in names[: len(values)]]  # pyright: ignore
    low, high = float(values.min()), float(values.max())
    scale = (HEIGHT - 4) / (high - low) if high > low else 0.0
    across = (WIDTH - 4) / max(1, values.shape[1] - 1)
    lines = legend = ""
    for k, (name, channel) in enumerate(zip(shown, values.tolist(), strict=True)):
        points = " ".join(f"{2 + across * i:.1f},{HEIGHT - 2 - scale * (v - low):.1f}" for i, v in enumerate(channel))
        lines += f'<polyline points="{points}" stroke="var(--m{k + 1})" stroke-width="1.2"/>'
        legend += f'<span style="color:var(--m{k + 1})">{escape(name)}</span> '
    more = len(names) - len(shown)  # pyright: ignore
    steps = number(fields.get("steps"))
    words = f"{legend}{f'and {more} more, ' if more else ''}{low:.3g} to {high:.3g}"
    words += f", {steps:.0f} steps" if steps is not None and math.isfinite(steps) else ""
    return f"<div class=sound>{_drawing(lines, 'series')}<small>{words}</small></div>"


def _drawing(inner: str, what: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" fill="none" role="img" '
        f'aria-label="{what}">{inner}</svg>'
    )


def modalities_line(has: object, lacks: object) -> str:
    """Present and missing modalities of a sample as HTML; empty where unknown."""
    parts = [("has", _words(has)), ("lacks", _words(lacks))]
    text = "; ".join(f"{word} {', '.join(names)}" for word, names in parts if names)
    return f"<small class=has>{escape(text)}</small>" if text else ""


def _words(names: object) -> Sequence[str]:
    return [str(name) for name in names] if isinstance(names, list) else []  # pyright: ignore
