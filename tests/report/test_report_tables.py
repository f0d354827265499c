"""Tables of reports: headline figures and their marks, relative improvement, and what travels."""

import csv
import io
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from safetensors import safe_open

from confed.federation.messages import Message
from confed.federation.wire import encode
from confed.recipes.recipe import load_recipe
from confed.report.comparison import compare, compare_runs
from confed.report.report import write_tables
from confed.report.tables.cells import best_marks, bold_note
from confed.report.tables.columns import COLUMNS, Context, MethodRow, bytes_up, columns_of, method_row
from confed.report.tables.methods import by_backbone, paper_table, results_table, study_table
from confed.report.tables.relative import (
    improvement,
    improvement_cell,
    left_out,
    mean_improvement,
    relative_drawing,
    relative_table,
)
from confed.report.tables.table import Cell, Column, Table, to_csv, to_html, to_latex, to_markdown
from confed.results.runs import StudyResults, load
from confed.results.summary import Summary
from confed.results.views import View
from confed.runs.run import run
from confed.system import format as formats
from refusals import refuses
from synthetic_study import CLIENTS, METHODS, SCENES, changed, make_study

DRAWS = ("relative",)


def summary(method: str, a: float, b: float, unseen: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "algorithm": method,
        "label": method.title(),
        "recipe": "toy",
        "metric": "accuracy",
        "clients": ["a", "b"],
        "personal": {"a": a, "b": b},
        "global_seen": {} if unseen is None else {"a": unseen, "b": unseen},
        "global_unseen": {} if unseen is None else {"c": unseen},
        "bytes_total": 2_500_000,
        "seconds": 200.0,
        **more,
    }


def test_formats_of_percent_points_and_missing_values() -> None:
    assert formats.percent(0.7123) == "71.2"
    assert formats.percent(0.7123, 0.0042) == "71.2 ± 0.4"
    assert formats.percent(None) == formats.percent(float("nan")) == formats.MISSING
    assert formats.points(-0.004) == "−0.4"
    assert [formats.size(n) for n in (0, 999, 1000, 999_999, 1_250_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "1.25 MB",
    ]
    assert [formats.count(n) for n in (812, 1_490_000)] == ["812", "1.49 M"]
    assert [formats.duration(s) for s in (0.42, 12.34, 200, 3599.6, 7500)] == [
        "0.42 s",
        "12.3 s",
        "3 min 20 s",
        "1 h 00 min",
        "2 h 05 min",
    ]
    assert [formats.p_value(p) for p in (0.0004, 0.0321, None)] == ["<0.001", "0.032", "–"]


def seeds_of(level: float, *noise: float) -> dict[int, float]:
    return {seed: level + value for seed, value in enumerate(noise)}


def test_bold_is_what_tests_do_not_tell_from_the_best() -> None:
    low = seeds_of(0.50, 0.01, -0.01, 0.02, 0.0, -0.02)
    high = seeds_of(0.60, 0.0, 0.02, -0.01, 0.01, -0.01)
    near = seeds_of(0.61, 0.02, -0.02, 0.01, -0.03, 0.02)
    alone, every = {0: 0.99}, [0, 1, 2]
    assert best_marks([low, high, near], every) == ["", "best", "best"]
    assert best_marks([low, high, near, {}], [0, 1, 2, 3]) == ["", "best", "best", ""]
    assert best_marks([high, near], [0, 1]) == ["", ""]  # nothing is told from the best
    assert best_marks([low, high, near], [0, 1]) == ["", "best", ""]  # the third is a bound
    assert best_marks([low, high, near], every, lambda i, j: i == 0) == ["", "", ""]  # the first is not tested
    four = [{seed: own[seed] for seed in range(4)} for own in (low, high, near)]
    assert best_marks(four, every) == ["", "", ""]
    assert best_marks([low, high, alone], every) == ["", "", ""]  # one seed: told from none
    assert bold_note([[Cell("1", mark="best")]])[0].startswith("Bold: the best mean, and those that paired t-tests")
    assert bold_note([[Cell("1")]]) == []


def test_marks_are_corrected_over_all_pairs() -> None:
    a = seeds_of(0.50, 0.0, 0.0, 0.0, 0.0, 0.0)
    b = seeds_of(0.51, 0.009, -0.009, 0.009, -0.009, 0.0)
    assert best_marks([a, b], [0, 1]) == ["", ""]  # p = 0.068
    c = seeds_of(0.51, 0.007, -0.007, 0.007, -0.007, 0.0)
    assert best_marks([a, c], [0, 1]) == ["", "best"]  # p = 0.034
    d = seeds_of(0.505, 0.02, -0.02, 0.03, -0.03, 0.0)
    assert best_marks([a, c, d], [0, 1, 2]) == ["", "", ""]  # three pairs: 3 * 0.034


def test_marks_follow_the_p_values_of_the_comparison(tmp_path: Path) -> None:
    study = load(make_study(tmp_path / "study", seeds=5))
    table, pairs = paper_table(study), compare_runs(study.runs).pairs
    own = [pair for pair in pairs if pair.measure == "personal_mean"]
    place = [column.full_title for column in table.columns].index("personal average")
    federated = table.sections[0]
    best = max(federated, key=lambda row: row[place].value or 0.0)[0].text
    for row in federated:
        p = [d.seeds_p for d in own if {study.labels[d.method], study.labels[d.reference]} == {best, row[0].text}]
        told = any(value is not None and value <= 0.05 for value in p)
        assert row[place].mark == ("" if told else "best")
    assert 0 < sum(row[place].mark == "best" for row in federated) < len(federated)
    assert sum("Bold: the best mean" in note for note in table.notes) == 1


def test_bold_needs_five_common_seeds_of_a_pair() -> None:
    high = seeds_of(0.60, 0.0, 0.002, -0.001, 0.001, -0.001)
    low = {seed: 0.4 + 0.001 * seed for seed in range(4)}
    near = seeds_of(0.61, 0.02, -0.02, 0.01, -0.03, 0.02)
    assert best_marks([low, high, near], [0, 1, 2]) == ["", "", ""]


def test_rows_that_may_not_be_tested_have_no_marks() -> None:
    def row(method: str, level: float, **more: Any) -> tuple[str, list[dict[str, Any]]]:
        values = [level + 0.01 * (seed % (3 if level > 0.6 else 2)) for seed in range(5)]
        return method, [summary(method, value, value, seed=seed, **more) for seed, value in enumerate(values)]

    def bold(*rows: tuple[str, list[dict[str, Any]]]) -> int:
        column = next(column for column in COLUMNS if column.group == "personal" and column.title == "mean")
        return sum(
            cell.mark == "best"
            for cell in column.cells([method_row(label, [*map(Summary, runs)]) for label, runs in rows])
        )

    blind = {"controls": {"personal": {"passed": False}}}
    assert bold(row("a", 0.5), row("b", 0.7)) == 1
    assert bold(row("a", 0.5, **blind), row("b", 0.7, **blind)) == 0
    assert bold(row("a", 0.5, **blind), row("b", 0.7)) == 1
    assert bold(row("a", 0.5), row("b", 0.7, metric="vqa_any")) == 0
    other_place = row("a", 0.5)
    for one in other_place[1]:
        del one["personal"]["b"]
    assert bold(other_place, row("b", 0.7)) == 0


def test_one_seed_has_no_marks_and_a_bound_stands_apart() -> None:
    methods = [
        ("Local", [summary("local", 0.5, 0.9)]),
        ("FedAvg", [summary("fedavg", 0.6, 0.7, 0.4)]),
        ("Central", [summary("central", 0.99, 0.99, 0.99)]),
    ]
    table = results_table([(label, [*map(Summary, runs)]) for label, runs in methods])
    local, average, central = table.rows
    assert [cell.text for cell in local] == [
        "Local",
        "50.0",
        "90.0",
        "70.0",
        "50.0",
        "–",
        "–",
        "2.50 MB",
        "3 min 20 s",
    ]
    assert not any(cell.mark for row in (local, average, central) for cell in row)
    assert not any("Bold" in note for note in table.notes)
    assert table.sections[1] == (central,)


def test_seeds_give_mean_and_spread() -> None:
    runs = [summary("fedavg", a, 0.7, 0.4, seed=seed) for seed, a in enumerate((0.60, 0.62))]
    (row,) = results_table([("FedAvg", [*map(Summary, runs)])]).rows
    assert row[1].text == "61.0 ± 1.4"  # sd = 2 / sqrt(2)
    assert row[1].sd == pytest.approx(2**0.5)
    assert row[2].text == "70.0 ± 0.0"


def test_terminal_table_shows_every_method() -> None:
    table = study_table([summary("local", 0.5, 0.9), summary("fedavg", 0.6, 0.7, 0.4)])
    cells = [cell for cell in table.columns[1].cells if isinstance(cell, Text)]
    assert [(cell.plain, cell.style) for cell in cells] == [("50.0", ""), ("60.0", "")]
    file = io.StringIO()
    Console(width=140, file=file).print(table)
    assert "Local" in file.getvalue()


def test_csv_holds_exact_numbers_and_every_client() -> None:
    clients = [f"c{i}" for i in range(20)]
    many = summary("fedavg", 0, 0, 0.4, clients=clients, personal=dict.fromkeys(clients, 1 / 3))
    table = results_table([("FedAvg", [Summary(many)])])
    assert len(table.brief().columns) == 7
    header, row = list(csv.reader(io.StringIO(to_csv(table))))
    assert header[1] == "personal c0 (%)"
    assert len(header) == 27
    assert row[1] == "33.33333333"
    assert row[-2:] == ["2500000", "200"]


def test_writers_escape_their_special_characters() -> None:
    columns = (Column("method", words=True), Column("a_1", "p & q"), Column("b", "p & q"))
    row = (Cell("A|<b>_%"), Cell("1.0 ± 0.1", 1.0, 0.1, "best"), Cell("2", 2.0))
    table = Table("50 % of_all", columns, ((row,), (row,)), ("note <i>",))
    assert "| A\\|\\<b>\\_% | **1.0 ± 0.1** | 2 |\n|  |  |  |" in to_markdown(table)
    latex = to_latex(table)
    assert r"A|$<$b$>$\_\% & \textbf{1.0 $\pm$ 0.1} & 2 \\" in latex
    assert r"\multicolumn{2}{c}{p \& q}" in latex
    assert r"\cmidrule(lr){2-3}" in latex
    html = to_html(table)
    assert "A|&lt;b&gt;_%" in html
    assert "<b>1.0</b><small> ± 0.1</small>" in html
    assert "<i>" not in html


def test_wrong_row_length_is_refused() -> None:
    refuses("2 cells, got 1", Table, "", (Column("a"), Column("b")), (((Cell("1"),),),))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds; every run of FedProx and one of Local failed."""
    folder = make_study(tmp_path_factory.mktemp("tables") / "study")
    shutil.rmtree(folder / "fedprox")
    (folder / "local" / "seed-1" / "summary.json").unlink()
    errors = dict.fromkeys(("fedprox/seed-0", "fedprox/seed-1"), "ValueError: no single answers")
    changed(folder, errors={**errors, "local/seed-1": "RuntimeError: killed"})
    return folder


def test_paper_table_has_every_place_and_both_averages(study: Path) -> None:
    table = paper_table(load(study))
    assert [column.full_title for column in table.columns] == [
        "method",
        *(f"personal {client}" for client in CLIENTS),
        "personal average",
        "personal hurt",
        *(f"unseen {scene}" for scene in SCENES),
        "unseen average",
    ]
    rows = {row[0].text: row[1:] for row in table.rows}
    assert list(rows) == list(METHODS.values())
    summaries = [json.loads((study / "fedp3" / f"seed-{s}" / "summary.json").read_text()) for s in (0, 1)]
    a, b = (100 * s["personal"]["school"] for s in summaries)
    cell = rows["FedP³"][CLIENTS.index("school")]
    assert (cell.value, cell.sd) == pytest.approx(((a + b) / 2, abs(a - b) / 2**0.5))
    unseen = [100 * sum(s["global_unseen"].values()) / 2 for s in summaries]
    assert rows["FedP³"][-1].value == pytest.approx(sum(unseen) / 2)
    assert [cell.text for cell in rows["Local"]][5:] == ["–"] * 4  # no global model


def test_harmonic_mean_is_of_base_and_of_new_classes_alone() -> None:
    views = {"global_seen": {"a": 0.8, "b": 0.6}, "global_unseen": {"new classes": 0.35, "sketch": 0.1}}
    row = method_row("Prompt", [Summary({**summary("promptfl", 0.5, 0.5), **views})])

    def found(*scenes: str) -> list[str]:
        columns = columns_of("paper", Context([row], ("a", "b"), scenes))
        return [column.cells([row])[0].text for column in columns if column.title == "harmonic mean"]

    assert found("new classes", "sketch") == ["46.7"]
    assert found("sketch") == []


def test_paper_table_ranks_federated_methods_only(study: Path) -> None:
    table = paper_table(load(study))
    assert [row[0].text for row in table.sections[1]] == ["Central"]
    assert not any(cell.mark for cell in table.sections[1][0])


def test_failed_cells_are_dashes_with_the_error_as_a_note(study: Path) -> None:
    table = paper_table(load(study))
    failed = next(row for row in table.rows if row[0].text == "FedProx")
    assert [cell.text for cell in failed[1:]] == ["–"] * 9
    assert "FedProx, seeds 0, 1, cannot run here: ValueError: no single answers" in table.notes
    assert "Local, seed 1, failed: RuntimeError: killed" in table.notes
    assert any("FedProx 0" in note and "Local 1" in note for note in table.notes)
    local = next(row for row in table.rows if row[0].text == "Local")
    assert local[1].sd is None  # one seed


def test_the_index_says_which_cells_were_refused(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "study")
    changed(tmp_path / "study", refused=["fedprox/seed-1", "local/seed-1"])
    assert load(tmp_path / "study").failed == (
        "FedProx, seed 0, failed: ValueError: no single answers",
        "FedProx, seed 1, cannot run here: ValueError: no single answers",
        "Local, seed 1, cannot run here: RuntimeError: killed",
    )


def test_hurt_clients_are_counted_over_shared_seeds(tmp_path: Path) -> None:
    # Local training has seed 0 only, where FedAvg is worse at two of four clients; seed 1 would hide one of them.
    folder = make_study(tmp_path / "study")
    levels = {
        ("local", 0): (0.5, 0.5, 0.5, 0.5),
        ("fedavg", 0): (0.4, 0.4, 0.5, 0.6),
        ("fedavg", 1): (0.9, 0.9, 0.9, 0.9),
    }
    for (method, seed), values in levels.items():
        changed(folder / method / f"seed-{seed}", personal=dict(zip(CLIENTS, values, strict=True)))
    (folder / "local/seed-1/summary.json").unlink()
    table = paper_table(load(folder))
    cells = {row[0].text: row[6] for row in table.rows}
    assert (cells["FedAvg"].text, cells["FedAvg"].value) == ("2 of 4", 2)
    assert cells["Local"].text == cells["Central"].text == "–"
    assert any("worse than with Local" in note for note in table.notes)
    shutil.rmtree(folder / "local")
    cells = {row[0].text: row[6] for row in paper_table(load(folder)).rows}
    assert cells["FedAvg"].text == "–"
    assert cells["FedP³"].text.endswith("of 4")  # by FedAvg, where nobody trained alone


def test_notes_name_the_rows_as_the_paper_does_and_tuned_values(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", seeds=1)
    changed(folder, tuned={"fedavg": {"local.lr": 0.01}, "fedprox": {"mu": 0.1, "local.lr": 0.003}})
    notes = paper_table(load(folder)).notes
    assert "In the FedVQA chapter, Local is DT and Central is CT." in notes
    assert (
        "Tuned on validation data: FedAvg local.lr=0.01; FedProx mu=0.1, local.lr=0.003. Not tuned: Local, FedP³, "
        "Central." in notes
    )


def test_many_clients_leave_their_columns_to_csv(study: Path) -> None:
    run = load(study / "fedp3" / "seed-0").runs[0]
    clients = [f"c{i}" for i in range(9)]
    content = {**run.summary.content, "clients": clients, "personal": dict.fromkeys(clients, 0.5)}
    many = replace(run, summary=Summary(content))
    table = paper_table(StudyResults(study, "", (many,)))
    assert [column.full_title for column in table.brief().columns] == ["method", "personal average", "unseen average"]
    assert len(table.columns) == 1 + 9 + 1 + 2 + 1  # nobody to be compared with


def test_tables_are_written_beside_the_runs(study: Path) -> None:
    paths = write_tables(study)
    names = [f"{n}.{e}" for n in ("table", "compare") for e in ("md", "csv", "tex")]
    assert [path.name for path in paths] == [
        *names, "compare-seeds.csv", "compare-clients.csv",
    ]  # fmt: skip
    rows = list(csv.reader(io.StringIO((study / "table.csv").read_text(encoding="utf-8"))))
    assert rows[0][:3] == ["method", "personal transport (%)", "personal transport sd (%)"]
    assert "differences to FedAvg in points" in (study / "compare.md").read_text(encoding="utf-8")
    assert "differences to FedP³" in write_tables(study, ["fedp3"])[3].read_text(encoding="utf-8")
    assert r"\textbf" not in (study / "table.tex").read_text(encoding="utf-8")
    alone = write_tables(study / "fedp3" / "seed-0")
    assert [path.name for path in alone] == ["table.md", "table.csv", "table.tex"]


def test_study_in_which_everything_failed(tmp_path: Path) -> None:
    index = {"runs": [{"method": "dkd", "seed": 0}], "methods": ["dkd"], "errors": {"dkd/seed-0": "ValueError: no"}}
    (tmp_path / "summary.json").write_text(json.dumps(index))
    refuses("found none of them; the first that failed: ValueError: no", load, tmp_path)


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
    refuses(r"relative must name a method .* got 'fedfoo'", compare([study]).relative, "fedfoo")


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


def summary_file(folder: Path) -> dict[str, Any]:
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
        for clients in summary_file(runs["wide"])[key].values():
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
    assert summary_file(runs["feddat"])["bytes_up"] == summary_file(runs["adapter"])["bytes_up"]


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
    found = {name: summary_file(folder)["parameters"] for name, folder in runs.items()}
    sent = sum(adapters(runs["adapter"]).values())
    assert found["adapter"]["sent"] == found["feddat"]["sent"] == sent
    assert found["adapter_local"]["sent"] == 0
    assert found["adapter"]["trained"] == found["adapter_local"]["trained"] > sent
    assert found["feddat"]["trained"] == found["adapter"]["trained"] + sent  # the client's own adapter too


def test_the_columns_of_a_table(runs: dict[str, Path]) -> None:
    study = load(runs["adapter"])
    parameters = summary_file(runs["adapter"])["parameters"]
    overhead = columns_of("paper", Context([], judged=View.DEPLOYED))[:4]
    trained, sent, share, up = (column.cells([MethodRow("", study.runs)])[0] for column in overhead)
    assert (trained.value, sent.value) == (parameters["trained"], parameters["sent"])
    assert share.value == pytest.approx(100 * parameters["sent"] / parameters["total"])
    rounds = summary_file(runs["adapter"])["bytes_up"]
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
