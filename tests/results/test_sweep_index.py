"""Index of a sweep, of this version and of 0.1."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confed.report.tables.sweep import write_sweep
from confed.results.sweep import Point, Sweep, read_sweep, write_sweep_index
from refusals import refuses

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
