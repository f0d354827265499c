"""Kinds of results folders."""

from pathlib import Path

import pytest

from confed.results.folder import kind_of, run_folders
from refusals import refuses

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
