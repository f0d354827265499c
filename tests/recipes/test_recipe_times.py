"""Every packaged recipe says at its head how long it takes on two cores, or why that was not measured."""

import re
from importlib import import_module
from importlib.resources import files
from typing import Any

import pytest

from command_line import Patch
from confed.cli.catalogue import listing
from confed.datasets.scenes import PRESETS
from confed.recipes.recipe import load_recipe, packaged_recipes
from repository import ROOT

MEASURED = re.compile(
    r"# Time: (\d+(\.\d)?) (s|min|h) on two cores per method and seed "
    r"\((\d+(\.\d)? (s|min|h) of processor time with \w+(; estimated from \d+ of \d+ rounds)?"
    r"|the same run (but for (?P<but>alpha|the rate) )?as (?P<other>\w+), where it was measured)\)"
)

OTHERWISE = re.compile(
    r"# Time: (not measured: .{10,}|\d+ to \d+ s of processor time per method and seed \(measured .+\)"
    r"|about \d+ minutes? of processor time for \w+ methods and one seed.*)"
)


def own_run(name: str, but: str | None) -> dict[str, Any]:
    """What decides the run of a recipe's own method, defaults filled in, without the key that differs."""
    sections = {key: dict(section) for key, section in load_recipe(name).sections.items()}
    if sections["data"].get("unseen", ()) is None:  # the preset's own
        sections["data"]["unseen"] = PRESETS[sections["data"]["preset"]].unseen
    section, key = {"alpha": ("algorithm", "alpha"), "the rate": ("local", "lr")}.get(but or "", ("", ""))
    sections.get(section, {}).pop(key, None)
    return sections


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_recipe_says_how_long_it_takes(name: str) -> None:
    text = (files("confed.recipes") / f"{name}.toml").read_text(encoding="utf-8")
    head = text[: text.index("[algorithm]")]
    lines = [line for line in head.splitlines() if line.startswith("# Time:")]
    assert len(lines) == 1
    found = MEASURED.fullmatch(lines[0])
    assert found or OTHERWISE.fullmatch(lines[0]), lines[0]
    if found and found["other"]:
        other = (files("confed.recipes") / f"{found['other']}.toml").read_text(encoding="utf-8")
        assert f"# Time: {found[1]} {found[3]} on two cores per method and seed" in other
        assert own_run(name, found["but"]) == own_run(found["other"], found["but"])
    assert next(row["time"] for row in listing("recipes") if row["name"] == name) == lines[0].removeprefix("# Time: ")


def test_the_line_of_a_measurement(monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recipe_times = import_module("recipe_times")
    used = recipe_times.Usage(main=10.0, workers=40.0)
    assert recipe_times.line(used, "fedavg") == (
        "# Time: 30 s on two cores per method and seed (50 s of processor time with fedavg)"
    )
    longer = used.with_rounds(share=0.5, times=11)  # half of it eleven times
    assert longer == recipe_times.Usage(60.0, 240.0)
    said = recipe_times.line(longer, "fedavg", "; estimated from 2 of 22 rounds")
    assert said == (
        "# Time: 3.0 min on two cores per method and seed "
        "(5.0 min of processor time with fedavg; estimated from 2 of 22 rounds)"
    )
    assert MEASURED.fullmatch(said)
    given = (0.84, 9.96, 89.0, 91.0, 5399.0, 5401.0, 36_001.0)
    assert [recipe_times.words(seconds) for seconds in given] == [
        "0.8 s", "10 s", "89 s", "1.5 min", "90 min", "1.5 h", "10 h",
    ]  # fmt: skip
