"""Similarities before and after training: the measurement against NumPy, its file, and its place in the report."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from confed.engines.local import Workspace
from confed.report.html.page import Tabs
from confed.report.report import render
from confed.report.sections.similarity import Similarity, read, section
from confed.results.folder import RunFolder
from confed.results.runs import load
from confed.runs.samples import similarities
from confed.testing.toy import ANSWERS, toy_clients, toy_contrastive_model, toy_model
from synthetic_study import make_run

DRAWS = True


def run_data(**clients: Any) -> Any:
    return SimpleNamespace(clients=clients or toy_clients(), dataset=SimpleNamespace(answers=ANSWERS))


def cosines(model: Any, batch: Any) -> np.ndarray:
    """v_NHA of each example against u_LTA of each example's answer, by hand."""
    model.eval()
    with torch.no_grad():
        v, u = (part.double().numpy() for part in model.project(*model.cut(batch)))
    return (v / np.linalg.norm(v, axis=1, keepdims=True)) @ (u / np.linalg.norm(u, axis=1, keepdims=True)).T


def test_initial_and_trained_values_are_measured(tmp_path: Path) -> None:
    trained = toy_contrastive_model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    folder = RunFolder(tmp_path)
    # The global file has all but LTA, which the client keeps to itself.
    tensors = {name: tensor for name, tensor in Workspace(trained).tensors.items() if "stem" not in name}
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("lta")}
    shared = {name: tensor for name, tensor in tensors.items() if name not in own}
    clients = toy_clients()
    first = next(iter(clients))
    folder.write_tensors(folder.models / "global" / "trained.safetensors", shared)
    folder.write_tensors(folder.models / "personal" / first / "trained.safetensors", own)
    found = similarities(folder, Workspace(toy_contrastive_model()), run_data(**clients), 4, count=5)
    assert found is not None
    assert found["place"] == first
    assert found["answers"] == sorted(found["answers"])
    assert 0 < found["same"] < 1
    table = clients[first].tables[2]
    rows = torch.linspace(0, len(table) - 1, min(5, len(table))).round().long().tolist()
    rows.sort(key=lambda row: (ANSWERS[int(table.columns["label"][row])], row))
    batch = table.batch(torch.tensor(rows))
    assert np.array(found["before"]) == pytest.approx(cosines(toy_contrastive_model(), batch), abs=1e-4)
    with torch.no_grad():
        for name, tensor in Workspace(model := toy_contrastive_model()).tensors.items():
            tensor.copy_(tensors.get(name, tensor))
    assert np.array(found["after"]) == pytest.approx(cosines(model, batch), abs=1e-4)


def test_nothing_is_measured_of_models_that_cannot_be_compared(tmp_path: Path) -> None:
    assert similarities(RunFolder(tmp_path), Workspace(toy_model()), run_data(), 4) is None
    assert similarities(RunFolder(tmp_path), Workspace(toy_contrastive_model()), run_data(), 4) is None


def test_means_are_of_positives_equal_answers_and_negatives() -> None:
    values = np.array([[0.9, 0.5, -0.2], [0.7, 0.6, 0.8], [0.1, 0.2, 0.3]])
    one = Similarity("a", "cosine", ("no", "no", "yes"), values, values)
    found = one.means(values)
    assert found["own"] == pytest.approx((0.9 + 0.6 + 0.3) / 3)
    assert found["same"] == pytest.approx((0.5 + 0.7) / 2)
    assert found["other"] == pytest.approx((-0.2 + 0.8 + 0.1 + 0.2) / 4)
    assert found["right"] == pytest.approx(2 / 3)  # the second question is nearest to "yes"
    alone = Similarity("a", "cosine", ("no", "yes"), values[:2, :2], values[:2, :2])
    assert "same" not in alone.means(alone.after)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    content = {"place": "home", "kind": "cosine", "answers": ["no", "no", "yes <b>"]}
    values = {"before": [[0.1] * 3] * 3, "after": [[0.9, 0.8, -0.5], [0.7, 0.9, -0.4], [-0.3, -0.2, 0.8]]}
    (run / "similarity.json").write_text(json.dumps({**content, **values}))
    return tmp_path


def test_the_report_shows_both_heat_maps_and_the_means(folder: Path) -> None:
    html = section(load(folder), Tabs())
    assert html.count("<image") == 3  # two heat maps and their scale
    assert "3 test questions of home; cosine similarity" in html
    assert "0.867" in html
    assert "−0.350" in html
    assert "yes &lt;b&gt;" in html
    assert "yes <b>" not in html
    assert "Similarities before and after training" in render(load(folder))


def test_a_file_that_is_no_good_is_left_out(folder: Path) -> None:
    path = folder / "fedavg" / "seed-0" / "similarity.json"
    content = json.loads(path.read_text())
    for faulty in (
        "{",
        json.dumps([]),
        json.dumps({**content, "after": [[1.0]]}),
        json.dumps({**content, "answers": []}),
    ):
        path.write_text(faulty)
        assert read(load(folder).runs[0]) is None
        assert section(load(folder), Tabs()) == ""
