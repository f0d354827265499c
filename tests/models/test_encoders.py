"""Towers of transformers under a head: what they compute, what learns, what is kept, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from confed.federation.stages import frozen_stages
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import load_exported
from confed.models.encoders import Encoders, encoder_tokenizer, encoders
from confed.recipes.recipe import load_recipe
from confed.runs.run import run

VISION = ("vit", "dinov2", "siglip_vision_model", "convnext", "resnet", "mobilenet_v2")
TEXT = ("bert", "roberta", "distilbert")
SMALL = ("study.methods=[]", "algorithm.name=fedavg", "data.train=6", "data.validation=4", "data.test=4",
         "model.name=encoders", "local.epochs=1", "run.rounds=2", "run.workers=1",
         "run.gallery=0", "run.controls=none", "run.evaluate_every=0")  # fmt: skip


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    text, mask = encoder_tokenizer(["what", "is", "this"])(["what is this?", "is this"])
    return {"image": torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8, generator=rng), "text": text,
            "text_mask": mask, "label": torch.tensor([0, 2])}  # fmt: skip


def learning(model: Encoders) -> set[str]:
    return {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("vision", VISION)
def test_a_linear_head_reads_the_towers_normalised_vector(vision: str, batch: dict[str, torch.Tensor]) -> None:
    model = encoders(3, 20, vision=f"tiny:{vision}").train()
    assert learning(model) == {"classifier"}
    assert not model.vision.training
    output = model(batch)
    plain: Any = model.vision.model
    with torch.no_grad():
        pixels = (batch["image"].float() / 255 - 0.5) / 0.5
        states = plain(pixel_values=pixels).last_hidden_state
    pooled = (
        states.mean((2, 3)) if states.ndim == 4 else states[:, 0] if vision != "siglip_vision_model" else states.mean(1)
    )
    expected = F.layer_norm(pooled, pooled.shape[-1:])
    torch.testing.assert_close(output.features, expected)
    torch.testing.assert_close(output.logits, F.linear(expected, model.classifier.weight, model.classifier.bias))


@pytest.mark.parametrize("text", TEXT)
@pytest.mark.parametrize("fusion", ["linear", "product", "attention"])
def test_fusions_read_both_and_nothing_of_padding(fusion: str, text: str, batch: dict[str, torch.Tensor]) -> None:
    model = encoders(3, 20, vision="tiny:resnet", text=f"tiny:{text}", fusion=fusion, width=32).eval()
    output = model(batch)
    assert output.logits.shape == (2, 3)
    other = batch | {"text": torch.where(batch["text_mask"] == 0, 7, batch["text"])}
    torch.testing.assert_close(model(other).logits, output.logits)
    for changed in (
        {"image": 255 - batch["image"]},
        {"text": batch["text"].flip(0), "text_mask": batch["text_mask"].flip(0)},
    ):
        assert not torch.allclose(model(batch | changed).logits, output.logits)


@pytest.mark.parametrize(
    ("trainable", "modules", "frozen"),
    [("head", {"fusion", "classifier"}, 4), ("top", {"vision", "text", "fusion", "classifier"}, 1),
     ("lora", {"vision", "text", "fusion", "classifier"}, 0), ("all", {"vision", "text", "fusion", "classifier"}, 0),
     ("adapters", {"vision", "text", "fusion", "classifier"}, 0)],
)  # fmt: skip
def test_what_learns_and_which_towers_are_kept(trainable: Any, modules: set[str], frozen: int) -> None:
    model = encoders(3, 20, vision="tiny:vit", text="tiny:bert", fusion="product", trainable=trainable)
    assert learning(model) == modules
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    of_pictures = [name.removeprefix("vision.") for name in trained if name.startswith("vision.")]
    assert frozen_stages(model.vision, of_pictures) == frozen
    if trainable == "top":
        towers = [name for name in trained if name.startswith(("vision.", "text."))]
        assert towers
        assert not any(".0." in name and "layer" in name for name in towers)


def test_normalisation_keeps_its_statistics_when_all_learns(batch: dict[str, torch.Tensor]) -> None:
    model = encoders(3, 20, vision="tiny:resnet", trainable="all").train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(batch).logits.sum().backward()
    assert before
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert model.vision.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vision": "tiny:unheard"}, "model.vision must be a name, a folder or tiny: and one of vit"),
        ({"vision": "tiny:bert"}, "model.vision must read pictures, and 'tiny:bert' reads input_ids"),
        ({"vision": "tiny:vit", "text": "tiny:vit"}, "model.text must read texts, and 'tiny:vit' reads pixel_values"),
        ({"vision": "nowhere at all"}, "expected a folder with a"),
    ],
)
def test_towers_that_cannot_be_read_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoders(3, 20, **options)


def test_a_run_keeps_what_frozen_towers_say_and_exports(tmp_path: Path) -> None:
    settings = ["model.vision=tiny:mobilenet_v2", "model.text=tiny:bert", "model.fusion=product"]
    run(load_recipe("fedvqa_scenes", [*SMALL, *settings]), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported")
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    batch = next(iter(finished.setup.population.data("sports").test(4)))
    expected = finished.model(None)(batch).logits
    assert torch.equal(load_exported(tmp_path / "exported")(batch).logits, expected)


@pytest.fixture(scope="module")
def weights() -> Path:
    folder = Path(os.environ.get("CONFED_WEIGHTS", Path(__file__).parents[3] / "shared" / "weights"))
    if not (folder / "mobilenet_v2_imagenet").is_dir():
        pytest.skip("no real encoders here; set CONFED_WEIGHTS to their folder")
    return folder


def test_real_encoders_see_and_read(weights: Path) -> None:
    model = encoders(
        2, 0, vision=str(weights / "mobilenet_v2_imagenet"), text=str(weights / "minilm_l3"), fusion="product"
    ).eval()
    tokenizer = encoder_tokenizer([], text=str(weights / "minilm_l3"))
    text, mask = tokenizer(["is there a dog?", "do you see a dog?", "how many planes are there?"])
    with torch.no_grad():
        images = torch.zeros(3, 3, 64, 64, dtype=torch.uint8)
        vectors = model._encoded({"image": images, "text": text, "text_mask": mask}).text
    assert vectors is not None
    said = F.normalize(vectors)
    similar = said @ said.T
    assert similar[0, 1] > 0.6
    assert similar[0, 2] < 0.3
