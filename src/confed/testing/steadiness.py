"""Contract checks: reproducibility, known results, the global model, and the same bits through every engine."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import concatenate_tables
from confed.engines.buffered import Buffered
from confed.engines.local import Simulation
from confed.engines.perform import Setup, Workspace
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts, Transport
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, Checkpoints, DirectoryStore
from confed.federation.compression import DOWNLINK, HELD, Compression, compressed_names
from confed.federation.equivalence import unbatchable_training
from confed.federation.local import Local
from confed.federation.messages import Call, Message, Reply
from confed.federation.ownership import modalities_of
from confed.federation.params import Scope, copy_into, matches_any, named_tensors
from confed.federation.protocols import Batch, Output
from confed.federation.state import ClientState, MemoryStore, ServerState, Store
from confed.privacy.protections import UPDATE
from confed.testing.toy import toy_setup
from confed.testing.trial import (
    ROUNDS,
    Backwards,
    Bytes,
    ContractViolation,
    Outcome,
    Recording,
    Together,
    clients_of,
    run,
    same,
    toy,
    undisturbed,
)


def one_global_model(algorithm: Algorithm) -> None:
    """The global model answers alike at clients, in unseen places and from its file, or needs clients' own parts."""
    outcome = undisturbed(algorithm)
    check_global_model(toy(algorithm), outcome.servers, outcome.states)


def check_global_model(
    setup: Setup, servers: Mapping[str, ServerState], states: Mapping[str, ClientState], tolerance: float = 1e-6
) -> None:
    """Check of ``Algorithm.global_model`` on a federation that has been trained."""
    declared, gaps = setup.algorithm.global_model, list[float]()
    for number in range(len(setup.population)):
        client = setup.population.info(number).id
        private = states[client].tensors.get("private", {})
        at_client = _scores(setup, servers, number, states[client])
        if declared == "with own parts":
            scrambled = ClientState({**states[client].tensors, "private": _noise(private)}, states[client].scalars)
            gaps.append(_gap(at_client, _scores(setup, servers, number, scrambled)))
            continue
        others = {
            "in an unseen place": _scores(setup, servers, number, ClientState()),
            "from its file": _scores_of_file(setup, servers, number),
            "with other values for what clients keep and train": _scores_of_file(setup, servers, number, noisy=True),
        }
        for where, scores in others.items():
            if (gap := _gap(at_client, scores)) > tolerance:
                raise ContractViolation(
                    f"one global model: scores at {client!r} and {where} differ by {gap:.3g}; if it needs parts of the "
                    "clients' own, global_model must be 'with own parts'"
                )
    if declared == "with own parts" and max(gaps) <= tolerance:
        raise ContractViolation(
            "one global model: said to need parts of the clients' own, it answers the same with any"
        )


def _scores(setup: Setup, servers: Mapping[str, ServerState], number: int, state: ClientState) -> Tensor:
    """Scores of a client's test examples with the global model, where the client keeps ``state``."""
    info, seen, store = setup.population.info(number), list[Tensor](), MemoryStore()
    store.save(info.id, state)
    recording = Recording(replace(setup, task=_telling(setup.task_of(info.id), seen), tasks={}))
    shared = Simulation(setup, store, recording).shared(servers, info)
    call = Call(info, "evaluate", Message(shared, {"split": "test", "limit": 0, "personal": False}))
    (reply,) = recording([call], store, setup.rounds)
    if reply.error is not None:
        raise ContractViolation(f"one global model: the evaluation at {info.id!r} failed: {reply.error}")
    return torch.cat(seen)


def _scores_of_file(setup: Setup, servers: Mapping[str, ServerState], number: int, noisy: bool = False) -> Tensor:
    """Scores of a client's test examples with what it is sent alone, as read from a file; ``noisy``: beside noise."""
    info, workspace = setup.population.info(number), Workspace(setup.model())
    tensors = Simulation(setup, MemoryStore()).shared(servers, info)
    given = setup.algorithm.initial_private(tensors)
    values = {**workspace.initial, **tensors, **given}
    if noisy:
        scopes, passive = workspace.scopes(setup.algorithm, info), setup.algorithm.traits.aggregates
        untouched = [name for name in workspace.initial if scopes[name] is Scope.PRIVATE and name not in given]
        values |= _noise({name: values[name] for name in untouched if not matches_any(name, passive)})
    copy_into([workspace.tensors[name] for name in values], list(values.values()))
    workspace.set_task(setup.task_of(info.id))
    network = setup.algorithm.deployed_model(workspace.model.eval())
    with torch.no_grad():
        return torch.cat([network(batch).logits for batch in setup.data(info.id).test(setup.local.eval_batch_size)])


def _telling(task: Any, seen: list[Tensor]) -> Any:
    kind = type(task)

    class Telling(kind):
        def tally(self, output: Output, batch: Batch) -> Any:
            seen.append(output.logits)
            return kind.tally(self, output, batch)

    telling = copy(task)
    object.__setattr__(telling, "__class__", Telling)
    return telling


def _noise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {n: torch.rand(t.shape, generator=rng).to(t) if t.is_floating_point() else t for n, t in tensors.items()}


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


PLAIN = Local(epochs=1, batch_size=10_000, lr=0.1, optimizer="sgd", weight_decay=0.0)


def neutral_is_fedavg(algorithm: Algorithm) -> None:
    """Neutral hyper-parameters give FedAvg's servers (model without BatchNorm and dropout, SGD)."""
    if isinstance(algorithm.traits.neutral, str):
        return
    neutral = replace(algorithm, **algorithm.traits.neutral)
    local = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd", weight_decay=0.0)
    clients, kind = clients_of(algorithm), algorithm.traits.made_for
    setups = [
        toy_setup(a, clients=clients, local=local, rounds=ROUNDS, noisy=False, kind=kind) for a in (neutral, FedAvg())
    ]
    runs = list(map(run, setups))
    servers = [Outcome(run.servers, {}, (), (), ()) for run in runs]
    same("neutral coefficients give FedAvg", *servers, tolerance=1e-6)


def stacked_equals_one_by_one(algorithm: Algorithm) -> None:
    """Training two clients at once gives what training one by one gives (without BatchNorm and dropout)."""
    if unbatchable_training(algorithm):
        return
    for local in (
        Local(epochs=2, batch_size=5, lr=0.05, optimizer="sgd", momentum=0.5, clip=1.0),
        Local(iterations=4, batch_size=4, lr=0.01, optimizer="adamw"),
    ):
        alone = toy_setup(algorithm, clients=clients_of(algorithm), local=local, rounds=ROUNDS, noisy=False)
        both = run(replace(alone, batch_clients=2), Together)
        same("clients trained at once equal one by one", run(alone), both, tolerance=1e-5)


def one_step_is_gradient_descent(algorithm: Algorithm) -> None:
    """One full-batch step on every client and a weighted mean is one step on all clients' data."""
    check = "one full step equals gradient descent"
    if isinstance(algorithm.traits.neutral, str):
        return
    neutral = replace(algorithm, **algorithm.traits.neutral)
    clients = clients_of(neutral)
    setup = toy_setup(neutral, clients=clients, local=PLAIN, rounds=1, noisy=False)
    got = run(setup).servers["main"].params
    model, task = setup.build(), setup.task
    tables = [c.tables[0] for c in clients.values()]
    alike = all(table.columns.keys() == tables[0].columns.keys() for table in tables)
    # For tensors that read one modality, all clients are those that have it.
    owners = dict[str, int]()
    for batch in [concatenate_tables(tables)] if alike else tables:
        whole = next(iter(batch.batches(10_000)))
        (task.loss(model(whole), whole) * len(batch)).backward()
        for modality in ("", *modalities_of(named_tensors(model))):
            owners[modality] = owners.get(modality, 0) + len(batch) * (not modality or modality in whole)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            count = owners[next(iter(modalities_of([name])), "")]
            wanted = parameter.detach() - PLAIN.lr * parameter.grad / count
            if not torch.allclose(got[name], wanted, rtol=1e-5, atol=1e-6):
                raise ContractViolation(f"{check}: {name} differs by up to {(got[name] - wanted).abs().max():.3g}")


DESCENT = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd")


def finite_and_deterministic(algorithm: Algorithm) -> None:
    """Two runs give the same bits, all of them finite."""
    check = "finite and deterministic"
    one, other = undisturbed(algorithm), run(toy(algorithm))
    same(check, one, other)
    for name, tensor in one.tensors().items():
        if not torch.isfinite(tensor.double()).all():
            raise ContractViolation(f"{check}: {name} holds a NaN or an infinity")
    if one.losses != other.losses or not all(map(math.isfinite, chain.from_iterable(r.values() for r in one.losses))):
        raise ContractViolation(f"{check}: losses differ or are not finite: {one.losses}, {other.losses}")


def resumes_exactly(algorithm: Algorithm) -> None:
    """Stopped after one round and continued from files by new objects, a run gives the same bits."""
    same("resumes exactly", undisturbed(algorithm), _interrupted(algorithm))


def has_asynchronous_rounds(algorithm: Algorithm) -> None:
    """With everyone in the buffer and equal delays a round is a synchronous one; with stale updates a run resumes."""
    check = "asynchronous rounds"
    setup = toy(algorithm)
    same(check, undisturbed(algorithm), run(setup, buffered=Buffered(len(setup.population), delays="equal")))
    same(check, run(setup, buffered=Buffered(1)), _interrupted(algorithm, Buffered(1)))


def _interrupted(algorithm: Algorithm, buffered: Buffered | None = None) -> Outcome:
    """A run that was stopped after one round, and goes on from its files."""
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        first_round = run(toy(algorithm), store=checkpoints.store, stop=1, buffered=buffered)
        checkpoints.save(Checkpoint(1, first_round.servers, 0))
        again = Checkpoints(Path(folder))
        checkpoint, _ = again.latest()
        start = checkpoint.servers, checkpoint.round
        return run(toy(algorithm), start=start, store=again.store, buffered=buffered)


def ignores_the_workspace(algorithm: Algorithm) -> None:
    """What another client left in the workspace (here NaN in weights and gradients) changes nothing."""

    def poison(workspace: Workspace) -> None:
        with torch.no_grad():
            for name in workspace.initial:
                tensor = workspace.tensors[name]
                tensor.fill_(math.nan if tensor.is_floating_point() else 77)
                if tensor.requires_grad:
                    tensor.grad = torch.full_like(tensor, math.nan)

    same("ignores the workspace", undisturbed(algorithm), run(toy(algorithm), lambda s: Recording(s, poison)))


def a_failure_changes_nothing(algorithm: Algorithm) -> None:
    """An action that raises leaves its client's state as it was, and the others go on."""
    check = "a failure changes nothing"
    clients = clients_of(algorithm)
    broken = _Broken(clients["client-1"])
    store = MemoryStore()
    setup = toy(algorithm, {**clients, "client-1": broken})
    first = run(setup, store=store, stop=1)
    before = store.load("client-1")
    broken.armed = True
    after = run(setup, start=(first.servers, 1), store=store, stop=2)
    broken.armed = False
    if "broken on purpose" not in after.errors[0].get("client-1", ""):
        raise ContractViolation(f"{check}: the failure was not reported: {after.errors}")
    now = store.load("client-1")
    if now.scalars != before.scalars or now.tensors.keys() != before.tensors.keys():
        raise ContractViolation(f"{check}: the failed client's state changed")
    for group, tensors in before.tensors.items():
        if any(not torch.equal(t, now.tensors[group][n]) for n, t in tensors.items()):
            raise ContractViolation(f"{check}: the failed client's {group} tensors changed")
    answered = {reply.client.id for _, _, reply in after.replies if reply.error is None}
    if not answered >= {"client-0", "client-2"}:
        raise ContractViolation(f"{check}: the other clients did not go on: {sorted(answered)} replied")


class _Broken(TableData):
    """Examples that fail in the middle of an epoch when armed."""

    armed = False

    def __init__(self, data: TableData) -> None:
        super().__init__(*data.tables)

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(batch_size, rng)):
            if self.armed and number == 1:
                raise OverflowError("broken on purpose")
            yield batch


def order_is_irrelevant(algorithm: Algorithm) -> None:
    """Computing clients in another order gives the same bits; registering them in another, the same numbers."""
    check = "the order of clients is irrelevant"
    same(check, undisturbed(algorithm), run(toy(algorithm), Backwards))
    if not algorithm.traits.centralised:
        exact = replace(algorithm, accumulator="float64")
        clients = clients_of(algorithm)
        reverse = dict(reversed(clients.items()))
        # AdamW would make a step of any size out of a gradient that is nothing but rounding.
        runs = [run(toy_setup(exact, clients=c, local=DESCENT, rounds=ROUNDS)) for c in (clients, reverse)]
        same(check, *runs, tolerance=1e-3)


@dataclass(frozen=True)
class _Lossless(Compression):
    """Packing of every value as it is."""

    @property
    def plain(self) -> bool:
        return False


def compressed_updates_arrive(algorithm: Algorithm) -> None:
    """Packed as they are, updates and models make the same servers; with four bits rounds go on."""
    check = "compressed updates arrive"
    setup = toy_setup(algorithm, clients=clients_of(algorithm), local=DESCENT, rounds=ROUNDS)
    one_server = len(setup.algorithm.phases()) == 1

    def compressed(packing: Compression) -> Outcome:
        outcome = run(replace(setup, uplink=packing, downlink=packing if one_server else Compression()))
        if failed := list(chain.from_iterable(errors.values() for errors in outcome.errors)):
            raise ContractViolation(f"{check}: a client fails: {failed[0]}")
        for client, call, reply in outcome.replies:
            if call.action == UPDATE and (bare := compressed_names(reply.message.tensors, setup.algorithm.traits.sums)):
                raise ContractViolation(f"{check}: {client} sent {bare[0]} as it is")
        slots = {HELD, DOWNLINK}
        servers: dict[str, ServerState] = {}
        for name, server in outcome.servers.items():
            servers[name] = replace(server, slots={n: t for n, t in server.slots.items() if n not in slots})
        return replace(outcome, servers=servers, states={})

    try:
        same(check, replace(run(setup), states={}), compressed(_Lossless()), tolerance=1e-3)
        compressed(Compression(4, 0.5))
    except (RuntimeError, ValueError) as error:
        raise ContractViolation(f"{check}: a run with it ends with {type(error).__name__}: {error}") from error


def survives_the_wire(algorithm: Algorithm) -> None:
    """Everything through bytes, and a new model object for every message: the same bits come out."""
    same("survives the wire", undisturbed(algorithm), run(toy(algorithm), Bytes))


def simulator_equals_flower(algorithm: Algorithm) -> None:
    """Through Flower's own application objects and messages, with states in the sites' folders: the same bits."""
    _same_through("simulator equals Flower", algorithm, flower_in)


def simulator_equals_flare(algorithm: Algorithm) -> None:
    """Through FLARE's own Collab objects and serialiser, with states in the sites' folders: the same bits."""
    _same_through("simulator equals FLARE", algorithm, flare_in)


def flower_in(setup: Setup, folder: Path) -> Transport:
    """Flower's applications and messages in this process."""
    from confed.engines.flower.loopback import sites_in
    from confed.engines.flower.transport import FlowerTransport

    return FlowerTransport(sites_in(setup, folder))


def flare_in(setup: Setup, folder: Path) -> Transport:
    """FLARE's Collab objects and serialiser in this process."""
    from confed.engines.flare.loopback import transport_in

    return transport_in(setup, folder)


def run_through(setup: Setup, transport: Callable[[Setup, Path], Transport]) -> Outcome:
    """A run whose clients answer behind a transport, with states in the sites' folders."""
    with TemporaryDirectory() as folder:
        sites = Path(folder)
        return run(setup, lambda s: _ThroughSites(s, transport(s, sites)), store=_SitesStore(sites))


def _same_through(check: str, algorithm: Algorithm, transport: Callable[[Setup, Path], Transport]) -> None:
    through = run_through(toy(algorithm), transport)
    here = undisturbed(algorithm)
    same(check, here, through)
    if here.losses != through.losses or here.errors != through.errors:
        raise ContractViolation(f"{check}: losses or errors differ: {through.losses}, {through.errors}")


class _ThroughSites(Recording):
    """Asks sites in this process, as if they were on other machines."""

    def __init__(self, setup: Setup, transport: Transport) -> None:
        super().__init__(setup)
        names = [setup.population.info(number).id for number in range(len(setup.population))]
        self.remote = Remote(setup, transport, timeouts=Timeouts(interval=1e-4))
        self.remote.sites.gather(names, wait=60)

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
