"""Split learning: a network whose first layers lie on a client and the rest on a server.

A server leads, one call per batch. A call carries the gradients at the cut of an earlier batch; the client takes its
step with them, runs its part on the next batch, and replies with the activations at the cut. What a client has in hand
between two calls (its part as trained so far, the optimiser, and of every batch on its way the activations with their
graph) is a :class:`Half`.

Where an engine keeps sessions, that is a live object. Where it does not, because every call may meet a new process, or
where it asks for a snapshot (:class:`confed.federation.client.Session`), it is written to the client's state, and in
another process the forward pass of each batch on its way is run again: from the same weights, under a seed derived from
(round, client, step), so that dropout drops the same units. Both give the same bits.

The servers of split learning: one holds the last layers, another averages the clients' first ones.
"""

import copy
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, Protection
from confed.federation.batches import to_device, training_batches
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local, make_optimizer, scheduled_step
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Mean, Params, Scope, copy_into, named_tensors, pick
from confed.federation.protocols import Batch
from confed.federation.randomness import derive, isolated
from confed.federation.reports import Flag, Report
from confed.federation.state import ServerState
from confed.federation.train import trained


class Cut(NamedTuple):
    """What a client's part makes of a batch."""

    tensors: Params  # named activations at the cut, each (B, ...) and differentiable; none where the batch is left out
    penalty: Tensor | None = None  # a loss of the client's own that it adds to what comes back, a scalar


Bottom = Callable[[Client, nn.Module, Batch, int], Cut]  # a client's model on a batch in a step


def steps_of(examples: int, local: Local) -> int:
    """Batches of a client's part of a round; a batch of one example, which has no negatives, is left out."""
    whole, rest = divmod(examples, local.batch_size)
    return local.epochs * (whole + (rest > 1) - (local.batch_size == 1) * whole)


@dataclass
class _OnItsWay:
    """A batch whose gradients have not arrived yet."""

    step: int
    batch: Batch
    cut: Params
    penalty: Tensor | None
    leaves: Mapping[str, Tensor]
    before: Params | None


class Half:
    """A client's part of a network in the middle of a round.

    Args:
        client: a client whose workspace :meth:`Client.load` has filled.
        bottom: from a batch to the activations at the cut.
        moments: of the optimiser, where they are kept from round to round.
        ahead: how many batches may be on their way when the client goes on to the next: 0 for exact gradients; with 1
            a batch's gradients are those of weights one step older.
        start: batches that were taken already.
    """

    def __init__(
        self, client: Client, bottom: Bottom, ahead: int = 0, start: int = 0, moments: Params | None = None
    ) -> None:
        self.model, self.tensors, self.bottom, self.ahead = client.model, client.tensors, bottom, ahead
        self.steps = steps_of(len(client.data), client.local)
        if self.steps == 0:
            raise ValueError(
                f"split learning needs at least two examples per batch, client {client.info.id!r} has "
                f"{len(client.data)} training examples and local.batch_size is {client.local.batch_size}"
            )
        self.parameters = trained(client)
        self.optimizer = make_optimizer(list(self.parameters.values()), client.local)
        restored(self.optimizer, self.parameters, moments or {})
        self.device = next(iter(self.parameters.values())).device
        self.waiting: deque[_OnItsWay] = deque()
        self.next, self._batches = start, _batches(client, start)
        self.loss, self.losses = 0.0, 0
        self.model.train()

    # a call -------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, client: Client, bottom: Bottom, ahead: int = 0) -> "Half":
        """The client's half as the last call left it.

        Raises:
            ValueError: no round is open for this client.
        """
        if client.session is not None and "half" in client.session:
            return client.session["half"]
        if client.state.scalars.get("split/round") != client.round:
            raise ValueError(f"client {client.info.id!r} has no open part in round {client.round + 1}")
        return _revived(client, bottom, ahead)

    def keep(self, client: Client) -> None:
        """Keeps the half for the next call: alive, or in the client's state, or both where a snapshot is wanted."""
        if client.session is not None:
            client.session["half"] = self
            if not client.session.writing or any(batch.before is None for batch in self.waiting):
                if client.state.scalars.get("split/round", client.round) != client.round:
                    _forget(client)  # of a round that this client did not finish
                return
            client.session.written = True
        _write_down(self, client)

    def learn(self, gradients: Params, client: Client) -> None:
        """One step with the gradients at the cut of the oldest batch on its way.

        Raises:
            ValueError: no batch is on its way, or gradients are missing, unknown or of another shape.
        """
        if not self.waiting:
            raise ValueError(f"client {client.info.id!r} was sent gradients, and no batch is on its way")
        oldest = self.waiting.popleft()
        shapes, came = _shapes(oldest.cut), _shapes(gradients)
        if came != shapes:
            raise ValueError(f"client {client.info.id!r} needs gradients of the shapes {shapes}, got {came}")
        roots = [(t, gradients[name].to(t)) for name, t in oldest.cut.items() if t.requires_grad]
        if oldest.penalty is not None:
            roots.append((oldest.penalty, torch.ones_like(oldest.penalty)))
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        for name, leaf in oldest.leaves.items():
            if leaf.grad is not None:
                gradient = self.parameters[name].grad
                self.parameters[name].grad = leaf.grad if gradient is None else gradient + leaf.grad
        progress = (client.round + oldest.step / self.steps) / client.rounds
        scheduled_step(self.optimizer, self.parameters.values(), client.local, progress)
        self.optimizer.zero_grad(set_to_none=True)

    def advance(self, client: Client) -> Params:
        """Runs the next batch; its activations as they are sent, or nothing when there are no more batches."""
        while self.next < self.steps:
            step, batch = self.next, next(self._batches)
            self.next += 1
            cut = self._forward(client, step, to_device(batch, self.device)).tensors
            if cut:
                return {name: value.detach().cpu() for name, value in cut.items()}
        return {}

    @property
    def current(self) -> tuple[int, Batch]:
        """Number and examples of the newest batch on its way, for a method whose last layers are the client's.

        Raises:
            ValueError: no batch is on its way.
        """
        if not self.waiting:
            raise ValueError("no batch is on its way")
        return self.waiting[-1].step, self.waiting[-1].batch

    @property
    def done(self) -> bool:
        """Whether all batches were taken and all their gradients have come."""
        return self.next >= self.steps and not self.waiting

    def note(self, loss: float) -> None:
        """Counts the loss of a batch."""
        self.loss, self.losses = self.loss + loss, self.losses + 1

    def close(self, client: Client) -> float:
        """Ends the round for this client: its trained values are in the workspace; returns the mean loss.

        Raises:
            ValueError: batches are left, or on their way.
        """
        if not self.done:
            raise ValueError(
                f"client {client.info.id!r} was dropped in round {client.round + 1} after {self.next} of {self.steps} "
                "batches"
            )
        if client.session is not None:
            client.session.clear()
        _forget(client)
        return self.loss / max(self.losses, 1)

    def _forward(self, client: Client, step: int, batch: Batch) -> Cut:
        alive = client.session is not None and not client.session.writing
        before = None if alive else client.values(Scope.SHARED, Scope.PRIVATE)
        leaves: dict[str, Tensor] = {}
        if self.ahead:  # the step that comes in between must not change what this graph holds
            leaves = {n: p.detach().clone().requires_grad_() for n, p in self.parameters.items()}
        with isolated(derive(client.seed, client.round, client.info.id, f"forward/{step}")), _precision(client, self):
            if leaves:
                bottom_part = _Part(self.model, lambda model: self.bottom(client, model, batch, step))
                values = {f"model.{name}": leaf for name, leaf in leaves.items()}
                cut: Cut = torch.func.functional_call(bottom_part, values, ())  # pyright: ignore
            else:
                cut = self.bottom(client, self.model, batch, step)
        if cut.tensors:
            self.waiting.append(_OnItsWay(step, batch, cut.tensors, cut.penalty, leaves, before))
        return cut


class _Part(nn.Module):
    """A function of a model as a module, so that other weights can take the place of the model's own."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Cut]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self) -> Cut:
        return self.function(self.model)


def _precision(client: Client, half: Half) -> AbstractContextManager[Any]:
    if client.local.precision == "fp32":
        return nullcontext()
    return torch.autocast(half.device.type, torch.bfloat16)


def _batches(client: Client, start: int) -> Iterator[Batch]:
    """The round's batches from number ``start`` on, in the order of whole-model training."""
    number = 0
    for epoch in range(client.local.epochs):
        for batch in training_batches(client, f"order/{epoch}"):
            if len(next(iter(batch.values()))) == 1:
                continue
            if number >= start:
                yield batch
            number += 1


# Between processes ----------------------------------------------------------------------------------------------


def stored(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An optimiser's moments as named tensors, ``<parameter>/<moment>``."""
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                moments[f"{name}/{key}"] = value.detach().to("cpu", copy=True)
    return moments


def _shapes(tensors: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def restored(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], moments: Params) -> None:
    """Gives a new optimiser the moments that :func:`stored` took from another."""
    # Where the whole step is one kernel, it counts on the device; otherwise in main memory.
    beside: dict[int, bool] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        beside |= {id(parameter): on_device for parameter in group["params"]}
    for key, value in moments.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters[name]
        device = parameter.device if moment != "step" or beside[id(parameter)] else value.device
        optimizer.state[parameter][moment] = value.to(device, copy=True)


def _write_down(half: Half, client: Client) -> None:
    _forget(client)
    state = client.state
    state.tensors["split/now"] = client.values(Scope.SHARED, Scope.PRIVATE)
    state.tensors["split/moments"] = stored(half.optimizer, half.parameters)
    gradients = {n: p.grad.detach().cpu().clone() for n, p in half.parameters.items() if p.grad is not None}
    state.tensors["split/gradients"] = gradients
    for batch in half.waiting:
        state.tensors[f"split/before {batch.step}"] = dict(batch.before or {})
    state.scalars |= {
        "split/round": client.round, "split/next": half.next, "split/loss": half.loss, "split/losses": half.losses,
    }  # fmt: skip


def _forget(client: Client) -> None:
    """Takes a round in hand out of the client's state."""
    for group in [name for name in client.state.tensors if name.startswith("split/")]:
        del client.state.tensors[group]
    for name in [name for name in client.state.scalars if name.startswith("split/")]:
        del client.state.scalars[name]


def _revived(client: Client, bottom: Bottom, ahead: int) -> Half:
    """The half that another process wrote down."""
    groups, scalars = client.state.tensors, client.state.scalars
    now = groups["split/now"]
    client.load({name: now[name] for name in client.names(Scope.SHARED)})
    names = list(now)

    def put(values: Params) -> None:
        # Through ``data``: an earlier graph holds a batch normalisation's running values, which it does not read.
        copy_into([client.tensors[n].data for n in names], [values[n] for n in names])

    put(now)
    next_step = int(scalars["split/next"])
    numbers = sorted(int(name.split(" ")[1]) for name in groups if name.startswith("split/before "))
    half = Half(client, bottom, ahead, numbers[0] if numbers else next_step)
    restored(half.optimizer, half.parameters, groups["split/moments"])
    half.loss, half.losses = float(scalars["split/loss"]), int(scalars["split/losses"])
    while half.next < next_step:
        step, batch = half.next, next(half._batches)  # pyright: ignore[reportPrivateUsage]
        half.next += 1
        if step in numbers:
            put(groups[f"split/before {step}"])
            half._forward(client, step, to_device(batch, half.device))  # pyright: ignore[reportPrivateUsage]
    put(now)
    for name, gradient in groups["split/gradients"].items():
        half.parameters[name].grad = gradient.to(half.device).clone()
    return half


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

    def collect(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Phase in which ``aux`` averages the clients' part.

        Raises:
            RuntimeError: no client sent its part.
        """
        expected = [self.broadcast(server, client).tensors for client in cohort]
        replies = yield [Call(c, "send", Message(), e, session=True) for c, e in zip(cohort, expected, strict=True)]
        mean, senders, first, last = Mean(self.accumulator_dtype), list[str](), dict[str, Tensor](), ""
        for reply in replies:
            if reply.error is not None:
                last = f"; {reply.client.id}: {reply.error}"
                continue
            mean.add(reply.message.tensors, self.share(reply.client))
            senders.append(reply.client.id)
            if self.not_averaged and reply.client.id == min(senders):
                first = {n: t for n, t in reply.message.tensors.items() if n.startswith(self.not_averaged)}
        if not senders:
            raise RuntimeError(f"no client sent its part in round {server.round + 1}{last}")
        return replace(server, round=server.round + 1, params={**mean.result(server.params), **first})

    def share(self, client: ClientInfo) -> float:
        """Weight of a client in means; every client counts the same."""
        return 1.0

    @property
    def not_averaged(self) -> str:
        """Beginning of the names of tensors that ``aux`` takes from the first client, by name; "" for none."""
        return ""

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection of updates: what crosses the cut is protected by ``privacy``."""
        return "its clients send activations batch by batch; algorithm.privacy clips and noises these"

    def reports(self, action: str) -> Report:
        """Reported scalars: the loss, and whether a client has sent its last batch of the round."""
        return {**super().reports(action), "done": Flag()}


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
