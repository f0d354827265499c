"""Relative improvement, client by client: golden values, the table beside accuracies, bars, and the command."""

import csv
import json
import warnings
from pathlib import Path

import pytest

from confed.report.comparison import compare
from confed.report.tables.relative import (
    improvement,
    improvement_cell,
    left_out,
    mean_improvement,
    relative_drawing,
    relative_table,
)
from synthetic_study import CLIENTS, make_study

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main

OURS = {"a": {0: 0.6, 1: 0.5}, "b": {0: 0.3}}
THEIRS = {"a": {0: 0.5, 1: 0.4, 2: 0.9}, "b": {0: 0.4}}


def test_relative_improvement_equals_a_computation_by_hand() -> None:
    found = improvement(OURS, THEIRS)
    assert found["a"] == pytest.approx({0: 0.2, 1: 0.25})
    assert found["b"] == pytest.approx({0: -0.25})
    assert mean_improvement(OURS, THEIRS) == pytest.approx({0: (0.2 - 0.25) / 2})  # seed 1 lacks a client
    cell = improvement_cell([0.2, 0.25])
    assert (cell.text, cell.value, cell.sd) == ("+22.5 ± 3.5", pytest.approx(22.5), pytest.approx(3.5355, abs=1e-4))
    assert improvement_cell([-0.25]).text == "−25.0"


def test_nothing_is_relative_to_nothing() -> None:
    assert improvement({"a": {0: 0.6}}, {"a": {0: 0.0}}) == {}
    assert improvement({"a": {0: 0.6}}, {"b": {0: 0.5}}) == {}
    assert mean_improvement({}, {}) == {}
    assert improvement_cell([]).text == "–"
    assert relative_drawing({"x": OURS}, {"x": "X"}, "x") is None


def test_there_is_no_mean_where_a_client_is_left_out() -> None:
    # Without "b", which gains most, the share would be negative and the difference of means is positive.
    own = {"a": {0: 0.4, 1: 0.4}, "b": {0: 0.3, 1: 0.3}}
    other = {"a": {0: 0.5, 1: 0.5}, "b": {0: 0.0, 1: 0.1}}
    assert left_out(own, other) == {"b": "is at 0 with it"}
    assert improvement(own, other) == {"a": pytest.approx({0: -0.2, 1: -0.2})}
    assert mean_improvement(own, other) == {}
    assert left_out(own, {"a": {0: 0.5}, "c": {0: 0.5}}) == dict.fromkeys("bc", "has no results of both")
    table = relative_table({"x": own, "y": other}, {"x": "X", "y": "Y"}, "x", "accuracy")
    assert [cell.text for cell in table.rows[1]][2::2] == ["−20.0 ± 0.0", "–", "–"]
    assert table.notes[1] == (
        "Relative to Y, no mean over clients: b is at 0 with it, and a mean over the others would mislead."
    )
    drawn = relative_drawing({"x": own, "y": other}, {"x": "X", "y": "Y"}, "x")
    assert drawn is not None
    assert b">\xe2\x80\x93<" in drawn.svg()


def test_each_row_is_a_method_and_the_first_one_is_ours() -> None:
    table = relative_table({"y": THEIRS, "x": OURS}, {"y": "Y", "x": "X"}, "x", "accuracy")
    titles = [column.full_title for column in table.columns]
    assert titles[1:] == [f"{c} {what}" for c in ("a", "b", "mean") for what in ("accuracy", "relative")]
    ours, theirs = table.rows
    assert [cell.text for cell in ours] == ["X", "55.0 ± 7.1", "", "30.0", "", "47.5 ± 3.5", ""]
    assert [cell.text for cell in theirs[:1]] == ["Y"]
    assert theirs[2].value == pytest.approx(22.5)
    assert theirs[4].value == pytest.approx(-25.0)
    assert theirs[6].value == pytest.approx(-2.5)


def test_a_comparison_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = make_study(tmp_path / "study", seeds=2)
    own, base = ({seed: _personal(study, m, seed) for seed in (0, 1)} for m in ("fedp3", "fedavg"))
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(study), "--relative", "fedp3", "--out", str(tmp_path / "out")])
    assert stop.value.code == 0
    assert "against each method" in capsys.readouterr().out
    rows = {r["method"]: r for r in csv.DictReader((tmp_path / "out/relative.csv").read_text().splitlines())}
    for client in CLIENTS:
        shares = [(own[s][client] - base[s][client]) / base[s][client] for s in (0, 1)]
        assert float(rows["FedAvg"][f"{client} relative (%)"]) == pytest.approx(50 * sum(shares), abs=1e-6)
        level = 50 * sum(base[s][client] for s in (0, 1))
        assert float(rows["FedAvg"][f"{client} accuracy (%)"]) == pytest.approx(level)
    svg = (tmp_path / "out/relative.svg").read_text()
    assert ">over FedAvg<" in svg
    assert all(f">{client}<" in svg for client in CLIENTS)
    with pytest.raises(ValueError, match=r"relative must name a method .* got 'fedfoo'"):
        compare([study]).relative("fedfoo")


def _personal(study: Path, method: str, seed: int) -> dict[str, float]:
    return json.loads((study / method / f"seed-{seed}/summary.json").read_text())["personal"]


def test_a_panel_that_would_flatten_others_has_its_own_scale() -> None:
    own = {client: {0: 0.8, 1: 0.7} for client in ("a", "b")}
    values = {"own": own} | {name: {c: dict.fromkeys(v, 0.6) for c, v in own.items()} for name in ("x", "y")}
    values["far"] = {client: {0: 0.05, 1: 0.05} for client in own}
    drawing = relative_drawing(values, {name: name for name in ("own", "x", "y", "far")}, "own")
    assert drawing is not None
    text = drawing.svg().decode()
    assert text.count("(own scale)") == 1
    assert "over far (own scale)" in text
