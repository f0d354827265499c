"""Kinds of finetuning on ViLT: what learns, how many values, adapters, and that the start is the backbone."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from confed.federation.structure import Adapters
from confed.models.adapters import Adapter, AdapterBank, Host
from confed.models.finetuning import Finetuning, Places, Prompt, finetune
from confed.models.vilt import vilt_b32, vilt_tiny
from refusals import refuses
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
def test_the_same_seed_gives_the_same_values_for_any_generator(trainable):
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


def test_ia3_scales_keys_values_and_the_feed_forward_input():
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


def test_reset_base_throws_the_targets_weights_away():
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


def test_prompts_go_between_the_first_token_and_the_patches():
    model = filled(vilt_tiny(ANSWERS, VOCABULARY, trainable="prompt", peft=Finetuning(tokens=3)))
    plain, inputs = vilt_tiny(ANSWERS, VOCABULARY), batch()
    inputs["text_mask"][0, 5:] = 0
    (hidden, mask, _), (bare, bare_mask, _) = model.embed(inputs), plain.embed(inputs)
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
    refuses(r"'prefix' does not work with Vilt: .*keys and values", vilt_tiny, ANSWERS, VOCABULARY, trainable="prefix")
    rng = torch.Generator()
    for kind, message in (
        ("adapters", "no places"), ("prompt", "insert tokens"), ("top", "no last block"), ("lora", "must name layers"),
        ("prefix", "no keys and values"),
    ):  # fmt: skip
        refuses(message, finetune, nn.Linear(2, 2), kind, Finetuning(), Places(heads=()), rng)


def test_only_adapters_ask_for_a_width_that_can_be_reduced():
    for trainable in ("all", "lora", "head"):
        vilt_tiny(ANSWERS, VOCABULARY, width=4, trainable=trainable)
    with pytest.raises(ValueError, match=r"reduction must lie in 1\.\.4, the features of the block, got 8"):
        vilt_tiny(ANSWERS, VOCABULARY, width=4, trainable="adapters")


@pytest.mark.parametrize(("key", "value"), [("rank", 0), ("tokens", 0), ("reduction", 0), ("alpha", 0.0)])
def test_wrong_options_are_named(key, value):
    refuses(rf"model\.peft\.{key} must be .*, got {value}", Finetuning, **{key: value})


class Body(nn.Module):
    """Two places after a residual sum and, with ``norms``, two inside of a normalised one."""

    def __init__(self, norms: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(6) if norms else nn.Identity() for _ in range(2))
        hosts = [Host(m, 6, after_norm=norms) for m in (self.norms if norms else self.blocks)]
        self.adapters = AdapterBank(hosts, 3)

    def forward(self, x):
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(x + block(x)) if isinstance(norm, nn.LayerNorm) else block(x)
        return x


def rng(seed=3):
    return torch.Generator().manual_seed(seed)


def adapted(*names, norms=False):
    body = Body(norms)
    for number, name in enumerate(names or ("adapter",)):
        body.adapters.add(name, rng(number))
    spread = rng(9)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.normal_(0, 0.5, generator=spread)
    return body


def inputs(rows=4):
    return torch.randn(rows, 6, generator=rng(0))


def by_hand(body, x, weights):
    """The value of the body at one row of weights, from the equations."""
    for block, norm in zip(body.blocks, body.norms, strict=True):
        host = norm if isinstance(norm, nn.LayerNorm) else block
        y = x @ block.weight.T + block.bias
        read = y if host is block else normalise(y + x, norm)
        total = y if host is block else y + x
        for name, weight in weights.items():
            a = getattr(host, name)
            hidden = (read @ a.down.weight.T + a.down.bias).clamp(min=0)
            total = total + weight * (hidden @ a.up.weight.T + a.up.bias)
        x = total if host is block else normalise(total, norm)
    return x


def normalise(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def test_adapters_have_the_published_parameter_counts():
    assert sum(p.numel() for p in Adapter(768, 48).parameters()) == 74_544
    hosts = [nn.Identity() for _ in range(12)]
    AdapterBank([Host(host, 768) for host in hosts], 16).add("adapter", rng())
    assert sum(p.numel() for host in hosts for p in host.parameters()) == 894_528


@pytest.mark.parametrize("norms", [False, True])
def test_value_is_residual_plus_weighted_bottlenecks(norms):
    body, x = adapted("own", "shared", norms=norms), inputs()
    assert isinstance(body.adapters, Adapters)
    assert body.adapters.names == ("own", "shared")
    torch.testing.assert_close(body(x), by_hand(body, x, {"own": 1.0}))
    with body.adapters.using({"own": 0.5, "shared": 0.25}):
        torch.testing.assert_close(body(x), by_hand(body, x, {"own": 0.5, "shared": 0.25}))
        with body.adapters.using({}):
            torch.testing.assert_close(body(x), by_hand(body, x, {}))
        torch.testing.assert_close(body(x), by_hand(body, x, {"own": 0.5, "shared": 0.25}))
    torch.testing.assert_close(body(x), by_hand(body, x, {"own": 1.0}))
    body.adapters.switch({"shared": 1.0})
    torch.testing.assert_close(body(x), by_hand(body, x, {"shared": 1.0}))


@pytest.mark.parametrize("norms", [False, True])
def test_chunks_of_a_batch_have_blends_of_their_own(norms):
    body, x = adapted("own", "shared", "copy", norms=norms), inputs(6)
    blends = ({"own": 0.5, "copy": 0.5}, {}, {"shared": 1.0})
    with body.adapters.using(*blends):
        together = body(x)
        refuses("3 blends of adapters need a multiple of as many rows, got 4", body, x[:4])
    for part, rows, weights in zip(together.chunk(3), x.chunk(3), blends, strict=True):
        torch.testing.assert_close(part, by_hand(body, rows, weights))


def test_an_error_inside_switches_back():
    body, x = adapted("own", "shared"), inputs()
    with pytest.raises(RuntimeError, match="shapes"), body.adapters.using({"shared": 1.0}):
        body(x[:, :5])
    torch.testing.assert_close(body(x), by_hand(body, x, {"own": 1.0}))


def test_half_and_half_of_equal_adapters_is_the_single_one():
    body, x = adapted("own", "copy"), inputs()
    with torch.no_grad():
        for block in body.blocks:
            for mine, other in zip(block.own.parameters(), block.copy.parameters(), strict=True):
                other.copy_(mine)
    single = body(x)
    with body.adapters.using({"own": 0.5, "copy": 0.5}):
        torch.testing.assert_close(body(x), single)


def test_only_adapters_that_are_switched_on_get_gradients():
    body = adapted("own", "shared")
    with body.adapters.using({"own": 1.0}):
        body(inputs()).sum().backward()
    assert all(p.grad is not None for p in body.blocks[0].own.parameters())
    assert all(p.grad is None for p in body.blocks[0].shared.parameters())


def test_base_keys_unchanged_and_new_keys_named_after_their_host():
    before = set(Body().state_dict())
    added = set(adapted().state_dict()) - before
    assert before <= set(adapted().state_dict())
    parts = ("down.weight", "down.bias", "up.weight", "up.bias")
    assert added == {f"blocks.{i}.adapter.{part}" for i in range(2) for part in parts}


def test_initial_values_come_from_the_generator_alone():
    state = torch.get_rng_state()
    first, second = Body(), Body()
    state = torch.get_rng_state()
    first.adapters.add("one", rng(4))
    second.adapters.add("another", rng(4))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(first.blocks[1].one.up.weight, second.blocks[1].another.up.weight, rtol=0, atol=0)
    assert first.blocks[1].one.up.weight.abs().sum() > 0
    assert not Adapter(6, 2, zero_up=True).up.weight.any()
    x = torch.linspace(-2, 2, 6)
    smooth = Adapter(6, 2, activation="gelu")
    hidden = x @ smooth.down.weight.T
    gate = 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(smooth(x), (hidden * gate) @ smooth.up.weight.T)


def test_a_copy_of_the_model_has_a_bank_and_adapters_of_its_own():
    body, x = adapted("own", "shared"), inputs()
    y, twin = body(x), copy.deepcopy(body)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(body(x), y, rtol=0, atol=0)
    assert not torch.allclose(twin(x), y)
    twin.adapters.add("third", rng())
    assert body.adapters.names == ("own", "shared")
    with body.adapters.using({"shared": 1.0}):
        assert twin.adapters.weights == ({"own": 1.0},)


def test_other_values_run_through_the_same_modules():
    body, x = adapted("own", "shared"), inputs()
    twice = {name: 2 * value for name, value in body.named_parameters() if ".own." in name}
    got = torch.func.functional_call(body, twice, (x,))
    with torch.no_grad():
        for name, value in body.named_parameters():
            if ".own." in name:
                value.mul_(2)
    torch.testing.assert_close(got, body(x))


def test_many_adapters_cost_their_size_and_no_backbone_gradients():
    model = vilt_tiny(5, 30, trainable="adapters")
    bank, before = model.adapters, sum(p.numel() for p in model.parameters())
    one = 2 * (2 * 32 * 4 + 4 + 32)
    for number in range(24):
        bank.add(f"client_{number}", rng(number))
    assert sum(p.numel() for p in model.parameters()) == before + 24 * one
    batch = {
        "image": torch.zeros(2, 3, 64, 64, dtype=torch.uint8),
        "text": torch.ones(2, 4, dtype=torch.int64),
        "text_mask": torch.ones(2, 4, dtype=torch.int64),
    }
    with bank.using({"client_3": 0.5, "client_7": 0.5}):
        model(batch).logits.sum().backward()
    with_gradients = sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert with_gradients == 2 * one + sum(p.numel() for p in model.classifier.parameters())


def test_bad_arguments_are_named():
    for reduction in (0, 7):
        with pytest.raises(ValueError, match=rf"reduction must lie in 1\.\.6, .*got {reduction}"):
            AdapterBank([Host(nn.Identity(), 6)], reduction).add("adapter", rng())
    with pytest.raises(ValueError, match="'adapter_weights': the host Linear already has a child or attribute"):
        Body().adapters.add("adapter_weights", rng())
    refuses("'adapter': the host Linear already has a child", adapted().adapters.add, "adapter", rng())
    refuses("'weight': the host Linear already has", adapted().adapters.add, "weight", rng())
    refuses(r"letters, digits and _, got 'a\.b'", adapted().adapters.add, "a.b", rng())
    refuses("no places for adapters", AdapterBank((), 1).add, "adapter", rng())
    with pytest.raises(ValueError, match="no adapter is called 'other'; there are adapter"):
        adapted().adapters.using({"adapter": 1.0}, {"other": 1.0})
    refuses("at least one mapping", adapted().adapters.using)
    refuses("activation must be one of relu, gelu, got 'tanh'", Adapter, 6, 2, activation="tanh")
