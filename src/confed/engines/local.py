"""The simulator: one workspace, clients one after the other, the loop in plain sight."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, read_tallies
from confed.federation.client import Client
from confed.federation.messages import Call, ClientInfo, Exchange, Message, Reply, drive
from confed.federation.params import Scope, layout, named_tensors
from confed.federation.protocols import ClientData, Task
from confed.federation.randomness import derive, isolated, sample_cohort
from confed.federation.state import ClientState, ServerState, Store
from confed.federation.train import Local
from confed.federation.wire import size
from confed.privacy.guards import check_reply

__all__ = ["Members", "Population", "RoundRecord", "Setup", "Simulation", "Workspace", "perform", "simulate"]


class Population(Protocol):
    """The registered clients; infos and data are made on demand, so that millions cost nothing."""

    def __len__(self) -> int:
        """How many clients there are."""
        ...

    def info(self, number: int) -> ClientInfo:
        """Who client ``number`` is."""
        ...

    def data(self, client_id: str) -> ClientData:
        """A client's examples."""
        ...


class Members:
    """A population held in memory.

    Args:
        data: client id -> its examples, in the federation's fixed order.
        modalities: what every client's examples contain.
    """

    def __init__(self, data: Mapping[str, ClientData], modalities: tuple[str, ...] = ()) -> None:
        self._data = data
        self._infos = [ClientInfo(name, len(examples), modalities) for name, examples in data.items()]

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, number: int) -> ClientInfo:
        """See :class:`Population`."""
        return self._infos[number]

    def data(self, client_id: str) -> ClientData:
        """See :class:`Population`.

        Raises:
            ValueError: no client has that id.
        """
        if client_id not in self._data:
            raise ValueError(f"no client is called {client_id!r}; there are {', '.join(self._data)}")
        return self._data[client_id]


class Workspace:
    """One model that all clients of a process take turns in.

    Args:
        model: the model, with its initial values. Its attribute ``frozen``, where it has one, names the tensors
            that are not trained.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.tensors = named_tensors(self.model)
        self.frozen = frozenset[str](getattr(model, "frozen", ()))
        self.initial = {n: t.detach().clone() for n, t in self.tensors.items() if n not in self.frozen}
        self._scopes: dict[tuple[tuple[str, Scope], ...], Mapping[str, Scope]] = {}

    def scopes(self, algorithm: Algorithm, client: ClientInfo) -> Mapping[str, Scope]:
        """Where each tensor lives for this client (worked out once per set of rules)."""
        rules = algorithm.rules(client)
        key = tuple(rules.items())
        if key not in self._scopes:
            self._scopes[key] = layout(self.tensors, rules, frozen=self.frozen)
        return self._scopes[key]


@dataclass(frozen=True)
class Setup:
    """What is the same for every call of a run.

    Attributes:
        algorithm: the method.
        population: the clients.
        task: loss and tally.
        local: how clients train.
        build: makes the model with its initial values; called once per process.
        rounds: rounds of the run.
        seed: the run's seed.
        keep_personal: whether clients keep their own version of the shared tensors.
        observers: name -> test examples of places that take no part (unseen scenes).
        device: where clients compute.
    """

    algorithm: Algorithm
    population: Population
    task: Task
    local: Local
    build: Callable[[], nn.Module]
    rounds: int
    seed: int = 0
    keep_personal: bool = True
    observers: Mapping[str, ClientData] = field(default_factory=dict[str, ClientData])
    device: str = "cpu"

    def data(self, client_id: str) -> ClientData:
        """The examples of a client or an observer."""
        return self.observers[client_id] if client_id in self.observers else self.population.data(client_id)


def perform(
    setup: Setup, workspace: Workspace, call: Call, state: ClientState, round: int
) -> tuple[Message, ClientState]:
    """Runs one action on one client; the same function in every engine.

    Args:
        setup: the run.
        workspace: the process's model; its content before and after is meaningless.
        call: client, action and message.
        state: the client's state; changed only in the returned copy.
        round: number of the round.

    Returns:
        The reply's message and the client's new state.

    Raises:
        ValueError: the method has no such action, or the reply carries a tensor that must not leave the client.
    """
    actions = setup.algorithm.actions()
    if call.action not in actions:
        raise ValueError(f"{type(setup.algorithm).__name__} has no action {call.action!r}; it has {sorted(actions)}")
    scopes = workspace.scopes(setup.algorithm, call.client)
    client = Client(
        info=call.client,
        data=setup.data(call.client.id),
        model=workspace.model,
        tensors=workspace.tensors,
        task=setup.task,
        local=setup.local,
        state=state,
        scopes=scopes,
        initial=workspace.initial,
        round=round,
        rounds=setup.rounds,
        seed=setup.seed,
        keep_personal=setup.keep_personal,
    )
    with isolated(derive(setup.seed, round, call.client.id, call.action)):
        message = actions[call.action](client, call.message)
    leaked = [n for n in message.tensors if scopes.get(n, Scope.SHARED) is not Scope.SHARED]
    if leaked:
        raise ValueError(f"client {call.client.id!r} must not send {leaked}: private or frozen for it")
    return message, client.state


@dataclass
class Ledger:
    """Bytes per client, counted from the serialised messages."""

    up: dict[str, int] = field(default_factory=dict[str, int])
    down: dict[str, int] = field(default_factory=dict[str, int])

    def count(self, call: Call, reply: Reply) -> None:
        """Counts one call and its reply."""
        name = call.client.id
        self.down[name] = self.down.get(name, 0) + size(call.message)
        if reply.error is None:
            self.up[name] = self.up.get(name, 0) + size(reply.message)


class Answerer(Protocol):
    """Computes replies to calls, in their order; processes or machines may do it ahead of time."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the store holds the clients' states."""
        ...


class InProcess:
    """Answers calls one by one in this process, when they are asked for."""

    def __init__(self, setup: Setup, workspace: Workspace | None = None) -> None:
        self._setup = setup
        self.workspace = Workspace(setup.build(), setup.device) if workspace is None else workspace

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """See :class:`Answerer`."""
        for call in calls:
            yield answer(self._setup, self.workspace, call, store, round)

    def close(self) -> None:
        """Nothing to release."""


def answer(setup: Setup, workspace: Workspace, call: Call, store: Store, round: int) -> Reply:
    """One reply; what goes wrong on the client becomes the reply's error and leaves its state as it was."""
    try:
        before = store.load(call.client.id)
        message, after = perform(setup, workspace, call, before.copy(), round)
        reply = check_reply(call, Reply(call.client, message))
        # Evaluation changes nothing; most methods' clients keep nothing: no write without need.
        if reply.error is None and changed(before, after):
            store.save(call.client.id, after)
        return reply
    except OSError:
        raise  # a full disk or a lost one is the run's problem, not the client's
    except Exception as error:
        return Reply(call.client, Message(), f"{type(error).__name__}: {error}")


def changed(before: ClientState, after: ClientState) -> bool:
    """Whether an action replaced anything in the client's state."""
    if before.scalars != after.scalars or before.tensors.keys() != after.tensors.keys():
        return True
    return any(
        group.keys() != after.tensors[name].keys() or any(t is not after.tensors[name][n] for n, t in group.items())
        for name, group in before.tensors.items()
    )


Tallies = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class RoundRecord:
    """What one round did.

    Attributes:
        round: its number, from 1.
        servers: every server's state after it.
        losses: client -> mean training loss.
        errors: client -> what went wrong there.
        bytes_up: client -> bytes it sent.
        bytes_down: client -> bytes it received.
        seconds: wall-clock time of the round without evaluation.
    """

    round: int
    servers: Mapping[str, ServerState]
    losses: Mapping[str, float]
    errors: Mapping[str, str]
    bytes_up: Mapping[str, int]
    bytes_down: Mapping[str, int]
    seconds: float


class Simulation(AbstractContextManager["Simulation"]):
    """A federation on this machine: a setup, somewhere to keep client states, and who answers calls.

    Args:
        setup: the run.
        store: client states.
        answerer: who computes replies; by default this process.
        cohort: clients per round; all by default.
    """

    def __init__(
        self,
        setup: Setup,
        store: Store,
        answerer: "InProcess | Answerer | None" = None,
        cohort: int | None = None,
    ) -> None:
        if len(setup.population) == 0:
            raise ValueError("a federation needs at least one client, got 0")
        self.setup, self.store = setup, store
        self.answerer = InProcess(setup) if answerer is None else answerer
        self.cohort = len(setup.population) if cohort is None else cohort

    def __exit__(self, *exception: object) -> None:
        close = getattr(self.answerer, "close", None)
        if close is not None:
            close()

    def start(self, workspace: Workspace) -> dict[str, ServerState]:
        """Every server's state before the first round."""
        scopes = workspace.scopes(self.setup.algorithm, self.setup.population.info(0))
        return self.setup.algorithm.init({n: t.cpu() for n, t in workspace.initial.items()}, scopes)

    def clients(self, most: int | None = None) -> list[ClientInfo]:
        """All clients, or the first ``most`` of them."""
        count = len(self.setup.population)
        return [self.setup.population.info(i) for i in range(count if most is None else min(most, count))]

    def exchange(self, round: int, ledger: Ledger, errors: dict[str, str], losses: dict[str, float]) -> Exchange:
        """An exchange that also keeps the books."""

        def ask(calls: Sequence[Call]) -> Iterator[Reply]:
            failed = 0
            for call, reply in zip(calls, self.answerer(calls, self.store, round), strict=True):
                ledger.count(call, reply)
                if reply.error is not None:
                    failed += 1
                    errors[call.client.id] = reply.error
                elif "loss" in reply.message.scalars:
                    losses[call.client.id] = float(reply.message.scalars["loss"])
                yield reply
            if calls and failed == len(calls):
                first = next(iter(errors.items()))
                raise RuntimeError(f"every client failed in round {round + 1}; {first[0]}: {first[1]}")

        return ask

    def evaluate(
        self,
        servers: Mapping[str, ServerState],
        round: int,
        *,
        split: str,
        limit: int = 0,
        most: int | None = 100,
    ) -> dict[str, dict[str, Tallies]]:
        """Global and personal models on the clients' examples, and the global one in unseen places.

        Returns:
            View ("global", "personal", "unseen") -> client or place -> tallies.
        """
        algorithm = self.setup.algorithm
        infos = self.clients(most)
        if algorithm.has_global:
            infos += [ClientInfo(name, 0) for name in self.setup.observers]
        scalars = {"split": split, "limit": limit}
        calls = [Call(c, "evaluate", Message(self.shared(servers, c), scalars)) for c in infos]
        result: dict[str, dict[str, Tallies]] = {"global": {}, "personal": {}, "unseen": {}}
        for call, reply in zip(calls, self.answerer(calls, self.store, round), strict=True):
            if reply.error is not None:
                continue
            for view in ("global", "personal"):
                tallies = read_tallies(reply.message.scalars, view)
                if tallies:
                    place = "unseen" if call.client.id in self.setup.observers else view
                    result[place][call.client.id] = tallies
        return result

    def shared(self, servers: Mapping[str, ServerState], client: ClientInfo) -> Mapping[str, Tensor]:
        """The shared tensors a client would receive, from all servers."""
        tensors: dict[str, Tensor] = {}
        for server in servers.values():
            tensors.update(self.setup.algorithm.broadcast(server, client).tensors)
        return tensors

    def examine(self, jobs: Sequence[tuple[str, Mapping[str, Tensor]]], round: int) -> Iterator[Message]:
        """Given models on given places' test examples, example by example; for analysis.

        Args:
            jobs: client or observer id, and the model's trained tensors.
            round: number of finished rounds.

        Raises:
            RuntimeError: a job failed.
        """
        calls = [Call(ClientInfo(place, 0), "examine", Message(tensors)) for place, tensors in jobs]
        for reply in self.answerer(calls, self.store, round):
            if reply.error is not None:
                raise RuntimeError(f"evaluation on {reply.client.id!r} failed: {reply.error}")
            yield reply.message


def simulate(simulation: Simulation, servers: Mapping[str, ServerState], start: int = 0) -> Iterator[RoundRecord]:
    """Runs the rounds ``start`` to the last, and the method's finish; yields after each.

    The caller logs, evaluates, plots, checkpoints or stops: there are no callbacks.

    Args:
        simulation: the federation.
        servers: every server's state after ``start`` rounds.
        start: number of finished rounds; ``setup.rounds + 1`` means that the finish is done too.
    """
    setup = simulation.setup
    servers = dict(servers)
    for round in range(start, setup.rounds + 1):
        began = time.perf_counter()
        simulation.store.begin(round + 1)
        ledger, errors, losses = Ledger(), dict[str, str](), dict[str, float]()
        exchange = simulation.exchange(round, ledger, errors, losses)
        if round < setup.rounds:
            numbers = sample_cohort(len(setup.population), simulation.cohort, setup.seed, round)
            cohort = [setup.population.info(number) for number in numbers]
            for name, flow in setup.algorithm.phases():
                servers[name] = drive(flow(servers[name], cohort), exchange)
        else:
            name = next(iter(servers))
            if type(setup.algorithm).finish is Algorithm.finish:
                return
            servers[name] = drive(setup.algorithm.finish(servers[name], simulation.clients()), exchange)
        yield RoundRecord(round + 1, dict(servers), losses, errors, ledger.up, ledger.down, time.perf_counter() - began)


def count_parameters(workspace: Workspace, scopes: Mapping[str, Scope]) -> dict[str, int]:
    """Numbers of values trained, sent and stored (kept on disk per client) for one client."""
    trained = sum(
        t.numel()
        for n, t in workspace.tensors.items()
        if t.requires_grad and scopes[n] in (Scope.SHARED, Scope.PRIVATE)
    )
    counts = {s: sum(t.numel() for n, t in workspace.tensors.items() if scopes[n] is s) for s in Scope}
    return {
        "total": sum(t.numel() for t in workspace.tensors.values()),
        "trained": trained,
        "sent": counts[Scope.SHARED],
        "stored": counts[Scope.SHARED] + counts[Scope.PRIVATE],
    }
