"""Dual encoders: equality with the library, learned context, frozen features, refusals."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from confed.federation.families.prompts import CONTEXT
from confed.federation.params import named_tensors
from confed.models import create_model
from confed.models.clip import (
    FAMILIES,
    _processor,  # pyright: ignore[reportPrivateUsage]
)

NAMES = ("red dog", "cat", "blue_bus")
PLAIN = ("red dog", "cat", "blue bus")


def encoder(family: str, **options: Any) -> Any:
    return create_model("clip", answers=NAMES, source=f"tiny:{family}", **options).eval()


def pictures(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def library(model: Any, family: str, texts: list[str]) -> Any:
    """What the library's own model makes of the same pictures and texts, with its processor's usual options."""
    processor = _processor(f"tiny:{family}", "")
    whole = "siglip" in family
    padding = {"padding": "max_length", "max_length": 64} if whole else {"padding": True}
    tokens = processor.tokenizer(texts, return_tensors="pt", **padding)
    told = {"input_ids": tokens["input_ids"]} if whole else dict(tokens)
    told.pop("token_type_ids", None)
    images = [np.ascontiguousarray(p.permute(1, 2, 0).numpy()) for p in pictures()]
    with torch.no_grad():
        return model.body(**told, **processor.image_processor(images, return_tensors="pt"))


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_shot_scores_are_the_librarys(family: str) -> None:
    model = encoder(family, trainable="head", template="This is a photo of {}.")
    wanted = library(model, family, [f"This is a photo of {name}." for name in PLAIN])
    with torch.no_grad():
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted.logits_per_image, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_context_of_plain_words_gives_the_librarys_text_features(family: str) -> None:
    model = encoder(family, context="a photo of a")
    wanted = library(model, family, [f"a photo of a {name}." for name in PLAIN])
    with torch.no_grad():
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted.logits_per_image, rtol=1e-5, atol=1e-5)


def test_prompt_ensemble_is_the_mean_of_the_librarys_features() -> None:
    templates = ("a photo of a {}.", "a drawing of a {}.", "one {}.")
    model = encoder("clip", trainable="head", templates=templates)
    each = [library(model, "clip", [t.format(name) for name in PLAIN]) for t in templates]
    texts = F.normalize(torch.stack([out.text_embeds for out in each]).mean(0), dim=-1)
    wanted = each[0].image_embeds @ texts.T * model.body.logit_scale.exp()
    with torch.no_grad():
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_learning_trains_the_context_and_nothing_else(family: str) -> None:
    model = encoder(family, context=4)
    assert model.context.vectors.shape == (4, 32)
    model.train()
    F.cross_entropy(model({"image": pictures()}).logits, torch.tensor([0, 1, 2])).backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {CONTEXT} == {n for n, _ in model.named_parameters()} - model.frozen
    assert model.context.vectors.grad.abs().sum() > 0


def test_context_of_each_class_reaches_its_own_class_alone() -> None:
    model, classes = encoder("clip", context=2), torch.arange(3)
    context = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model.class_features(context, classes)
        context[1] += 1
        after = model.class_features(context, classes)
    assert [bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_classes_that_are_not_offered_cannot_win() -> None:
    model = encoder("clip", context=2)
    offered = torch.tensor([[True, False, True]] * 3)
    with torch.no_grad():
        whole, some = model({"image": pictures()}).logits, model({"image": pictures(), "offered": offered}).logits
    torch.testing.assert_close(some[:, [0, 2]], whole[:, [0, 2]], rtol=1e-5, atol=1e-5)
    assert (some.softmax(1)[:, 1] == 0).all()


def test_features_of_a_frozen_tower_are_computed_once_per_picture() -> None:
    model, passes = encoder("clip"), []
    model.body.vision_model.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        first = model.image_features({"image": pictures()})
        again = model.image_features({"image": pictures().flip(0)})
    assert len(passes) == 1
    assert torch.equal(first, again.flip(0))


def test_text_encoder_runs_once_per_step_and_once_for_many_evaluation_batches() -> None:
    model, passes = encoder("clip"), []
    model.body.text_model.register_forward_hook(lambda *_: passes.append(1))
    model({"image": pictures()})
    assert len(passes) == 1
    with torch.no_grad():
        for _ in range(3):
            model({"image": pictures()})
        model.context.vectors.add_(1)
        model({"image": pictures()})
    assert len(passes) == 3


def test_lora_changes_both_towers_and_nothing_is_kept() -> None:
    model = encoder("clip", trainable="lora")
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in learned} == {"text_model", "vision_model"}
    model.train()
    F.cross_entropy(model({"image": pictures()}).logits, torch.tensor([0, 1, 2])).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if n in learned)
    assert model._pictures.bytes_kept == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_has_two_names(family: str) -> None:
    # Training of everything would step twice along its gradient, and send it twice.
    tensors = named_tensors(encoder(family, trainable="all"))
    assert len({id(tensor) for tensor in tensors.values()}) == len(tensors)


def test_linear_head_learns_alone_on_unit_features() -> None:
    model = encoder("siglip", head="linear", trainable="head")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"classifier.weight", "classifier.bias"}
    features = model({"image": pictures()}).features
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))


def test_attention_adapter_is_fedclips_network() -> None:
    model = encoder("clip", head="attention", trainable="head")
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {"picture_adapter"}
    plain, adapter = model.image_features({"image": pictures()}), model.picture_adapter
    with torch.no_grad():
        adapter.output.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        network = torch.nn.Sequential(adapter.hidden, torch.nn.Tanh(), adapter.output, torch.nn.Softmax(dim=1))
        weighed = network(plain * 24**0.5) * plain
        wanted = weighed / weighed.norm(dim=1, keepdim=True) @ model.handwritten_features(torch.arange(3)).T
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted * model.body.logit_scale.exp())
    assert (output.features - plain).abs().max() > 0.01


def test_bottleneck_adapter_is_clip_adapters_network() -> None:
    model = encoder("siglip", head="adapter", trainable="head")
    learned = {n for n, p in model.named_parameters() if p.requires_grad}
    assert learned == {"picture_adapter.down.weight", "picture_adapter.up.weight"}
    plain, adapter = model.image_features({"image": pictures()}), model.picture_adapter
    assert adapter.down.weight.shape == (plain.shape[1] // 4, plain.shape[1])
    with torch.no_grad():
        hidden = (plain @ adapter.down.weight.T).clamp_min(0) @ adapter.up.weight.T
        mixed = 0.2 * hidden.clamp_min(0) + 0.8 * plain
        output = model({"image": pictures()})
    torch.testing.assert_close(output.features, mixed / mixed.norm(dim=1, keepdim=True))
    F.cross_entropy(model.train()({"image": pictures()}).logits, torch.tensor([0, 1, 2])).backward()
    assert adapter.down.weight.grad.abs().sum() > 0


def test_patch_features_are_projected_and_of_unit_length() -> None:
    found = encoder("clip").patch_features({"image": pictures()})
    assert found.shape == (3, 16, 24)
    torch.testing.assert_close(found.norm(dim=2), torch.ones(3, 16))
    with pytest.raises(ValueError, match="pools them by attention"):
        encoder("siglip").patch_features({"image": pictures()})


def test_a_model_without_a_text_tower_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it is of the kind 'vit', and dual encoders are clip, siglip"):
        create_model("clip", answers=NAMES, source=str(tmp_path))


@pytest.fixture(scope="module")
def pair() -> dict[str, str]:
    folder = Path(os.environ.get("CONFED_WEIGHTS", Path(__file__).parents[3] / "shared" / "weights"))
    if not (folder / "mobilenet_v2_imagenet").is_dir():
        pytest.skip("no real encoders here; set CONFED_WEIGHTS to their folder")
    return {"source": str(folder / "mobilenet_v2_imagenet"), "text": str(folder / "minilm_l3")}


def test_a_classifier_and_a_text_encoder_compare_names(pair: dict[str, str]) -> None:
    names = ("dog", "bird", "aeroplane")
    model = create_model("clip", answers=names, template="{}", trainable="head", **pair).eval()
    alone = create_model(
        "encoders", answers=names, vocab_size=0, vision=pair["source"], labels=pair["text"], zero_shot=True
    )
    image = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = alone.eval()({"image": image}).logits
        prepared = (image.float() / 255 - 0.5) / 0.5
        # names are embedded in the precision of their file there, in float32 here
        torch.testing.assert_close(model({"image": prepared}).logits, expected, rtol=2e-3, atol=5e-3)


def test_context_of_a_pair_is_all_that_learns(pair: dict[str, str]) -> None:
    model = create_model("clip", answers=NAMES, context="a photo of a", trainable="prompt", **pair)
    plain = create_model("clip", answers=NAMES, template="a photo of a {}.", trainable="head", **pair)
    output = model({"image": torch.zeros(1, 3, 224, 224)})
    torch.testing.assert_close(output.logits, plain({"image": torch.zeros(1, 3, 224, 224)}).logits)
    output.logits[0, 0].backward()
    assert [name for name, value in model.named_parameters() if value.grad is not None] == [CONTEXT]
    with pytest.raises(ValueError, match=r"leave model\.text empty"):
        model.patch_features({})
    with pytest.raises(ValueError, match="no places for them"):
        create_model("clip", answers=NAMES, trainable="adapters", **pair)
