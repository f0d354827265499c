"""Grid features: states of a frozen picture encoder in place of detected regions.

The encoder's last states, without class token, are a grid of at most G x G cells; larger grids are averaged over cells.
Pictures are squeezed to a square of the encoder's size and normalised as its checkpoint says.

For the built-in benchmark the encoder is that of the packaged ``albef_mini``, which was trained on the benchmark's
public split and on no client's data. A patch of 16 x 16 pixels is a region. Its vector is the encoder's last state
after the final normalisation, so that every dimension is of the same order already (standard deviations from 0.3 to 2.4
on the public split; dividing by them made no clear difference in one comparison of a small MCAN, one seed). No
statistics of the data at hand enter.

Grids of patches in place of detected regions are common practice (Jiang et al., "In Defense of Grid Features for Visual
Question Answering", CVPR 2020).
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.examples import Pictures, channels_first
from confed.data.intake.opening import read_picture
from confed.data.picture_tables import NoPictures
from confed.data.pictures import resize
from confed.data.regions import HeldRegions, grid_boxes
from confed.federation.ranges import check_value
from confed.models.heads import COUNT
from confed.models.pretrained import published

if TYPE_CHECKING:
    from confed.models.albef import Albef


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

    whole: Any = published(AutoModel, name, 0)
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


# Grid features of the built-in benchmark: 4 x 4 cells -------------------------------------------------------

ENCODER = "albef_mini"  # the name under which regions remember what made them
_CHUNK = 512


def grid_features(images: np.ndarray | Pictures) -> HeldRegions:
    """The regions of pictures: features (M, 16, 64) and the boxes of the cells, both float32."""
    if isinstance(images, NoPictures):
        raise ValueError("grid features are made from pictures, and the dataset has none")
    model = _encoder()
    size, patch = model.config.image_size, model.config.patch
    if tuple(images.shape[1:]) != (size, size, 3):
        raise ValueError(
            f"the built-in encoder of grid features reads pictures of {size} x {size} pixels, got "
            f"{images.shape[1]} x {images.shape[2]}: set data.image_size = {size}, or prepare features of your own"
        )
    table, side = channels_first(images), size // patch
    features = np.empty((len(table), side * side, model.config.width), dtype=np.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # how many there are decides the order of sums, and so the last bits
    try:
        with torch.inference_mode():
            mean, std = (torch.tensor(values)[:, None, None] for values in (model.config.mean, model.config.std))
            for rows in torch.arange(len(table)).split(_CHUNK):
                if len(rows):  # a table without pictures has one part without rows
                    hidden = model.visual_embedding((table[rows] / 255 - mean) / std)
                    for block in model.blocks:
                        hidden = block(hidden)
                    features[rows[0] : rows[-1] + 1] = model.visual_norm(hidden)[:, 1:].numpy()
    finally:
        torch.set_num_threads(threads)
    boxes = np.broadcast_to(grid_boxes(side, side), (len(table), side * side, 4))
    return HeldRegions(features, np.ascontiguousarray(boxes), ENCODER)


def regions_of(picture: np.ndarray, encoder: str) -> HeldRegions:
    """The regions of one picture, as those that a model was trained on were made."""
    if encoder == ENCODER:
        return grid_features(resize(picture, _encoder().config.image_size)[None])
    if encoder.startswith(PREFIX):
        name, _, grid = encoder.removeprefix(PREFIX).rpartition("#")
        model = load_vision_encoder(name, int(grid))
        return model(resize(picture, model.size)[None])
    raise ValueError(
        "this model reads features that were made elsewhere"
        + (f", by {encoder}" if encoder else "")
        + "; a picture cannot be turned into such features here"
    )


@lru_cache(maxsize=1)
def _encoder() -> "Albef":
    """The packaged model, of which only the picture encoder is used."""
    from confed.models.albef import albef_mini, mini_answer_tokenizer

    return albef_mini(1, mini_answer_tokenizer(()).vocab_size).eval()
