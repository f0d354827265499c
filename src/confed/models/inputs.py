"""Input preparation of backbones: pictures as patches, and attention masks."""

import json
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from confed.federation.protocols import Batch


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (B, S) of ones and zeros as what is added to attention scores, (B, 1, 1, S)."""
    # Plain arithmetic, because the library's mask builder looks at the data and so prevents vmap.
    return (mask[:, None, None, :] == 0).to(dtype) * torch.finfo(dtype).min


def processor_settings(processor: Any) -> str:
    """Digest of the settings of a processor of ``transformers``, by which it makes inputs of pictures."""
    return sha256(json.dumps(processor.to_dict(), sort_keys=True, default=str).encode()).hexdigest()[:16]


def checked_image(batch: Batch, size: tuple[int, int], model: str) -> Tensor:
    """The pictures of a batch, (B, 3, H, W)."""
    if "image" not in batch:
        raise ValueError(f"a batch of {model} needs the key 'image', got {', '.join(sorted(batch)) or 'none'}")
    image, expected = batch["image"], (3, *size)
    if image.ndim != 4 or tuple(image.shape[1:]) != expected:
        raise ValueError(f"image must have shape (B, {', '.join(map(str, expected))}), got {tuple(image.shape)}")
    return image


def patch_tokens(image: Tensor, convolution: Any, cls_token: Tensor, grid: tuple[int, int]) -> Tensor:
    """Class token and patches row by row, without positions, (B, 1 + rows * columns, d)."""
    if not image.is_floating_point():
        image = image.to(convolution.weight.dtype).mul_(1 / 127.5).sub_(1.0)
    (rows, columns), p = grid, convolution.weight.shape[-1]
    # The stride of the convolution is its kernel, so it is one matrix product over the unfolded patches.
    x = image.reshape(-1, 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).reshape(-1, rows * columns, 3 * p * p)
    x = F.linear(x, convolution.weight.flatten(1), convolution.bias)
    return torch.cat([cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
