"""Runs and sweeps as they are read from folders, of this version and of earlier ones."""

import ast
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import confed
from confed.report.comparison import compare
from confed.report.tables.methods import cost_to_target_table
from confed.report.tables.sweep import write_sweep
from confed.results import stored
from confed.results.folder import kind_of, run_folders
from confed.results.run_files import lines_of
from confed.results.runs import load
from confed.results.stored import (
    FinalResult,
    examples_of_predictions,
    read_examples,
    read_records,
    records_file,
    records_of,
    write_records,
)
from confed.results.sweep import Point, Sweep, read_sweep, write_sweep_index
from confed.results.views import EVALUATED, View
from refusals import refuses
from synthetic_study import CLIENTS, METHODS, ROUNDS, SCENES, make_run


@pytest.fixture(scope="module")
def study(finished_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_study, tmp_path_factory.mktemp("results") / "study"))


def test_study_keeps_the_order_of_its_index(study: Path) -> None:
    found = load(study)
    assert found.methods == tuple(METHODS)
    assert found.labels["fedp3"] == "FedP³"
    assert found.seeds == (0, 1)
    assert found.clients == tuple(CLIENTS)
    assert found.scenes == tuple(SCENES)
    assert all(run.complete and not run.missing for run in found.runs)


def test_rows_with_one_label_are_told_apart(tmp_path: Path) -> None:
    entries = [{"method": row, "seed": 0, "folder": f"{row}/seed-0"} for row in ("mild", "strong", "fedavg")]
    for entry in entries:
        make_run(tmp_path / str(entry["folder"]), "fedavg" if entry["method"] == "fedavg" else "fedprox")
    expected = {"mild": "FedProx (mild)", "strong": "FedProx (strong)", "fedavg": "FedAvg"}
    assert load(tmp_path).labels == expected  # an index is missing: the labels are the runs' own
    labels = {"mild": "FedProx", "strong": "FedProx", "fedavg": "FedAvg"}
    index = {"methods": list(labels), "labels": labels, "runs": entries}
    (tmp_path / "summary.json").write_text(json.dumps(index))
    assert load(tmp_path).labels == load(tmp_path).rows == expected


def test_run_on_its_own_is_a_study_of_one(study: Path) -> None:
    found = load(study / "fedavg" / "seed-1")
    assert found.single
    assert [(run.method, run.seed) for run in found.runs] == [("fedavg", 1)]
    assert len(found.runs[0].records.rounds) == ROUNDS
    assert len(found.runs[0].records.evaluations) == ROUNDS + 1


def test_interrupted_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    for name in ("summary.json", "gallery.json", "predictions.safetensors", "timings.jsonl"):
        (folder / name).unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:6]) + '\n{"event": "round", "rou')
    run = load(folder).runs[0]
    assert not run.complete
    assert run.summary.content["rounds"] == 3
    assert run.summary.clients == tuple(CLIENTS)
    assert run.summary.scenes == tuple(SCENES)
    assert run.predictions() == {}
    assert run.gallery() == []
    assert set(run.missing) == {"summary.json", "gallery.json", "predictions.safetensors", "timings.jsonl"}


def test_samples_that_nobody_asked_for_are_not_missing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / "gallery.json").unlink()
    assert set(load(folder).runs[0].missing) == {"gallery.json"}
    (folder / "recipe.toml").write_text("[run]\ngallery = 0\n")
    assert not load(folder).runs[0].missing


def test_study_without_index(study: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg")
    make_run(tmp_path / "fedp3" / "seed-0", "fedp3")
    found = load(tmp_path)
    assert found.methods == ("fedavg", "fedp3")
    assert "interrupted" in found.remarks[0]


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_neither_run_nor_study(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    refuses(r"must be a run folder .* or a study folder", load, tmp_path / name)


def test_race_counts_rounds_and_bytes_to_the_end_of_fedavg(study: Path) -> None:
    table = cost_to_target_table(load(study))
    assert table is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["FedAvg"] == ["6", "57.6 MB"]  # 6 rounds, 4 clients, 1.2 MB each way
    assert rows["Local"] == ["not in 6", "–"]
    assert int(rows["FedP³"][0]) < 6
    assert "Central" not in rows


RECIPE = '[algorithm]\nname = "fedavg"\n'
INDEX = '{"recipe": "r", "methods": ["fedavg"], "seeds": [0], "runs": [{"folder": "fedavg/seed-0"}]}'


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("", {}),
        ("", {"notes.txt": "x"}),
        ("run", {"recipe.toml": RECIPE}),
        ("run", {"recipe.toml": RECIPE, "summary.json": '{"algorithm": "fedavg"}'}),
        ("federation", {"recipe.toml": RECIPE, "members.json": "[]"}),
        ("study", {"recipe.toml": RECIPE, "summary.json": INDEX}),
        ("study", {"summary.json": INDEX}),  # its making was cut short
        ("sweep", {"sweep.json": "{}"}),
        ("sweep", {"models.json": "{}"}),  # version 0.1, of several models
    ],
)
def test_kind_of_a_folder(kind: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert kind_of(tmp_path) == kind
    if kind in ("run", "federation"):
        assert run_folders(tmp_path) == [tmp_path]
    elif kind == "study":
        assert run_folders(tmp_path) == [tmp_path / "fedavg/seed-0"]
    else:
        refuses("neither a run folder", run_folders, tmp_path)


def test_kind_of_a_damaged_index(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("[3]")
    refuses(r"summary\.json must be a JSON object", kind_of, tmp_path)


TOY = '''
import confed

@confed.register_measure
class Sure(confed.Measure):
    """Probability of the answer given."""

    name = "sure"

    def per_example(self, output, batch):
        return output.logits.softmax(1).amax(1)
'''
JOURNAL_READERS = {
    "results/runs.py",  # timings alone
    "results/stored.py",  # records of runs that have no files of them
    "runs/run.py",  # resumption
    "deployment/server.py",  # resumption
    "studies/tune.py",  # configurations, whose folders have no records
}


@pytest.mark.usefixtures("undrawn_figures")
def test_a_measure_of_one_file_gets_columns_and_a_p_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_measure.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    confed.allow_code("toy_measure")
    settings = {"data.train": 8, "data.validation": 4, "data.test": 16, "model.name": "vilt_tiny", "local.epochs": 1}
    settings |= {"run.measures": ["toy_measure:Sure"], "run.gallery": 0, "run.controls": "none"}
    study = confed.study(
        "fedvqa_scenes", settings, methods=["local", "fedavg"], seeds=1, rounds=2, workers=1,
        folder=tmp_path / "study", progress=False,
    )  # fmt: skip
    found = {d.measure: d for d in compare([study.folder], "local").differences}["sure, personal on own data"]
    folders = [study.folder / method / "seed-0" for method in ("fedavg", "local")]
    sides = [read_examples(folder, "personal") for folder in folders]
    apart = [np.mean(sides[0][place]["measure/sure"] - sides[1][place]["measure/sure"]) for place in sides[0]]
    assert found.points == pytest.approx(np.mean(apart))
    assert found.signs is not None
    assert found.signs.difference == pytest.approx(found.points)
    assert found.examples_p is not None
    for folder in folders:
        _same_as_history_and_predictions(folder)


def _same_as_history_and_predictions(folder: Path) -> None:
    found, history = read_records(folder), records_of(lines_of(folder / "metrics.jsonl"))
    assert (found.rounds, found.evaluations) == (history.rounds, history.evaluations)
    for view in history.values:
        assert found.measured(view) == history.measured(view)
        assert list(found.values[view].columns) == list(history.values[view].columns)
    predictions, summary = (
        load_file(folder / "predictions.safetensors"),
        json.loads((folder / "summary.json").read_text()),
    )
    for view, key in zip(EVALUATED, (View.PERSONAL, View.SEEN, View.UNSEEN), strict=True):
        at_rest, exported = read_examples(folder, view), examples_of_predictions(predictions, view)
        assert at_rest.keys() == exported.keys()
        for place, columns in exported.items():
            assert all(np.array_equal(at_rest[place][name], column) for name, column in columns.items())
            assert summary[key][place] == pytest.approx(at_rest[place]["correct"].mean())
        rows = [row for row in found.tests.get(view, ()) if row.owner == row.place]
        assert {row.place: row.metrics["accuracy"] for row in rows} == summary[key]
        assert [row.weight for row in rows] == [len(at_rest[row.place]["correct"]) for row in rows]


def lines(places: int, rounds: int = 3) -> list[dict[str, object]]:
    rng, history = np.random.default_rng(0), []
    for number in range(1, rounds + 1):
        names = [f"client-{place}" for place in rng.permutation(places)] if number == 2 else [*map(str, range(places))]
        sent = {name: 2**40 + place for place, name in enumerate(names[:3])}
        history.append({"event": "round", "round": number, "loss": {names[0]: 0.5}, "errors": {}, "bytes_up": sent})
        values = {name: {"loss": float(rng.random()), "right": 1.0, "late": float(rng.random())} for name in names}
        history.append({"event": "evaluation", "round": number, "split": "validation", "personal": values})
    return history


def test_whole_numbers_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(lines(5))
    write_records(tmp_path, records, {})
    assert read_records(tmp_path).measured("personal") == records.measured("personal")
    assert read_records(tmp_path).by_round("training", "bytes_up") == records.by_round("training", "bytes_up")
    monkeypatch.setattr(stored, "EXACT", 10)
    monkeypatch.setattr(stored, "MOST", 30)  # two columns of 15 rows
    write_records(tmp_path, records, {})
    found, loss = read_records(tmp_path), records.by_round("personal", "loss")
    assert found.by_round("personal", "right") == records.by_round("personal", "right")
    for number, places in found.by_round("personal", "loss").items():
        assert places == {place: float(np.float32(value)) for place, value in loss[number].items()}
    means = {number: np.mean([*places.values()]) for number, places in records.by_round("personal", "late").items()}
    late = found.by_round("personal", "late")
    assert {number: places["mean of 5 places"] for number, places in late.items()} == pytest.approx(means)


def test_places_with_other_columns_keep_theirs(tmp_path: Path) -> None:
    examples = {
        "a": {"correct": np.ones(2, np.float32), "prediction": np.array([[1, 2], [3, 4]]), "name": np.arange(2)},
        "b": {"correct": np.zeros(1, np.float32), "prediction": np.array([[5, 6, 7]]), "measure/m": np.ones(1)},
    }
    tests = {
        "unseen": [
            FinalResult("a", "a", 2, {"accuracy": 1.0, "ece": 0.1}),
            FinalResult("b", "a", 2, {"accuracy": 0.25}),
        ]
    }
    write_records(tmp_path, replace(records_of([]), tests=tests), {"unseen": examples})
    assert read_records(tmp_path).tests == tests
    found = read_examples(tmp_path, "unseen")
    assert found["a"].keys() == {"name", "prediction", "correct"}
    assert found["b"].keys() == {"prediction", "measure/m", "correct"}
    assert found["a"]["prediction"].tolist() == [[1, 2, -1], [3, 4, -1]]


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40])
def test_the_history_stands_in_for_damaged_records(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(2)))
    write_records(tmp_path, records_of(lines(2)), {})
    records_file(tmp_path, "personal").write_bytes(damage)
    assert read_records(tmp_path).measured("personal") == records_of(lines(2)).measured("personal")
    (tmp_path / "recipe.toml").write_text("")
    assert load(tmp_path).runs[0].records.reached == 3


def test_nothing_but_resumption_and_records_reads_the_history() -> None:
    source = Path(stored.__file__).parents[1]
    readers: set[str] = set()
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search("read_jsonl|lines_of|records_of", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("read_jsonl", "lines_of", "records_of"):
                readers |= {path.relative_to(source).as_posix()} if "metrics" in ast.unparse(node) else set()
    assert readers <= JOURNAL_READERS


# As version 0.1 wrote them.
VALUES = """{
 "recipe": "feddat_function",
 "over": "data.shards",
 "points": [
  {"settings": {"data.shards": "1", "run.rounds": "6"}, "folder": "shards-1"},
  {"settings": {"data.shards": "2", "run.rounds": "7"}, "folder": "shards-2"}
 ],
 "references": ["adapter"],
 "margin": 0.02,
 "by": ""
}"""
MODELS = """{
 "recipe": "bicsl",
 "models": {"mcan": "MCAN-s", "ban": "BAN"},
 "references": [],
 "margin": 0.01
}"""


def test_an_index_of_values_of_version_0_1(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(VALUES)
    points = (
        Point({"data.shards": "1", "run.rounds": "6"}, "shards-1"),
        Point({"data.shards": "2", "run.rounds": "7"}, "shards-2"),
    )
    sweep = read_sweep(tmp_path)
    assert sweep == Sweep("feddat_function", "data.shards", points, ("adapter",), 0.02)
    assert sweep.models == {}
    assert points[1].title == "data.shards=2, run.rounds=7"


def test_an_index_of_version_0_1_is_replaced_when_written(tmp_path: Path) -> None:
    (tmp_path / "models.json").write_text(MODELS)
    sweep = read_sweep(tmp_path)
    points = (Point({"models": "mcan"}, "mcan", "MCAN-s"), Point({"models": "ban"}, "ban", "BAN"))
    assert sweep == Sweep("bicsl", "models", points)
    assert sweep.models == {"mcan": "MCAN-s", "ban": "BAN"}
    assert points[0].title == "MCAN-s"
    write_sweep_index(tmp_path, replace(sweep, by="data.split"))
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert read_sweep(tmp_path) == replace(sweep, by="data.split")


def test_an_index_must_not_lead_elsewhere(tmp_path: Path) -> None:
    point: dict[str, Any] = {"settings": {"a.b": "1"}, "folder": "../x"}
    index = {"recipe": "r", "over": "a.b", "points": [point], "references": [], "margin": 0.01}
    (tmp_path / "sweep.json").write_text(json.dumps(index))
    refuses(r"a study's folder must be no path.*, got '\.\./x'", read_sweep, tmp_path)
    point["folder"] = "b-1"
    (tmp_path / "sweep.json").write_text(json.dumps(index))
    refuses(r"the sweep over a\.b has no finished run", write_sweep, tmp_path)
    (tmp_path / "sweep.json").unlink()
    (tmp_path / "models.json").write_text(MODELS.replace("mcan", "../away"))
    refuses(r"a study's folder must be no path.*, got '\.\./away'", read_sweep, tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "3", '{"models": 3}', MODELS.replace("0.01", '"x"'), MODELS.replace("0.01", "9" * 400), "{"]
)
def test_an_index_of_another_form_is_refused(content: str, tmp_path: Path) -> None:
    for name in ("models.json", "sweep.json"):
        (tmp_path / name).write_text(content)
        refuses(f"{name} is no index of a sweep", read_sweep, tmp_path)
