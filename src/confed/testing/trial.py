"""Short runs on the toy federation, and their outcomes for comparison."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from confed.data.examples import TableData
from confed.engines.buffered import Buffered
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.usage import Timeline
from confed.federation.algorithm import Algorithm
from confed.federation.messages import Call, Reply
from confed.federation.state import ClientState, MemoryStore, ServerState, Store
from confed.federation.step_checkpoints import Position, StepCheckpoints, TrainingCheckpoint
from confed.federation.wire import decode, decode_state, encode, encode_state
from confed.testing.toy import toy_clients, toy_setup

ROUNDS = 3
SIZES = (7, 11, 8)
"""Training examples of the contract's clients: two or three batches of four, none of fewer than three."""


class ContractViolation(AssertionError):
    """Violation of the contract by a method; the message says which check and how."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run: servers, every client's state, losses, all replies, and the model's frozen tensors."""

    servers: Mapping[str, ServerState]
    states: Mapping[str, ClientState]
    losses: Sequence[Mapping[str, float]]
    errors: Sequence[Mapping[str, str]]
    replies: Sequence[tuple[str, Call, Reply]]
    frozen: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that survives, under unique names."""
        result: dict[str, Tensor] = {}
        for name, server in self.servers.items():
            result |= {f"server {name}: {n}": t for n, t in server.params.items()}
            for slot, p in server.slots.items():
                for n, t in p.items():
                    result[f"server {name}, {slot}: {n}"] = t
        for client, state in self.states.items():
            for group, p in state.tensors.items():
                for n, t in p.items():
                    result[f"{client}, {group}: {n}"] = t
        return result


class Recording:
    """Executor that records all calls and replies, and may disturb the workspace first."""

    def __init__(self, setup: Setup, before: Callable[[Workspace], None] | None = None) -> None:
        self.inner, self.before = InProcess(setup), before
        self.setup, self.workspace = setup, self.inner.workspace
        self.replies: list[tuple[str, Call, Reply]] = []
        self.timeline = Timeline(0)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Answers as the simulator does, see :class:`confed.engines.executor.InProcess`."""
        for call in calls:
            if self.before is not None:
                self.before(self.workspace)
            reply = answer(self.setup, self.workspace, call, store, round)
            self.replies.append((call.client.id, call, reply))
            yield reply


class Backwards(Recording):
    """Executor that computes the calls in reverse order and returns the replies in the right one."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """All answers, computed before the first is handed over."""
        computed = {i: answer(self.setup, self.workspace, calls[i], store, round) for i in reversed(range(len(calls)))}
        yield from (computed[i] for i in range(len(calls)))


class Bytes(Recording):
    """Executor that serialises every message and state, with a new model object each time, as another machine would."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Answers computed from bytes and handed over as what their bytes say."""
        for call in calls:
            message = decode(encode(call.sent))
            receiver = MemoryStore()
            receiver.save(call.client.id, decode_state(encode_state(store.load(call.client.id))))
            workspace = Workspace(self.setup.model(), lasting=False)
            reply = answer(self.setup, workspace, replace(call, message=message, wire=None), receiver, round)
            store.save(call.client.id, decode_state(encode_state(receiver.load(call.client.id))))
            yield replace(reply, message=decode(encode(reply.message)))


class _Ended(BaseException):
    """The end of a process in the middle of training."""


class _EndingCheckpoint(TrainingCheckpoint):
    def save_if_due(self, position: Position, optimizer: torch.optim.Optimizer) -> None:
        super().save_if_due(position, optimizer)
        raise _Ended


class _EndingCheckpoints(StepCheckpoints):
    training = _EndingCheckpoint


class CutShort(Recording):
    """Executor whose trainings end after one step, and go on from there in another workspace."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Answers of the second tries."""
        for call in calls:
            with TemporaryDirectory() as folder:
                ending, going_on = _EndingCheckpoints(Path(folder), (0.0, 0)), StepCheckpoints(Path(folder), (0.0, 0))
                for checkpoints in (ending, going_on):
                    checkpoints.enter("call")
                before = MemoryStore()
                before.save(call.client.id, store.load(call.client.id))
                other = Workspace(self.setup.model(), lasting=False)
                with suppress(_Ended):
                    answer(replace(self.setup, checkpoints=ending), other, call, before, round)
                yield answer(replace(self.setup, checkpoints=going_on), self.workspace, call, store, round)


class Together(Recording):
    """Executor that trains clients at once where ``batch_clients`` says so."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Answers as the simulator does; of a method that declares it, none one by one (:class:`ContractViolation`)."""
        for call, reply in zip(calls, self.inner(calls, store, round), strict=True):
            self.replies.append((call.client.id, call, reply))
            yield reply
        if self.inner.unbatchable_reason and self.setup.algorithm.traits.unbatchable_reason == "":
            raise ContractViolation(f"clients were trained one by one: {self.inner.unbatchable_reason}")


def run(
    setup: Setup,
    recording: Callable[[Setup], Recording] = Recording,
    start: tuple[Mapping[str, ServerState], int] | None = None,
    store: Store | None = None,
    stop: int | None = None,
    buffered: Buffered | None = None,
) -> Outcome:
    """Runs a federation in this process."""
    store = MemoryStore() if store is None else store
    executor = recording(setup)
    # A buffer that holds everyone's update needs everyone in training.
    training = None if buffered is None else max(buffered.size, 2)
    simulation = Simulation(setup, store, executor, training, buffered=buffered)
    servers, begin = start or (simulation.start(executor.workspace), 0)
    records: list[RoundRecord] = []
    for record in simulate(simulation, servers, begin):
        records.append(record)
        servers = record.servers
        if record.round == stop:
            break
    names = [setup.population.info(i).id for i in range(len(setup.population))]
    return Outcome(
        servers,
        {name: store.load(name) for name in names},
        [record.losses for record in records],
        [record.errors for record in records],
        executor.replies,
        {n: t for n, t in executor.workspace.tensors.items() if n not in executor.workspace.initial},
    )


_undisturbed: list[tuple[object, Algorithm, Outcome]] = []


def undisturbed(algorithm: Algorithm) -> Outcome:
    """A method's toy run without any disturbance, kept for the next check of an equal method: do not change it."""
    for setup, method, outcome in _undisturbed:
        if setup is toy_setup and type(method) is type(algorithm) and method == algorithm:
            return outcome
    outcome = run(toy(algorithm))
    _undisturbed[:] = [(toy_setup, algorithm, outcome)]
    return outcome


def same(check: str, one: Outcome, other: Outcome, tolerance: float = 0.0) -> None:
    """Check that the same tensors survive both runs, equal to the bit or within a tolerance."""
    first, second = one.tensors(), other.tensors()
    if first.keys() != second.keys():
        raise ContractViolation(f"{check}: different tensors survive: {sorted(first.keys() ^ second.keys())}")
    for name, tensor in first.items():
        same = (
            torch.equal(tensor, second[name])
            if tolerance == 0
            else torch.allclose(tensor.double(), second[name].double(), rtol=tolerance, atol=tolerance)
        )
        if not same:
            gap = (tensor.double() - second[name].double()).abs().max()
            raise ContractViolation(f"{check}: {name} differs by up to {gap:.3g}")


def clients_of(algorithm: Algorithm, seed: int = 0, sizes: tuple[int, ...] = SIZES) -> dict[str, TableData]:
    """Clients for a method, with their examples by seed."""
    return toy_clients(seed, sizes, algorithm.traits.made_for)


def toy(algorithm: Algorithm, clients: dict[str, TableData] | None = None) -> Setup:
    """The toy federation with a method, for :data:`ROUNDS` rounds."""
    return toy_setup(algorithm, clients=clients or clients_of(algorithm), rounds=ROUNDS)
