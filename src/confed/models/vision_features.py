"""Grid features from a picture encoder of ``transformers``, in place of detected regions.

The encoder's last states, without class token, as a grid of at most G x G cells; larger grids are averaged over cells.
Pictures are squeezed to a square of the encoder's size and normalised as its checkpoint says.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.intake.opening import read_picture
from confed.data.pictures import resize
from confed.data.regions import HeldRegions, grid_boxes
from confed.federation.ranges import check_value
from confed.models.heads import COUNT
from confed.models.hub_names import hub_name
from confed.models.pretrained import checked_folder, reading

PREFIX = "transformers:"
"""How regions name an encoder of ``transformers`` that made them: this, its name, ``#`` and the cells per side."""
_PLAIN = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class VisionEncoder:
    """A frozen picture encoder."""

    def __init__(
        self, model: nn.Module, size: int, mean: Sequence[float], std: Sequence[float], grid: int, name: str
    ) -> None:
        check_value(grid, COUNT, "grid")
        self.model, self.size, self.grid, self.name = model.eval(), size, grid, name
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, pictures: np.ndarray) -> HeldRegions:
        """Regions of uint8 pictures (B, S, S, 3), row by row."""
        pixels = torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))) / 255
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            output: Any = self.model(pixel_values=((pixels - self.mean) / self.std).to(device))
        patch: Any = getattr(self.model.config, "patch_size", None)
        plane = plane_of(output.last_hidden_state, self.size // patch if isinstance(patch, int) else 0)
        if max(plane.shape[2:]) > self.grid:
            plane = F.adaptive_avg_pool2d(plane, (min(plane.shape[2], self.grid), min(plane.shape[3], self.grid)))
        boxes = np.repeat(grid_boxes(*plane.shape[2:])[None], len(pictures), axis=0)
        return HeldRegions(plane.flatten(2).transpose(1, 2).float().cpu().numpy(), boxes, self.name)

    def files(self, files: Sequence[Path], batch: int = 32) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Features (R, W) and boxes (R, 4) of picture files, one after the other."""
        rest = iter(files)
        while file_batch := list(islice(rest, batch)):
            regions = self(np.stack([resize(read_picture(file), self.size) for file in file_batch]))
            yield from zip(regions.features, regions.boxes, strict=True)


def plane_of(states: Tensor, patches: int) -> Tensor:
    """The last states as a picture, (B, d, h, w)."""
    if states.ndim == 4:
        return states
    tokens = states.shape[1]
    side = patches if 0 < patches * patches <= tokens else math.isqrt(tokens)  # stages may have merged patches
    # Whatever comes before the patches: a class token, distillation or register tokens.
    return states[:, tokens - side * side :].transpose(1, 2).unflatten(2, (side, side))


@lru_cache(maxsize=1)
def load_vision_encoder(name: str, grid: int = 10, device: str = "cpu") -> VisionEncoder:
    """A picture encoder of ``transformers``."""
    from transformers import AutoModel

    loaded: Any
    where = checked_folder(Path(name)) if Path(name).is_dir() else hub_name(name)
    if where is None:
        raise ValueError(f"expected a folder with a model of `transformers` or a hub name owner/name, got {name!r}")
    with reading(name, "picture encoder"):
        loaded = AutoModel.from_pretrained(
            where, output_loading_info=True, trust_remote_code=False, use_safetensors=True
        )
    whole, description = loaded
    # The library fills these with random numbers. The last states do not pass through a pooler.
    missing = sorted(tensor for tensor in description["missing_keys"] if "pooler." not in tensor)
    if missing:
        raise ValueError(f"the checkpoint {name!r} lacks {len(missing)} tensors of its model, the first: {missing[0]}")
    model = getattr(whole, "vision_model", whole)
    config = model.config
    reads = getattr(model, "main_input_name", "nothing known")
    if reads != "pixel_values":
        raise ValueError(f"{name!r} must read pictures, it reads {reads!r}")
    size = getattr(config, "image_size", 224)
    mean, std = colours_of(name)
    side = size if isinstance(size, int) else size[0]
    return VisionEncoder(model.to(device), side, mean, std, grid, f"{PREFIX}{name}#{grid}")


def colours_of(name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and standard deviation of the colour channels, as the checkpoint has them."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        options, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:  # a checkpoint without a preprocessor
        return _PLAIN
    return options.get("image_mean", _PLAIN[0]), options.get("image_std", _PLAIN[1])
