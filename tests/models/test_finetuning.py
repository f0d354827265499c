"""Kinds of finetuning on ViLT: what learns, how many values, and that the start is the backbone."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from confed.models.finetuning import Finetuning, Places, Prompt, finetune
from confed.models.vilt import vilt_b32, vilt_tiny
from small_pictures import asked_pictures

ANSWERS, VOCABULARY = 7, 30
KINDS = ("adapters", "lora", "ia3", "prompt", "bias")


@functools.cache
def full_size(trainable, **peft):
    with torch.device("meta"):  # no memory: shapes only
        return vilt_b32(100, trainable=trainable, peft=Finetuning(**peft))


batch = functools.partial(asked_pictures, VOCABULARY, first=9)


def trained(model, without=("classifier.", "heads.")):
    return {n: p for n, p in model.named_parameters() if p.requires_grad and not n.startswith(without)}


def count(tensors):
    return sum(p.numel() for p in tensors.values())


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("adapters", 12 * 74_544),
        ("lora", 589_824),
        ("prompt", 2 * 299_712),
        # 8,448 in each of 12 blocks, which the paper counts, and those outside of blocks.
        ("bias", 12 * 8_448 + 4 * 768),
        ("ia3", 12 * (2 * 768 + 3072)),
        ("head", 0),
    ],
)
def test_finetuning_has_the_published_parameter_counts(trainable, expected):
    model = full_size(trainable)
    assert count(trained(model)) == expected
    assert count(trained(model, without=("none",))) == expected + 1_337_956
    if trainable == "bias":
        assert count({n: p for n, p in trained(model).items() if ".layer." in n}) == 12 * 8_448


def test_the_prompt_of_one_modality():
    prompt = Prompt(5, 768, torch.Generator())
    assert sum(p.numel() for p in prompt.parameters()) == 299_712
    e, (first, _, second) = prompt.embedding.weight, prompt.mlp
    torch.testing.assert_close(
        prompt(), (e @ first.weight.T + first.bias).tanh() @ second.weight.T + second.bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("trainable", KINDS)
def test_the_same_seed_gives_the_same_values_whatever_the_global_generator_holds(trainable):
    before = torch.get_rng_state()
    model = vilt_tiny(ANSWERS, VOCABULARY, trainable=trainable, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    twin, other = (vilt_tiny(ANSWERS, VOCABULARY, trainable=trainable, seed=seed) for seed in (2, 3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(model(batch()).logits, twin(batch()).logits)
    assert not torch.equal(model(batch()).logits, other(batch()).logits)


@pytest.mark.parametrize(("trainable", "peft"), [("lora", {}), ("ia3", {}), ("adapters", {"zero_up": True})])
def test_starts_as_the_backbone(trainable, peft):
    plain = vilt_tiny(ANSWERS, VOCABULARY, seed=1)
    model = vilt_tiny(ANSWERS, VOCABULARY, seed=1, trainable=trainable, peft=Finetuning(**peft))
    torch.testing.assert_close(plain(batch()).logits, model(batch()).logits, rtol=1e-6, atol=1e-6)


def filled(model):
    rng = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.normal_(0, 0.5, generator=rng)
    return model


def test_lora_is_the_low_rank_update_of_query_and_value():
    model = filled(vilt_tiny(ANSWERS, VOCABULARY, trainable="lora", peft=Finetuning(rank=4, alpha=1.0)))
    assert {n.split("attention.attention.")[1] for n in trained(model)} == {
        f"{layer}.lora_{factor}.default.weight" for layer in ("query", "value") for factor in "AB"
    }
    plain = vilt_tiny(ANSWERS, VOCABULARY)
    values = dict(model.named_parameters())
    with torch.no_grad():
        for i, block in enumerate(plain.vilt.encoder.layer):
            for layer in ("query", "value"):
                name = f"vilt.encoder.layer.{i}.attention.attention.{layer}"
                a, b = (values[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
                block.attention.attention.get_submodule(layer).weight += b @ a / 4
    torch.testing.assert_close(model(batch()).logits, plain(batch()).logits, rtol=1e-4, atol=1e-5)


def test_ia3_scales_keys_values_and_what_the_second_feed_forward_layer_reads():
    model = filled(vilt_tiny(ANSWERS, VOCABULARY, trainable="ia3"))
    plain, values = vilt_tiny(ANSWERS, VOCABULARY), dict(model.named_parameters())
    with torch.no_grad():
        for i, block in enumerate(plain.vilt.encoder.layer):
            for layer, inputs in (("attention.attention.key", False), ("attention.attention.value", False),
                                  ("output.dense", True)):  # fmt: skip
                scale = values[f"vilt.encoder.layer.{i}.{layer}.ia3_l.default"]
                target = block.get_submodule(layer)
                target.weight *= scale.reshape(1, -1) if inputs else scale.reshape(-1, 1)
                if not inputs:
                    target.bias *= scale.flatten()
    assert len(trained(model)) == 6
    torch.testing.assert_close(model(batch()).logits, plain(batch()).logits, rtol=1e-4, atol=1e-5)


def test_reset_base_throws_the_pretrained_weights_of_the_targets_away():
    plain = vilt_tiny(ANSWERS, VOCABULARY, seed=1)
    model = vilt_tiny(ANSWERS, VOCABULARY, seed=1, trainable="lora", peft=Finetuning(reset_base=True))
    ours, theirs = (m.vilt.encoder.layer[1].attention.attention for m in (model, plain))
    assert not torch.equal(ours.query.base_layer.weight, theirs.query.weight)
    assert torch.equal(ours.key.weight, theirs.key.weight)
    assert not ours.query.base_layer.weight.requires_grad
    assert ours.query.base_layer.weight.abs().max() <= 32**-0.5  # uniform, as nn.Linear
    # 46,080 biases of 30 layers with two targets of 768 are what the paper's 1.52M contains beside the factors.
    fresh = {n: p for n, p in trained(model).items() if n.endswith("bias")}
    assert count(fresh) == 2 * 2 * 32


def test_targets_choose_the_layers():
    options = Finetuning(rank=2, targets=("attention.output.dense", "key"))
    model = vilt_tiny(ANSWERS, VOCABULARY, trainable="lora", peft=options)
    assert {n.split(".lora")[0].split(".", 4)[4] for n in trained(model)} == {
        "attention.output.dense", "attention.attention.key",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"no layer of Vilt is called 'qkv'; there are .*attention\.query"):
        vilt_tiny(ANSWERS, VOCABULARY, trainable="lora", peft=Finetuning(targets=("query", "qkv")))


def test_prompts_go_behind_the_first_token_and_in_front_of_the_patches():
    model = filled(vilt_tiny(ANSWERS, VOCABULARY, trainable="prompt", peft=Finetuning(tokens=3)))
    plain, inputs = vilt_tiny(ANSWERS, VOCABULARY), batch()
    inputs["text_mask"][0, 5:] = 0
    (hidden, mask), (bare, bare_mask) = model.embed(inputs), plain.embed(inputs)
    assert hidden.shape == (4, 9 + 1 + 16 + 6, 32)
    kept = [0, *range(4, 13), *range(16, 32)]
    torch.testing.assert_close(hidden[:, kept], bare)
    torch.testing.assert_close(mask[..., kept], bare_mask)
    assert not mask[..., [1, 2, 3, 13, 14, 15]].any()
    for row in hidden:
        torch.testing.assert_close(row[1:4], model.prompts["text"]())
        torch.testing.assert_close(row[13:16], model.prompts["visual"]())
    F.cross_entropy(model(inputs).logits, torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.any() for p in trained(model).values())
    assert all(p.grad is None for p in model.vilt.parameters())


@pytest.mark.parametrize("trainable", KINDS)
def test_one_step_changes_what_learns_and_nothing_else(trainable):
    model = vilt_tiny(ANSWERS, VOCABULARY, trainable=trainable)
    filled(model)
    before = copy.deepcopy(model.state_dict())
    learning = trained(model, without=("none",))
    F.cross_entropy(model(batch()).logits, torch.arange(4)).backward()
    torch.optim.SGD(learning.values(), 1.0).step()
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed <= set(learning)
    # Biases of keys change no softmax; those of texts' and pictures' beginnings may not either.
    assert {n for n in learning if not n.endswith("key.bias")} - changed == set()
    assert model.frozen.isdisjoint(learning)
    assert model.frozen | set(learning) >= set(model.state_dict())


def test_what_a_backbone_cannot_do_is_said():
    with pytest.raises(ValueError, match=r"'prefix' does not work with Vilt: .*keys and values"):
        vilt_tiny(ANSWERS, VOCABULARY, trainable="prefix")
    rng = torch.Generator()
    for kind, message in (
        ("adapters", "no places"), ("prompt", "insert tokens"), ("top", "no last block"), ("lora", "must name layers"),
        ("prefix", "no keys and values"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            finetune(nn.Linear(2, 2), kind, Finetuning(), Places(heads=()), rng)


def test_only_adapters_ask_for_a_width_that_can_be_reduced():
    for trainable in ("all", "lora", "head"):
        vilt_tiny(ANSWERS, VOCABULARY, width=4, trainable=trainable)
    with pytest.raises(ValueError, match=r"reduction must lie in 1\.\.4, the features of the block, got 8"):
        vilt_tiny(ANSWERS, VOCABULARY, width=4, trainable="adapters")


@pytest.mark.parametrize(("key", "value"), [("rank", 0), ("tokens", 0), ("reduction", 0), ("alpha", 0.0)])
def test_wrong_options_are_named(key, value):
    with pytest.raises(ValueError, match=rf"model\.peft\.{key} must be .*, got {value}"):
        Finetuning(**{key: value})
