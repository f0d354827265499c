"""Plans of runs: calls and bytes are those of the run, nothing is written, and time follows from what was measured."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import toy_federation  # its datasets have names then
from confed.cli.app import main
from confed.engines.local import Simulation, simulate
from confed.engines.perform import Workspace
from confed.federation.compression import Compression
from confed.federation.protocols import Batch
from confed.federation.state import MemoryStore
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs import plan as planning
from confed.runs.plan import RunPlan, makespan, plan_run
from confed.runs.run import run
from matrix_cases import SGD, Plain, setup_of

assert toy_federation.squares

TINY = (
    "study.methods=[]", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.name=squares",
    "data.test=4", "local.epochs=1", "local.batch_size=4", "run.workers=1", "run.gallery=0", "run.evaluate_every=2",
)  # fmt: skip


def _recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, *more])


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.name=fedavg", "data.train=40", "run.rounds=3"),
        ("algorithm.name=fedavg_ft", "data.train=8", "run.rounds=2", "run.cohort=2"),
        ("algorithm.name=scaffold", "data.train=12", "run.rounds=3", "run.keep_checkpoints=1"),
        ("algorithm.name=fedprox", "data.train=8", "run.rounds=3", "run.uplink.bits=4", "run.downlink.bits=8"),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_calls_and_bytes_are_those_of_the_run(tmp_path: Path, settings: tuple[str, ...]) -> None:
    recipe = _recipe(*settings)
    found = plan_run(recipe)
    run(recipe, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if line["event"] in ("round", "finish")]
    assert (found.bytes_up, found.bytes_down) == tuple(
        sum(sum(line[key].values()) for line in done) for key in ("bytes_up", "bytes_down")
    )
    assert found.calls == sum(len(line["bytes_down"]) for line in done)
    assert found.evaluations == sum(line["event"] == "evaluation" for line in lines)
    kept = [
        path for part in ("checkpoint", "models") for path in (tmp_path / "run" / part).rglob("*") if path.is_file()
    ]
    size = sum(path.stat().st_size for path in (*kept, tmp_path / "run/predictions.safetensors"))
    assert size / 1.5 < found.disk < size * 1.5


def test_who_is_not_measured_has_the_rounds_model() -> None:
    """Or a client that is measured in the next round would be sent the change of a model that it does not have."""
    given = replace(setup_of(Plain(), SGD, downlink=Compression(8)), rounds=8, seed=1)
    clock = planning._Clock(given, Workspace(given.model()), 1, time.perf_counter)
    with Simulation(given, MemoryStore(), clock, 2) as simulation:
        records = list(simulate(simulation, simulation.start(Workspace(given.model()))))
    assert [record.errors for record in records] == [{}] * 8
    sizes = {size for record in records for size in record.bytes_down.values()}
    assert min(sizes) < max(sizes) / 2


def test_calls_of_split_learning_grow_with_the_examples(tmp_path: Path) -> None:
    """40 examples in batches of 4: ten batches, of which six are measured at most."""
    recipe = _recipe("algorithm.name=split_learning", "data.train=40", "run.rounds=2", "run.evaluate_every=0")
    found = plan_run(recipe)
    run(recipe, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    calls = sum(traffic["calls"] for line in lines for traffic in line.get("traffic", {}).values())
    sent = sum(sum(line["bytes_up"].values()) for line in lines)
    assert found.calls == pytest.approx(calls, rel=0.05)
    assert found.bytes_up == pytest.approx(sent, rel=0.05)


def test_time_follows_from_seconds_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that training batches alone move, a client of N examples takes N / batch size seconds per epoch."""
    from confed.data.examples import TableData

    now, before = [0.0], TableData.train

    def batches(data: TableData, size: int, rng: torch.Generator) -> Iterator[Batch]:
        for batch in before(data, size, rng):
            now[0] += 1.0
            yield batch

    monkeypatch.setattr(TableData, "train", batches)
    recipe = _recipe("algorithm.name=fedavg", "data.train=40", "run.rounds=5", "local.epochs=3")
    found = plan_run(recipe, clock=lambda: now[0])
    assert found.clients_seconds == pytest.approx((30.0, 30.0, 30.0))
    assert found.round_seconds() == pytest.approx(90.0)
    assert found.seconds() == pytest.approx(450.0)
    assert found.round_seconds(2) == pytest.approx(60.0)
    assert found.seconds(3) == pytest.approx(150.0)


def test_of_many_clients_a_few_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    before = planning.InProcess.__call__

    def counted(executor: planning.InProcess, calls: list[planning.Call], *more: object) -> object:
        asked.extend(call.client.id for call in calls if call.action == "fit")
        return before(executor, calls, *more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(planning.InProcess, "__call__", counted)
    monkeypatch.setattr(planning, "MEASURED", 2)
    found = plan_run(_recipe("algorithm.name=fedavg", "data.train=8", "run.rounds=4"))
    assert len(asked) == 2 * 2 * len(planning.BATCHES)
    assert (found.clients, found.cohort, found.calls, len(found.clients_seconds)) == (3, 3, 12, 3)


def test_jobs_go_to_the_first_worker_that_is_free() -> None:
    assert makespan([], 2) == 0
    assert makespan([3, 1, 1, 1], 1) == 6
    assert makespan([3, 1, 1, 1], 2) == 3
    assert makespan([1, 1, 1, 3], 2) == 4
    assert makespan([1, 2], 9) == 2


def test_a_client_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("confed.federation.algorithm.Algorithm.objective", broken)
    with pytest.raises(RuntimeError, match=r"client '.*' failed in a measured round: ZeroDivisionError: by design"):
        plan_run(_recipe("algorithm.name=fedavg", "data.train=8", "run.rounds=2"))


def _printed(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    found = capfd.readouterr()
    return found.out, found.err


def test_commands_print_a_plan_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    known = RunPlan("FedAvg", 4, 2.0, 10, 20, 10**6, 10**6, 2**30, 0, 10**6, 5.0, 20.0, (30.0, 40.0), (), 0, (), ())
    plans = {"fedavg": known, "fedprox": replace(known, label="FedProx", clients_seconds=(130.0, 140.0))}
    monkeypatch.setattr("confed.cli.grids.plan_run", lambda recipe: plans[recipe.sections["algorithm"]["name"]])
    out, _ = _printed(
        ["run", "fedvqa_scenes", "study.methods=[]", "algorithm.name=fedavg", "--workers", "2", "--plan"], capfd
    )
    assert "one process: 15 min 05 s" in out  # 5 + 10 (20 + 70)
    assert "2 processes on as many cores: 10 min 05 s" in out  # 5 + 10 (20 + 40)
    asked = ["compare", "fedvqa_scenes", "--methods", "fedavg,fedprox", "--seeds", "2", "--plan"]
    out, _ = _printed([*asked, "--workers", "2"], capfd)
    assert "4 runs (2 seeds): 80 calls, 8.00 MB sent, 4.00 MB on disk, 1.07 GB of memory per process" in out
    assert "one process: 2 h 07 min" in out  # 2 (905 + 2905)
    assert "2 processes on as many cores: 1 h 19 min" in out  # 905, 905 and 2905 beside 2905
    assert "4 array tasks at a time: 48 min 25 s" in out
    out, said = _printed([*asked, "--on", "slurm", "--slurm", "time=5"], capfd)
    warned = " ".join(said.split())
    assert (
        "warning: FedProx: preparing data and one round take about 4 min 55 s, and cells stop after 3 min 00 s"
        in warned
    )
    assert "warning: FedAvg" not in warned
    found = json.loads(_printed([*asked, "--json"], capfd)[0])
    assert found["runs"]["FedAvg"]["seconds"] == 905
    assert found["seconds_of_an_array"] == 2905
    swept = ["compare", "fedvqa_scenes", "methods.fedprox.mu=0.1,0.2", "--methods", "fedavg,fedprox"]
    out, said = _printed([*swept, "--plan", "--workers", "2"], capfd)
    assert "3 runs (1 seed): 60 calls" in out  # FedAvg has no mu, and is computed once
    assert "one process: 1 h 52 min" in out  # 905 + 2 x 2905
    assert "runs of each seed that are the same at an earlier value and count once: 1" in " ".join(said.split())
    assert not list(tmp_path.iterdir())
