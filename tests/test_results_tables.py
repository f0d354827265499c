"""Formats, the headline table and its writers."""

import csv
import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from confed.results import formats
from confed.results.tables import marks, results_table, study_table
from confed.results.writers import Cell, Column, Table, to_csv, to_html, to_latex, to_markdown


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


def test_formats() -> None:
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


def test_marks_follow_the_shown_decimal() -> None:
    assert marks([71.24, 71.16, None, 70.0]) == ["best", "best", "", "second"]
    assert marks([50.0, 50.0]) == ["", ""]


def test_best_and_second_leave_out_the_bound() -> None:
    methods = [
        ("Local", [summary("local", 0.5, 0.9)]),
        ("FedAvg", [summary("fedavg", 0.6, 0.7, 0.4)]),
        ("Central", [summary("central", 0.99, 0.99, 0.99)]),
    ]
    table = results_table(methods)
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
    assert [cell.mark for cell in local] == ["", "second", "best", "best", "second", "", "", "", ""]
    assert [cell.mark for cell in average][1:5] == ["best", "second", "second", "best"]
    assert not any(cell.mark for cell in central)
    assert table.sections[1] == (central,)


def test_seeds_give_mean_and_spread() -> None:
    runs = [summary("fedavg", a, 0.7, 0.4, seed=seed) for seed, a in enumerate((0.60, 0.62))]
    (row,) = results_table([("FedAvg", runs)]).rows
    assert row[1].text == "61.0 ± 1.4"  # sd = 2 / sqrt(2)
    assert row[1].sd == pytest.approx(2**0.5)
    assert row[2].text == "70.0 ± 0.0"


def test_terminal_table_shows_every_method() -> None:
    table = study_table([summary("local", 0.5, 0.9), summary("fedavg", 0.6, 0.7, 0.4)])
    cells = [cell for cell in table.columns[1].cells if isinstance(cell, Text)]
    assert [(cell.plain, cell.style) for cell in cells] == [("50.0", "underline"), ("60.0", "bold")]
    file = io.StringIO()
    Console(width=140, file=file).print(table)
    assert "Local" in file.getvalue()


def test_csv_holds_exact_numbers_and_every_client() -> None:
    clients = [f"c{i}" for i in range(20)]
    many = summary("fedavg", 0, 0, 0.4, clients=clients, personal=dict.fromkeys(clients, 1 / 3))
    table = results_table([("FedAvg", [many])])
    assert len(table.brief().columns) == 7
    header, row = list(csv.reader(io.StringIO(to_csv(table))))
    assert header[1] == "personal c0 (%)"
    assert len(header) == 27
    assert row[1] == "33.33333333"
    assert row[-2:] == ["2500000", "200"]


def test_writers_escape_their_special_characters() -> None:
    columns = (Column("method", words=True), Column("a_1", "p & q"), Column("b", "p & q"))
    row = (Cell("A|<b>_%"), Cell("1.0 ± 0.1", 1.0, 0.1, "best"), Cell("2", 2.0, mark="second"))
    table = Table("50 % of_all", columns, ((row,), (row,)), ("note <i>",))
    assert "| A\\|\\<b>\\_% | **1.0 ± 0.1** | <u>2</u> |\n|  |  |  |" in to_markdown(table)
    latex = to_latex(table)
    assert r"A|$<$b$>$\_\% & \textbf{1.0 $\pm$ 0.1} & \underline{2} \\" in latex
    assert r"\multicolumn{2}{c}{p \& q}" in latex
    assert r"\cmidrule(lr){2-3}" in latex
    html = to_html(table)
    assert "A|&lt;b&gt;_%" in html
    assert "<b>1.0</b><small> ± 0.1</small>" in html
    assert "<i>" not in html


def test_wrong_row_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells, got 1"):
        Table("", (Column("a"), Column("b")), (((Cell("1"),),),))
