"""Input preparation of backbones: pictures as patches, and attention masks."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from confed.federation.protocols import Batch
from confed.models.hub_names import hub_name
from confed.models.pretrained import WEIGHTS

_FILES = ("preprocessor_config.json", "processor_config.json")
_TINY, _TINY_SIDE = "tiny:", 32
_PADDING = {"LlavaImageProcessor", "JanusImageProcessor", "DeepseekVLImageProcessor"}
_LARGEST = 2048
"""Pixels from which on a size is one of areas, as processors of pictures of any size have it."""


def picture_side(model: Mapping[str, Any]) -> int | None:
    """Side in pixels of the square pictures that a model by name reads; None where its processor takes any size."""
    if str(model.get("source", "")).startswith(_TINY):
        return _TINY_SIDE
    return _side(_processor(model))


def picture_fit(model: Mapping[str, Any]) -> str:
    """How the processor of a model by name makes squares of pictures: "squeeze", "crop" or "pad"."""
    if str(model.get("source", "")).startswith(_TINY):
        return "squeeze"
    processor = _processor(model)
    if processor.get("image_grid_pinpoints"):  # tiles in the picture's own proportions: no square is what it makes
        return "squeeze"
    kind = str(processor.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if kind in _PADDING and processor.get("do_pad", kind != "LlavaImageProcessor"):
        return "pad"
    return "crop" if _cropped_from(processor) else "squeeze"


def cropped_middle(model: Mapping[str, Any]) -> tuple[int, int]:
    """Shorter edge to which a model's processor resizes pictures, and side of the middle that it crops; zeros: all."""
    processor = _processor(model)
    crop = processor.get("crop_size")
    side = crop.get("height") if isinstance(crop, Mapping) else crop
    edge = _cropped_from(processor)
    return (edge, side) if edge and isinstance(side, int) else (0, 0)


def _processor(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a source's processor of pictures; empty where there is none."""
    source = str(model.get("source", ""))
    folder = next((path for path in (WEIGHTS / source, Path(source).expanduser()) if source and path.is_dir()), None)
    for name in _FILES:
        file = _on_hub(source, name, str(model.get("revision", ""))) if folder is None else folder / name
        if file is not None and file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            return content.get("image_processor", content)
    return {}


def _side(processor: Mapping[str, Any]) -> int | None:
    """The side that pictures are cropped from, that of one tile, or that they are resized to."""
    cropped = processor.get("crop_size") if processor.get("do_center_crop") else None
    # What it crops is the middle of a larger square: it gets that one.
    given = _cropped_from(processor) or cropped or processor.get("max_image_size") or processor.get("size")
    sides = given if isinstance(given, Mapping) else {"height": given}
    side = next((sides[key] for key in ("height", "shortest_edge", "longest_edge") if sides.get(key)), None)
    return side if isinstance(side, int) and side <= _LARGEST else None


def _cropped_from(processor: Mapping[str, Any]) -> int:
    """The shorter edge of pictures before their middle is cropped; 0 where nothing is, or proportions are not kept."""
    size, crop = processor.get("size"), processor.get("crop_size")
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else size
    side = crop.get("height") if isinstance(crop, Mapping) else crop
    if not processor.get("do_center_crop") or not isinstance(edge, int) or not isinstance(side, int):
        return 0
    return edge if side <= edge <= _LARGEST else 0


def _on_hub(source: str, name: str, revision: str) -> Path | None:
    """A file of a model on the hub; None where there is none, or no network."""
    if hub_name(source) is None:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(source, name, revision=revision or None))
    except (OSError, ValueError, HfHubHTTPError):
        return None


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (B, S) of ones and zeros as what is added to attention scores, (B, 1, 1, S)."""
    # Plain arithmetic, because the library's mask builder looks at the data and so prevents vmap.
    return (mask[:, None, None, :] == 0).to(dtype) * torch.finfo(dtype).min


def processor_settings(processor: Any) -> str:
    """Digest of the settings of a processor of ``transformers``, by which it makes inputs of pictures."""
    return sha256(json.dumps(processor.to_dict(), sort_keys=True, default=str).encode()).hexdigest()[:16]


def needed(batch: Batch, model: str, *keys: str) -> list[Tensor]:
    """Some tensors of a batch; one that it lacks is a ValueError."""
    for key in keys:
        if key not in batch:
            raise ValueError(f"a batch of {model} needs the key {key!r}, got {', '.join(sorted(batch)) or 'none'}")
    return [batch[key] for key in keys]


def check_shape(tensor: Tensor, name: str, *expected: int | str) -> Tensor:
    """The tensor, if it has a shape, in which letters stand for any number; else a ValueError."""
    same = [isinstance(size, str) or size == actual for size, actual in zip(expected, tensor.shape, strict=False)]
    if tensor.ndim != len(expected) or not all(same):
        shape = ", ".join(map(str, expected)) + "," * (len(expected) == 1)
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(tensor.shape)}")
    return tensor


def checked_image(batch: Batch, size: tuple[int, int], model: str) -> Tensor:
    """The pictures of a batch, (B, 3, H, W)."""
    (image,) = needed(batch, model, "image")
    return check_shape(image, "image", "B", 3, *size)


def checked_text(
    batch: Batch, rows: int | None, longest: int, model: str, keys: tuple[str, str] = ("text", "text_mask")
) -> tuple[Tensor, Tensor]:
    """The token ids of as many texts and which of them are no padding, each (B, L); of choices (B, K, L)."""
    several = keys[0] == "choices"
    text, mask = needed(batch, model, *keys)
    if text.ndim != 2 + several or (rows is not None and len(text) != rows) or text.shape[-1] > longest:
        shape = f"({len(text) if rows is None else rows}, {'K, ' if several else ''}at most {longest})"
        raise ValueError(f"{keys[0]} must have shape {shape}, got {tuple(text.shape)}")
    if mask.shape != text.shape:
        raise ValueError(f"{keys[1]} must have the shape of {keys[0]} {tuple(text.shape)}, got {tuple(mask.shape)}")
    return text, mask


def patches(image: Tensor, side: int) -> Tensor:
    """Squares of pictures (B, 3, H, W), row by row, (B, rows * columns, 3 * side * side)."""
    rows, columns = image.shape[2] // side, image.shape[3] // side
    x = image.reshape(-1, 3, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(-1, rows * columns, 3 * side * side)


def patch_tokens(image: Tensor, convolution: Any, cls_token: Tensor) -> Tensor:
    """Class token and patches row by row, without positions, (B, 1 + rows * columns, d)."""
    if not image.is_floating_point():
        image = image.to(convolution.weight.dtype).mul_(1 / 127.5).sub_(1.0)
    # The stride of the convolution is its kernel, so it is one matrix product over the unfolded patches.
    x = patches(image, convolution.weight.shape[-1])
    x = F.linear(x, convolution.weight.flatten(1), convolution.bias)
    return torch.cat([cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
