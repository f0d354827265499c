"""Studies from Python: methods by name and as objects, growth, tables and tests."""

import re
import shutil
from pathlib import Path

import pytest

import confed
from command_line import refused
from confed.algorithms.fedprox import FedProx
from confed.system.events import Event, JobProgress, RunProgress
from refusals import refuses
from tiny_runs import TINY, Halved, Linear
from toy_federation import squares


def start(folder: Path, methods: object = ("local", "fedavg"), **settings: object) -> confed.Study:
    settings = {"rounds": 1, "workers": 1, "progress": False, **settings}
    return confed.study("fedvqa_scenes", TINY, methods=methods, folder=folder, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> confed.Study:
    return start(tmp_path_factory.mktemp("python") / "study", seeds=2)


def test_a_study_has_its_runs_and_files(finished: confed.Study) -> None:
    assert str(finished) == f"Study of Local only, FedAvg, 4 finished runs: {finished.folder}"
    assert [(run.method, run.seed) for run in finished] == [("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)]
    assert (len(finished), finished.methods, finished.seeds, finished.errors) == (4, ("local", "fedavg"), (0, 1), {})
    assert {"compare.csv", "table.md", "report.html"} <= {path.name for path in finished.folder.iterdir()}
    assert finished["fedavg", 1].summary["seed"] == 1
    with refused(r"has no run \('st', 0\); there are \('local', 0\)"):
        _ = finished["st", 0]


def test_the_table_has_means_over_seeds(finished: confed.Study) -> None:
    table = finished.table
    runs = [run for run in finished if run.method == "fedavg"]
    expected = 100 * sum(run.summary["global_seen_mean"] for run in runs) / 2
    assert table.loc["FedAvg", "global seen"] == pytest.approx(expected)
    assert table.loc["Local only"].isna()["global seen"]


def test_plot_has_a_line_per_method_and_bands_over_seeds(tmp_path: Path) -> None:
    study = start(tmp_path / "study", seeds=2, rounds=2)
    panel = study.plot().axes[0]
    lines = {line.get_label(): line for line in panel.get_lines() if line.get_label()}
    assert list(lines) == ["Local only", "FedAvg"]
    seeds = [study["fedavg", seed].history[panel_of(panel.get_title(loc="left"))].dropna() for seed in (0, 1)]
    assert list(lines["FedAvg"].get_xdata()) == list(seeds[0].index)
    assert list(lines["FedAvg"].get_ydata()) == pytest.approx(list(50 * (seeds[0] + seeds[1])))
    low = min(seed[2] for seed in seeds)
    band = panel.collections[1].get_paths()[0].vertices
    assert min(height for rounds, height in band if rounds == 2) == pytest.approx(100 * low)
    single = study["fedavg", 1].plot().axes[0]
    assert list(single.get_lines()[0].get_ydata()) == pytest.approx(
        list(100 * study["fedavg", 1].history["personal"].dropna())
    )


def panel_of(title: str) -> str:
    """Column of the history that a panel shows."""
    return {"personal models": "personal", "deployed at each client": "global"}[title]


def test_plot_of_too_few_rounds_is_refused(tmp_path: Path) -> None:
    (run,) = start(tmp_path / "study", ["fedavg"], rounds=1, **{"run.evaluate_every": 0})
    refuses("curves need at least two evaluated rounds, found fewer", run.plot)


def test_methods_are_compared_with_a_reference(finished: confed.Study) -> None:
    comparison = finished.compare("local")
    assert comparison.references == ("local",)
    assert ("personal on own data", "FedAvg") in comparison.frame().index
    assert "<table" in comparison._repr_html_()
    refuses("fedprox", finished.compare, "fedprox")
    refuses("margin must lie between 0 and 100 points, got 0", finished.compare, margin=0)


def test_the_same_call_runs_what_is_missing(finished: confed.Study, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "study")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/summary.json")}
    grown = start(folder, {"weak": FedProx(mu=1e-4), "strong": FedProx(mu=1.0), "local": "local"}, seeds=[1])
    assert [(run.method, run.seed) for run in grown][-2:] == [("weak", 1), ("strong", 1)]
    assert grown["strong", 1].recipe.construct("algorithm").mu == 1.0
    assert len(before) == 4
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert len(grown.resume(progress=False)) == 6


def test_objects_of_this_session_are_compared(tmp_path: Path) -> None:
    class Unnamed(Halved):
        pass

    recipe = confed.Recipe(model=Linear(4), data=squares(6, 4), local={"lr": 0.1}, run={"rounds": 1, "gallery": 0})
    study = confed.study(recipe, methods=["fedavg", Halved(share=0.1)], folder=tmp_path / "study", progress=False)
    assert study.methods == ("fedavg", "Halved")
    assert study["Halved", 0].recipe.construct("algorithm") == Halved(share=0.1)
    assert study["Halved", 0].personal("warm").head.out_features == 4  # type: ignore[union-attr]
    del Unnamed


def test_faulty_methods_and_seeds_are_refused(tmp_path: Path) -> None:
    with refused("two methods would be called 'fedprox': give a mapping of names"):
        start(tmp_path / "study", [FedProx(mu=0.1), FedProx(mu=1.0)])
    with refused("methods must be names, a list of names or objects, or a mapping of rows, got Fed"):
        start(tmp_path / "study", FedProx(mu=0.1))
    refuses("no algorithm is called 'fedavgg'; did you mean 'fedavg'", start, tmp_path / "study", ["fedavgg"])
    with refused("seeds must be a whole number of at least 1, or different whole numbers, got 0"):
        start(tmp_path / "study", seeds=0)
    for seeds in (2.0, "01", [0, 0.5], [1, 1], True, None):
        refuses(f"or different whole numbers, got {re.escape(repr(seeds))}", start, tmp_path / "study", seeds=seeds)
    assert not (tmp_path / "study").exists()
    with refused("no run could be made: "):
        confed.study("fedvqa_scenes", TINY, methods=["fedlgt"], folder=tmp_path / "none", workers=1, progress=False)


def test_what_a_study_would_drop_is_refused(tmp_path: Path) -> None:
    for given in ({"algorithm": FedProx(mu=0.1)}, {"algorithm": "fedprox"}, {"method": "fedavg"}):
        with refused(rf"{next(iter(given))} is no setting here: confed\.study takes methods, by"):
            start(tmp_path / "study", **given)
    recipe = confed.load_recipe("fedvqa_scenes", {**TINY, "algorithm.name": "moon", "run.rounds": 1})
    with refused(r"algorithm\.mu=0\.5 has no effect on local, fedavg: give the row as an object"):
        confed.study(recipe, {"algorithm.mu": 0.5}, methods=["local", "fedavg"], folder=tmp_path / "study")
    assert not (tmp_path / "study").exists()
    study = confed.study(
        recipe, {"algorithm.mu": 0.5}, methods=["local", "moon"], folder=tmp_path / "study", workers=1, progress=False
    )
    assert study["moon", 0].recipe.construct("algorithm").mu == 0.5


def test_objects_of_this_session_run_where_processes_are_spawned(tmp_path: Path) -> None:
    recipe = confed.Recipe(
        model=Linear(4), data=squares(6, 4), local={"lr": 0.1},
        run={"rounds": 1, "gallery": 0, "workers": 2, "start_method": "spawn"},
    )  # fmt: skip
    study = confed.study(recipe, methods=["local", "fedavg"], folder=tmp_path / "study", workers=2, progress=False)
    assert (len(study), dict(study.errors)) == (2, {})
    again = confed.study(
        recipe, methods=["local", "fedavg"], seeds=2, folder=tmp_path / "study", workers=2, progress=False
    )
    assert (len(again), dict(again.errors)) == (4, {})
    assert isinstance(again["fedavg", 1].personal("warm"), Linear)


def test_one_method_that_cannot_run_leaves_the_others(tmp_path: Path) -> None:
    study = start(tmp_path / "study", ["fedavg", "fedlgt"])
    assert [run.method for run in study] == ["fedavg"]
    assert list(study.errors) == ["fedlgt/seed-0"]


def test_an_interrupted_study_says_how_to_go_on(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        inner = event.event if isinstance(event, JobProgress) else None
        if isinstance(inner, RunProgress) and inner.stage == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"Go on with confed\.load_study\('.*'\)\.resume\(\)"):
        start(tmp_path / "study", ["fedavg"], progress=interrupt)
    study = confed.load_study(tmp_path / "study")
    assert str(study).startswith("Study of FedAvg, 0 finished runs")
    assert study.resume(workers=1, progress=False)["fedavg", 0].finished


def test_folders_of_other_kinds_are_refused(finished: confed.Study, tmp_path: Path) -> None:
    refuses(r"is that of a run: use confed\.load_run", confed.load_study, finished["fedavg", 0].folder)
    refuses(r"is that of a study: use confed\.load_study", confed.load_run, finished.folder)
    refuses("is no study folder", confed.load_study, tmp_path)


def test_a_study_of_the_command_line_loads(finished_study: Path) -> None:
    study = confed.load_study(finished_study)
    assert len(study) == 10
    assert study.compare().references == ("fedavg",)
