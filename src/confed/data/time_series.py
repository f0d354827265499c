"""Sensor time series with equal channels, in one array."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from confed.data.ragged import Ragged, joined


@dataclass(frozen=True, eq=False)
class Series(Ragged):
    """M series of K channels; ``values`` are float32, shape (S, K).

    Attributes:
        channels: names of the K channels.
    """

    channels: tuple[str, ...]

    def __post_init__(self) -> None:
        k = len(self.channels)
        if self.values.dtype != np.float32 or self.values.ndim != 2 or self.values.shape[1] != k or k == 0:
            raise ValueError(
                f"values of {k} channels must be float32 of shape (S, {k}), with at least one channel, got "
                f"{self.values.dtype} {self.values.shape}"
            )
        if not np.isfinite(self.values).all():
            raise ValueError("values of series must be finite numbers, got some that are not")
        super().__post_init__()
        self.check_filled("series")

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values of B row numbers, float32 (B, S, K), zeros behind each, and their steps, int64 (B,)."""
        return self.padded(rows)

    @staticmethod
    def join(tables: "Sequence[Series]") -> "Series":
        """Series of several tables one behind the other."""
        kinds = sorted({table.channels for table in tables})
        if len(kinds) > 1:
            raise ValueError(f"series must have the same channels to be put together, got {', '.join(map(str, kinds))}")
        return joined(tables)

    def standardised(self, mean: np.ndarray, deviation: np.ndarray) -> "Series":
        """The same series, every channel less its mean and divided by its deviation."""
        scale = np.where(deviation > 0, deviation, 1.0)
        return replace(self, values=((self.values - mean) / scale).astype(np.float32))
