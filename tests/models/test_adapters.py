import copy

import pytest
import torch
from torch import nn

from confed.federation.structure import Adapters
from confed.models.adapters import Adapter, AdapterBank, Host
from confed.models.vilt import vilt_tiny


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
        with pytest.raises(ValueError, match="3 blends of adapters need a multiple of as many rows, got 4"):
            body(x[:4])
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


def test_many_adapters_cost_their_own_size_and_no_gradients_of_the_backbone():
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
    with pytest.raises(ValueError, match="'adapter': the host Linear already has a child"):
        adapted().adapters.add("adapter", rng())
    with pytest.raises(ValueError, match="'weight': the host Linear already has"):
        adapted().adapters.add("weight", rng())
    with pytest.raises(ValueError, match=r"letters, digits and _, got 'a\.b'"):
        adapted().adapters.add("a.b", rng())
    with pytest.raises(ValueError, match="no places for adapters"):
        AdapterBank((), 1).add("adapter", rng())
    with pytest.raises(ValueError, match="no adapter is called 'other'; there are adapter"):
        adapted().adapters.using({"adapter": 1.0}, {"other": 1.0})
    with pytest.raises(ValueError, match="at least one mapping"):
        adapted().adapters.using()
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, got 'tanh'"):
        Adapter(6, 2, activation="tanh")
