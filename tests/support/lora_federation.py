"""A toy federation of LoRA of any rank in the body of the toy model, with everything that was said."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confed.engines.local import InProcess, Simulation, simulate
from confed.engines.participation import Members
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.federation.messages import Call, Reply
from confed.federation.state import MemoryStore, ServerState, Store
from confed.testing.toy import ToyModel, ToyTask, toy_clients

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


class Listener(InProcess):
    """Answers calls, and remembers them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.heard: list[tuple[int, Call, Reply]] = []

    def __call__(self, calls: Any, store: Store, round: int) -> Any:
        for call, reply in zip(calls, super().__call__(calls, store, round), strict=True):
            self.heard.append((round, call, reply))
            yield reply


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
    simulation = Simulation(setup, MemoryStore(), listener, cohort)
    servers = simulation.start(listener.workspace)
    states = [servers["main"], *(record.servers["main"] for record in simulate(simulation, servers))]
    return simulation, listener, states


def product(tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    """D + B A in double precision, D where there is one."""
    update = tensors[B].double().numpy() @ tensors[A].double().numpy()
    return update + tensors[D].double().numpy() if D in tensors else update


RANKS = {"client-0": 1, "client-2": 2}
"""Ranks of two of the three clients."""
