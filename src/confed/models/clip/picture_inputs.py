"""Pictures as a dual encoder's processor prepares them, and features of frozen picture towers, kept by example."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from confed.models.inputs import processor_settings

__all__ = ["PictureInputs"]

KEPT = 256 * 2**20
"""Bytes of prepared pictures or of features that are kept; beyond these the oldest are made again."""


class PictureInputs:
    """What a processor makes of pictures, or what a function makes of that, kept up to a number of bytes.

    Args:
        image_processor: of ``transformers``.
        kept: bytes.
    """

    def __init__(self, image_processor: Any, kept: int = KEPT) -> None:
        self._images, self._budget, self._bytes = image_processor, kept, 0
        self._kept: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()

    @property
    def bytes_kept(self) -> int:
        """Bytes of all that is kept."""
        return self._bytes

    @property
    def settings(self) -> str:
        """Digest of those of the processor."""
        return processor_settings(self._images)

    def prepared(self, images: Tensor) -> dict[str, Tensor]:
        """Inputs of the library's picture tower, each (B, ...).

        Args:
            images: uint8, shape (B, 3, H, W).
        """
        rows = list(images.cpu().permute(0, 2, 3, 1).contiguous().numpy())
        made: Mapping[str, Tensor] = self._images(rows, return_tensors="pt")
        return {name: value.to(images.device) for name, value in made.items()}

    def kept(self, images: Tensor, kind: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function makes of each picture, (B, ...), computed once per picture.

        Args:
            images: uint8, shape (B, 3, H, W).
            kind: what it is, beside the picture itself.
            make: from pictures (K, 3, H, W) to rows (K, ...); a row depends on its own picture alone.
        """
        pixels = images.cpu().contiguous().numpy()
        keys = [blake2b(p.tobytes() + bytes(f"{p.shape} {kind}", "ascii"), digest_size=16).digest() for p in pixels]
        missing = list(dict.fromkeys(i for i, key in enumerate(keys) if key not in self._kept))
        fresh: dict[bytes, Tensor] = {}
        if missing:
            with torch.no_grad():
                made = make(images[torch.tensor(missing, device=images.device)]).detach()
            fresh = {keys[i]: row.clone() for i, row in zip(missing, made, strict=True)}
        rows = [fresh[key] if key in fresh else self._kept[key][0] for key in keys]
        for key, row in fresh.items():
            self._keep(key, row)
        return torch.stack(rows).to(images.device)

    def _keep(self, key: bytes, row: Tensor) -> None:
        if row.nbytes > self._budget:
            return
        self._kept[key] = (row,)
        self._bytes += row.nbytes
        while self._bytes > self._budget:
            self._bytes -= self._kept.popitem(last=False)[1][0].nbytes
