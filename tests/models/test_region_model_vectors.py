"""MMNasNet, MCAN and BUTD: logits of openvqa's layers, run apart in double precision, as stored numbers.

The released weights are no part of the tests. Weights and inputs here are drawn by name, so that nothing but the
logits has to be stored; the layers that gave them were written out apart from this library after openvqa's
``models/mmnasnet``, ``models/mcan`` and ``models/butd``, without dropout, at a width of 16 with two heads of 8 and
boxes in pixels of a picture of 640 x 640.
"""

import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.models.butd import BUTD
from confed.models.mcan import MCAN
from confed.models.mmnasnet import DECODER, ENCODER, MMNasNet
from confed.models.region_model import RegionModel, Sizes

SIDE = 640
LOGITS = {
    "mmnasnet": [
        [-0.162572462, 0.837983109, 0.559475169, -2.626516534],
        [-0.240779042, 0.849752873, 0.603462277, -2.618707158],
        [-0.196693484, 0.841558005, 0.546727577, -2.614885933],
    ],
    "mcan": [
        [-0.728750561, -0.229707000, 1.499659609, 1.307937920],
        [-1.251910375, 0.192779419, 0.962227788, 0.535866287],
        [-0.388844850, -0.232286342, 1.400355943, 1.175106777],
    ],
    "butd": [
        [-0.355713332, -0.426181282, 0.047862031, -0.470694447],
        [-0.356358936, -0.419575421, 0.064155932, -0.476021756],
        [-0.361468352, -0.433319325, 0.064321237, -0.480922391],
    ],
}


def build(name: str, **changes: int) -> RegionModel:
    sizes, shared = Sizes(4, 12, 5, region_width=6), {"hidden": 16, "features": 12, "dropout": 0.1}
    if name == "butd":
        return BUTD(sizes, **shared, classifier_dropout=0.5)  # pyright: ignore[reportArgumentType]
    if name == "mcan":
        return MCAN(sizes, **shared, layers=2, heads=2, flat_hidden=16)  # pyright: ignore[reportArgumentType]
    others = {"head_width": 8, "relation": 6, "flat_hidden": 16, "picture_side": SIDE, **changes}
    return MMNasNet(sizes, encoder=ENCODER, decoder=DECODER, **shared, **others)  # pyright: ignore[reportArgumentType]


def weights(name: str, shape: tuple[int, ...]) -> Tensor:
    """Drawn from the parameter's name; lengths and scales around their usual values."""
    drawn = torch.from_numpy(np.asarray(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)))
    values = drawn * shape[-1] ** -0.5 if len(shape) > 1 else 0.3 * drawn
    layer, kind = name.split(".")[-2:]
    return values + (2 if kind == "weight_g" else 1 if "norm" in layer and kind == "weight" else 0)


def logits(model: RegionModel) -> np.ndarray:
    model.double().eval()
    draws = np.random.RandomState(5)
    regions, low = draws.standard_normal((3, 5, 6)), draws.uniform(0, 300, (3, 5, 2))
    boxes = np.concatenate([low, low + draws.uniform(0, 340, (3, 5, 2))], axis=-1) / SIDE
    for values in (regions, boxes):
        values[1, 3:], values[2, 4:] = 0, 0  # padding
    mask = np.arange(7) < np.array([[7], [4], [2]])
    batch = {"regions": regions, "boxes": boxes, "text": draws.randint(1, 12, (3, 7)) * mask, "text_mask": mask * 1}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name, tuple(parameter.shape)))
        return model({key: torch.from_numpy(value) for key, value in batch.items()}).logits.numpy()


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_those_of_openvqas_layers(name: str) -> None:
    np.testing.assert_allclose(logits(build(name)), LOGITS[name], atol=2e-8, rtol=0)


def test_the_pixel_of_the_box_geometry_is_in_them() -> None:
    assert np.abs(logits(build("mmnasnet", picture_side=0)) - LOGITS["mmnasnet"]).max() > 1e-6
