"""Magneto's layers: against the same computation written out, and the initial values that belong to them."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.models.modal_transformer import Encoder, magneto_gain
from confed.models.pretrained import seeded

WIDTH, HEADS, HIDDEN = 16, 4, 24


def _encoder(block: str = "magneto", layers: int = 2, init: str = "torchscale", width: int = WIDTH) -> Encoder:
    options = {"block": block, "magneto_init": init}
    return seeded(0, lambda: Encoder(width, layers, HEADS, HIDDEN if width == WIDTH else 2 * width, **options))


def _norm(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    gap = x - x.mean(-1, keepdim=True)
    return gap / (gap.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def _expected(model: Encoder, x: Tensor, seen: Tensor) -> Tensor:
    """One example (S, d), head by head; ``seen`` (S, S) says who looks at whom."""
    p = {name: value.double() for name, value in model.state_dict().items()}
    sub_norm = "layers.0.inner_norm.weight" in p
    x = x.double()
    for i in range(len(model.layers)):
        at, part = f"layers.{i}", WIDTH // HEADS
        joint = _norm(x, p, f"{at}.attention_norm") @ p[f"{at}.attention.qkv.weight"].T + p[f"{at}.attention.qkv.bias"]
        heads = []
        for h in range(HEADS):
            query, key, value = (joint[:, j * WIDTH + h * part : j * WIDTH + (h + 1) * part] for j in range(3))
            scores = (query @ key.T / math.sqrt(part)).masked_fill(~seen, -math.inf)
            heads.append(scores.softmax(-1) @ value)
        mixed = torch.cat(heads, 1)
        if sub_norm:
            mixed = _norm(mixed, p, f"{at}.attention.inner_norm")
        x = x + mixed @ p[f"{at}.attention.out_proj.weight"].T + p[f"{at}.attention.out_proj.bias"]
        inner = F.gelu(_norm(x, p, f"{at}.ffn_norm") @ p[f"{at}.fc1.weight"].T + p[f"{at}.fc1.bias"])
        if sub_norm:
            inner = _norm(inner, p, f"{at}.inner_norm")
        x = x + inner @ p[f"{at}.fc2.weight"].T + p[f"{at}.fc2.bias"]
    return _norm(x, p, "norm")


@pytest.mark.parametrize("block", ["magneto", "prenorm"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_states_are_those_of_the_formulas(block: str, causal: bool, padded: bool) -> None:
    model = _encoder(block).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:  # 1 and 0 would hide a mistake
                value.add_(0.3 * torch.randn(value.shape, generator=rng))
    x = torch.randn(2, 5, WIDTH, generator=rng)
    present = torch.tensor([[True] * 5, [True, True, False, True, False]]) if padded else None
    got = model(x, present, causal)
    for row in range(2):
        kept = torch.ones(5, dtype=torch.bool) if present is None else present[row]
        seen = torch.ones(int(kept.sum()), int(kept.sum()), dtype=torch.bool)
        expected = _expected(model, x[row, kept], seen.tril() if causal else seen)
        torch.testing.assert_close(got[row, kept], expected.float(), atol=2e-6, rtol=1e-5)


def test_gain_has_its_golden_value_and_needs_a_layer() -> None:
    assert magneto_gain(12) == pytest.approx(1.7827097, abs=1e-7)  # the golden value of the fact sheet
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        magneto_gain(0)


def _is_uniform(x: Tensor, bound: float) -> bool:
    return bool(x.abs().max() <= bound * (1 + 1e-6)) and x.abs().max().item() == pytest.approx(bound, rel=0.02)


def test_initial_values_of_torchscale() -> None:
    width = 64
    layer, gain = _encoder(layers=12, width=width).layers[3], magneto_gain(12)
    query, key, value = layer.attention.qkv.weight.detach().split(width)
    for part in (query, key):
        assert _is_uniform(part, math.sqrt(6 / (2 * width) / 2))
    assert _is_uniform(value, gain * math.sqrt(6 / (2 * width) / 2))
    assert _is_uniform(layer.attention.out_proj.weight.detach(), gain * math.sqrt(6 / (2 * width)))
    assert not layer.attention.out_proj.bias.any()
    assert _is_uniform(layer.fc1.weight.detach(), gain / math.sqrt(width))
    assert _is_uniform(layer.fc2.weight.detach(), gain / math.sqrt(2 * width))
    # Biases are scaled, too; those of queries and keys are not.
    biases = torch.stack([part.abs().max() for part in layer.attention.qkv.bias.detach().split(width)])
    assert bool((biases[:2] <= 1 / math.sqrt(width)).all())
    assert 1 / math.sqrt(width) < biases[2] <= gain / math.sqrt(width)
    assert 1 / math.sqrt(width) < layer.fc1.bias.abs().max() <= gain / math.sqrt(width)


def test_initial_values_of_the_paper_and_of_plain_layers() -> None:
    width = 64
    layer, gain = _encoder(layers=12, init="paper", width=width).layers[0], magneto_gain(12)
    query, key, value = layer.attention.qkv.weight.detach().split(width)
    parts = {"query": (query, 1.0), "key": (key, 1.0), "value": (value, gain)}
    parts |= {"out": (layer.attention.out_proj.weight, gain), "fc1": (layer.fc1.weight, gain)}
    for name, (part, scale) in parts.items():
        expected = scale * math.sqrt(2 / sum(part.shape))
        assert part.std().item() == pytest.approx(expected, rel=0.05), name
    assert not any(b.any() for b in (layer.attention.qkv.bias, layer.fc1.bias, layer.fc2.bias))

    plain = _encoder("prenorm", layers=12, width=width).layers[0]
    assert _is_uniform(plain.attention.out_proj.weight.detach(), math.sqrt(6 / (2 * width)))
    assert plain.inner_norm is None
    assert plain.attention.inner_norm is None


def test_later_tokens_change_nothing_in_causal_attention() -> None:
    model = _encoder().eval()
    x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 4:] = 9.0
    torch.testing.assert_close(model(x, None, True)[:, :4], model(changed, None, True)[:, :4])
    assert not torch.allclose(model(x)[:, :4], model(changed)[:, :4])
