"""Region features in place of pictures, for models of bottom-up attention.

Anderson et al., "Bottom-Up and Top-Down Attention for Image Captioning and Visual Question Answering", CVPR 2018: a
picture is R vectors of width W, one per detected region (or cell of a grid), each with its box. A picture with fewer
regions has rows of zeros behind its last one; models leave rows of zeros out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from confed.data.refusals import check_finite, check_form, check_same


class Regions(Protocol):
    """Regions of M pictures, in memory or read when they are asked for."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, R, W)."""
        ...

    @property
    def encoder(self) -> str:
        """Name of the feature extractor, for the features of new pictures; empty if unknown."""
        ...

    def __len__(self) -> int:
        """M."""
        ...

    def __getitem__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features (B, R, W) and boxes (B, R, 4) of B pictures, float32, as copies.

        A box is x1, y1, x2, y2 as fractions of the picture's width and height.
        """
        ...


@dataclass(frozen=True)
class HeldRegions:
    """:class:`Regions` in memory.

    Attributes:
        features: shape (M, R, W).
        boxes: x1, y1, x2, y2 in [0, 1] of the picture, shape (M, R, 4).
        encoder: what made them; empty if unknown.
    """

    features: np.ndarray
    boxes: np.ndarray
    encoder: str = ""

    def __post_init__(self) -> None:
        check_form("features of regions", self.features, None, "M", "R", "W")
        check_form("boxes of regions", self.boxes, None, *self.features.shape[:2], 4)
        check_finite("features of regions", self.features)
        if not ((self.boxes >= 0) & (self.boxes <= 1)).all():
            raise ValueError("boxes must lie in [0, 1] of the picture, got some that do not")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, R, W)."""
        m, r, w = self.features.shape
        return m, r, w

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        features, boxes = self.features[index], self.boxes[index]
        return features.astype(np.float32, copy=False), boxes.astype(np.float32, copy=False)


def grid_boxes(rows: int, columns: int) -> np.ndarray:
    """The cells of a grid over the picture, row by row, float32, shape (rows * columns, 4)."""
    top, left = np.divmod(np.arange(rows * columns), columns)
    cells = np.stack([left / columns, top / rows, (left + 1) / columns, (top + 1) / rows], axis=1)
    return cells.astype(np.float32)


def join(parts: Sequence[HeldRegions]) -> HeldRegions:
    """The regions of several picture tables, one behind the other; of other numbers of regions, padded with zeros."""
    check_same("width and encoder of regions", [(features.shape[2], features.encoder) for features in parts])
    most = max(features.shape[1] for features in parts)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, most - values.shape[1]), (0, 0)))

    return HeldRegions(
        np.concatenate([padded(features.features) for features in parts]),
        np.concatenate([padded(features.boxes) for features in parts]),
        parts[0].encoder,
    )
