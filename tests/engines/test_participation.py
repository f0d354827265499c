"""Clients that join late, clients that leave, and clients that are left out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.engines.local import Participation, RoundRecord, Setup, Simulation, Workspace, simulate
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Flow
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.tables.headline import table_of
from confed.results.folder import RunFolder, read_jsonl
from confed.results.runs import load
from confed.runs.run import prepare, run
from confed.testing.toy import toy_clients, toy_setup
from refusals import refuses

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
        ("run.keep_checkpoints=0", "run.keep_checkpoints must be at least 1, got 0"),
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
    assert load_recipe(tmp_path / "whole/recipe.toml").run == recipe.run
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

    def stop(progress) -> None:
        if progress.round == 3 and "loss" in progress.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "parts", progress=stop)
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
