"""Federations in this process: rounds, who takes part, and compiled models."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from confed.algorithms.central import Central
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.local import LocalOnly
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import check_compiler
from confed.engines.local import InProcess, Members, Participation, RoundRecord, Setup, Simulation, Workspace, simulate
from confed.engines.perform import count_parameters
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm, action
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local, Schedule
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.federation.traits import GlobalModel, Traits
from confed.federation.wire import encode
from confed.models import create_model
from confed.recipes.recipe import Recipe, load_recipe
from confed.recipes.run_section import RunSection
from confed.report.tables.methods import table_of
from confed.results.folder import RunFolder, read_jsonl
from confed.results.runs import load
from confed.runs.run import prepare, run
from confed.tasks.vqa import VQA
from confed.testing.toy import toy_clients, toy_setup
from method_contract import keep_contract, with_and_without_transports
from refusals import refuses
from tiny_runs import stop_in_round


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
    refuses("no client is called 'zoe'; there are client-0", setup.data, "zoe")
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


TINY = (
    "study.methods=[]", "algorithm.name=fedavg_ft", "model.name=vilt_tiny", "model.width=16", "model.layers=1",
    "data.train=24", "data.validation=8", "data.test=16", "data.unseen=[]", "run.without=['home', 'commercial']",
    "local.epochs=1", "run.rounds=4", "run.workers=1", "run.gallery=0", "run.evaluate_examples=8",
)  # fmt: skip


def _tiny(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, *more])


def _run(
    setup: Setup, participation: Participation, cohort: int | None = None
) -> tuple[list[RoundRecord], MemoryStore]:
    store = MemoryStore()
    with Simulation(setup, store, cohort=cohort, participation=participation) as simulation:
        return list(simulate(simulation, simulation.start(Workspace(setup.model())))), store


def test_clients_take_part_from_joining_to_leaving() -> None:
    participation = Participation({"client-1": 2, "client-2": 4}, {"client-0": 3, "client-1": 4})
    records, _ = _run(toy_setup(FedAvg(), rounds=5), participation)
    asked = [sorted(record.bytes_down) for record in records]
    assert asked == [["client-0"], ["client-0", "client-1"], ["client-1"], ["client-2"], ["client-2"]]


def test_a_round_averages_those_present_only() -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    (record,), store = _run(setup, Participation({}, {"client-1": 1}))
    a, c = (store.load(client).tensors["personal"] for client in ("client-0", "client-2"))
    for name, value in record.servers["main"].params.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (12 * a[name] + 16 * c[name]) / 28)
    assert not store.load("client-1")


COUNTS: list[int] = []


@dataclass(frozen=True)
class Counting(Algorithm):
    """Notes how many clients the engine says there are."""

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """See the base class."""
        COUNTS.append(server.clients)
        return super().round(server, cohort)


def test_servers_are_told_how_many_clients_there_are() -> None:
    COUNTS.clear()
    _run(toy_setup(Counting(), rounds=4), Participation({"client-2": 3}, {"client-0": 4}), cohort=1)
    assert COUNTS == [2, 2, 3, 2]


def test_until_it_joins_a_client_changes_nothing() -> None:
    four = toy_clients(sizes=(12, 20, 16, 9))
    three = {name: data for name, data in four.items() if name != "client-1"}
    late, _ = _run(toy_setup(FedAvg(), clients=four, rounds=8), Participation({"client-1": 6}), cohort=2)
    never, _ = _run(toy_setup(FedAvg(), clients=three, rounds=8), Participation(), cohort=2)
    for a, b in zip(late[:5], never[:5], strict=True):
        assert a.losses == b.losses
        for name, value in a.servers["main"].params.items():
            assert torch.equal(value, b.servers["main"].params[name])
    assert any("client-1" in record.losses for record in late[5:])


def test_only_those_present_are_evaluated_and_finish() -> None:
    setup = toy_setup(FedAvgFT(), rounds=3)
    participation = Participation({"client-1": 2}, {"client-0": 3})
    with Simulation(setup, MemoryStore(), participation=participation) as simulation:
        servers = simulation.start(Workspace(setup.model()))
        seen = [sorted(simulation.evaluate(servers, 0, split="validation")["global"])]
        for record in simulate(simulation, servers):
            seen.append(sorted(simulation.evaluate(record.servers, record.round, split="validation")["personal"]))
    zero, one, two = (f"client-{number}" for number in range(3))
    assert seen == [[zero, two], [zero, two], [zero, one, two], [one, two], [one, two]]
    assert sorted(record.losses) == [one, two]


def test_faulty_presence_is_an_error_before_training(tmp_path: Path) -> None:
    for change, complaint in (
        ("run.joins.nobody=2", "run.joins names no client 'nobody'; there are transport, sports"),
        ("run.leaves.nobody=2", "run.leaves names no client 'nobody'"),
        ("run.without=['nobody']", "run.without names no client 'nobody'"),
        (
            "run.without=['transport', 'sports', 'educational', 'natural', 'home', 'commercial']",
            "must leave at least one client",
        ),
        ("run.joins={transport=2, sports=2, educational=3, natural=2}", "leave no client in round 1"),
        ("run.leaves={transport=2, sports=2, educational=3, natural=2}", "leave no client in round 3"),
    ):
        refuses(complaint, run, _tiny(change), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    for change, complaint in (
        ("run.joins.sports=5", "run.joins.sports must be a round from 1 to 4, got 5"),
        ("run.joins.sports=0", "got 0"),
        ("run.joins.sports=soon", r"run.joins.sports: .* got 'soon'"),
        ("run.leaves.sports=1", "run.leaves.sports must be a round after 1"),
        ("run.leaves.sports=5", "at most 4, got 5"),
        ("run.keep_checkpoints=all", "run.keep_checkpoints"),
    ):
        refuses(complaint, _tiny, change)
    refuses(r"needs run\.checkpoint_every", _tiny, "run.keep_checkpoints=joins", "run.checkpoint_every=0")
    refuses("after 3, in which it joins", _tiny, "run.joins.sports=3", "run.leaves.sports=3")


def test_leaving_a_client_out_leaves_the_others_data_alone() -> None:
    _, whole = prepare(_tiny("run.without=[]"))
    setup, part = prepare(_tiny("run.without=['sports']", "run.joins.sports=3"))
    left = ["transport", "educational", "natural", "home", "commercial"]
    assert list(part.clients) == list(part.dataset.clients) == left
    assert len(setup.population) == 5
    assert "sports" not in part.dataset.facts
    for name, data in part.clients.items():
        assert data is whole.clients[name]
    pooled, _ = prepare(_tiny("run.without=['sports']", "algorithm.name=central"))
    assert pooled.population.info(0).num_examples == 5 * 24


def test_checkpoints_before_joins_are_kept_besides_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, always={1})
    for round in range(1, 6):
        checkpoints.store.begin(round)
        checkpoints.store.save("ann", ClientState(scalars={"n": round}))
        checkpoints.save(Checkpoint(round, {"main": ServerState(round, {"w": torch.ones(1)})}, 0))
    assert checkpoints.rounds() == [1, 4, 5]
    assert checkpoints.load(1).servers["main"].round == 1
    checkpoints.copy(1, tmp_path / "other", without=["bob"])
    copied = Checkpoints(tmp_path / "other")
    assert copied.latest()[0].round == 1
    assert copied.store.load("ann").scalars == {"n": 1}
    checkpoints.copy(4, tmp_path / "third", without=["ann"])
    assert Checkpoints(tmp_path / "third").store.clients() == []


def test_a_changing_federation_resumes_exactly(tmp_path: Path) -> None:
    recipe = _tiny("run.joins.natural=3", "run.leaves.sports=3", "run.keep_checkpoints=joins", "run.checkpoint_every=9")
    summary = run(recipe, tmp_path / "whole")
    kept = load_recipe(tmp_path / "whole/recipe.toml").run
    assert replace(kept, batch_clients=recipe.run.batch_clients) == recipe.run  # a run keeps the number it chose
    assert set(summary["personal"]) == {"transport", "sports", "educational", "natural"}
    for view in ("personal", "global_seen"):  # who left keeps its cell and is in no mean
        stayed = [value for client, value in summary[view].items() if client != "sports"]
        assert summary[f"{view}_mean"] == pytest.approx(sum(stayed) / 3)
    stayed = [value for client, value in summary["personal"].items() if client != "sports"]
    assert (summary["personal_worst"], summary["personal_spread"]) == (min(stayed), max(stayed) - min(stayed))
    assert summary["left"] == ["sports"]
    assert any("left before the end" in note and "sports" in note for note in summary["notes"])
    assert "Left before the last round and in no mean: sports." in table_of(load(tmp_path / "whole")).notes
    lines = read_jsonl(RunFolder(tmp_path / "whole").metrics)
    for line in lines:
        present = set(line["loss" if line["event"] != "evaluation" else "global"])
        assert ("natural" in present) == (line["round"] >= 3)
        assert ("sports" in present) == (line["round"] < 3)
    assert Checkpoints(RunFolder(tmp_path / "whole").checkpoint).rounds() == [2, 4, 5]

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "parts", progress=stop_in_round(3))
    run(recipe, tmp_path / "parts", resume=True)
    for name in ("metrics.jsonl", "predictions.safetensors", "models/personal/sports/trained.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert json.loads((tmp_path / "parts/summary.json").read_text())["personal"] == summary["personal"]


def test_a_pooled_run_has_no_comings_and_goings(tmp_path: Path) -> None:
    changes = ("run.joins.natural=3", "run.leaves.sports=3", "run.rounds=3")
    summary = run(_tiny("algorithm.name=central", *changes), tmp_path / "run")
    assert len(summary["global_seen"]) == 4
    # Its means are over the clients that the federated methods' are over.
    stayed = [value for client, value in summary["global_seen"].items() if client != "sports"]
    assert summary["global_seen_mean"] == pytest.approx(sum(stayed) / 3)


def test_a_compiler_that_fails_is_said_with_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def compiled(function: Any) -> Any:
        def call(_: Any) -> None:
            raise RuntimeError("no C++ compiler\nfound")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    refuses("set it to false: RuntimeError: no C\\+\\+ compiler found", check_compiler, "cpu")
    refuses(r"run\.batch_clients must be 1 then, got 4", RunSection, batch_clients=4, compile=True, workers=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_a_compiled_run_has_the_numbers_of_one_that_is_not():
    check_compiler("cpu")
    rng = torch.Generator().manual_seed(0)
    pictures, columns = torch.randint(0, 256, (8, 3, 64, 64), generator=rng).to(torch.uint8), {
        "text": torch.randint(5, 30, (8, 6), generator=rng),
        "text_mask": torch.ones(8, 6, dtype=torch.int64),
        "label": torch.randint(0, 4, (8,), generator=rng),
    }  # fmt: skip
    table = Table(pictures, torch.arange(8), columns)
    data = Members({name: TableData(table, table.take(4), table.take(0)) for name in ("a", "b")})
    local = Local(batch_size=4, lr=0.05, optimizer="sgd", eval_batch_size=4)
    build = partial(create_model, "vilt_tiny", answers=4, vocab_size=64)

    def run(compile: bool) -> tuple[Any, str]:
        setup = Setup(FedAvg(), data, VQA(4), local, build, 2, features=FeatureSettings(10**6), compile=compile)
        assert (setup.model()._compiled_call_impl is not None) == compile
        simulation = Simulation(setup, MemoryStore())
        executor: Any = simulation.executor
        servers = simulation.start(executor.workspace)
        for record in simulate(simulation, servers):
            assert not record.errors
            servers = record.servers
        return servers["main"].params, executor.features.reason

    (expected, _), (found, why) = run(False), run(True)
    assert why == "run.compile is true: a compiled pass has no stages"
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
