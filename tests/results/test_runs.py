"""Reading folders back; also makes the synthetic study that the other tests of results use."""

import json
import shutil
from pathlib import Path

import pytest

from confed.report.tables.cost import cost_to_target_table
from confed.results.runs import load
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
    assert run.clients == tuple(CLIENTS)
    assert run.scenes == tuple(SCENES)
    assert run.predictions() == {}
    assert run.gallery() == []
    assert set(run.missing) == {"summary.json", "gallery.json", "predictions.safetensors", "timings.jsonl"}


def test_study_without_index(study: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg")
    make_run(tmp_path / "fedp3" / "seed-0", "fedp3")
    found = load(tmp_path)
    assert found.methods == ("fedavg", "fedp3")
    assert "interrupted" in found.remarks[0]


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_neither_run_nor_study(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"must be a run folder .* or a study folder"):
        load(tmp_path / name)


def test_race_counts_rounds_and_bytes_to_the_end_of_fedavg(study: Path) -> None:
    table = cost_to_target_table(load(study))
    assert table is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["FedAvg"] == ["6", "57.6 MB"]  # 6 rounds, 4 clients, 1.2 MB each way
    assert rows["Local"] == ["not in 6", "–"]
    assert int(rows["FedP³"][0]) < 6
    assert "Central" not in rows
