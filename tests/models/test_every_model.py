"""What holds of every small model: values from the seed, rows on their own, parts of a pass, what learns, refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from confed.models import create_model, create_tokenizer
from confed.models.tokenizer import WordTokenizer
from larger_values import spread

ANSWERS, VOCABULARY, ROWS = 7, 60, 3
WORDS = ("text", "text_mask")
REGIONS = ("regions", *WORDS)
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "vilt_tiny": (("image", *WORDS), {}),
    "vault_mini": (("image", *WORDS), {"pretrained": False}),
    "vit_mini": (("image",), {"pretrained": False}),
    "albef_mini": (("image", *WORDS, "answer_tokens"), {"pretrained": False}),
    "blip_mini": (("image", *WORDS, "answer_tokens"), {"pretrained": False}),
    "cnn_words": (("image", *WORDS), {}),
    "ctran_mini": (("image",), {"graph": True}),
    "ctran_text_mini": (WORDS, {}),
    "resnet_multilabel_mini": (("image",), {}),
    "modal_transformer_tiny": (("small", *WORDS), {"modalities": ("image", "text")}),
    "mmfed_tiny": (("small", *WORDS), {"modalities": ("image", "text")}),
    "late_fusion_mini": (("small", *WORDS), {"modalities": ("image", "text")}),
    "butd_mini": (REGIONS, {}), "ban_mini": (REGIONS, {}), "mfb_mini": (REGIONS, {}),
    "mcan_s_mini": (REGIONS, {}), "mcan_l_mini": (REGIONS, {}),
    "mmnas_s_mini": (("boxes", *REGIONS), {}), "mmnas_l_mini": (("boxes", *REGIONS), {}),
}  # fmt: skip
"""Name -> keys of a batch that it needs, and options."""
READS_ABSENT = ("modal_transformer_tiny", "mmfed_tiny", "late_fusion_mini")


def build(name: str, **options: Any) -> Any:
    return create_model(name, answers=ANSWERS, vocab_size=VOCABULARY, **MODELS[name][1], **options).eval()


def batch_of(name: str) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    mask = (torch.arange(9) < torch.tensor([[5], [9], [3]])).long()
    low = torch.rand(ROWS, 6, 2, generator=rng) / 2
    whole = {
        "image": torch.randint(0, 256, (ROWS, 3, 64, 64), generator=rng, dtype=torch.uint8),
        "text": torch.randint(7, VOCABULARY, (ROWS, 9), generator=rng) * mask,
        "text_mask": mask,
        "answer_tokens": torch.tensor([[2, 9, 3, 0], [2, 11, 12, 3], [2, 8, 3, 0]]),
        "regions": torch.randn(ROWS, 6, 64, generator=rng),
        "boxes": torch.cat([low, low + 0.3], -1),
    }
    whole["small"] = whole["image"][:, :, :28, :28]
    return {"image" if key == "small" else key: whole[key] for key in MODELS[name][0]}


@pytest.mark.parametrize("name", MODELS)
def test_values_come_from_the_seed_alone(name: str) -> None:
    before = torch.get_rng_state()
    model, twin, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    again = twin.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        output = model(batch_of(name))
        assert output.logits.shape[-1] in (ANSWERS, VOCABULARY)
        assert torch.equal(output.logits, twin(batch_of(name)).logits)
        assert not torch.equal(output.logits, other(batch_of(name)).logits)
        assert torch.equal(output.logits, model(batch_of(name) | {"unread": torch.zeros(1)}).logits)


@pytest.mark.parametrize("name", MODELS)
def test_examples_do_not_see_each_other(name: str) -> None:
    model, batch = build(name), batch_of(name)
    with torch.no_grad():
        whole = model(batch)
        rows = [model({key: value[i : i + 1] for key, value in batch.items()}) for i in range(ROWS)]
    torch.testing.assert_close(whole.features, torch.cat([row.features for row in rows]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.logits, torch.cat([row.logits for row in rows]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_other_values_for_one_call(name: str) -> None:
    model, other, batch = build(name, seed=3), build(name, seed=4), batch_of(name)
    with torch.no_grad():
        expected = model(batch).logits
        swapped = torch.func.functional_call(model, other.state_dict(), (batch,))
        torch.testing.assert_close(swapped.logits, other(batch).logits, rtol=1e-5, atol=1e-6)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(batch).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_it_says_which_input_is_missing(name: str) -> None:
    if name in READS_ABSENT:
        with pytest.raises(ValueError, match="at least one of image, text, got label"):
            build(name)({"label": torch.zeros(1)})
        return
    batch = batch_of(name)
    for key in set(batch) - {"answer_tokens"}:
        with pytest.raises(ValueError, match=f"needs the key '{key}', got "):
            build(name)({other: value for other, value in batch.items() if other != key})


@pytest.mark.parametrize("name", MODELS)
def test_its_tokenizer_reads_what_it_reads(name: str) -> None:
    tokenizer: Any = create_tokenizer(name, ("red", "ball"), max_length=9)
    text, mask = tokenizer(["a red ball"])
    assert text.shape == mask.shape == (1, 9)
    if "text" not in MODELS[name][0] or "answer_tokens" in MODELS[name][0]:
        return
    model: Any = create_model(name, answers=("yes", "no"), vocab_size=tokenizer.vocab_size, **MODELS[name][1])
    batch = batch_of(name) | {"text": text.expand(ROWS, -1), "text_mask": mask.expand(ROWS, -1)}
    assert model(batch).logits.shape == (ROWS, 2)
    assert isinstance(tokenizer, WordTokenizer)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap over fused attention
@pytest.mark.parametrize(
    ("name", "trainable"), [("vilt_tiny", "all"), ("vit_mini", "adapters"), ("vault_mini", "adapters")]
)
def test_per_sample_gradients_through_vmap_equal_a_loop(name: str, trainable: str) -> None:
    model, rows = build(name, trainable=trainable), batch_of(name)
    parameters = {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}

    def loss(params: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        one = {key: value[None] for key, value in row.items()}
        return torch.func.functional_call(model, params, (one,)).logits.logsumexp(1).sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, rows)
    single = torch.func.grad(loss)(parameters, {key: value[2] for key, value in rows.items()})
    for key, value in single.items():
        torch.testing.assert_close(together[key][2], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vilt_tiny", "vit_mini", "vault_mini", "albef_mini", "blip_mini", "mcan_s_mini"])
def test_two_parts_of_a_pass_and_two_blends_of_adapters_at_once(name: str) -> None:
    model, batch = build(name, trainable="adapters"), batch_of(name)
    model.adapters.add("second", torch.Generator().manual_seed(1))
    spread(model, 0.1)
    assert model.prefix_is_frozen
    assert not build(name).prefix_is_frozen
    blends: tuple[dict[str, float], ...] = ({"adapter": 1.0}, {"adapter": 0.5, "second": 0.5})
    with torch.no_grad():
        state = model.prefix(batch)
        torch.testing.assert_close(model.suffix(state).logits, model(batch).logits)
        alone: list[Tensor] = []
        for blend in blends:
            with model.adapters.using(blend):
                alone.append(model(batch).logits)
        with model.adapters.using(*blends):
            together = model.suffix(model.repeat(state, 2)).logits
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)


TOPS = {
    "vilt_tiny": ("vilt.encoder.layer.1.", "vilt.layernorm.", "vilt.pooler."),
    "vit_mini": ("vit.layers.3.", "vit.layernorm."),
    "vault_mini": ("vilt.encoder.layer.2.", "vilt.layernorm.", "vilt.pooler."),
    "blip_mini": ("text_decoder.bert.encoder.layer.1.",),
    "albef_mini": ("text_decoder.bert.encoder.layer.1.",),
}
HEADS = {"blip_mini": "text_decoder.cls.", "albef_mini": "text_decoder.cls."}


@pytest.mark.parametrize("trainable", ["all", "top", "head", "adapters", "bias", "lora", "ia3", "prompt"])
@pytest.mark.parametrize("name", TOPS)
def test_what_learns_follows_from_trainable_and_gets_gradients(name: str, trainable: str) -> None:
    model, batch = build(name, trainable=trainable), batch_of(name)
    names = {key for key, _ in model.named_parameters()}
    added = {"adapters": ".adapter.", "bias": "bias", "lora": "lora_", "ia3": "ia3_", "prompt": "prompts."}
    chosen = {key for key in names if trainable in added and added[trainable] in key}
    if trainable in ("all", "top"):
        chosen = {key for key in names if trainable == "all" or key.startswith(TOPS[name])}
    expected = chosen | {key for key in names if key.startswith(HEADS.get(name, "classifier."))}
    assert {key for key, value in model.named_parameters() if value.requires_grad} == expected
    assert expected == names - model.frozen
    assert model.frozen | expected >= set(model.state_dict())
    assert chosen or trainable == "head"
    model(batch).logits.square().sum().backward()
    assert {key for key, value in model.named_parameters() if value.grad is not None} == expected
