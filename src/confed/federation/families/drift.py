"""Corrections of drift: what a method keeps of each client, and the sum of it at the server, both zero at first."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, uniform_weight
from confed.federation.client import Client
from confed.federation.params import Params, Scope
from confed.federation.protocols import Task
from confed.federation.state import ServerState


@dataclass(frozen=True)
class Corrected(Algorithm):
    """Base of methods that correct the drift of what is learned; statistics of the data are averaged alone."""

    # names of the model's buffers, which are averaged and not corrected; read off the model
    statistics: tuple[str, ...] = field(default=(), kw_only=True)
    slot: ClassVar[str] = "drift"
    """The sum over all clients, among the server's slots."""

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the tensors that are statistics of the data and not parameters."""
        return replace(self, statistics=tuple(name for name, _ in model.named_buffers()))

    def init(self, params: Params, scopes: Mapping[str, Scope]) -> dict[str, ServerState]:
        """The initial model, and the sum of the clients' corrections, which is zero."""
        (name, server), = super().init(params, scopes).items()  # fmt: skip
        total = {n: torch.zeros_like(t) for n, t in server.params.items() if self.is_corrected(n, t)}
        return {name: replace(server, slots={self.slot: total})}

    weight = uniform_weight

    def zeros(self, client: Client) -> dict[str, Tensor]:
        """A client's correction before its first round; an error for a method that does not know the model."""
        shared = client.names(Scope.SHARED)
        names = [n for n in shared if self.is_corrected(n, client.tensors[n])]
        if names != [n for n in shared if client.tensors[n].requires_grad]:
            raise ValueError(
                f"{self.title} does not know this model's buffers; call configure(model, task) before the run"
            )
        return {n: torch.zeros_like(client.incoming[n]) for n in names}

    def is_corrected(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is learned, and no statistic."""
        return tensor.is_floating_point() and name not in self.statistics
