"""Sounds and sensor series of gallery samples, shortened."""

import base64
import io
import wave
from typing import Any

import numpy as np

from confed.data.sounds import Sounds
from confed.data.time_series import Series

LONGEST = 160_000
"""Bytes of sound that are kept of a sample, at most: 10 s at 8 kHz, 5 s at 16 kHz. The rest is left out and said so."""


STEPS, CHANNELS = 128, 6
"""Steps, evenly spread, and channels that are kept of a series, at most."""


def kept_sound(sounds: Sounds, row: int) -> dict[str, Any]:
    """Shortened recording for a gallery."""
    clip = sounds.row(row)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sounds.rate)
        file.writeframes(clip[: LONGEST // 2].astype("<i2").tobytes())
    return {"wav": base64.b64encode(buffer.getvalue()).decode(), "seconds": round(len(clip) / sounds.rate, 3)}


def kept_series(series: Series, row: int) -> dict[str, Any]:
    """Shortened series for a gallery."""
    values = series.row(row)
    chosen = np.linspace(0, len(values) - 1, min(len(values), STEPS)).round().astype(int)
    kept = values[chosen, :CHANNELS].T
    rounded: list[list[float]] = []
    for channel in kept.tolist():
        rounded.append([float(f"{value:.4g}") for value in channel])
    return {"channels": list(series.channels), "values": rounded, "steps": len(values)}
