"""The simulator, its books, and worker processes."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from torch import nn

from confed.algorithms.central import Central
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.local import LocalOnly
from confed.data.examples import TableData
from confed.engines.local import InProcess, RoundRecord, Setup, Simulation, Workspace, simulate
from confed.engines.perform import count_parameters
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local, Schedule
from confed.federation.messages import Call, Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.state import MemoryStore
from confed.federation.traits import GlobalModel, Traits
from confed.federation.wire import encode
from confed.testing.toy import toy_clients, toy_setup
from method_contract import keep_contract, with_and_without_transports


def _records(setup: Setup, workers: int = 0, cohort: int | None = None) -> tuple[list[RoundRecord], MemoryStore]:
    store = MemoryStore()
    executor = Workers(setup, workers) if workers else InProcess(setup)
    with Simulation(setup, store, executor, cohort) as simulation:
        return list(simulate(simulation, simulation.start(Workspace(setup.build())))), store


@pytest.mark.parametrize("method", [FedAvg(), LocalOnly(), FedAvgFT()])
def test_worker_processes_give_the_same_bits(method: Algorithm) -> None:
    setup = toy_setup(method, clients=toy_clients(sizes=(12, 20, 16, 8, 9)), local=Local(epochs=1, batch_size=3))
    (one, kept), (two, kept_too) = _records(setup), _records(setup, workers=2)
    assert [(r.losses, r.errors, r.bytes_up, r.bytes_down) for r in one] == [
        (r.losses, r.errors, r.bytes_up, r.bytes_down) for r in two
    ]
    for name, value in one[-1].servers["main"].params.items():
        assert torch.equal(value, two[-1].servers["main"].params[name])
    for client in ("client-0", "client-4"):
        for group, tensors in kept.load(client).tensors.items():
            for name, value in tensors.items():
                assert torch.equal(value, kept_too.load(client).tensors[group][name])


class Dies(Algorithm):
    """The process of one client is killed in the middle of its second round."""

    traits = Traits(neutral="-")

    @action
    def fit(self, client: Client, message: Message) -> Message:
        if client.info.id == "client-1" and client.round == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(client, message)


def test_a_dead_worker_is_one_clients_error_and_the_run_goes_on() -> None:
    records, _ = _records(toy_setup(Dies(), rounds=3), workers=2)
    assert [set(r.errors) for r in records] == [set(), {"client-1"}, set()]
    assert "worker died with exit code -9" in records[1].errors["client-1"]
    assert set(records[1].losses) == {"client-0", "client-2"}


class Poisoned(Algorithm):
    """One client sends a NaN in the second round."""

    traits = Traits(neutral="-")

    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        if client.info.id == "client-2" and client.round == 1:
            reply.tensors["head.bias"][0] = float("nan")
        return reply


def test_a_nan_update_is_refused_named_and_the_round_goes_on() -> None:
    records, _ = _records(toy_setup(Poisoned(), rounds=3))
    assert "'head.bias' holds a NaN" in records[1].errors["client-2"]
    assert "client-2" not in records[1].bytes_up
    assert not records[2].errors
    assert all(torch.isfinite(t.double()).all() for t in records[-1].servers["main"].params.values())


def test_the_ledger_counts_what_is_serialised() -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    sent: list[int] = []

    class Weighing(InProcess):
        def __call__(self, calls, store, round) -> Iterator:
            for call, reply in zip(calls, super().__call__(calls, store, round), strict=True):
                sent.extend([len(encode(call.message)), len(encode(reply.message))])
                yield reply

    with Simulation(setup, MemoryStore(), Weighing(setup)) as simulation:
        (record,) = simulate(simulation, simulation.start(Workspace(setup.build())))
    assert sum(record.bytes_down.values()) == sum(sent[::2])
    assert sum(record.bytes_up.values()) == sum(sent[1::2])


def test_cohorts_are_sampled_and_only_they_are_asked() -> None:
    records, store = _records(toy_setup(FedAvg(), rounds=6), cohort=1)
    assert all(len(r.losses) == 1 for r in records)
    asked = {name for r in records for name in r.losses}
    assert len(asked) > 1
    assert all(store.load(name) for name in asked)


def test_fine_tuning_changes_personal_models_only() -> None:
    plain, kept = _records(toy_setup(FedAvg()))
    tuned, kept_tuned = _records(toy_setup(FedAvgFT(finetune_epochs=2)))
    assert len(tuned) == len(plain) + 1
    for name, value in plain[-1].servers["main"].params.items():
        assert torch.equal(value, tuned[-1].servers["main"].params[name])
    personal, personal_tuned = (s.load("client-0").tensors["personal"] for s in (kept, kept_tuned))
    assert not torch.equal(personal["head.weight"], personal_tuned["head.weight"])


def test_local_only_sends_nothing_and_central_has_one_member() -> None:
    records, store = _records(toy_setup(LocalOnly()))
    assert records[-1].servers["main"].params == {}
    assert set(store.load("client-0").tensors) == {"private", "personal"}
    central = toy_setup(Central())
    assert len(central.population) == 1
    assert central.population.info(0).num_examples == sum(len(c) for c in toy_clients().values())


class PrivateHead(Algorithm):
    """FedPer's layout."""

    traits = Traits(neutral="-")

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.PRIVATE, "*": Scope.SHARED}


def test_parameters_trained_sent_and_stored() -> None:
    setup = toy_setup(PrivateHead())
    workspace = Workspace(setup.build())
    info = setup.population.info(0)
    counts = count_parameters(workspace, workspace.scopes(PrivateHead(), info))
    head, stem, body, norm = 27, 56, 72, 16 + 17
    assert counts["total"] == head + stem + body + norm
    assert counts["trained"] == head + body + 16
    assert counts["sent"] == body + norm
    assert counts["stored"] == head + body + norm


def test_private_heads_stay_apart_and_are_used_in_evaluation() -> None:
    setup = toy_setup(PrivateHead(), rounds=3)
    store = MemoryStore()
    with Simulation(setup, store, InProcess(setup)) as simulation:
        *_, record = simulate(simulation, simulation.start(Workspace(setup.build())))
        assert not any(name.startswith("head") for name in record.servers["main"].params)
        views = simulation.evaluate(record.servers, 3, split="test")
        tensors = {**store.load("client-0").tensors["private"], **record.servers["main"].params}
        calls = [("client-0", tensors, {})]
        (examined,) = simulation.examine(calls, 3)
    heads = [store.load(f"client-{i}").tensors["private"]["head.weight"] for i in range(2)]
    assert not torch.equal(*heads)
    correct, count = views["global"]["client-0"]["accuracy"]
    assert float(examined.tensors["correct"].sum()) == correct
    assert count == 12


def test_unseen_places_are_asked_of_whole_global_models_only() -> None:
    for method, asked in ((PrivateHead(), []), (FedAvg(), ["mars"])):
        setup = toy_setup(method, rounds=1)
        setup = replace(setup, observers={"mars": setup.data("client-1")})
        with Simulation(setup, MemoryStore(), InProcess(setup)) as simulation:
            *_, record = simulate(simulation, simulation.start(Workspace(setup.build())))
            views = simulation.evaluate(record.servers, 1, split="test")
        assert list(views["unseen"]) == asked
        assert len(views["global"]) == 3


def test_a_leaking_reply_is_an_error() -> None:
    setup = toy_setup(PrivateHead())
    leaky = replace(setup, algorithm=_Leaky())
    with Simulation(leaky, MemoryStore()) as simulation:
        assert isinstance(simulation.executor, InProcess)
        with pytest.raises(RuntimeError, match="every client failed"):
            list(simulate(simulation, simulation.start(simulation.executor.workspace)))


class _Leaky(PrivateHead):
    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        return Message({**reply.tensors, "head.weight": client.tensors["head.weight"].detach().clone()})


def test_data_of_a_client_nobody_knows() -> None:
    setup = toy_setup(FedAvg())
    with pytest.raises(ValueError, match="no client is called 'zoe'; there are client-0"):
        setup.data("zoe")
    assert isinstance(setup.data("client-0"), TableData)


class OwnHeads(Algorithm):
    """Client 0 trains a private head; the others' is frozen by rule, as with heads for different answer sets."""

    traits = Traits(neutral="-")

    @property
    def global_model(self) -> GlobalModel:
        return "with own parts"

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.PRIVATE if client.id == "client-0" else Scope.FROZEN, "*": Scope.SHARED}


class SharedByLater(Algorithm):
    """The first client takes no part in the head; the others share it."""

    traits = Traits(neutral="-")

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.FROZEN if client.id == "client-0" else Scope.SHARED, "*": Scope.SHARED}


@with_and_without_transports
@pytest.mark.parametrize("method", [OwnHeads(), SharedByLater(), PrivateHead()])
def test_scopes_that_differ_between_clients_keep_the_contract(method: Algorithm, transports: bool) -> None:
    ran = keep_contract(method, transports)
    assert transports or "nothing leaks from client to client" in ran
    records, _ = _records(toy_setup(method), workers=2)
    assert not records[-1].errors
    assert set(records[-1].losses) == {"client-0", "client-1", "client-2"}


def test_replies_left_by_a_flow_are_not_given_to_the_next() -> None:
    setup = toy_setup(FedAvg())
    message = Message({n: t for n, t in setup.build().state_dict().items() if "stem" not in n})
    calls = [Call(setup.population.info(i), "fit", message) for i in range(3)]
    store = MemoryStore()
    wanted = {r.client.id: r.message.tensors["head.bias"] for r in InProcess(setup)(calls, MemoryStore(), 0)}
    with closing(Workers(setup, 2)) as workers:
        some = workers(calls, store, 0)
        next(some)
        some.close()
        for call in calls:
            (reply,) = workers([call], store, 0)
            assert reply.error is None
            assert torch.equal(reply.message.tensors["head.bias"], wanted[call.client.id])


class Counts(Algorithm):
    """A counter in the client's state."""

    traits = Traits(neutral="-")

    @action
    def count(self, client: Client, message: Message) -> Message:
        if client.info.id == "client-1":
            time.sleep(0.2)
        client.state.scalars["n"] = int(client.state.scalars.get("n", 0)) + 1
        return Message({}, {"n": client.state.scalars["n"]})


def test_two_calls_to_one_client_follow_each_other() -> None:
    setup = toy_setup(Counts())
    ann, bob = setup.population.info(0), setup.population.info(1)
    with closing(Workers(setup, 2)) as workers:
        replies = list(workers([Call(c, "count", Message()) for c in (bob, ann, ann, ann)], MemoryStore(), 0))
    assert [r.message.scalars["n"] for r in replies] == [1, 1, 2, 3]


class MissingFile(Algorithm):
    """A client whose files are gone."""

    traits = Traits(neutral="-")

    @action
    def fit(self, client: Client, message: Message) -> Message:
        if client.info.id == "client-1":
            raise FileNotFoundError("pictures.tar")
        return super().fit(client, message)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_clients_own_file_error_is_its_own(workers: int) -> None:
    records, _ = _records(toy_setup(MissingFile(), rounds=2), workers=workers)
    assert [r.errors for r in records] == [{"client-1": "FileNotFoundError: pictures.tar"}] * 2


def test_divergence_of_private_tensors_is_noticed() -> None:
    setup = toy_setup(LocalOnly(), local=Local(epochs=2, batch_size=4, lr=1e30, optimizer="sgd"), noisy=False)
    with pytest.raises(RuntimeError, match=r"training diverged at local\.lr = 1e\+30: .*; a smaller rate may do"):
        _records(setup)


def test_fine_tuning_has_its_own_schedule() -> None:
    local = Local(epochs=1, batch_size=4, lr=0.05, schedule=Schedule("linear"))
    assert local.schedule.factor(1.4) == 0.0
    _, plain = _records(toy_setup(FedAvgFT(finetune_epochs=0), local=local))
    _, tuned = _records(toy_setup(FedAvgFT(finetune_epochs=3), local=local))
    task, data = toy_setup(FedAvg()).task, toy_clients()["client-1"]
    batch = next(iter(data.test(50)))
    losses = []
    for store in (plain, tuned):
        model = toy_setup(FedAvg()).build().eval()
        personal = store.load("client-1").tensors["personal"]
        with torch.no_grad():
            losses.append(float(task.loss(torch.func.functional_call(model, personal, (batch,)), batch)))
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("method", "views"), [(FedAvg(), 2), (LocalOnly(), 1)])
def test_no_model_is_evaluated_twice_on_the_same_examples(method: Algorithm, views: int) -> None:
    seen = list[str]()
    setup = toy_setup(method, clients=toy_clients(sizes=(12, 20, 16, 8)), rounds=3)

    class Counting(type(setup.build())):
        def forward(self, batch: Batch) -> Output:
            if not self.training:
                values = [*self.state_dict().values(), *(batch[key] for key in sorted(batch) if key != "index")]
                seen.append(sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest())
            return super().forward(batch)

    def build() -> nn.Module:
        model = setup.build()
        model.__class__ = Counting
        return model

    def views_of(setup: Setup, forget: bool) -> list[object]:
        executor = InProcess(setup)
        simulation, found = Simulation(setup, MemoryStore(), executor, 2), list[object]()
        for record in simulate(simulation, simulation.start(executor.workspace)):
            if forget:
                simulation._personal.clear()
            found.append(simulation.evaluate(record.servers, record.round, split="validation"))
        return found

    counting = replace(setup, build=build)
    expected = views_of(counting, forget=True)
    assert len(set(seen)) < len(seen)  # so that the check can fail
    again = len(seen)
    seen.clear()
    assert views_of(counting, forget=False) == expected
    assert len(set(seen)) == len(seen) < again
    # Each round a new global model at four clients, and two clients' new personal models.
    batches = [math.ceil(len(list(setup.data(f"client-{i}").validation(1))) / 64) for i in range(4)]
    assert len(seen) == (views - 1) * 3 * sum(batches) + 3 * 2
