"""The servers of split learning: one holds the last layers, another averages the clients' first ones.

The client's side is :mod:`confed.federation.families.split`.
"""

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.families.split import restored, stored
from confed.federation.local import Local
from confed.federation.messages import Call, Flow
from confed.federation.optimizer import make_optimizer, scheduled_step
from confed.federation.params import Params, Scope, copy_into, named_tensors, pick
from confed.federation.state import ServerState

MISFITS = (RuntimeError, ValueError, KeyError, IndexError, TypeError)
"""What comes of rows that do not fit a server's layers: a client that sends such is left out, the others go on."""


class TwoServers(Algorithm):
    """Base of methods with two servers: "main" holds a part of the network, "aux" averages the clients' part."""

    def init(self, params: Params, scopes: Mapping[str, Scope]) -> dict[str, ServerState]:
        """State of both servers: what clients share at ``aux``, what lives on a server only at ``main``."""
        return {
            "aux": ServerState(0, pick(params, scopes, Scope.SHARED)),
            "main": ServerState(0, pick(params, scopes, Scope.SERVER)),
        }

    def phases(self) -> Sequence[tuple[str, Callable[[ServerState, Sequence[ClientInfo]], Flow]]]:
        """The phases of a round: distribution, training and collection, each with its server."""
        return (("aux", self.distribute), ("main", self.split), ("aux", self.collect))

    def distribute(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Phase in which ``aux`` sends every client its part, and their sessions begin (action ``receive``).

        A client that fails here has no open round, which its first step says.

        Raises:
            RuntimeError: no client could begin.
        """
        replies = yield [Call(c, "receive", self.broadcast(server, c), session=True) for c in cohort]
        failed = [reply for reply in replies if reply.error is not None]
        if len(failed) == len(cohort):
            last = f"{failed[-1].client.id}: {failed[-1].error}"
            raise RuntimeError(f"no client could begin round {server.round + 1}; {last}")
        return server

    @abstractmethod
    def split(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Phase in which clients train batch by batch with ``main``."""

    @abstractmethod
    def collect(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Phase in which ``aux`` averages the clients' part."""


def left_out(client: str, error: Exception) -> Exception:
    """Warning that a client is left out of a round because of what it sent; the error, for a message."""
    warnings.warn(f"{client!r} is left out of the round: what it sent does not fit: {error}", stacklevel=2)
    return error


class ServerPart:
    """A server's layers while they learn with one client.

    Args:
        modules: the layers, of any values; copied.
        params: their values.
        local: how they are trained: as the clients' part.
        round: number of the round, from 0.
        rounds: rounds of the run.
        steps: batches of this client in a round.
        moments: of the optimiser, where they are kept from round to round.
    """

    def __init__(
        self, modules: nn.Module, params: Params, local: Local, round: int, rounds: int, steps: int,
        moments: Params | None = None,
    ) -> None:  # fmt: skip
        self.modules: Any = copy.deepcopy(modules).train()
        self._tensors = named_tensors(self.modules)
        copy_into([self._tensors[name] for name in params], list(params.values()))
        self._trained = dict(self.modules.named_parameters())
        self._optimizer = make_optimizer(list(self._trained.values()), local)
        restored(self._optimizer, self._trained, moments or {})
        self._local, self._round, self._rounds, self._steps, self._step = local, round, rounds, max(steps, 1), 0

    def learn(self, loss: Tensor) -> None:
        """One step along the gradient of a loss; gradients at the cut are left in its leaves."""
        self.step(loss.backward)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def step(self, backward: Callable[[], None]) -> None:
        """One step with the gradients that ``backward`` leaves behind.

        Raises:
            ValueError: the client's examples make no more batches in a round; one that goes on without end would hold
                the others up for good.
        """
        if self._step >= self._steps:
            raise ValueError(f"more than the {self._steps} batches that its examples make")
        self._optimizer.zero_grad(set_to_none=True)
        backward()
        progress = (self._round + self._step / self._steps) / self._rounds
        scheduled_step(self._optimizer, self._trained.values(), self._local, progress)
        self._step += 1

    def values(self) -> dict[str, Tensor]:
        """All values as trained, buffers included."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors.items()}

    def finite(self) -> bool:
        """Whether every value is a finite number; a copy that has diverged must not be averaged."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self._tensors.values())

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's moments, under the names of :func:`stored`."""
        return stored(self._optimizer, self._trained)
