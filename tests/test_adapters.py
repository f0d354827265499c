import copy

import pytest
import torch
from torch import nn

from confed.models.adapters import Adapter, add_adapters, blend


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def adapted(**options):
    body = Body()
    add_adapters(body.blocks, 6, 3, rng=torch.Generator().manual_seed(3), **options)
    return body


def test_golden_parameter_counts():
    one = sum(p.numel() for p in Adapter(768, 48).parameters())
    assert one == 74_544
    hosts = [nn.Identity() for _ in range(12)]
    add_adapters(hosts, 768, 16)
    assert sum(p.numel() for host in hosts for p in host.parameters()) == 894_528


def test_value_is_residual_plus_bottleneck():
    body, x = adapted(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = x
    for block in body.blocks:
        y = expected @ block.weight.T + block.bias
        down = y @ block.adapter.down.weight.T + block.adapter.down.bias
        expected = y + down.clamp(min=0) @ block.adapter.up.weight.T + block.adapter.up.bias
    torch.testing.assert_close(body(x), expected)


def test_base_keys_unchanged_and_new_keys_named_after_their_host():
    before = set(Body().state_dict())
    added = set(adapted().state_dict()) - before
    assert before <= set(adapted().state_dict())
    parts = ("down.weight", "down.bias", "up.weight", "up.bias")
    assert added == {f"blocks.{i}.adapter.{part}" for i in range(2) for part in parts}


def test_zero_up_starts_as_the_backbone_and_initial_values_ignore_the_global_generator():
    body, x = adapted(zero_up=True), torch.ones(1, 6)
    y = body(x)
    blend(body, {})
    torch.testing.assert_close(y, body(x), rtol=0, atol=0)
    state = torch.get_rng_state()
    first, second = Adapter(8, 2), Adapter(8, 2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(first.down.weight, second.down.weight, rtol=0, atol=0)


def test_a_copy_uses_its_own_adapters():
    body, x = adapted(), torch.ones(1, 6)
    y, twin = body(x), copy.deepcopy(body)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(body(x), y, rtol=0, atol=0)
    assert not torch.allclose(twin(x), y)


def test_named_adapters_blend_as_a_weighted_sum():
    host = nn.Identity()
    rng = torch.Generator().manual_seed(0)
    add_adapters([host], 4, 2, name="own", rng=rng)
    add_adapters([host], 4, 2, name="shared", rng=rng)
    x = torch.ones(2, 4)
    torch.testing.assert_close(host(x), x + host.own(x))
    blend(host, {"own": 0.5, "shared": 0.25})
    torch.testing.assert_close(host(x), x + 0.5 * host.own(x) + 0.25 * host.shared(x))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"reduction must lie in 1\.\.6 .*got 7"):
        add_adapters([nn.Identity()], 6, 7)
    with pytest.raises(ValueError, match="already has a child called 'adapter'"):
        add_adapters(adapted().blocks, 6, 2)
    with pytest.raises(ValueError, match="no adapter is called 'other'"):
        blend(adapted(), {"other": 1.0})
    with pytest.raises(ValueError, match="has no adapters"):
        blend(Body(), {})
