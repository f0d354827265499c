"""Steps of split learning in the report: who worked when, and what a step sends."""

import json
from pathlib import Path

import pytest

from confed.report.report import render
from confed.report.sections.split_steps import Span, busy, busy_table, drawing, section, spans_of, traffic_table
from confed.results.runs import load
from synthetic_study import CLIENTS, changed, make_run

TRAFFIC = {
    "receive": {"calls": 12, "up": 0, "down": 1200},
    "step": {"calls": 60, "up": 60_000, "down": 30_000},
    "send": {"calls": 12, "up": 1200, "down": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    changed(run, traffic=TRAFFIC)
    spans = [
        (CLIENTS[0], "receive", 1.0, 1.5), (CLIENTS[1], "receive", 1.0, 2.0), ("main", "step", 2.0, 2.25),
        (CLIENTS[0], "step", 2.0, 3.0), ("aux", "send", 3.0, 3.0),
    ]  # fmt: skip
    lines = [{"round": 1, "party": p, "what": w, "start": s, "end": e} for p, w, s, e in spans]
    (run / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_run(tmp_path / "local" / "seed-0", "local", 0)
    return tmp_path


def test_busy_is_the_share_of_time_in_which_a_party_works() -> None:
    spans = [Span("a", "x", 0, 2), Span("a", "y", 1, 3), Span("a", "x", 5, 6), Span("b", "x", 9, 10)]
    assert busy(spans) == pytest.approx({"a": 0.4, "b": 0.1})  # overlapping spans count once
    assert busy([]) == {}
    assert busy([Span("a", "x", 1, 1)]) == {"a": 0.0}


def test_the_table_of_parties_has_clients_first(folder: Path) -> None:
    table = busy_table(load(folder))
    assert table is not None
    assert [column.title for column in table.columns] == [
        "method",
        CLIENTS[0],
        CLIENTS[1],
        "main",
        "aux",
        "spans",
        "time",
    ]
    (row,) = table.rows
    assert [cell.value for cell in row[1:5]] == pytest.approx([75, 50, 12.5, 0])
    assert (row[5].value, row[6].value) == (5, 2)


def test_bytes_are_per_call_and_per_round(folder: Path) -> None:
    study = load(folder)
    rounds = study.of("fedavg")[0].summary.content["rounds"]
    table = traffic_table(study)
    assert table is not None
    step = next(row for row in table.rows if row[1].text == "step")
    assert step[0].text == "FedAvg"
    assert [cell.value for cell in step[3:]] == pytest.approx(
        [1000, 500, 60 / rounds, 60_000 / rounds, 30_000 / rounds]
    )


def test_the_report_has_the_steps_and_says_what_travels(folder: Path) -> None:
    study = load(folder)
    assert len(spans_of(study.of("fedavg")[0])) == 5
    assert spans_of(study.of("local")[0]) == []
    picture = drawing(study)
    assert picture is not None
    assert picture.inline() == drawing(study).inline()  # type: ignore[union-attr]
    html = render(study)
    assert "Steps of split learning" in html
    assert "FedAvg: activations and their gradients" in html
    assert "Bytes per step and per round" in html


def test_runs_without_steps_have_no_such_section(tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    study = load(tmp_path)
    assert section(study) == ""
    assert "only model weights are exchanged" in render(study)
    (tmp_path / "fedavg" / "seed-0" / "timeline.jsonl").write_text('{"start": 1}\nnonsense\n')
    assert spans_of(load(tmp_path).runs[0]) == []


def test_every_action_of_split_methods_is_put_into_words(folder: Path) -> None:
    changed(folder / "fedavg" / "seed-0", traffic={**TRAFFIC, "top": {"calls": 20, "up": 10, "down": 10}})
    table = traffic_table(load(folder))
    assert table is not None
    assert all(row[2].text for row in table.rows)
    assert any("one call more than it has batches" in note for note in table.notes)


def test_rounds_are_those_of_the_runs_that_counted(folder: Path) -> None:
    broken = make_run(folder / "fedavg" / "seed-1", "fedavg", 1)
    (broken / "summary.json").unlink()
    lines = (broken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join(lines[:3]))  # it was interrupted in its second round
    study = load(folder)
    table = traffic_table(study)
    assert table is not None
    step = next(row for row in table.rows if row[1].text == "step")
    rounds = study.of("fedavg")[0].summary.content["rounds"]
    assert rounds != study.of("fedavg")[1].summary.content["rounds"]
    assert step[5].value == pytest.approx(60 / rounds)


def test_the_timeline_names_servers_and_says_they_take_turns(folder: Path) -> None:
    html = section(load(folder))
    assert "aux averages the clients" in html
    assert "take turns" not in html  # how many processes there were is not known here
    path = folder / "fedavg" / "seed-0" / "recipe.toml"
    path.write_text(path.read_text().replace("[run]", "[run]\nworkers = 1"))
    assert "take turns" in section(load(folder))
