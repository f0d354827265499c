"""Pictures as a processor of ``transformers`` prepares them, kept example by example."""

from collections import OrderedDict
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from confed.models.hf.placeholder import TEXT_INPUTS, Placeholder

__all__ = ["Pictures"]

_KEPT = 256 * 2**20
"""Bytes of processed pictures that are kept; beyond these the oldest are made again."""


class Pictures:
    """Inputs that a processor makes of pictures, kept up to a number of bytes.

    Args:
        placeholder: what stands for a picture in a prompt; the processor wants texts with its pictures.
        kept: bytes.

    Attributes:
        axes: input -> what its first axis is of in the library's model: "example", or "packed": all pictures of a
            batch, or parts of all of them, such as tiles and patches.
    """

    def __init__(self, placeholder: Placeholder, kept: int = _KEPT) -> None:
        self._placeholder, self._budget, self._bytes = placeholder, kept, 0
        self._kept: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()
        grey = np.zeros((32, 48, 3), np.uint8)
        self.axes = {key: "example" if len(value) == 1 else "packed" for key, value in self._made(grey, grey).items()}

    @property
    def bytes_kept(self) -> int:
        """Bytes of all inputs that are kept."""
        return self._bytes

    def __call__(self, images: Tensor, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Inputs of the library's model for pictures, each (B, P, ...).

        Args:
            images: uint8, shape (B, P, 3, H, W).
            only: names of the inputs that are needed; None for all.
        """
        keys = [key for key in self.axes if only is None or key in only]
        if not keys:
            return {}
        rows = [self._one(picture) for picture in images.cpu().flatten(0, 1).permute(0, 2, 3, 1).contiguous().numpy()]
        made = {key: torch.stack([row[key] for row in rows]) for key in keys} if rows else {}
        return {key: value.unflatten(0, images.shape[:2]).to(images.device) for key, value in made.items()}

    def _made(self, *pictures: np.ndarray) -> dict[str, Tensor]:
        """What the processor makes of the pictures of one example, beside its text."""
        made = self._placeholder.processed(*pictures)
        return {key: value for key, value in made.items() if key not in TEXT_INPUTS}

    def _one(self, picture: np.ndarray) -> dict[str, Tensor]:
        key = picture.tobytes() + bytes(str(picture.shape), "ascii")
        found = self._kept.get(key)
        if found is None:
            made = self._made(picture)
            found = {name: made[name] if axis == "packed" else made[name][0] for name, axis in self.axes.items()}
            size = sum(value.nbytes for value in found.values()) + len(key)
            if size <= self._budget:
                self._kept[key] = found
                self._bytes += size
            while self._bytes > self._budget:
                old, gone = self._kept.popitem(last=False)
                self._bytes -= sum(value.nbytes for value in gone.values()) + len(old)
        return found

    def joined(self, inputs: Mapping[str, Tensor], shown: Tensor) -> dict[str, Tensor]:
        """The same inputs as the library's model reads them; nothing where no example has a picture.

        Args:
            inputs: each (B, P, ...).
            shown: which of the P pictures each example has, bool (B, P).
        """
        if not bool(shown.any()):
            return {}
        found: dict[str, Tensor] = {}
        for key, value in inputs.items():
            if self.axes[key] == "packed":
                found[key] = value[shown].flatten(0, 1)
                continue
            there = shown.view(*shown.shape, *[1] * (value.ndim - 2))
            own = torch.where(there, value, torch.zeros_like(value))  # so does the processor pad pictures
            found[key] = own.sum(1) if value.ndim == 2 else own.flatten(1, 2)  # one number per example counts something
        return found
