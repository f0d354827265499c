"""Sensor time series with equal channels, in one array."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from confed.data.ragged import Ragged, joined
from confed.data.refusals import check_finite, check_form, check_same


@dataclass(frozen=True, eq=False)
class Series(Ragged):
    """M series of K channels; ``values`` are float32, shape (S, K)."""

    channels: tuple[str, ...]

    def __post_init__(self) -> None:
        k = len(self.channels)
        check_form(f"values of {k} channels", self.values, np.float32, "S", k or "at least one channel")
        check_finite("values of series", self.values)
        super().__post_init__()
        self.check_filled("series")

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values of B row numbers, float32 (B, S, K), zeros behind each, and their steps, int64 (B,)."""
        return self.padded(rows)

    @staticmethod
    def join(tables: "Sequence[Series]") -> "Series":
        """Series of several tables one behind the other."""
        check_same("channels of series", [table.channels for table in tables])
        return joined(tables)

    def standardised(self, mean: np.ndarray, deviation: np.ndarray) -> "Series":
        """The same series, every channel less its mean and divided by its deviation."""
        scale = np.where(deviation > 0, deviation, 1.0)
        return replace(self, values=((self.values - mean) / scale).astype(np.float32))
