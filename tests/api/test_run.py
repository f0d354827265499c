"""Runs and studies from Python: the bytes of the command line, going on, objects of the session, results and models."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import confed
from command_line import Patch, refused
from confed.algorithms.fedprox import FedProx
from confed.api.progress import in_this_session
from confed.api.run import Report, check_reached
from confed.inference.ask import ask
from confed.registry import models
from confed.results.folder import RunFolder
from confed.studies.runner import run_single
from confed.system.events import Event, JobProgress, Note, RunProgress
from refusals import refuses
from tiny_runs import TINY, Halved, Linear
from toy_federation import squares

SCENES = "fedvqa_scenes"
PICTURE = np.full((64, 64, 3), 200, np.uint8)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What a run computes; costs and versions apart."""
    names = ("metrics.jsonl", "recipe.toml", "predictions.safetensors", "models/global/trained.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def start(folder: Path | None = None, **settings: object) -> confed.Run:
    return confed.run(
        "fedvqa_scenes", TINY, method="fedavg", folder=folder, progress=False, **{"rounds": 2, **settings}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> confed.Run:
    return start(tmp_path_factory.mktemp("python") / "run")


def test_a_run_has_the_bytes_of_the_command_line(finished: confed.Run, tmp_path: Path) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in TINY.items()]
    recipe = confed.load_recipe("fedvqa_scenes", [*overrides, "run.rounds=2"]).method("fedavg")
    run_single(recipe, tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(finished.folder)


def test_a_run_says_what_it_is(finished: confed.Run) -> None:
    assert str(finished) == f"Run FedAvg, seed 0, 2 rounds, finished: {finished.folder}"
    assert (finished.method, finished.seed, finished.rounds, finished.finished) == ("fedavg", 0, 2, True)
    assert finished.clients == ("warm", "cold", "both")
    assert finished.recipe.run.rounds == 2
    assert finished.summary["label"] == "FedAvg"


def test_results_are_the_summary_as_frames(finished: confed.Run) -> None:
    results, summary = finished.results, finished.summary
    assert results["personal"].dropna().to_dict() == summary["personal"]
    assert results["global"].to_dict() == {**summary["global_seen"], **summary["global_unseen"]}
    assert results.loc["everything", "kind"] == "unseen"
    history = finished.history
    assert list(history.index) == [0, 1, 2]
    assert history.loc[2, "bytes_up"] == sum(summary["bytes_up"]["2"].values())
    values = finished.evaluations
    last = values[(values["round"] == 2) & (values["view"] == "personal") & (values["metric"] == "accuracy")]
    assert last["value"].mean() == pytest.approx(history.loc[2, "personal"])


def test_a_method_without_a_global_model_has_no_such_column(tmp_path: Path) -> None:
    run = start_local(tmp_path / "local")
    assert "global" not in run.results.columns
    refuses("Local only has no global model; name a client's personal model", run.global_model)


def start_local(folder: Path) -> confed.Run:
    return confed.run("fedvqa_scenes", TINY, method="local", rounds=1, folder=folder, progress=False)


def test_models_are_copies_of_their_own(finished: confed.Run) -> None:
    warm, cold, shared = finished.personal("warm"), finished.personal("cold"), finished.global_model()
    for client, model in (("warm", warm), ("cold", cold)):
        tensors = load_file(RunFolder(finished.folder).personal_model(client))
        there = dict(model.named_parameters()) | dict(model.named_buffers())
        assert tensors
        assert all(torch.equal(tensor, there[name]) for name, tensor in tensors.items())
        assert not model.training
    assert shared(finished.batch("warm", count=3)).logits.shape[0] == 3
    assert len(finished.batch("warm", "train", 100)["label"]) == 6
    refuses("no client is called 'hot'; there are warm, cold, both", finished.personal, "hot")
    refuses("no client or unseen place is called 'hot'; there are warm, cold", finished.batch, "hot")
    with refused("split must be one of train, validation, test, got 'all'"):
        finished.batch("warm", "all")  # type: ignore[arg-type]


def test_predictions_are_those_of_the_command_line(finished: confed.Run, tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "grey.png")
    expected = ask(finished.folder, tmp_path / "grey.png", "which colour is this?", "warm", top=2)
    for source in (tmp_path / "grey.png", str(tmp_path / "grey.png"), PICTURE, Image.fromarray(PICTURE), [PICTURE]):
        assert finished.predict(source, "which colour is this?", "warm", top=2) == expected
    assert finished.predict(PICTURE, "which?")["model"] == "global"
    refuses("this run's models answer questions: give a question", finished.predict, PICTURE)
    refuses("answer questions: leave known out", finished.predict, PICTURE, "which?", known=["red=yes"])
    with refused(r"must be uint8 of shape \(H, W, 3\), \(H, W, 4\) or \(H, W\), got float64"):
        finished.predict(PICTURE / 255.0, "which?")
    refuses("read one picture and one question at a time", finished.predict, PICTURE, ["which?", "and which?"])


def test_models_that_label_are_asked_as_well(finished_label_run: Path) -> None:
    run = confed.load_run(finished_label_run)
    found = run.predict(np.zeros((8, 8, 3), np.uint8), known=["red=yes"])
    assert found["known"][0]["label"] == "red"
    assert {entry["label"] for entry in found["labels"]} == {"green", "blue", "never"}
    refuses("give labels: leave question out", run.predict, PICTURE, "which?")


def test_a_finished_run_is_returned_and_another_recipe_refused(finished: confed.Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    again = start(finished.folder)
    assert again.summary == finished.summary
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before
    with refused(r"holds a run with local\.lr=0\.003, not 0\.1; give another folder"):
        start(finished.folder, local={"lr": 0.1})
    refuses("exists already and is no run folder", start, finished.folder.parent)


def test_interrupted_runs_go_on_with_the_same_numbers(finished: confed.Run, tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        inner = event.event if isinstance(event, JobProgress) else None
        if isinstance(inner, RunProgress) and inner.round == 1 and inner.stage == "training":
            raise KeyboardInterrupt

    for number, go_on in enumerate((lambda run: run.resume(progress=False), lambda run: start(run.folder))):
        folder = tmp_path / f"run{number}"
        with pytest.raises(KeyboardInterrupt, match=r"is saved\. Go on with confed\.load_run\('.*'\)\.resume\(\)"):
            confed.run("fedvqa_scenes", TINY, method="fedavg", rounds=2, folder=folder, progress=interrupt)
        run = confed.load_run(folder)
        assert str(run) == f"Run fedavg, seed 0, unfinished, 1 rounds done: {folder}"
        assert list(run.history.index) == [0, 1]
        for read in (lambda run: run.results, lambda run: run.summary, lambda run: run.personal("warm")):
            refuses("is not finished: it stands at round 1; continue it with", read, run)
        assert go_on(run).finished
        assert bytes_of(folder) == bytes_of(finished.folder)


def test_objects_of_this_session_run_resume_and_answer_here_only(tmp_path: Path) -> None:
    recipe = confed.Recipe(
        algorithm=Halved(share=0.25), model=Linear(4), data=squares(6, 4), local={"lr": 0.1, "epochs": 1},
        run={"rounds": 1, "gallery": 0, "workers": 2},
    )  # fmt: skip
    told: list[Event] = []
    run = confed.run(recipe, folder=tmp_path / "run", progress=told.append)
    (note,) = [event.text for event in told if isinstance(event, Note)]
    assert note.startswith(f"recipe.toml cannot hold {', '.join(recipe.session_only)}: the run goes on")
    assert isinstance(run.personal("warm"), Linear)
    assert not torch.equal(run.global_model().head.weight, Linear(4).head.weight)  # type: ignore[union-attr]
    name = recipe.sections["model"]["name"]
    entry = models._entries.pop(name)
    try:
        other = confed.load_run(tmp_path / "run")
        assert len(other.results) == 4
        refuses(f"the model '{name}' is an object of the Python session", other.personal, "warm")
    finally:
        models.add(name, entry)


def test_spawned_processes_lack_the_objects_of_this_session() -> None:
    run = {"workers": 2, "start_method": "spawn"}
    recipe = confed.Recipe(model=Linear(4), data="squares", run=run)
    assert in_this_session(recipe, lambda event: None).run.workers == 1
    assert in_this_session(confed.Recipe(model="vilt_tiny", data="squares", run=run), print).run.workers == 2
    with refused(r"run\.engine must be 'local' with objects of this session"):
        in_this_session(recipe.changed({"run.engine": "ray"}), print)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: confed.run(TINY), r"recipe must be a name, a path or a confed\.Recipe, got dict"),  # type: ignore[arg-type]
        (lambda: confed.run("nope"), "no recipe at 'nope': `confed list recipes`"),
        (lambda: confed.run(method="fedavg", algorithm="fedprox"), "either method or algorithm"),
        (lambda: confed.run(SCENES, {"algorithm": "fedprox"}, method="fedavg"), "either method or algorithm"),
        (
            lambda: confed.run(SCENES, TINY, methods=["local"]),
            r"methods is no setting here: .*confed\.study takes several",
        ),
        (
            lambda: confed.run(SCENES, TINY, seeds=2),
            r"seeds is no setting here: .*confed\.study takes several",
        ),
        (lambda: confed.run(SCENES, ["run.rounds=1"]), r"a mapping of section\.key to values, such as .*, got \['run"),  # type: ignore[arg-type]
        (lambda: confed.run(SCENES, {1: 2}), r"a mapping of section\.key to values, .*, got {1: 2}"),  # type: ignore[arg-type]
        (lambda: confed.run(SCENES, {"local": {"lr": 1}}, local={"lr": 2}), "local is given twice"),
        (lambda: confed.load_run(Path(__file__).parent), r"is no run folder \(recipe\.toml\)"),
    ],
)
def test_calls_are_checked(call: Callable[[], object], message: str) -> None:
    refuses(message, call)


def test_missing_tools_and_libraries_are_named(tmp_path: Path, monkeypatch: Patch) -> None:
    run = start_local(tmp_path / "run")
    refuses(r"the tracking tool must be one of trackio, .*, got 'nope'", run.track, "nope")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(r"data frames need pandas, which is not installed: pip install"):
        _ = run.history


def test_settings_of_another_algorithm_are_refused(tmp_path: Path) -> None:
    prox = {**TINY, "algorithm.name": "fedprox", "algorithm.mu": 0.5}
    with refused(r"algorithm\.name='fedprox' has no effect on fedavg: leave method='fedavg' out"):
        confed.run("fedvqa_scenes", prox, method="fedavg")
    recipe = confed.load_recipe("fedvqa_scenes", {**TINY, "algorithm.name": "fedprox"})
    with refused(r"algorithm\.mu=0\.5 has no effect on fedavg: leave method='fedavg' out"):
        confed.run(recipe, {"algorithm.mu": 0.5}, method="fedavg")
    with refused(r"algorithm\.server\.lr=0\.5 has no effect on local"):
        confed.run(recipe, {"algorithm.server": {"lr": 0.5}}, method="local")
    moon = {**prox, "algorithm.name": "moon"}
    run = confed.run("fedvqa_scenes", moon, method="moon", rounds=1, folder=tmp_path / "run", progress=False)
    assert run.recipe.construct("algorithm").mu == 0.5
    check_reached({"algorithm.mu": "0.5"}, {}, {"moon": run.recipe}, "")  # a text of TOML
    with refused(r"algorithm\.mu='0\.7' has no effect on moon"):
        check_reached({"algorithm.mu": "0.7"}, {}, {"moon": run.recipe}, "")
    # A row of the study with keywords of its own goes before those of [algorithm].
    rows = {"fedprox": {"mu": 0.1}, "weak": {"name": "fedprox", "mu": 0.2}}
    study = recipe.with_rows([*rows], rows)
    for row in rows:
        refuses(rf"algorithm\.mu=0\.5 has no effect on {row}", confed.run, study, {"algorithm.mu": 0.5}, method=row)


def test_a_folder_of_its_own_and_the_threads_of_the_caller(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [start(rounds=1), start(rounds=1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [str(run.folder) for run in runs] == ["runs/fedvqa_scenes", "runs/fedvqa_scenes-2"]


def test_the_report_shows_itself_in_a_notebook(finished: confed.Run) -> None:
    report = finished.report()
    assert isinstance(report, Report)
    assert Path(report) == report.path == finished.folder / "report.html"
    shown = report._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert shown.count("<") == 2  # nothing of the page ends the frame


def test_exported_models_load_again(finished: confed.Run, tmp_path: Path) -> None:
    refuses("client goes with merged", finished.export, tmp_path / "exported", client="warm")
    folders = finished.export(tmp_path / "exported")
    assert {"global", "clients/warm", "clients/cold", "clients/both"} <= set(folders)
    assert folders["clients/warm"].is_dir()
    trained = confed.load_exported(tmp_path / "exported", "warm")
    batch = finished.batch("warm")
    assert torch.equal(trained.model(batch).logits, finished.personal("warm")(batch).logits)


def test_runs_without_the_record_of_their_start_load(finished: confed.Run, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "old")
    for name in ("begun.toml", "begun.json", "timings.jsonl"):
        (tmp_path / "old" / name).unlink()
    old = confed.load_run(tmp_path / "old")
    assert old.results.equals(finished.results)
    assert isinstance(old.personal("warm"), nn.Module)
    assert start(old.folder).summary == finished.summary


def compared(folder: Path, methods: object = ("local", "fedavg"), **settings: object) -> confed.Study:
    settings = {"rounds": 1, "workers": 1, "progress": False, **settings}
    return confed.study("fedvqa_scenes", TINY, methods=methods, folder=folder, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory: pytest.TempPathFactory) -> confed.Study:
    return compared(tmp_path_factory.mktemp("python") / "study", seeds=2)


def test_a_study_has_its_runs_and_files(two_methods: confed.Study) -> None:
    assert str(two_methods) == f"Study of Local only, FedAvg, 4 finished runs: {two_methods.folder}"
    assert [(run.method, run.seed) for run in two_methods] == [("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)]
    assert (len(two_methods), two_methods.methods, two_methods.seeds, two_methods.errors) == (
        4,
        ("local", "fedavg"),
        (0, 1),
        {},
    )
    assert {"compare.csv", "table.md", "report.html"} <= {path.name for path in two_methods.folder.iterdir()}
    assert two_methods["fedavg", 1].summary["seed"] == 1
    with refused(r"has no run \('st', 0\); there are \('local', 0\)"):
        _ = two_methods["st", 0]


def test_the_table_has_means_over_seeds(two_methods: confed.Study) -> None:
    table = two_methods.table
    runs = [run for run in two_methods if run.method == "fedavg"]
    expected = 100 * sum(run.summary["global_seen_mean"] for run in runs) / 2
    assert table.loc["FedAvg", "global seen"] == pytest.approx(expected)
    assert table.loc["Local only"].isna()["global seen"]


def test_plot_has_a_line_per_method_and_bands_over_seeds(tmp_path: Path) -> None:
    study = compared(tmp_path / "study", seeds=2, rounds=2)
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
    (run,) = compared(tmp_path / "study", ["fedavg"], rounds=1, **{"run.evaluate_every": 0})
    refuses("curves need at least two evaluated rounds, found fewer", run.plot)


def test_methods_are_compared_with_a_reference(two_methods: confed.Study) -> None:
    comparison = two_methods.compare("local")
    assert comparison.references == ("local",)
    assert ("personal on own data", "FedAvg") in comparison.frame().index
    assert "<table" in comparison._repr_html_()
    refuses("fedprox", two_methods.compare, "fedprox")
    refuses("headline must be one of personal, global_seen, got 'best'", two_methods.compare, headline="best")
    refuses("margin must lie between 0 and 100 points, got 0", two_methods.compare, margin=0)


def test_the_same_call_runs_what_is_missing(two_methods: confed.Study, tmp_path: Path) -> None:
    folder = shutil.copytree(two_methods.folder, tmp_path / "study")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/summary.json")}
    grown = compared(folder, {"weak": FedProx(mu=1e-4), "strong": FedProx(mu=1.0), "local": "local"}, seeds=[1])
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
        compared(tmp_path / "study", [FedProx(mu=0.1), FedProx(mu=1.0)])
    with refused("methods must be names, a list of names or objects, or a mapping of rows, got Fed"):
        compared(tmp_path / "study", FedProx(mu=0.1))
    refuses("no algorithm is called 'fedavgg'; did you mean 'fedavg'", compared, tmp_path / "study", ["fedavgg"])
    with refused("seeds must be a whole number of at least 1, or different whole numbers, got 0"):
        compared(tmp_path / "study", seeds=0)
    for seeds in (2.0, "01", [0, 0.5], [1, 1], True, None):
        refuses(f"or different whole numbers, got {re.escape(repr(seeds))}", compared, tmp_path / "study", seeds=seeds)
    assert not (tmp_path / "study").exists()
    with refused("no run could be made: "):
        confed.study("fedvqa_scenes", TINY, methods=["fedlgt"], folder=tmp_path / "none", workers=1, progress=False)


def test_what_a_study_would_drop_is_refused(tmp_path: Path) -> None:
    for given in ({"algorithm": FedProx(mu=0.1)}, {"algorithm": "fedprox"}, {"method": "fedavg"}):
        with refused(rf"{next(iter(given))} is no setting here: confed\.study takes methods, by"):
            compared(tmp_path / "study", **given)
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
    study = compared(tmp_path / "study", ["fedavg", "fedlgt"])
    assert [run.method for run in study] == ["fedavg"]
    assert list(study.errors) == ["fedlgt/seed-0"]


def test_an_interrupted_study_says_how_to_go_on(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        inner = event.event if isinstance(event, JobProgress) else None
        if isinstance(inner, RunProgress) and inner.stage == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"Go on with confed\.load_study\('.*'\)\.resume\(\)"):
        compared(tmp_path / "study", ["fedavg"], progress=interrupt)
    study = confed.load_study(tmp_path / "study")
    assert str(study).startswith("Study of FedAvg, 0 finished runs")
    assert study.resume(workers=1, progress=False)["fedavg", 0].finished


def test_folders_of_other_kinds_are_refused(two_methods: confed.Study, tmp_path: Path) -> None:
    refuses(r"is that of a run: use confed\.load_run", confed.load_study, two_methods["fedavg", 0].folder)
    refuses(r"is that of a study: use confed\.load_study", confed.load_run, two_methods.folder)
    refuses("is no study folder", confed.load_study, tmp_path)


def test_a_study_of_the_command_line_loads(finished_study: Path) -> None:
    study = confed.load_study(finished_study)
    assert len(study) == 10
    assert study.compare().references == ("fedavg",)
