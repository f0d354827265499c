"""Commands that need a GPU and official files: their recipes, rows and overrides exist."""

import re
import shlex

import pytest

from confed.prepare.pretraining import MINIS
from confed.recipes.recipe import load_recipe, packaged_recipes
from repository import script_module

papers_tables = script_module("benchmarks/papers_tables.py")

COMMANDS = [command for job in papers_tables.JOBS for command in job.commands]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:3]))
def test_a_command_names_what_there_is(command: str) -> None:
    verb, *words = shlex.split(command)
    assert "DATA" in command or verb in ("weights", "tune", "compare", "data")
    if verb == "weights":
        assert words[1] in MINIS
    name = next((word for word in words if word in packaged_recipes()), None)
    if verb in ("compare", "tune") and "--gates" not in words:
        assert name is not None
        overrides = [re.sub(r"(=[^,\[]+),.*", r"\1", w) for w in words if re.match(r"\w+\.[\w.]+=", w)]
        recipe = load_recipe(name, overrides)
        rows = words[words.index("--methods") + 1] if "--methods" in words else "all"
        for row in recipe.table if rows == "all" else rows.split(","):
            assert recipe.method(row)


def test_the_script_prints_what_it_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["papers_tables", "bicsl", "--data", "there"])
    assert papers_tables.main() == 0
    printed = capsys.readouterr().out
    assert "confed compare bicsl_vqa2_official --models all --seeds 3 data.root=there/vqa_v2" in printed
    assert "feddat" not in printed
