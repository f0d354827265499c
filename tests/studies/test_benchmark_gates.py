"""Gates of a benchmark from its recipe: which rows are its references, and what is run for them."""

import json
import shutil
from pathlib import Path

import pytest

from command_line import Capture, confed
from confed.recipes.recipe import load_recipe, parse_recipe
from confed.results.gates import Rows
from confed.studies.gates import rows_for_gates, with_references
from confed.studies.study import grid_of

SMALL = ["data.train=16", "data.validation=4", "data.test=8", "run.rounds=1", "model.layers=1", "model.width=16"]
SMALL += ["run.controls=all", "run.modality_matrix=false"]


def test_feddats_references_are_told_by_what_they_train() -> None:
    recipe = load_recipe("feddat_domain")
    rows = rows_for_gates(with_references(recipe.with_rows(recipe.table)))
    assert rows == Rows("central", "adapter_local", ("clf_local", "adapter_local"), ("full", "adapter"))


def test_missing_references_are_added() -> None:
    recipe = load_recipe("modalities").with_rows(["fedavg"])
    assert with_references(recipe).methods == ("fedavg", "local", "central")
    assert rows_for_gates(with_references(recipe)) == Rows("central", "local")
    assert with_references(load_recipe("modalities")).methods == load_recipe("modalities").methods


def test_one_and_a_half_times_the_rounds_are_rounded_up() -> None:
    grid = grid_of("modalities", ["run.rounds=5"], gates=True)
    assert [recipe.run.rounds for recipe, _ in grid.recipes.values()] == [5, 8]
    assert list(grid.recipes) == ["rounds-5", "rounds-8"]


def test_gates_of_a_recipe_and_of_its_study(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "gates"
    command = ["compare", "modalities", "--gates", *SMALL, "--methods", "fedavg", "--workers", "1", "--out", out]
    assert confed(*command) == 0
    capsys.readouterr()
    content = json.loads((out / "gates.json").read_text())
    found = {gate["key"]: gate for gate in content["gates"]}
    assert content["rounds"] == 1
    assert found["d"]["values"]["ceiling"] == pytest.approx(78.99, abs=0.01)
    assert found["b"]["values"].keys() == {"FedAvg", "Local only", "Centralised"}
    assert found["a"]["passed"] is not None
    assert found["e"]["passed"] is not None
    assert found["c"]["passed"] is None
    # Nothing is run for a finished study, and without longer runs nobody knows whether its rows have converged.
    assert confed("compare", out / "rounds-1", "--gates", "--json") == 0
    again = {gate["key"]: gate for gate in json.loads(capsys.readouterr().out)["gates"]}
    assert again["b"]["passed"] is None
    assert again["a"] == found["a"]
    assert confed("compare", out / "rounds-1", out / "rounds-2", "--gates", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gates"] == content["gates"]
    (out / "sweep.json").unlink()  # as an earlier version left such a folder
    assert confed(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gates"] == content["gates"]
    assert confed("resume", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gates"] == content["gates"]


def test_a_study_that_differs_in_more_than_rounds_is_refused(tmp_path: Path, capsys: Capture) -> None:
    from confed.studies.runner import run_study
    from confed.studies.study import open_study

    recipe = load_recipe("modalities", [*SMALL, "run.evaluate_every=0"]).with_rows(["local"])
    open_study(recipe, tmp_path / "study", [0, 1])
    run_study(tmp_path / "study")
    assert confed("compare", tmp_path / "study", tmp_path / "study", "--gates") != 0
    assert "1.5 times the rounds" in capsys.readouterr().err
    plain = "rounds = 1\n"
    for changes, message in [
        ({0: [(plain, "rounds = 2\n")], 1: []}, "first study, 1, got 1 in local/seed-1"),
        ({0: [(plain, "rounds = 2\n"), ("train = 16", "train = 48")]}, "data.train of local/seed-0 is 48 here, 16 in"),
        ({seed: [(plain, "rounds = 2\n"), ("memory = 1.0", "memory = 2.0")] for seed in (0, 1)}, ""),
    ]:
        longer = shutil.copytree(tmp_path / "study", tmp_path / "longer", dirs_exist_ok=True)
        for seed, texts in changes.items():
            file = longer / f"local/seed-{seed}/recipe.toml"
            text = file.read_text()
            for old, new in texts:
                assert old in text
                text = text.replace(old, new)
            file.write_text(text)
        assert (confed("compare", tmp_path / "study", longer, "--gates") == 0) is not bool(message)
        assert message in " ".join(capsys.readouterr().err.split())


def test_gates_of_multi_label_data_compare_average_precision(tmp_path: Path) -> None:
    small = ["data.clients=2", "data.train=4", "data.validation=2", "data.test=6", "data.unseen=2", "run.cohort=2"]
    arguments = [*small, "run.rounds=1", "local.epochs=1", "--methods", "local", "--workers", "1"]
    assert confed("compare", "fedlgt_scenes", "--gates", *arguments, "--out", tmp_path) == 0
    found = {gate["key"]: gate for gate in json.loads((tmp_path / "gates.json").read_text())["gates"]}
    [summary] = (tmp_path / "rounds-1/central").rglob("summary.json")
    values = json.loads(summary.read_text())["multilabel"]["global"]
    assert found["a"]["values"]["central"] == pytest.approx(100 * values["C-AP"])
    assert {key for key, gate in found.items() if gate["passed"] is None} == {"c", "d", "e"}


def test_a_row_named_as_a_reference_is_not_replaced() -> None:
    text = '[algorithm]\nname = "fedavg"\n[model]\nname = "modal_transformer_mini"\n[task]\nname = "vqa"\n'
    text += '[data]\nname = "modalities"\n[study]\nmethods = ["local"]\n[methods.local]\nname = "fedavg"\n'
    assert with_references(parse_recipe(text)).methods == ("local", "central")
