"""Recipes that name a module: refused before anything of it is imported, unless the user allowed the module."""

import json
import os
import sys
from pathlib import Path

import pytest

import confed
from command_line import refused
from confed import registry
from confed.cli import main
from confed.recipes.recipe import load_recipe
from confed.registry import ALLOWED, algorithms, allowing_code


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ALLOWED, "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A module whose import leaves a file behind, and which also holds a function of the operating system."""
    sprung = tmp_path / "sprung"
    (tmp_path / "trap_of_tests.py").write_text(
        f"from pathlib import Path\nfrom os import system\nfrom confed import Algorithm, Traits\n"
        f"Path({str(sprung)!r}).touch()\n"
        "class Mine(Algorithm):\n    traits = Traits(label='Mine', neutral='none')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "trap_of_tests", None)
    monkeypatch.delitem(sys.modules, "trap_of_tests")
    return sprung


def test_a_module_that_is_not_allowed_is_not_even_imported(trap: Path) -> None:
    with refused(r"'trap_of_tests', which you have not allowed.*--allow-code trap_of_tests"):
        _ = algorithms["trap_of_tests:Mine"]
    assert not trap.exists()
    assert "trap_of_tests" not in sys.modules


@pytest.mark.parametrize("name", ["os:system", "confed.cli:main", "confed.cli.app:main", "__main__:os", "trap:a.b"])
def test_no_other_name_gets_through(name: str) -> None:
    for kind in (registry.algorithms, registry.models, registry.datasets, registry.tasks):
        with refused("which you have not allowed"):
            _ = kind[name]


def test_what_a_module_imports_is_not_the_module_s(trap: Path) -> None:
    with allowing_code(["trap_of_tests"]):
        assert algorithms["trap_of_tests:Mine"].traits.label == "Mine"
        with refused(r"is defined in another module, '(posix|nt)', which you have not allowed"):
            _ = algorithms["trap_of_tests:system"]
    assert os.environ[ALLOWED] == ""


def test_a_package_allows_its_modules_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boxed_methods").mkdir()
    (tmp_path / "boxed_methods" / "__init__.py").write_text("")
    (tmp_path / "boxed_methods" / "inner.py").write_text("def thing():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with allowing_code(["boxed_methods"]):
        assert registry.datasets["boxed_methods.inner:thing"]() == 1
        with refused("not allowed"):
            _ = registry.datasets["boxed_methods_else:thing"]


def test_the_long_name_of_a_registered_thing_needs_no_permission() -> None:
    assert algorithms["confed.algorithms.fedavg:FedAvg"] is algorithms["fedavg"]
    with refused("not allowed"):
        _ = algorithms["confed.algorithms.fedavg:Algorithm"]


def test_the_user_s_settings_allow(trap: Path, tmp_path: Path) -> None:
    settings = tmp_path / "config" / "confed" / "settings.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('allow_code = ["trap_of_tests"]\n')
    assert algorithms["trap_of_tests:Mine"].traits.label == "Mine"
    settings.write_text('allow_code = "trap_of_tests"\n')
    with refused(r"settings\.toml: allow_code must be a list"):
        _ = algorithms["trap_of_tests:Mine"]


def test_python_allows_by_a_function(trap: Path) -> None:
    confed.allow_code("trap_of_tests")
    assert algorithms["trap_of_tests:Mine"].traits.label == "Mine"
    with refused("names of modules"):
        confed.allow_code("a,b")


def test_a_module_that_is_not_found_is_looked_for_on_the_path() -> None:
    with allowing_code(["nowhere_to_be_found"]), refused(r"PYTHONPATH=\. before the command"):
        load_recipe("fedvqa_scenes", ["algorithm.name=nowhere_to_be_found:Mine"])


@pytest.mark.parametrize("verb", ["run", "predict", "evaluate", "export", "resume", "forget", "compare", "report"])
def test_a_run_folder_s_recipe_runs_no_code(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, proof = tmp_path / "run", tmp_path / "proof"
    run.mkdir()
    (run / "recipe.toml").write_text(f'[algorithm]\nname = "os:system"\ncommand = "touch {proof}"\n')
    (run / "summary.json").write_text(json.dumps({"clients": ["a"], "label": "x", "complete": True}))
    (run / "metrics.jsonl").write_text("")
    if verb == "resume":
        (run / "summary.json").unlink()
    more = {
        "run": [str(run / "recipe.toml"), "--out", str(tmp_path / "out")],
        "evaluate": [str(run), "--data", "name=digits"],
        "predict": [str(run), "--image", "x.png", "--question", "what?"],
        "export": [str(run), str(tmp_path / "out")],
        "resume": [str(run)],
        "forget": [str(run), "--client", "a"],
        "compare": [str(run), str(run)],
        "report": [str(run)],
    }
    with pytest.raises(SystemExit) as ended:
        main([verb, *more[verb]])
    said = capsys.readouterr().err
    if verb in ("compare", "report"):  # of what is written there they need no code
        assert ended.value.code == 0
    else:
        assert ended.value.code == 2
        assert said.count("\n") == 1
        assert "'os', which you have not allowed: where you trust it, add --allow-code os, " in said
    assert not proof.exists()


def test_the_command_s_option_allows_for_this_command_alone(
    trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["data.train=4", "data.validation=2", "data.test=2", "model.name=vilt_tiny", "run.rounds=0"]
    arguments = ["run", "fedvqa_scenes", "study.methods=[]", "algorithm.name=trap_of_tests:Mine", *small]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path / "out"), "--allow-code", "trap_of_tests"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "run.rounds" in said  # the recipe's next fault: the method was found
    assert trap.exists()
    assert os.environ[ALLOWED] == ""


def test_every_verb_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["run"], ["client"], ["doctor"], ["federation", "new"], ["data", "describe"], ["compare"], ["tune"]):
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
        assert "--allow-code" in capsys.readouterr().out


def test_run_takes_a_list_of_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.preset=dirichlet", "data.clients=2", "data.train=4", "data.validation=2", "data.test=2"]
    small += ["data.unseen=[]", "model.name=vilt_tiny", "run.rounds=1", "run.gallery=0", "run.workers=1"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "fedvqa_scenes", *small, "--methods", "fedavg,local", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"fedavg", "local"}
    with pytest.raises(SystemExit) as ended:
        main(["run", "fedvqa_scenes", *small, "--methods", "fedavg,nobody", "--out", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "no algorithm is called 'nobody'" in " ".join(capsys.readouterr().err.split())
