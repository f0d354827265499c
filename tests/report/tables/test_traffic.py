"""What travels: the bytes of real runs against the sizes of the shared tensors, and the columns of tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from confed.federation.messages import Message
from confed.federation.wire import encode
from confed.recipes.recipe import load_recipe
from confed.report.tables.columns import Context, MethodRow, bytes_up, columns_of
from confed.report.tables.cost import by_backbone
from confed.report.tables.paper import paper_table
from confed.report.tables.table import Cell, Column, Table
from confed.results.runs import load
from confed.results.views import View
from confed.runs.run import run
from refusals import refuses

SMALL = [
    'study.methods=["adapter","feddat","adapter_local"]', "data.preset=function", "data.train=16", "data.validation=10",
    "data.test=10", "local.epochs=1", "run.rounds=2", "run.workers=1", "run.gallery=0", "run.evaluate_every=0",
]  # fmt: skip
ITEM = 4
"""Bytes of a float32."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real runs of vilt_mini's adapters, and of those of a wider model."""
    root = tmp_path_factory.mktemp("transmitted")
    recipes = {name: load_recipe("feddat_scenes", SMALL) for name in ("adapter", "feddat", "adapter_local")}
    model = ["name=vilt_tiny", "width=128", "layers=2", "trainable=adapters", "peft.reduction=1"]
    wide = load_recipe("feddat_scenes", [*SMALL, *(f"model.{setting}" for setting in model)])
    found = {name: root / name for name in (*recipes, "wide")}
    for name, recipe in recipes.items():
        run(recipe.method(name), found[name])
    run(wide.method("adapter"), found["wide"])
    return found


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def adapters(folder: Path) -> dict[str, int]:
    """Name -> number of values of the tensors in the run's saved global model."""
    with safe_open(folder / "models" / "global" / "trained.safetensors", "pt") as tensors:
        return {name: tensors.get_tensor(name).numel() for name in tensors.keys()}  # noqa: SIM118 - it is no mapping


def test_less_than_a_percent_travels_beside_adapters(runs: dict[str, Path]) -> None:
    sizes = adapters(runs["wide"])
    assert all("adapter" in name for name in sizes)
    assert sum(sizes.values()) == 2 * (2 * 128 * 128 + 2 * 128)
    for key in ("bytes_up", "bytes_down"):
        for clients in summary(runs["wide"])[key].values():
            for sent in clients.values():
                assert sum(sizes.values()) * ITEM <= sent <= 1.01 * sum(sizes.values()) * ITEM


def test_names_and_shapes_travel_beside_values(runs: dict[str, Path]) -> None:
    """So much per tensor however large it is: a tenth of vilt_mini's small adapters."""
    assert sum(adapters(runs["adapter"]).values()) == 3 * (2 * 64 * 8 + 8 + 64)
    for name in ("adapter", "feddat", "wide"):
        sizes = adapters(runs[name])
        beside = bytes_up(load(runs[name]).runs[0])
        assert beside is not None
        beside -= sum(sizes.values()) * ITEM
        assert 0 < beside < 128 * len(sizes)
    # FedDAT sends one of its two adapters, so what Adapter sends.
    assert summary(runs["feddat"])["bytes_up"] == summary(runs["adapter"])["bytes_up"]


def test_published_adapters_travel_with_a_thousandth_beside_them() -> None:
    shapes = {"down.weight": (48, 768), "down.bias": (48,), "up.weight": (768, 48), "up.bias": (768,)}
    tensors = {
        f"backbone.encoder.layer.{layer}.output.adapters.shared.{name}": torch.zeros(shape)
        for layer in range(12)
        for name, shape in shapes.items()
    }
    assert sum(tensor.numel() for tensor in tensors.values()) == 894_528  # FedDAT, ViLT
    assert 1 < len(encode(Message(tensors))) / (894_528 * ITEM) < 1.002


def test_heads_are_trained_and_not_sent(runs: dict[str, Path]) -> None:
    found = {name: summary(folder)["parameters"] for name, folder in runs.items()}
    sent = sum(adapters(runs["adapter"]).values())
    assert found["adapter"]["sent"] == found["feddat"]["sent"] == sent
    assert found["adapter_local"]["sent"] == 0
    assert found["adapter"]["trained"] == found["adapter_local"]["trained"] > sent
    assert found["feddat"]["trained"] == found["adapter"]["trained"] + sent  # the client's own adapter too


def test_the_columns_of_a_table(runs: dict[str, Path]) -> None:
    study = load(runs["adapter"])
    parameters = summary(runs["adapter"])["parameters"]
    overhead = columns_of("paper", Context([], judged=View.DEPLOYED))[:4]
    trained, sent, share, up = (column.cells([MethodRow("", study.runs)])[0] for column in overhead)
    assert (trained.value, sent.value) == (parameters["trained"], parameters["sent"])
    assert share.value == pytest.approx(100 * parameters["sent"] / parameters["total"])
    rounds = summary(runs["adapter"])["bytes_up"]
    every = [n for clients in rounds.values() for n in clients.values()]
    assert up.value == pytest.approx(sum(every) / len(every))
    table = paper_table(study)
    assert table.columns[1:5] == tuple(column.heading for column in overhead)
    assert table.rows[0][1:5] == (trained, sent, share, up)
    assert "vilt_mini" in table.title
    assert [column.cells([MethodRow("", [])])[0].text for column in overhead] == ["–"] * 4
    local = [MethodRow("", load(runs["adapter_local"]).runs)]
    assert [column.cells(local)[0].text for column in overhead[1:3]] == ["0", "0.00"]


def test_tables_of_other_clients_are_not_put_together() -> None:
    tables = {name: Table("t", (Column("method"), Column(name)), (((Cell("x"), Cell("1")),),)) for name in ("a", "b")}
    refuses(r"the table of b must have the columns of a's \(method, a\), got method, b", by_backbone, tables)
    refuses("at least one", by_backbone, {})
