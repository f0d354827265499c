"""The contract that every method keeps, as executable checks.

``check_algorithm(MyMethod())`` runs all of them on the toy federation in a second or two and raises
:class:`ContractViolation` at the first that fails. The test suite runs it for every registered method.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.pooling import pool
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.remote import Remote
from confed.engines.roll import Patience, Post
from confed.engines.timeline import Timeline
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, Checkpoints, DirectoryStore
from confed.federation.messages import Call, Reply, drive
from confed.federation.ownership import modalities_of
from confed.federation.params import Scope, named_tensors
from confed.federation.state import ClientState, MemoryStore, ServerState, Store
from confed.federation.train import Local
from confed.federation.wire import decode, decode_state, encode, encode_state
from confed.toy import toy_clients, toy_setup

__all__ = ["CHECKS", "ContractViolation", "check_algorithm", "contract"]

ROUNDS = 3
DESCENT = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd")
PLAIN = Local(epochs=1, batch_size=10_000, lr=0.1, optimizer="sgd", weight_decay=0.0)
Check = Callable[[Algorithm], None]


class ContractViolation(AssertionError):
    """A method breaks the contract; the message says which check and how."""


def check_algorithm(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Runs every check of the contract that applies to a method.

    Args:
        algorithm: the method with the hyper-parameters to check.

    Returns:
        Check -> "passed", or why it does not apply.

    Raises:
        ContractViolation: a check failed.
    """
    verdicts: list[tuple[str, str]] = []
    for name, check in CHECKS.items():
        reason = exemption(algorithm, name)
        if reason is None:
            check(algorithm)
        verdicts.append((name, reason or "passed"))
    return verdicts


def contract(name: str) -> list[tuple[str, str]]:
    """For one registered method, each check and either "applies" or why it does not.

    Raises:
        ValueError: no method has that name.
    """
    from confed.registry import algorithms

    algorithm = algorithms[name]()
    return [(check, exemption(algorithm, check) or "applies") for check in CHECKS]


def exemption(algorithm: Algorithm, check: str) -> str | None:
    """Why a check does not apply to a method, in the method's own words; None if it applies."""
    if check in ("neutral coefficients give FedAvg", "one full step equals gradient descent"):
        return algorithm.neutral if isinstance(algorithm.neutral, str) else None
    if algorithm.pooled and check in ("a failure changes nothing", "nothing leaks from client to client"):
        return "there is one member, so there are no others to go on or to leak to"
    if check == "simulator equals Flower" and find_spec("flwr") is None:
        return "Flower is not installed (the extra 'flower')"
    if check == "simulator equals FLARE" and find_spec("nvflare") is None:
        return "NVIDIA FLARE is not installed (the extra 'flare')"
    return None


# One run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The end of a run: servers, every client's state, the losses, and all replies."""

    servers: Mapping[str, ServerState]
    states: Mapping[str, ClientState]
    losses: Sequence[Mapping[str, float]]
    errors: Sequence[Mapping[str, str]]
    replies: Sequence[tuple[str, Call, Reply]]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that survives, under unique names."""
        result: dict[str, Tensor] = {}
        for name, server in self.servers.items():
            result |= {f"server {name}: {n}": t for n, t in server.params.items()}
            result |= {f"server {name}, {slot}: {n}": t for slot, p in server.slots.items() for n, t in p.items()}
        for client, state in self.states.items():
            result |= {f"{client}, {group}: {n}": t for group, p in state.tensors.items() for n, t in p.items()}
        return result


class _Recording:
    """An answerer that remembers what was said, and may disturb the workspace first."""

    def __init__(self, setup: Setup, before: Callable[[Workspace], None] | None = None) -> None:
        self.inner, self.before = InProcess(setup), before
        self.setup, self.workspace = setup, self.inner.workspace
        self.replies: list[tuple[str, Call, Reply]] = []
        self.timeline = Timeline(0)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call in calls:
            if self.before is not None:
                self.before(self.workspace)
            reply = answer(self.setup, self.workspace, call, store, round)
            self.replies.append((call.client.id, call, reply))
            yield reply


class _Backwards(_Recording):
    """Computes the calls in reverse order and hands the replies over in the right one."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        computed = {i: answer(self.setup, self.workspace, calls[i], store, round) for i in reversed(range(len(calls)))}
        yield from (computed[i] for i in range(len(calls)))


class _Bytes(_Recording):
    """Sends every message and state through bytes, to a new model object each time, as a machine far away.

    No session lasts there, so that a client must find everything in its state.
    """

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call in calls:
            message = decode(encode(call.message))
            there = MemoryStore()
            there.save(call.client.id, decode_state(encode_state(store.load(call.client.id))))
            workspace = Workspace(self.setup.model(), lasting=False)
            reply = answer(self.setup, workspace, replace(call, message=message), there, round)
            store.save(call.client.id, decode_state(encode_state(there.load(call.client.id))))
            yield replace(reply, message=decode(encode(reply.message)))


def _run(
    setup: Setup,
    recording: Callable[[Setup], _Recording] = _Recording,
    start: tuple[Mapping[str, ServerState], int] | None = None,
    store: Store | None = None,
    stop: int | None = None,
) -> Outcome:
    store = MemoryStore() if store is None else store
    answerer = recording(setup)
    simulation = Simulation(setup, store, answerer)
    servers, begin = start or (simulation.start(answerer.workspace), 0)
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
        answerer.replies,
    )


def _same(check: str, one: Outcome, other: Outcome, tolerance: float = 0.0) -> None:
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


def _setup(algorithm: Algorithm, clients: dict[str, TableData] | None = None) -> Setup:
    return toy_setup(algorithm, clients=clients, rounds=ROUNDS)


# The checks ---------------------------------------------------------------------------------------------------


def finite_and_deterministic(algorithm: Algorithm) -> None:
    """Two runs give the same bits, all of them finite."""
    check = "finite and deterministic"
    one, other = _run(_setup(algorithm)), _run(_setup(algorithm))
    _same(check, one, other)
    for name, tensor in one.tensors().items():
        if not torch.isfinite(tensor.double()).all():
            raise ContractViolation(f"{check}: {name} holds a NaN or an infinity")
    if one.losses != other.losses or not all(math.isfinite(v) for r in one.losses for v in r.values()):
        raise ContractViolation(f"{check}: losses differ or are not finite: {one.losses}, {other.losses}")


def resumes_exactly(algorithm: Algorithm) -> None:
    """Stopped after one round and continued from files by new objects, a run gives the same bits."""
    setup = _setup(algorithm)
    whole = _run(setup)
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        part = _run(setup, store=checkpoints.store, stop=1)
        checkpoints.save(Checkpoint(1, part.servers, 0))
        again = Checkpoints(Path(folder))
        checkpoint, _ = again.latest()
        rest = _run(_setup(algorithm), start=(checkpoint.servers, checkpoint.round), store=again.store)
        _same("resumes exactly", whole, rest)


def ignores_the_workspace(algorithm: Algorithm) -> None:
    """What another client left in the workspace (here NaN in weights and gradients) changes nothing."""

    def poison(workspace: Workspace) -> None:
        with torch.no_grad():
            for name in workspace.initial:
                tensor = workspace.tensors[name]
                tensor.fill_(math.nan if tensor.is_floating_point() else 77)
                if tensor.requires_grad:
                    tensor.grad = torch.full_like(tensor, math.nan)

    clean = _run(_setup(algorithm))
    _same("ignores the workspace", clean, _run(_setup(algorithm), lambda s: _Recording(s, poison)))


def sends_only_what_is_shared(algorithm: Algorithm) -> None:
    """No private or frozen tensor travels up, by name or by value."""
    check = "sends only what is shared"
    setup = _setup(algorithm)
    outcome = _run(setup)
    workspace = Workspace(setup.model())
    for client, call, reply in outcome.replies:
        if reply.error is not None:
            raise ContractViolation(f"{check}: {call.action} failed on {client}: {reply.error}")
        scopes = workspace.scopes(setup.algorithm, call.client)
        hidden = list(outcome.states[client].tensors.get("private", {}).values())
        for name, tensor in reply.message.tensors.items():
            if scopes.get(name, Scope.SHARED) is not Scope.SHARED:
                raise ContractViolation(f"{check}: {call.action} of {client} sent {name}, which is {scopes[name]}")
            if any(t.shape == tensor.shape and t.numel() > 2 and torch.equal(t, tensor) for t in hidden):
                raise ContractViolation(f"{check}: {call.action} of {client} sent a private tensor as {name}")


def a_failure_changes_nothing(algorithm: Algorithm) -> None:
    """An action that raises leaves its client's state as it was, and the others go on."""
    check = "a failure changes nothing"
    clients = toy_clients(kind=algorithm.finetuning)
    broken = _Broken(clients["client-1"])
    store = MemoryStore()
    setup = _setup(algorithm, {**clients, "client-1": broken})
    first = _run(setup, store=store, stop=1)
    before = store.load("client-1")
    broken.armed = True
    after = _run(setup, start=(first.servers, 1), store=store, stop=2)
    broken.armed = False
    if "broken on purpose" not in after.errors[0].get("client-1", ""):
        raise ContractViolation(f"{check}: the failure was not reported: {after.errors}")
    now = store.load("client-1")
    if now.scalars != before.scalars or now.tensors.keys() != before.tensors.keys():
        raise ContractViolation(f"{check}: the failed client's state changed")
    for group, tensors in before.tensors.items():
        if any(not torch.equal(t, now.tensors[group][n]) for n, t in tensors.items()):
            raise ContractViolation(f"{check}: the failed client's {group} tensors changed")
    if not after.losses[0].keys() >= {"client-0", "client-2"}:
        raise ContractViolation(f"{check}: the other clients did not go on: {after.losses}")


class _Broken(TableData):
    """Examples that fail in the middle of an epoch when armed."""

    armed = False

    def __init__(self, data: TableData) -> None:
        super().__init__(*data.tables)

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(super().train(batch_size, rng)):
            if self.armed and number == 1:
                raise OverflowError("broken on purpose")
            yield batch


def order_is_irrelevant(algorithm: Algorithm) -> None:
    """Computing clients in another order gives the same bits; registering them in another, the same numbers."""
    check = "the order of clients is irrelevant"
    setup = _setup(algorithm)
    whole = _run(setup)
    _same(check, whole, _run(setup, _Backwards))
    if not algorithm.pooled:
        exact = replace(algorithm, accumulator="float64")
        clients = toy_clients(kind=algorithm.finetuning)
        reverse = dict(reversed(clients.items()))
        # AdamW would make a step of any size out of a gradient that is nothing but rounding.
        runs = [_run(toy_setup(exact, clients=c, local=DESCENT, rounds=ROUNDS)) for c in (clients, reverse)]
        _same(check, *runs, tolerance=1e-3)


def nothing_leaks(algorithm: Algorithm) -> None:
    """Another client's data cannot be seen in what a client sends and keeps in the same round."""
    check = "nothing leaks from client to client"
    clients, other = (toy_clients(seed, kind=algorithm.finetuning) for seed in (0, 5))
    mixed = {**clients, "client-0": other["client-0"]}
    one, two = _run(_setup(algorithm, clients), stop=1), _run(_setup(algorithm, mixed), stop=1)
    first, second = ([(c, r) for c, _, r in run.replies if c != "client-0"] for run in (one, two))
    for (client, a), (_, b) in zip(first, second, strict=True):
        for name, tensor in a.message.tensors.items():
            if not torch.equal(tensor, b.message.tensors[name]):
                raise ContractViolation(f"{check}: client-0's data show in {client}'s {name}")


def servers_see_their_own_part(algorithm: Algorithm) -> None:
    """Where there are several servers, what one asks and what it is told holds no tensor of another's.

    Neither by its name nor by its values: those that another server holds, or was sent or told in the same round.
    """
    check = "servers see their own part only"
    setup = _setup(algorithm)
    answerer = _Recording(setup)
    simulation = Simulation(setup, MemoryStore(), answerer)
    servers = simulation.start(answerer.workspace)
    if len(servers) == 1:
        return
    cohort = simulation.clients()
    parts = {name: set(server.params) for name, server in servers.items()}
    if len(set.union(*parts.values())) != sum(map(len, parts.values())):
        raise ContractViolation(f"{check}: two servers hold the same tensor")
    seen: list[tuple[str, str, Tensor]] = []
    for name, flow in setup.algorithm.phases():
        answerer.replies.clear()
        given = replace(servers[name], clients=len(cohort), rounds=ROUNDS, local=setup.local)
        servers[name] = drive(flow(given, cohort), lambda calls: answerer(calls, simulation.store, 0))
        others = set.union(*(part for other, part in parts.items() if other != name))
        values = [t for other, s in servers.items() if other != name for t in s.params.values()]
        for client, call, reply in answerer.replies:
            for tensor_name, tensor in (*call.message.tensors.items(), *reply.message.tensors.items()):
                where = f"{tensor_name} in {call.action} of {client}"
                seen.append((name, where, tensor))
                if tensor_name in others or any(_same_values(t, tensor) for t in values):
                    raise ContractViolation(f"{check}: {name} sees {where}")
    for number, (server, where, tensor) in enumerate(seen):
        for other, there, foreign in seen[:number]:
            if other != server and _same_values(tensor, foreign):
                raise ContractViolation(f"{check}: {server} sees {where}, which {other} sees as {there}")


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of some size are the same; constants, such as biases of zeros, tell nothing."""
    if one.numel() <= 2 or one.shape != other.shape or not torch.equal(one, other):
        return False
    return bool((one != one.flatten()[0]).any())


def keeps_frozen_tensors(algorithm: Algorithm) -> None:
    """Frozen tensors hold the same bits after a run."""
    setup = _setup(algorithm)
    initial = setup.model().state_dict()
    recording = _Recording(setup)
    _run(setup, lambda _: recording)
    for name in set(recording.workspace.tensors) - set(recording.workspace.initial):
        if not torch.equal(recording.workspace.tensors[name], initial[name]):
            raise ContractViolation(f"keeps frozen tensors: {name} changed")


def survives_the_wire(algorithm: Algorithm) -> None:
    """Everything through bytes, and a new model object for every message: the same bits come out."""
    _same("survives the wire", _run(_setup(algorithm)), _run(_setup(algorithm), _Bytes))


def simulator_equals_flower(algorithm: Algorithm) -> None:
    """Through Flower's own application objects and messages, with states in the sites' folders: the same bits."""

    def post(setup: Setup, folder: Path) -> Post:
        from confed.engines.flower import GridPost
        from confed.engines.flower_loopback import sites_in

        return GridPost(sites_in(setup, folder))

    _same_through("simulator equals Flower", algorithm, post)


def simulator_equals_flare(algorithm: Algorithm) -> None:
    """Through FLARE's own Collab objects and serialiser, with states in the sites' folders: the same bits."""

    def post(setup: Setup, folder: Path) -> Post:
        from confed.engines.flare_loopback import post_in

        return post_in(setup, folder)

    _same_through("simulator equals FLARE", algorithm, post)


def _same_through(check: str, algorithm: Algorithm, post: Callable[[Setup, Path], Post]) -> None:
    setup = _setup(algorithm)
    with TemporaryDirectory() as folder:
        sites = Path(folder)
        through = _run(setup, lambda s: _ThroughSites(s, post(s, sites)), store=_SitesStore(sites))
    here = _run(setup)
    _same(check, here, through)
    if here.losses != through.losses or here.errors != through.errors:
        raise ContractViolation(f"{check}: losses or errors differ: {through.losses}, {through.errors}")


class _ThroughSites(_Recording):
    """Asks sites in this process, as if they were on other machines."""

    def __init__(self, setup: Setup, post: Post) -> None:
        super().__init__(setup)
        names = [setup.population.info(number).id for number in range(len(setup.population))]
        self.remote = Remote(setup, post, patience=Patience(interval=1e-4))
        self.remote.roll.gather(names, wait=60)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call, reply in zip(calls, self.remote(calls, store, round), strict=True):
            self.replies.append((call.client.id, call, reply))
            yield reply


class _SitesStore(MemoryStore):
    """The states that the sites below a folder keep."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load(self, client_id: str) -> ClientState:
        (root,) = (self._folder / client_id / "state").iterdir()
        store = DirectoryStore(root)
        store.version = store.newest(client_id)
        return store.load(client_id)


def neutral_is_fedavg(algorithm: Algorithm) -> None:
    """With neutral hyper-parameters the servers go FedAvg's way (model without BatchNorm and dropout, SGD)."""
    if isinstance(algorithm.neutral, str):
        return
    neutral = replace(algorithm, **algorithm.neutral)
    local = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd", weight_decay=0.0)
    kind = algorithm.finetuning
    runs = [_run(toy_setup(a, local=local, rounds=ROUNDS, noisy=False, kind=kind)) for a in (neutral, FedAvg())]
    servers = [Outcome(run.servers, {}, (), (), ()) for run in runs]
    _same("neutral coefficients give FedAvg", *servers, tolerance=1e-6)


def one_step_is_gradient_descent(algorithm: Algorithm) -> None:
    """One full-batch step on every client and a weighted mean is one step on everybody's data."""
    check = "one full step equals gradient descent"
    if isinstance(algorithm.neutral, str):
        return
    neutral = replace(algorithm, **algorithm.neutral)
    clients = toy_clients(kind=neutral.finetuning)
    setup = toy_setup(neutral, clients=clients, local=PLAIN, rounds=1, noisy=False)
    got = _run(setup).servers["main"].params
    model, task = setup.build(), setup.task
    tables = [c.tables[0] for c in clients.values()]
    alike = all(table.columns.keys() == tables[0].columns.keys() for table in tables)
    # Of what reads one modality, everybody are those who have it.
    owners = dict[str, int]()
    for batch in [pool(tables)] if alike else tables:
        whole = next(iter(batch.batches(10_000)))
        (task.loss(model(whole), whole) * len(batch)).backward()
        for part in ("", *modalities_of(named_tensors(model))):
            owners[part] = owners.get(part, 0) + len(batch) * (not part or part in whole)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            count = owners[next(iter(modalities_of([name])), "")]
            wanted = parameter.detach() - PLAIN.lr * parameter.grad / count
            if not torch.allclose(got[name], wanted, rtol=1e-5, atol=1e-6):
                raise ContractViolation(f"{check}: {name} differs by up to {(got[name] - wanted).abs().max():.3g}")


CHECKS: dict[str, Check] = {
    "finite and deterministic": finite_and_deterministic,
    "resumes exactly": resumes_exactly,
    "ignores the workspace": ignores_the_workspace,
    "sends only what is shared": sends_only_what_is_shared,
    "a failure changes nothing": a_failure_changes_nothing,
    "the order of clients is irrelevant": order_is_irrelevant,
    "nothing leaks from client to client": nothing_leaks,
    "servers see their own part only": servers_see_their_own_part,
    "keeps frozen tensors": keeps_frozen_tensors,
    "survives the wire": survives_the_wire,
    "simulator equals Flower": simulator_equals_flower,
    "simulator equals FLARE": simulator_equals_flare,
    "neutral coefficients give FedAvg": neutral_is_fedavg,
    "one full step equals gradient descent": one_step_is_gradient_descent,
}
