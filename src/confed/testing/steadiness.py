"""Contract checks of reproducibility: after a stop, with other clients, in another order, beside a failure."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from confed.data.examples import TableData
from confed.engines.buffered import Buffered
from confed.engines.perform import Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.local import Local
from confed.federation.protocols import Batch
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_clients, toy_setup
from confed.testing.trial import ROUNDS, Backwards, ContractViolation, Recording, run, same, toy, undisturbed

DESCENT = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd")


def finite_and_deterministic(algorithm: Algorithm) -> None:
    """Two runs give the same bits, all of them finite."""
    check = "finite and deterministic"
    one, other = undisturbed(algorithm), run(toy(algorithm))
    same(check, one, other)
    for name, tensor in one.tensors().items():
        if not torch.isfinite(tensor.double()).all():
            raise ContractViolation(f"{check}: {name} holds a NaN or an infinity")
    if one.losses != other.losses or not all(math.isfinite(v) for r in one.losses for v in r.values()):
        raise ContractViolation(f"{check}: losses differ or are not finite: {one.losses}, {other.losses}")


def resumes_exactly(algorithm: Algorithm) -> None:
    """Stopped after one round and continued from files by new objects, a run gives the same bits."""
    setup = toy(algorithm)
    whole = undisturbed(algorithm)
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        first_half = run(setup, store=checkpoints.store, stop=1)
        checkpoints.save(Checkpoint(1, first_half.servers, 0))
        again = Checkpoints(Path(folder))
        checkpoint, _ = again.latest()
        rest = run(toy(algorithm), start=(checkpoint.servers, checkpoint.round), store=again.store)
        same("resumes exactly", whole, rest)


def has_asynchronous_rounds(algorithm: Algorithm) -> None:
    """With everyone in the buffer and equal delays a round is a synchronous one; with stale updates a run resumes."""
    check = "asynchronous rounds"
    setup = toy(algorithm)
    same(check, undisturbed(algorithm), run(setup, buffered=Buffered(len(setup.population), delays="equal")))
    stale = Buffered(1)
    whole = run(setup, buffered=stale)
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        first_half = run(setup, store=checkpoints.store, stop=1, buffered=stale)
        checkpoints.save(Checkpoint(1, first_half.servers, 0))
        again = Checkpoints(Path(folder))
        checkpoint, _ = again.latest()
        rest = run(toy(algorithm), start=(checkpoint.servers, 1), store=again.store, buffered=stale)
        same(check, whole, rest)


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
    clients = toy_clients(kind=algorithm.traits.made_for)
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
        clients = toy_clients(kind=algorithm.traits.made_for)
        reverse = dict(reversed(clients.items()))
        # AdamW would make a step of any size out of a gradient that is nothing but rounding.
        runs = [run(toy_setup(exact, clients=c, local=DESCENT, rounds=ROUNDS)) for c in (clients, reverse)]
        same(check, *runs, tolerance=1e-3)
