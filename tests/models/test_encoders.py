"""Towers of transformers under a head: what they compute, what learns, what is kept, and what is refused."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from command_line import Patch
from confed.federation.specs import model_spec
from confed.federation.stages import frozen_stages
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import load_exported
from confed.models.encoders import Encoders, encoder_tokenizer, encoders
from confed.models.finetuning import Finetuning
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses

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
    head: Any = model.classifier
    torch.testing.assert_close(output.logits, F.linear(expected, head.weight, head.bias))


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
        ({"vision": "tiny:bert"}, "model.vision must be a name, a folder or tiny: and one of vit, .*, got 'tiny:bert'"),
        ({"vision": "tiny:vit", "text": "tiny:vit"}, "model.text must be a name, a folder or tiny: .* got 'tiny:vit'"),
        ({"vision": "nowhere at all"}, "expected a folder with a"),
    ],
)
def test_towers_that_cannot_be_read_are_named(options: dict[str, str], message: str) -> None:
    refuses(message, encoders, 3, 20, **options)


@pytest.mark.parametrize("fusion", ["linear", "labels"])
def test_vectors_of_labels_stay_or_start_learning(fusion: str, batch: dict[str, torch.Tensor]) -> None:
    def build(**options: Any) -> Encoders:
        return encoders(3, 20, vision="tiny:resnet", fusion=fusion, labels="random", width=32, **options)

    fixed, learning = build(), build(labels_learn=True)
    name = "classifier.vectors" if fusion == "linear" else "tokens.labels"
    assert name in fixed.frozen
    assert name in dict(learning.named_parameters())
    assert name not in learning.frozen
    assert torch.equal(fixed.state_dict()[name], learning.state_dict()[name])
    assert torch.equal(fixed(batch).logits, learning(batch).logits)
    for model in (fixed, learning):
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], 0.1)
        F.cross_entropy(model(batch).logits, batch["label"]).backward()
        optimizer.step()
        moved = not torch.equal(model.state_dict()[name], build().state_dict()[name])
        assert moved == (model is learning)


def test_label_tokens_read_the_cells_and_what_is_known(batch: dict[str, torch.Tensor]) -> None:
    model = encoders(4, 20, vision="tiny:resnet", fusion="labels", width=32, layers=2).eval()
    unknown = model(batch).logits
    states = torch.tensor([[-1, -1, -1, 1], [-1, -1, -1, -1]])
    told = model(batch | {"known": states}).logits
    assert not torch.allclose(told[0], unknown[0])
    torch.testing.assert_close(told[1], unknown[1])
    changed = batch["image"].clone()
    changed[:, :, :8, :8] = 255 - changed[:, :, :8, :8]
    assert not torch.allclose(model(batch | {"image": changed}).logits, unknown)
    assert model_spec(model).reads_states
    assert not model_spec(encoders(4, 20, vision="tiny:resnet")).reads_states


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusion": "labels", "text": "tiny:bert"}, "it needs no model.text"),
        ({"labels_learn": True}, "model.labels_learn is about vectors: it needs model.labels"),
    ],
)
def test_options_that_contradict_are_named(options: dict[str, Any], message: str) -> None:
    refuses(message, encoders, 3, 20, vision="tiny:resnet", **options)


def run_and_exported(root: Path, *settings: str) -> tuple[Any, torch.Tensor]:
    """A batch of a small run's test examples and what its model says of them, beside its export."""
    run(load_recipe("fedvqa_scenes", [*SMALL, *settings]), root / "run")
    export(root / "run", root / "exported")
    finished = FinishedRun(root / "run")
    finished.load()
    batch = next(iter(finished.setup.population.data("sports").test(4)))
    return batch, finished.model(None)(batch).logits


def test_a_run_keeps_what_frozen_towers_say_and_exports(tmp_path: Path) -> None:
    settings = ["model.vision=tiny:mobilenet_v2", "model.text=tiny:bert", "model.fusion=product"]
    batch, expected = run_and_exported(tmp_path, *settings)
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


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("trainable", ["top", "adapters"])
def test_a_pass_that_goes_on_above_kept_blocks_is_the_whole_pass(
    vision: str, trainable: Any, batch: dict[str, torch.Tensor]
) -> None:
    model = encoders(3, 20, vision=f"tiny:{vision}", trainable=trainable, blocks=1, peft=Finetuning(reduction=4)).eval()
    tower = model.vision
    learning = [name for name, parameter in tower.named_parameters() if parameter.requires_grad]
    cut = frozen_stages(tower, learning)
    assert cut == len(tower.blocks) - 1 > 0
    assert [stage.alone for stage in tower.stages] == [True] * cut + [False] * (len(tower.stages) - 1 - cut) + [False]
    state = tower.forward_stages(None, 0, cut, batch)
    above = tower.forward_stages(state, cut, len(tower.stages), batch)
    whole = tower._result(tower.states({"pixel_values": (batch["image"].float() / 255 - 0.5) / 0.5}), 32)
    torch.testing.assert_close(above, whole)
    torch.testing.assert_close(tower(batch), whole)
    tower(batch).sum().backward()
    assert all(parameter.grad is None for parameter in tower.parameters() if not parameter.requires_grad)


def test_one_tower_alone_is_tuned(batch: dict[str, torch.Tensor]) -> None:
    model = encoders(3, 20, vision="tiny:vit", text="tiny:bert", fusion="product", trainable="lora", tuned=("text",))
    assert learning(model) == {"text", "fusion", "classifier"}
    assert set(model.towers) == {"vision"}


def test_statistics_learn_where_that_is_asked_for(batch: dict[str, torch.Tensor]) -> None:
    model = encoders(3, 20, vision="tiny:resnet", trainable="all", statistics=True).train()
    before = {name: value.clone() for name, value in model.named_buffers() if "running_mean" in name}
    model(batch)
    assert before
    assert not any(torch.equal(value, before[name]) for name, value in model.named_buffers() if name in before)
    assert model.frozen.isdisjoint(before)


def test_a_frozen_text_is_read_once_and_again_after_a_change(
    batch: dict[str, torch.Tensor], monkeypatch: Patch
) -> None:
    model = encoders(3, 20, vision="tiny:vit", text="tiny:bert", fusion="product").eval()
    assert model.text is not None
    passes: list[int] = []
    states = model.text.states
    monkeypatch.setattr(model.text, "states", lambda inputs: passes.append(1) or states(inputs))
    first = model(batch).logits
    assert torch.equal(model(batch).logits, first)
    assert len(passes) == 2  # two different texts
    with torch.no_grad():
        next(model.text.parameters()).mul_(2.0)
    assert not torch.equal(model(batch).logits, first)
    assert len(passes) == 4


def test_random_vectors_score_in_place_of_names(batch: dict[str, torch.Tensor]) -> None:
    model = encoders(3, 20, vision="tiny:vit", labels="random", width=8)
    output = model(batch)
    head: Any = model.classifier
    assert head.vectors.shape == (3, 8)
    torch.testing.assert_close(head.vectors.norm(dim=1), torch.ones(3))
    expected = head.project(output.features) @ head.vectors.T + head.bias
    torch.testing.assert_close(output.logits, expected)
    assert "classifier.vectors" in model.frozen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_shot": True}, "model.zero_shot compares names: it needs a text encoder as model.labels"),
        ({"labels": "somewhere/encoder"}, "model.labels needs the answers' names, got their number 3"),
        ({"vision": "tiny:resnet", "trainable": "lora"}, "model.peft.targets must name layers"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], message: str) -> None:
    refuses(message, encoders, 3, 20, **{"vision": "tiny:vit", **options})


def test_an_encoder_of_a_missing_library_is_refused_in_a_line(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    content = {"model_type": "timm_wrapper", "architecture": "resnet18", "architectures": ["TimmWrapperModel"]}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refuses(r"model\.vision: .* timm", encoders, 3, 20, vision=str(tmp_path))


def test_exported_towers_are_read_by_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModel

    settings = ["model.vision=tiny:resnet", "model.trainable=top", "algorithm.name=fedavg"]
    batch, expected = run_and_exported(tmp_path, *settings)
    plain: Any = AutoModel.from_pretrained(tmp_path / "exported" / "global" / "vision").eval()
    head = load_file(tmp_path / "exported" / "global" / "head.safetensors")
    with torch.no_grad():
        states = plain(pixel_values=(batch["image"].float() / 255 - 0.5) / 0.5).last_hidden_state
    features = F.layer_norm(states.mean((2, 3)), states.shape[1:2])
    scores = F.linear(features, head["classifier.weight"], head["classifier.bias"])
    torch.testing.assert_close(scores, expected)


def test_names_of_an_encoders_own_classes_find_other_names(weights: Path) -> None:
    names = ["dog", "bird", "aeroplane", "fruit"]
    model = encoders(
        names, 0, vision=str(weights / "mobilenet_v2_imagenet"), labels=str(weights / "minilm_l3"), zero_shot=True
    ).eval()
    classifier: Any = model.vision.model
    classes = {name.split(",")[0]: number - 1 for number, name in classifier.config.id2label.items() if number}
    for own, other in (
        ("golden retriever", "dog"),
        ("macaw", "bird"),
        ("airliner", "aeroplane"),
        ("strawberry", "fruit"),
    ):
        vector = model.vision.class_names[classes[own]][None]  # pyright: ignore
        assert names[int(model.classifier(vector).argmax())] == other
