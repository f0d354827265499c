"""Descriptions of methods, models, datasets, tasks, recipes and sections, and lists in groups."""

import json
import re
import shlex
from pathlib import Path

import pytest

from command_line import Capture, Patch, confed, refusal
from confed import registry
from confed.cli.catalogue import listing, packaged, papers
from confed.cli.description import Description, describe_name, names, settings
from confed.cli.list import page
from confed.federation.traits import GROUPS
from confed.recipes.recipe import load_recipe
from refusals import refuses

EVERYTHING = [(kind, name) for kind, listed in names().items() for name in listed]


def described(kind: str, name: str) -> Description:
    (found,) = describe_name(name, kind)
    return found


@pytest.mark.filterwarnings("ignore:the model .* writes its answers")
@pytest.mark.parametrize("kind", names())
def test_pages_fit_80_columns_and_commands_are_valid(kind: str) -> None:
    for name in names()[kind]:
        one = described(kind, name)
        text = [re.sub(r"(?<!\\)\[/?(bold)?\]", "", line).replace("\\[", "[") for line in page(one, 80)]
        commands = {f"  {line}" for line in one.examples}
        wide = [line for whole in text for line in whole.splitlines() if len(line) > 80 and line not in commands]
        assert not wide, (name, wide)
        assert one.summary, name
        assert one.examples, name
        for command in one.examples:
            runs(command)


def runs(command: str) -> None:
    """Check of a command without running it: the recipe, its keys and its rows."""
    words = shlex.split(command)
    if words[:2] != ["confed", "run"]:
        assert words[1] in ("compare", "data", "show"), command
        return
    rest = words[2:]
    rows = rest[rest.index("--methods") + 1].split(",") if "--methods" in rest else []
    given = [word for word in rest if "=" in word]
    source = rest[0] if "=" not in rest[0] else "fedvqa_scenes"
    recipe = load_recipe(source, given)
    if rows:
        recipe.with_rows(rows)


@pytest.mark.parametrize("kind", ["method", "task", "section"])
def test_every_setting_says_what_it_means(kind: str) -> None:
    for name in names()[kind]:
        assert not [setting.name for setting in described(kind, name).settings if not setting.meaning], name


def test_settings_are_those_of_the_constructor() -> None:
    lam = {setting.name: setting for setting in settings(registry.algorithms["fedp3"])}["lam"]
    assert (lam.kind, lam.default, lam.required) == ("number, at least 0", "1.0", False)
    root = {setting.name: setting for setting in settings(registry.datasets["chat_records"])}["root"]
    assert (root.kind, root.required) == ("path", True)
    nested = {setting.name: setting for setting in settings(registry.algorithms["fedavg"])}
    assert nested["server"].kind == "table"
    assert nested["server.optimizer"].default == '"none"'
    assert nested["update_privacy.clip"].required


def test_papers_are_those_of_the_page() -> None:
    found = papers()
    assert set(found) == set(registry.algorithms.names())
    assert "ACM MM 2023" in found["fedp3"].source
    assert any("softmax is monotone" in difference.why for difference in found["fedp3"].differences)
    assert [d.text for d in found["fedkd"].differences] != [d.text for d in found["moon"].differences]
    assert any(difference.text.startswith("KgCoOp") for difference in found["promptfl"].differences)
    assert not any(difference.text.startswith("PmcmFL") for difference in found["modality_transformer"].differences)


def test_groups_are_declared_by_methods() -> None:
    groups = {row["name"]: row["group"] for row in listing("methods")}
    assert set(groups.values()) == set(GROUPS)
    assert (groups["bicsl"], groups["fedavg"], groups["ditto"]) == ("split", "averaging", "personalisation")
    places = [GROUPS.index(row["group"]) for row in listing("methods")]
    assert places == sorted(places)


def test_filters_leave_what_fits_them() -> None:
    assert {row["group"] for row in listing("recipes", task="multilabel")} == {"multilabel"}
    assert "fedlgt" in {row["name"] for row in listing("methods", task="multilabel")}
    assert {row["name"] for row in listing("methods", paper="feddat")} == {"feddat", "fedpeft"}
    assert {row["name"] for row in listing("methods", paper="mcmahan")} == {"fedavg"}
    assert "feddat_scenes" in {row["name"] for row in listing("recipes", paper="FedDAT")}
    refuses("did you mean 'vqa'", listing, "methods", task="vqaa")
    refuses("--paper filters methods and recipes, got 'models'", listing, "models", paper="x")


@pytest.mark.parametrize("kind", ["methods", "models", "tasks", "datasets", "recipes"])
def test_lists_fit_80_columns(kind: str, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert confed("list", kind) == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    shown = {word for line in lines for word in line.split()[:1]}
    assert {row["name"] for row in listing(kind)} <= shown


def test_show_prints_suggests_and_writes(tmp_path: Path, capfd: Capture) -> None:
    assert confed("show", "ditto") == 0
    out = capfd.readouterr().out
    for text in ("Li et al., ICML 2021", "lam = 0.1   number, at least 0", "confed run chat_captions --methods ditto"):
        assert text in out
    assert "did you mean fedprox" in refusal(capfd, "show", "fedproxx")
    assert confed("show", "local") == 0  # a method, and a section of recipes
    out = capfd.readouterr().out
    assert "local · Local only (method, references)" in out
    assert "batch_size = 32" in out
    assert confed("show", "local", "--kind", "section", "--json") == 0
    assert [one["kind"] for one in json.loads(capfd.readouterr().out)] == ["section"]
    assert confed("show", "fedvqa_scenes", "--toml") == 0
    (tmp_path / "mine.toml").write_text(capfd.readouterr().out, encoding="utf-8")
    assert load_recipe(tmp_path / "mine.toml").methods == load_recipe("fedvqa_scenes").methods


OWN = """
from dataclasses import dataclass
from confed import Algorithm

@dataclass(frozen=True)
class Gentle(Algorithm):
    \"\"\"FedAvg with a penalty on large scores.

    Attributes:
        lam: weight of the penalty.
    \"\"\"

    lam: float = 0.25

def pictures(*, count: int = 3):
    \"\"\"Pictures of our own.

    Args:
        count: how many.
    \"\"\"
"""


def test_show_describes_what_is_the_user_s_own(tmp_path: Path, capfd: Capture, monkeypatch: Patch) -> None:
    (tmp_path / "shown_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(registry.ALLOWED, "")
    allowed = ("--allow-code", "shown_own")
    assert confed("show", "shown_own:Gentle", *allowed) == 0
    out = capfd.readouterr().out
    for text in ("FedAvg with a penalty", "lam = 0.25", "--methods shown_own:Gentle --allow-code shown_own"):
        assert text in out
    assert confed("show", "shown_own:pictures", "--kind", "dataset", *allowed) == 0
    assert "count = 3   whole number" in capfd.readouterr().out
    for arguments, message in [
        (("shown_own:Gentle",), "which you have not allowed"),
        (("shown_own:pictures", *allowed), "say which with --kind"),
    ]:
        assert message in refusal(capfd, "show", *arguments)
    file = tmp_path / "mine.toml"
    recipe = load_recipe("fedvqa_scenes", ['study.methods=["local", "ditto"]'])
    file.write_text("# Two methods.\n#\n# More.\n" + recipe.to_toml(), encoding="utf-8")
    assert confed("show", str(file)) == 0
    out = capfd.readouterr().out
    assert "Two methods." in out
    assert "local, ditto" in out
    assert confed("show", str(file), "--toml") == 0
    assert capfd.readouterr().out == file.read_text()
    file.write_text("[run]\nround = 3\n", encoding="utf-8")
    assert "algorithm.name must be given" in refusal(capfd, "show", str(file))


def test_every_recipe_is_described() -> None:
    assert {one.name for one in packaged()} == set(names()["recipe"])
    assert all(one.summary for one in packaged())
