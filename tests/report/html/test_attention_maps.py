"""Attention over regions in the gallery: boxes painted on the picture."""

import base64
import io
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from confed.federation.protocols import Output
from confed.report.html.media import attention_overlay
from confed.runs.samples import answer


def painted(html: str) -> np.ndarray:
    found = re.search(r"base64,([^)]*)\)", html)
    assert found is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGBA"))


def test_boxes_are_light_where_they_count() -> None:
    boxes = [[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0], [0.25, 0.25, 0.75, 0.75]]
    pixels = painted(attention_overlay([0.25, 1.0, 0.0], boxes))
    side = len(pixels)
    assert pixels.shape == (side, side, 4)
    dark = pixels[2, -3, 3]  # in no box
    assert dark == round(255 * 0.7)
    assert pixels[side // 8, side // 8, 3] == pytest.approx(dark / 2, abs=1)  # the square root of a quarter
    assert pixels[3 * side // 4, 3 * side // 4, 3] == 0
    assert tuple(pixels[side - 1, side - 1]) == (255, 214, 64, 255)  # the frame of the box that counted most
    assert pixels[3 * side // 8, 3 * side // 8, 3] == pytest.approx(dark / 2, abs=1)  # overlap: the larger weight


@pytest.mark.parametrize(
    ("weights", "boxes"),
    [
        ([0.5, 1.0], [[0, 0, 1, 1]]),
        ([], []),
        ([0.0], [[0, 0, 1, 1]]),
        ([1.0], [[0, 0, 1, float("nan")]]),
        ([1.0], None),
        ([1.0], [[0, 0, 1]]),
        ("x", [[0, 0, 1, 1]]),
    ],
)
def test_what_is_no_map_is_left_out(weights: Any, boxes: Any) -> None:
    assert attention_overlay(weights, boxes) == ""


def test_a_box_outside_the_picture_is_drawn_as_a_point() -> None:
    assert painted(attention_overlay([1.0, 0.5], [[0.5, 0.5, 0.5, 0.5], [1.2, -1, 1.5, -0.5]])).shape[2] == 4


class Regional(nn.Module):
    """Answers 1, looks at the second of three regions; asked for similarities if it has a temperature."""

    def __init__(self, temperature: float | None = None) -> None:
        super().__init__()
        if temperature is not None:
            self.temperature = temperature

    def forward(self, batch: dict[str, Tensor]) -> Output:
        return Output(torch.tensor([[0.1, 0.4]] * len(batch["regions"])), torch.zeros(len(batch["regions"]), 1))

    def attention(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor([[0.5, 1.0, 0.25]] * len(batch["regions"]))


def test_samples_hold_weights_and_boxes_without_padding() -> None:
    regions = torch.ones(2, 3, 4)
    regions[1, 2] = 0
    boxes = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0], [0.12345, 0.0, 1.0, 1.0]]).expand(2, 3, 4)
    workspace: Any = SimpleNamespace(model=Regional())
    first, second = answer(workspace, {"regions": regions, "boxes": boxes}, ("no", "yes"))
    assert first["answer"] == "yes"
    assert first["attention"] == [0.5, 1.0, 0.25]
    assert first["boxes"][2] == [0.123, 0.0, 1.0, 1.0]
    assert (second["attention"], len(second["boxes"])) == ([0.5, 1.0], 2)
    assert first["probability"] == pytest.approx(1 / (1 + np.exp(-0.3)), abs=1e-4)
    without = answer(workspace, {"regions": regions}, ("no", "yes"))
    assert without[0]["attention"] is None


def test_similarities_have_the_temperature_of_training() -> None:
    workspace: Any = SimpleNamespace(model=Regional(0.1))
    (found,) = answer(workspace, {"regions": torch.ones(1, 3, 4)}, ("no", "yes"))
    assert found["probability"] == pytest.approx(1 / (1 + np.exp(-3)), abs=1e-4)
