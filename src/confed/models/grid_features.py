"""Grid features of the built-in benchmark: patch states of a frozen picture encoder, 4 x 4 cells.

The encoder is that of the packaged ``albef_mini``, which was trained on the benchmark's public split and on no client's
data. A patch of 16 x 16 pixels is a region. Its vector is the encoder's last state after the final normalisation, so
that every dimension is of the same order already (standard deviations from 0.3 to 2.4 on the public split; dividing by
them made no clear difference in one comparison of a small MCAN, one seed). No statistics of the data at hand enter.

Grids of patches in place of detected regions are common practice (Jiang et al., "In Defense of Grid Features for Visual
Question Answering", CVPR 2020).
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from confed.data.examples import Pictures, channels_first
from confed.data.picture_tables import NoPictures
from confed.data.pictures import resize
from confed.data.regions import HeldRegions, grid_boxes
from confed.models.vision_features import PREFIX, load_vision_encoder

if TYPE_CHECKING:
    from confed.models.albef import Albef


ENCODER = "albef_mini"  # the name under which regions remember what made them
_CHUNK = 512


def grid_features(images: np.ndarray | Pictures) -> HeldRegions:
    """The regions of pictures.

    Returns:
        Features (M, 16, 64) and the boxes of the cells, both float32.
    """
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
            for rows in torch.arange(len(table)).split(_CHUNK):
                if len(rows):  # a table without pictures has one part without rows
                    features[rows[0] : rows[-1] + 1] = _patch_states(model, table[rows]).numpy()
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


def _patch_states(model: "Albef", images: Tensor) -> Tensor:
    """States of the patches, row by row, (B, P, d), of uint8 pictures (B, 3, H, W)."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (model.config.mean, model.config.std))
    hidden = model.visual_embedding((images / 255 - mean) / std)
    for block in model.blocks:
        hidden = block(hidden)
    return model.visual_norm(hidden)[:, 1:]
