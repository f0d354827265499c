"""MMFed's network: co-attention written out, absent modalities, names."""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.federation.params import named_tensors
from confed.federation.structure import feature_width, reads_absent
from confed.models import create_model, create_tokenizer
from confed.models.mmfed import CoAttentionNetwork, mmfed_tiny
from modal_batches import ALL, modal_batch, only

SUBSETS = [names for size in range(1, 5) for names in combinations(ALL, size)]


def _model(**options: Any) -> CoAttentionNetwork:
    return mmfed_tiny(5, 20, **{"modalities": ALL, "series_channels": 2} | options)


def _look(layer: Any, states: Tensor, context: Tensor) -> Tensor:
    """The cross-attention layer for one example without padding: (n, d) look at (m, d)."""
    width, heads = states.shape[1], 2
    norm = layer.attention_norm
    query = norm(states) @ layer.attention.qkv.weight[:width].T + layer.attention.qkv.bias[:width]
    both = norm(context) @ layer.attention.qkv.weight[width:].T + layer.attention.qkv.bias[width:]
    key, value = both[:, :width], both[:, width:]
    part = width // heads
    mixed = [
        (query[:, s] @ key[:, s].T / part**0.5).softmax(-1) @ value[:, s]
        for s in (slice(h * part, (h + 1) * part) for h in range(heads))
    ]
    states = states + layer.attention.out_proj(torch.cat(mixed, 1))
    return states + layer.fc2(F.gelu(layer.fc1(layer.ffn_norm(states))))


@pytest.mark.parametrize("names", SUBSETS)
def test_every_set_of_modalities(names: tuple[str, ...]) -> None:
    model, batch = _model().eval(), only(modal_batch(), *names)
    output = model(batch)
    encoded: dict[str, Any] = {name: model.embed[name](batch) for name in model.embed if name in names}
    for row in range(3):
        own = {
            name: states[row] if present is None else states[row, present[row]]
            for name, (states, present) in encoded.items()
        }
        expected = torch.zeros(4, 16)
        for place, name in enumerate(ALL):
            if name in own:
                others = [states for other, states in own.items() if other != name]
                module: Any = model.embed[name]
                seen = _look(module.look, own[name], torch.cat(others)) if others else own[name]
                expected[place] = seen.mean(0)
        torch.testing.assert_close(output.features[row], expected.flatten(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits, model.head(output.features))


def test_a_batch_trains_what_it_has() -> None:
    model, batch = _model(), only(modal_batch(), "text", "audio")
    F.cross_entropy(model(batch).logits, batch["label"]).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name.split(".")[1] for name in trained if name.startswith("embed.")} == {"text", "audio"}
    assert any(".look." in name for name in trained)
    model.zero_grad(set_to_none=True)
    alone = only(modal_batch(), "text")
    F.cross_entropy(model(alone).logits, alone["label"]).backward()
    assert not any(".look." in name for name, p in model.named_parameters() if p.grad is not None)


def test_names_say_whose_a_tensor_is() -> None:
    model = _model()
    names = set(named_tensors(model))
    assert {".".join(name.split(".")[:2]) for name in names} == {
        *(f"embed.{name}" for name in ALL), "head.weight", "head.bias"
    }  # fmt: skip
    assert all(tensor.numel() for tensor in named_tensors(model).values())
    assert feature_width(model, "a test") == 4 * 16
    assert model.modalities == ALL
    reads_absent(model, "a test")


def test_by_name_and_about_as_large_as_the_transformer() -> None:
    tokenizer = create_tokenizer("mmfed_mini", ["one", "two"])
    sizes = [
        sum(p.numel() for p in create_model(name, answers=10, vocab_size=tokenizer.vocab_size).parameters())
        for name in ("mmfed_mini", "modal_transformer_mini")
    ]
    assert 0.5 < sizes[0] / sizes[1] < 2
