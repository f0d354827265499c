"""Size and fit of pictures that a processor of ``transformers`` reads, from its configuration, without the library."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
