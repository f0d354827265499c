"""Base of methods whose clients share the public examples of one place, and of servers that learn from these too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

from torch import nn

from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.params import Scope, named_tensors
from confed.federation.protocols import ClientData, Task
from confed.federation.specs import PlacesItself
from confed.federation.state import ClientState, ServerState

SERVER = "server"  # under which name a server that learns draws its random numbers


@runtime_checkable
class UsesPublicData(Protocol):
    """Protocol of methods with public data; :attr:`confed.federation.client.Client.public` has them."""

    def public_place(self) -> str:
        """Name of the unseen place that is public, and so counts as unseen no longer."""
        ...

    def with_public_data(self, examples: int, answers: int) -> Self:
        """The method, told the size of the public data; called once per run, before training."""
        ...


@dataclass(frozen=True)
class ServerSide:
    """What a server needs to train a model of its own on the public examples."""

    # makes that model with its initial values; called when the server first trains, so never at a site
    build: Callable[[], nn.Module]
    data: ClientData  # the public examples; none at a server that knows other parties' data by a card only
    task: Task  # its loss
    seed: int  # the run's seed
    device: str = "cpu"  # where the server computes

    @cached_property
    def model(self) -> nn.Module:
        """The server's model; whatever it holds when a round begins is meaningless."""
        model = self.build()
        if isinstance(model, PlacesItself):
            model.place(self.device)
        else:
            model.to(self.device)
        return model

    def learner(self, server: ServerState, lr: float | None = None) -> Client:
        """The server as one that trains: its model with its values, on the public examples.

        Args:
            server: its state.
            lr: the server's learning rate; None for the clients'.

        Raises:
            ValueError: the engine did not say how to train.
        """
        if server.local is None:
            raise ValueError("a server that trains must be told how: its state has no local settings")
        tensors = named_tensors(self.model)
        learner = Client(
            info=ClientInfo(SERVER, len(self.data)),
            data=self.data,
            model=self.model,
            tensors=tensors,
            task=self.task,
            local=server.local if lr is None else replace(server.local, lr=lr),
            state=ClientState(),
            scopes={name: Scope.SHARED if name in server.params else Scope.FROZEN for name in tensors},
            initial={},
            round=server.round,
            rounds=max(server.rounds, 1),
            seed=self.seed,
        )
        learner.load(server.params)
        return learner


@runtime_checkable
class ServerLearns(UsesPublicData, Protocol):
    """Protocol of methods whose server trains a model of its own on the public data."""

    def with_server_side(self, side: ServerSide) -> Self:
        """The method, told what its server trains; called once per run, before training."""
        ...
