"""pFedMMA: the middle projection is shared, what is around it is a client's own."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.pfedmma import PFedMMA
from confed.engines.participation import Members
from confed.engines.perform import Setup
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.models.adapters import AdapterBank, Host
from confed.testing.toy import ToyTask, toy_clients
from toy_runs import Listener, simulated

WIDTH, RANK = 6, 3


class Block(nn.Module):
    """A linear layer with a place for adapters behind it."""

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.output.weight, generator=rng)
        self.output.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x)


class Towers(nn.Module):
    """Two towers of frozen blocks with adapters, and a head on both."""

    answer_head = "head"

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(2)
        self.text = nn.ModuleList(Block(rng) for _ in range(2))
        self.image = nn.ModuleList(Block(rng) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        nn.init.normal_(self.head.weight, generator=rng)
        nn.init.zeros_(self.head.bias)
        hosts: list[Any] = [block.output for tower in (self.text, self.image) for block in tower]
        for host in hosts:
            nn.init.zeros_(host.bias)
        self.adapters = AdapterBank([Host(host, WIDTH) for host in hosts], WIDTH // RANK)
        self.adapters.add("adapter", rng)

    @property
    def frozen(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    def forward(self, batch: Batch) -> Output:
        text, image = batch["x"], batch["x"]
        for block in self.text:
            text = block(text)
        for block in self.image:
            image = block(image)
        return Output(self.head(text + image), text + image)


def extended(method: PFedMMA) -> Towers:
    model = Towers()
    method.configure(model, ToyTask()).add_modules(model, torch.Generator().manual_seed(5))
    return model


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_an_adapter_passes_through_the_shared_projection(scale: float) -> None:
    model = extended(PFedMMA(scale=scale))
    tensors = {name: value.double().numpy() for name, value in model.state_dict().items()}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for tower, block in (("text", 1), ("image", 2)):
        place, middle = f"{tower}.{block}.output", f"shared_projection.{block}_{RANK}"

        def linear(name: str, values: Any) -> Any:
            return values @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

        base = linear(place, x.double().numpy())
        inner = np.maximum(linear(f"{place}.adapter.down", base), 0)
        inner = np.maximum(linear(middle, inner), 0)
        wanted = base + scale * linear(f"{place}.adapter.up", inner)
        assert np.abs(wanted - base).max() > 1e-4
        np.testing.assert_allclose(model.get_submodule(place)(x).detach().numpy(), wanted, atol=1e-5)


def test_blocks_of_the_same_depth_share_a_projection() -> None:
    names = {name for name, _ in extended(PFedMMA()).named_parameters() if name.startswith("shared_projection")}
    assert names == {f"shared_projection.{place}_3.{part}" for place in range(3) for part in ("weight", "bias")}
    model = extended(PFedMMA())
    # r x r and r values for each of the three depths: what travels, by name once.
    assert sum(p.numel() for n, p in model.state_dict().items() if "shared" in n) == 3 * (RANK * RANK + RANK)
    apart = extended(PFedMMA(towers="apart"))
    assert sum(p.numel() for n, p in apart.state_dict().items() if "shared" in n) == 5 * (RANK * RANK + RANK)


def test_both_towers_train_the_projection_they_share() -> None:
    model = extended(PFedMMA())
    shared = model.get_parameter("shared_projection.0_3.weight")
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(tower[0](x).square().sum(), shared)[0] for tower in (model.text, model.image)]
    assert all(gradient.any() for gradient in gradients)


def test_a_copy_has_projections_of_its_own() -> None:
    model = extended(PFedMMA())
    other = copy.deepcopy(model)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    before = model({"x": x}).logits
    with torch.no_grad():
        other.get_parameter("shared_projection.0_3.weight").fill_(9)
    assert torch.equal(model({"x": x}).logits, before)
    assert not torch.equal(other({"x": x}).logits, before)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_only_projections_travel_and_their_mean_returns(weighting: Any) -> None:
    method = PFedMMA(weighting=weighting).configure(Towers(), ToyTask())
    local = Local(epochs=1, batch_size=8, lr=0.01)
    setup = Setup(method, Members(toy_clients()), ToyTask(), local, Towers, rounds=1)
    listener = Listener(setup)
    finished = simulated(setup, executor=listener)
    after = finished.params
    weights = [call.client.num_examples if weighting == "examples" else 1 for _, call, _ in listener.heard]
    for name, value in after.items():
        assert name.startswith("shared_projection.")
        sent = [reply.message.tensors[name].double().numpy() for _, _, reply in listener.heard]
        np.testing.assert_allclose(value.numpy(), np.average(sent, axis=0, weights=weights), atol=1e-6)
    for _, call, reply in listener.heard:
        assert set(call.message.tensors) == set(reply.message.tensors) == set(after)
    own = [finished.store.load(f"client-{k}").tensors["private"] for k in range(3)]
    for name in ("text.0.output.adapter.down.weight", "image.2.output.adapter.up.weight", "head.weight"):
        assert not torch.equal(own[0][name], own[1][name])
