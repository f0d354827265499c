"""A toy federation of LoRA of any rank in the body of the toy model, with everything that was said."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confed.engines.local import Simulation
from confed.engines.participation import Members
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.federation.state import ServerState
from confed.testing.toy import ToyModel, ToyTask, toy_clients
from toy_runs import Listener, simulated

SCALE = 2.0
A, B, D = "body.lora_A.default.weight", "body.lora_B.default.weight", "body.lora_added"


class LoRALayer(nn.Module):
    """A linear layer with LoRA, its tensors called as the library ``peft`` calls them."""

    def __init__(self, base: nn.Linear, rank: int, rng: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": SCALE}
        with torch.no_grad():
            nn.init.uniform_(self.get_parameter("lora_A.default.weight"), -0.35, 0.35, generator=rng)
            nn.init.zeros_(self.get_parameter("lora_B.default.weight"))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + SCALE * self.lora_B["default"](self.lora_A["default"](x))


class LoRAToy(ToyModel):
    """The toy model with LoRA in its body."""

    def __init__(self, noisy: bool, rank: int) -> None:
        rng = torch.Generator().manual_seed(7)
        super().__init__(noisy, rng)
        self.body = LoRALayer(self.body, rank, rng)  # pyright: ignore

    @property
    def frozen(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}


def lora_toy(rank: int) -> Callable[..., LoRAToy]:
    return lambda noisy=True, *_: LoRAToy(noisy, rank)


def run(
    method: Algorithm,
    *,
    rank: int = 1,
    rounds: int = 2,
    cohort: int | None = None,
    sizes: tuple[int, ...] = (12, 20, 16),
) -> tuple[Simulation, Listener, list[ServerState]]:
    """A federation on the toy model: the simulation, what was said, and the server before and after each round."""
    build = lora_toy(rank)
    method = method.configure(build(False), ToyTask())
    local = Local(epochs=2, batch_size=8, lr=0.05)
    setup = Setup(method, Members(toy_clients(sizes=sizes)), ToyTask(), local, lambda: build(False), rounds=rounds)
    listener = Listener(setup)
    finished = simulated(setup, cohort, listener)
    return finished.simulation, listener, finished.states


def product(tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    """D + B A in double precision, D where there is one."""
    update = tensors[B].double().numpy() @ tensors[A].double().numpy()
    return update + tensors[D].double().numpy() if D in tensors else update


RANKS = {"client-0": 1, "client-2": 2}
"""Ranks of two of the three clients."""
