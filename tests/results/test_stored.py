"""Records at rest are those of the history and of the predictions, and what is derived from them has one source."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import confed
from confed.report.comparison import compare
from confed.results import stored
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
from confed.results.views import EVALUATED, View

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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("read_jsonl", "lines_of", "records_of"):
                readers |= {path.relative_to(source).as_posix()} if "metrics" in ast.unparse(node) else set()
    assert readers <= JOURNAL_READERS
