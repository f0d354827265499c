"""Recordings of one sample rate in one array, and resampling to it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from torch import Tensor

from confed.data.ragged import Ragged, end_to_end, joined
from confed.data.refusals import check_form, check_length, check_same

_FULL = 32768.0
"""The int16 value that stands for 1."""


@dataclass(frozen=True, eq=False)
class Sounds(Ragged):
    """M recordings, samples int16 (T,); ``origin``: which of them are made of one recording, int64 (M,)."""

    rate: int
    origin: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_form("samples", self.values, np.int16, "T")
        if self.rate < 1:
            raise ValueError(f"the sample rate must be at least 1 Hz, got {self.rate}")
        super().__post_init__()
        self.check_filled("sound")
        check_length("origin", self.origin, len(self), "recording")

    def independent(self, rows: np.ndarray) -> int:
        """Number of different recordings among the given ones."""
        return len(np.unique(rows if self.origin is None else self.origin[rows]))

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms of B row numbers in [-1, 1), float32 (B, T), zeros behind each, and lengths, int64 (B,)."""
        return self.padded(rows, 1 / _FULL)

    @staticmethod
    def join(tables: "Sequence[Sounds]") -> "Sounds":
        """Recordings of several tables one behind the other."""
        check_same("sample rates", [table.rate for table in tables])
        return joined([replace(table, origin=None) for table in tables])


def sounds_of(clips: Sequence[np.ndarray], rates: int | Sequence[int], rate: int, names: Sequence[str]) -> Sounds:
    """Recordings as a table of one rate; that some had another one is said once."""
    each = [rates] * len(clips) if isinstance(rates, int) else list(rates)
    check_length("rates", each, len(clips), "clip")
    check_length("names", names, len(clips), "clip")
    parts: list[np.ndarray] = []
    for name, clip, clip_rate in zip(names, clips, each, strict=True):
        if clip.ndim != 1 or not len(clip):
            raise ValueError(f"sound {name!r} must be one channel of at least one sample, got shape {clip.shape}")
        if clip_rate < 1:
            raise ValueError(f"sound {name!r}: the sample rate must be at least 1 Hz, got {clip_rate}")
        if clip.dtype != np.int16 and (clip.dtype.kind != "f" or not np.isfinite(clip).all()):
            raise ValueError(f"sound {name!r} must be int16, or finite floating point in [-1, 1], got {clip.dtype}")
        floating = clip.dtype != np.int16
        if clip_rate == rate and not floating:
            parts.append(clip)
            continue
        values = clip * _FULL if floating else clip
        parts.append(_whole(resample(values, clip_rate, rate) if clip_rate != rate else values))
    others = sorted({clip_rate for clip_rate in each if clip_rate != rate})
    if others:
        count = sum(clip_rate != rate for clip_rate in each)
        warnings.warn(
            f"{count} of {len(clips)} sounds have {', '.join(map(str, others))} Hz: resampled to {rate} Hz",
            stacklevel=2,
        )
    values, offsets = end_to_end(parts) if parts else (np.zeros(0, np.int16), np.zeros(1, np.int64))
    return Sounds(values, offsets, rate)


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """A recording at another rate, by a polyphase filter."""
    from scipy.signal import resample_poly

    common = gcd(rate, wanted)
    return np.asarray(resample_poly(samples.astype(np.float64), wanted // common, rate // common))


def _whole(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), -_FULL, _FULL - 1).astype(np.int16)
