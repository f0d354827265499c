"""Rows with tasks of their own, the models of a recipe, and the same methods with several models."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from command_line import Capture, Patch, confed, refusal, refused
from confed.cli.study import finish
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.comparison import compare
from confed.report.tables.models import model_studies, model_tables, pairs_of, write_models
from confed.report.tables.paper import paper_table
from confed.results.folder import kind_of
from confed.results.metric import metric_note, metric_of, types_in_order
from confed.results.runs import load
from confed.results.sweep import Sweep, read_sweep
from confed.studies.study import models_of, open_sweep, points_of_models
from refusals import refuses
from synthetic_study import make_run

RECIPE = """
[algorithm]
name = "fedavg"
[model]
name = "vilt_tiny"
width = 32
[task]
name = "vqa"
[data]
name = "scenes"
train = 12
validation = 5
test = 8
[local]
epochs = 1
lr = 1e-3
[run]
rounds = 1
workers = 1
gallery = 0
evaluate_every = 0
controls = "none"
[study]
methods = ["fedavg", "soft"]
models = ["vilt_tiny", "narrow"]
[methods.soft]
name = "fedavg"
label = "FedAvg, soft"
[methods.soft.task]
objective = "bce"
[models.narrow]
name = "vilt_tiny"
label = "narrow ViLT"
width = 16
layers = 1
attention_heads = 2
[models.narrow.local]
lr = 0.5
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "several.toml"
    path.write_text(RECIPE)
    return path


def test_a_row_has_a_task_of_its_own(source: Path) -> None:
    recipe = load_recipe(source)
    assert recipe.method("fedavg").sections["task"]["objective"] == "ce"
    assert recipe.method("soft").sections["task"]["objective"] == "bce"


@pytest.fixture
def contrastive(source: Path) -> Path:
    source.write_text(RECIPE.replace('objective = "bce"', 'name = "contrastive"'))
    return source


def test_rows_of_another_task_start_from_its_defaults(contrastive: Path) -> None:
    section = load_recipe(contrastive, ["task.objective=bce"]).method("soft").sections["task"]
    assert section["name"] == "contrastive"
    assert "objective" not in section


def test_a_recipe_with_models_is_written_and_read_again(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe(source)
    again = tmp_path / "again.toml"
    again.write_text(recipe.to_toml())
    read = load_recipe(again)
    assert (read.models, read.variants, read.overrides) == (recipe.models, recipe.variants, recipe.overrides)
    assert read.to_toml() == recipe.to_toml()
    assert "models" not in recipe.with_model("narrow").to_toml()


def test_a_model_has_its_own_keywords_and_way_of_training(source: Path) -> None:
    recipe = load_recipe(source)
    first, narrow = recipe.with_model("vilt_tiny"), recipe.with_model("narrow")
    assert (first.sections["model"]["width"], first.local.lr) == (32, 1e-3)  # the recipe's own model
    assert (narrow.sections["model"]["width"], narrow.local.lr) == (16, 0.5)
    assert narrow.methods == recipe.methods
    assert recipe.with_model("vit_mini").sections["model"]["name"] == "vit_mini"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("methods.soft.task.objectiv=1", r"unknown key methods.soft.task.objectiv=1; did you mean 'objective'"),
        ("methods.soft.task=3", r"methods.soft.task must be a section of \[task\]'s keys, got 3"),
        ("models.narrow.widht=3", r"unknown key models.narrow.widht=3; did you mean 'width'"),
        ("models.narrow.local=3", r"models.narrow.local must be a section"),
        ('study.models=["nobody"]', "no model is called 'nobody'"),
        ('study.models=["../up"]', "a model's row has letters"),
        ('models.x.name="vit_mini"', r"\[models.x\] is not one of study.models: vilt_tiny, narrow"),
    ],
)
def test_faulty_rows_and_models_are_named(source: Path, override: str, message: str) -> None:
    refuses(message, load_recipe, source, [override])


def test_models_that_a_command_leaves_out_are_no_mistake(source: Path) -> None:
    assert load_recipe(source, ['study.models=["vit_mini"]']).variants == {}


def test_models_of_a_command(source: Path) -> None:
    recipe = load_recipe(source)
    assert models_of(recipe, "all") == ("vilt_tiny", "narrow")
    assert models_of(recipe, "narrow, vit_mini,narrow") == ("narrow", "vit_mini")
    for wanted, message in (("nobody", r"among those of the recipe \(vilt_tiny, narrow\)"), (" , ", "at least one")):
        refuses(message, models_of, recipe, wanted)
    refuses("names no models", models_of, replace(recipe, models=()), "all")


def opened(
    recipe: Recipe, rows: Sequence[str], root: Path, references: Sequence[str] = (), margin: float = 0.01
) -> Sweep:
    """A sweep over models, with their studies."""
    wanted = Sweep(recipe.name, "models", points_of_models(recipe, rows), tuple(references), margin)
    recipes = {row: (recipe.with_model(row).with_rows(recipe.methods), {}) for row in rows}
    return open_sweep(root, wanted, recipes, models_from=recipe)


def test_the_index_grows_in_the_recipes_order_and_is_no_way_out(source: Path, tmp_path: Path) -> None:
    recipe, root = load_recipe(source), tmp_path / "out"
    opened(recipe, ["narrow"], root)
    index = opened(recipe, ["vilt_tiny"], root, references=["soft"], margin=0.02)
    assert kind_of(root) == "sweep"
    assert index == read_sweep(root)
    assert list(index.models.items()) == [("vilt_tiny", "vilt_tiny"), ("narrow", "narrow ViLT")]
    assert (index.references, index.margin) == (("soft",), 0.02)
    with refused("holds a sweep of several over models, not of other over models"):
        opened(replace(recipe, name="other"), ["narrow"], root)
    (tmp_path / "full" / "x").mkdir(parents=True)
    refuses("exists already", opened, recipe, ["narrow"], tmp_path / "full")


def test_the_command_runs_all_models_goes_on_and_adds_seeds(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    # Each model's own report takes a while; test_report.py is about it.
    monkeypatch.setattr("confed.report.report.write_report", lambda folder: (folder / "report.html").write_text(""))
    out = tmp_path / "out"
    common = ["compare", str(source), "--out", str(out), "--workers", "1"]
    assert confed(*common, "--models", "narrow") == 0
    (out / "sweep.json").unlink()  # as version 0.1 wrote its index
    old = '{"recipe": "several", "models": {"narrow": "narrow ViLT"}, "references": [], "margin": 0.01}'
    (out / "models.json").write_text(old)
    assert confed("resume", str(out)) == 0
    made = (out / "narrow" / "soft" / "seed-0" / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert confed(*common, "--models", "all", "--json", "study.models=['narrow','vilt_tiny']") == 0
    found = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert (out / "narrow" / "soft" / "seed-0" / "summary.json").stat().st_mtime_ns == made
    assert [path.name for path in out.glob("*.json")] == ["sweep.json"]  # the new index took the place of the old
    assert set(found["values"]["overall"]["fedavg"]) == {"narrow ViLT", "vilt_tiny"}
    (pair,) = found["pairs"]["overall"]
    values = {
        (model, row): json.loads((out / model / row / "seed-0" / "summary.json").read_text())["personal_mean"]
        for model in ("narrow", "vilt_tiny")
        for row in ("fedavg", "soft")
    }
    difference = np.mean([values[model, "fedavg"] - values[model, "soft"] for model in ("narrow", "vilt_tiny")])
    assert pair["paired"]["difference"] == pytest.approx(difference)
    page = (out / "report.html").read_text()
    assert 'href="narrow/report.html"' in page
    assert "narrow ViLT" in (out / "models.md").read_text()
    assert confed("resume", str(out)) == 0
    assert confed("compare", str(out), "--out", str(tmp_path / "read")) == 0
    assert (tmp_path / "read" / "models.csv").read_text() == (out / "models.csv").read_text()
    (out / "report.html").unlink()
    assert confed("report", str(out)) == 0
    assert (out / "report.html").is_file()
    assert f"{out}/narrow" in refusal(capsys, "report", str(out), "--figures")


def test_models_with_other_settings_are_not_in_one_table(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "out"
    opened(load_recipe(source), ["narrow"], root)
    same = load_recipe(source, ["run.seed=3", "run.gallery=2", "local.lr=0.2", 'study.methods=["soft"]'])
    with refused(r"narrow there has data.train=12, not 20;.*another folder with --out"):
        opened(load_recipe(source, ["data.train=20"]), ["vilt_tiny"], root)
    assert list(read_sweep(root).models) == ["narrow"]  # a refused command changes nothing
    opened(same, ["vilt_tiny"], root)  # the other model has a learning rate of its own
    assert list(read_sweep(root).models) == ["vilt_tiny", "narrow"]


def test_a_faulty_model_leaves_no_folder_behind(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe(source)
    with refused("no algorithm is called 'nobody'"):
        opened(replace(recipe, methods=("nobody",)), ["narrow"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_of_one_label_are_told_apart(tmp_path: Path) -> None:
    for row, method in (("a", "fedavg"), ("a", "fedp3"), ("b", "fedavg")):
        make_run(tmp_path / row / method / "seed-0", method, 0)
    failed = {"recipe": "r", "methods": ["fedavg"], "runs": [{"method": "fedavg", "seed": 0}]}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "summary.json").write_text(json.dumps({**failed, "errors": {"fedavg/seed-0": "no <room>"}}))
    studies, _ = write_models(tmp_path, {"a": "MCAN", "b": "MCAN", "c": "BAN", "d": "MFB"})
    assert list(studies.studies) == ["MCAN (a)", "MCAN (b)"]
    notes = "\n".join(model_tables(studies)["models"].notes)
    assert "BAN: " in notes
    assert "no <room>" in notes
    assert "MFB: nothing has been run yet" in notes
    page = (tmp_path / "report.html").read_text()
    assert "no &lt;room&gt;" in page
    assert "2 models, 2 methods" in page


def test_a_reference_that_did_not_finish_costs_no_table(
    tmp_path: Path, source: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    root = tmp_path / "out"
    rows = load_recipe(source).with_rows(["fedavg", "soft", "feddat"])
    opened(rows, ["narrow"], root, references=["feddat", "soft"])
    for method in ("fedavg", "soft"):
        make_run(root / "narrow" / method / "seed-0", "fedavg", 0)
    monkeypatch.setattr("confed.report.report.write_report", lambda folder: None)
    finish(root, 1, False)
    assert "reference 'feddat' has no finished run" in capsys.readouterr().err
    assert (root / "models.md").is_file()


def test_a_sweep_has_a_line_for_each_model(source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("confed.report.report.write_report", lambda folder: (folder / "report.html").write_text(""))
    out = tmp_path / "out"
    command = ["compare", str(source), "--over", "data.train=8,12", "--out", str(out), "--workers", "1"]
    assert "give one of them" in refusal(capsys, *command, "--models", "all", "--split", "iid,dirichlet")
    assert confed(*command, "--models", "all", "--methods", "fedavg") == 0
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [(row["models"], row["data.train"]) for row in rows] == [
        ("vilt_tiny", "8"), ("vilt_tiny", "12"), ("narrow", "8"), ("narrow", "12"),
    ]  # fmt: skip
    for model, width in (("vilt_tiny", 32), ("narrow", 16)):
        for train in (8, 12):
            own = load_recipe(out / f"train-{train}-models-{model}" / "fedavg" / "seed-0" / "recipe.toml")
            assert (own.sections["model"]["width"], own.sections["data"]["train"]) == (width, train)
    assert confed("resume", str(out)) == 0
    assert read_sweep(out).models == {}  # it is no table of models


def test_models_need_a_recipe(capsys: Capture) -> None:
    assert "--models" in refusal(capsys, "compare", ".", "--models", "all")


def renamed(folder: Path, metric: str, soft: bool = False) -> None:
    """A run whose metric has another name, perhaps with scores between 0 and 1."""
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metric": metric}))
    if soft:
        found = load_file(folder / "predictions.safetensors")
        key = next(key for key in found if key.endswith("/correct"))
        found[key] = np.where(found[key] > 0, 0.3, 0.0).astype(np.float32)
        save_file(found, folder / "predictions.safetensors")


def test_metrics_of_two_names_are_compared_if_scores_are_0_or_1(tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    other = make_run(tmp_path / "fedp3" / "seed-0", "fedp3", 0)
    assert metric_note(load(tmp_path).runs) == ""
    assert metric_of(load(tmp_path).runs) == "accuracy"
    renamed(other, "vqa_accuracy")
    study = load(tmp_path)
    assert metric_of(study.runs) == "score"
    assert "every score is 0 or 1" in metric_note(study.runs)
    comparison = compare([tmp_path])
    assert comparison.metric == "score"
    assert comparison.differences
    assert any("Metrics have several names" in note for note in paper_table(study).notes)
    # An answer that any annotator gave is worth 1 too, and is another quantity.
    renamed(other, "vqa_any")
    assert {d.refused for d in compare([tmp_path]).differences} == {"the metrics differ (vqa_any, not accuracy)"}
    assert metric_note(load(tmp_path).runs).startswith("Warning: the metrics differ")
    renamed(other, "vqa_accuracy", soft=True)
    comparison = compare([tmp_path])
    assert any("Warning: the metrics differ" in remark for remark in comparison.remarks)
    # The values stay, and every test goes: over seeds, over examples, ranks, equivalence, relative improvement.
    reason = "the metrics differ (vqa_accuracy, not accuracy)"
    assert {d.refused for d in comparison.differences} == {reason}
    fields = ("over_seeds", "equivalence", "over_examples", "signs")
    assert all(getattr(d, name) is None for d in comparison.differences for name in fields)
    measures = "personal on own data, global on seen, global on unseen"
    assert f"Not tested: FedP³ against FedAvg ({measures}): {reason}." in comparison.remarks
    (row,) = (row for row in comparison.table().sections[0] if row[1].text == "FedP³")
    assert row[4].text.endswith(", not tested")
    assert row[-1].text == reason
    assert len(comparison.relative("fedp3").rows) == 1
    assert f"Not compared with FedAvg: {reason}." in comparison.relative("fedp3").notes


def test_metrics_that_differ_are_not_tested_over_models(tmp_path: Path) -> None:
    for model in "abc":
        for method in ("fedavg", "fedprox", "fedp3"):
            folder = make_run(tmp_path / model / method / "seed-0", method)
            if method == "fedp3":
                renamed(folder, "vqa_accuracy", soft=True)
    models = model_studies({model: load(tmp_path / model) for model in "abc"})
    assert pairs_of(models) == [("fedavg", "fedprox")]
    assert pairs_of(models, ["fedavg"]) == [("fedprox", "fedavg")]
    notes = model_tables(models)["models"].notes
    assert any("Not tested against each other: FedAvg and FedP³: the metrics differ" in note for note in notes)


def test_other_data_are_not_tested_and_are_no_models(tmp_path: Path, capsys: Capture) -> None:
    one, other = make_run(tmp_path / "one", "fedavg"), make_run(tmp_path / "other", "fedp3")
    path = other / "recipe.toml"
    recipe = path.read_text().replace('name = "scenes"', 'name = "modalities"')
    path.write_text(recipe.replace('name = "vilt_mini"', 'name = "modal_mini"'))
    comparison = compare([one, other])
    assert {d.refused for d in comparison.differences} == {"the data differ (modalities, not scenes)"}
    main_code = confed("compare", str(one), str(other), "--out", str(tmp_path / "out"))
    assert main_code == 0
    assert "no table over models: the data differ" in capsys.readouterr().err
    assert not (tmp_path / "out" / "models.md").exists()
    assert not (tmp_path / "out" / "backbones.md").exists()


def test_a_method_named_twice_in_an_older_study_has_one_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    entry = {"method": "fedavg", "seed": 0, "folder": "fedavg/seed-0"}
    (tmp_path / "summary.json").write_text(json.dumps({"methods": ["fedavg"], "runs": [entry, entry]}))
    assert len(load(tmp_path).runs) == 1


def test_another_task_is_one_difference_not_all_its_keys(contrastive: Path, tmp_path: Path) -> None:
    recipe: Recipe = load_recipe(contrastive)
    for row in recipe.methods:
        folder = make_run(tmp_path / "runs" / row / "seed-0", "fedavg", 0)
        (folder / "recipe.toml").write_text(recipe.method(row).to_toml())
    (warning,) = compare([tmp_path / "runs"]).warnings
    assert warning.endswith("differ in more than the algorithm: task.name (contrastive, not vqa)")


def test_answer_types_stand_in_their_usual_order() -> None:
    assert types_in_order(["other", "number", "yes/no", "other"]) == ["yes/no", "number", "other"]
    assert types_in_order(["other", "count"]) == ["count", "other"]


def test_what_a_model_says_of_local_holds_for_every_row(source: Path) -> None:
    text = "methods.fedavg.local={lr=0.25, epochs=3}"
    recipe = load_recipe(source, [text])
    own = {model: recipe.with_model(model).method("fedavg").local for model in recipe.models}
    assert {model: (local.lr, local.epochs) for model, local in own.items()} == {
        "vilt_tiny": (0.25, 3),
        "narrow": (0.5, 3),
    }
    assert recipe.with_model("narrow").method("soft").local.lr == 0.5
