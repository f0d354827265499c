"""Sweeps over values and over models: reused and resumed, and one table and figure over all."""

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy import stats

from command_line import Capture, Patch, confed, refusal, refused
from confed.cli.grids import finish
from confed.data.examples import FederatedDataset
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.comparison import compare
from confed.report.tables.methods import paper_table
from confed.report.tables.models import OVERALL, load_models, model_studies, model_tables, pairs_of, write_models
from confed.report.tables.sweep import write_sweep
from confed.results.folder import kind_of
from confed.results.metric import metric_note, metric_of, types_in_order
from confed.results.runs import load
from confed.results.sweep import Sweep, read_sweep
from confed.studies.study import Axis, models_of, open_sweep, parse_axis, points_of, points_of_models
from modal_examples import gaps, recipe_file
from refusals import refuses
from synthetic_study import make_run

DRAWS = ("sweep",)
TINY = [
    "feddat_function", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=16",
    "data.validation=4", "data.test=10", "local.epochs=1", "run.gallery=0", "run.evaluate_every=0", "run.controls=none",
    "--methods", "clf_local,full", "methods.clf_local.model.trainable=all", "--reference", "full",
]  # fmt: skip

OVER = ["--over", "data.shards=1,2", "--with", "run.rounds=1,2", "--seeds", "2", "--workers", "1"]


def values(root: Path, grid: str, row: str, key: str) -> list[float]:
    """The mean over clients of each seed, from the runs' own files."""
    found: list[float] = []
    for seed in (0, 1):
        summary = json.loads((root / grid / row / f"seed-{seed}" / "summary.json").read_text())
        found.append(float(np.mean([summary[key][client] for client in summary["clients"]])))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two numbers of clients, two methods, two seeds."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    assert confed("compare", *TINY, *OVER, "--out", folder) == 0
    return folder


def test_one_table_over_all_values(root: Path) -> None:
    results = json.loads((root / "results.json").read_text())
    assert [(p["settings"], p["clients"], p["rounds"], p["measure"], p["reference"]) for p in results["points"]] == [
        ({"data.shards": "1", "run.rounds": "1"}, 5, "1", "deployed_mean", "full"),
        ({"data.shards": "2", "run.rounds": "2"}, 10, "2", "deployed_mean", "full"),
    ]
    rows = list(csv.DictReader((root / "table.csv").read_text().splitlines()))
    assert [(row["data.shards"], row["clients"], row["rounds"], row["method"]) for row in rows] == [
        ("1", "5", "1", "clf-L"), ("1", "5", "1", "full*"), ("2", "10", "2", "clf-L"), ("2", "10", "2", "full*"),
    ]  # fmt: skip
    for point, grid in zip(results["points"], ("shards-1", "shards-2"), strict=True):
        local, full = values(root, grid, "clf_local", "personal"), values(root, grid, "full", "global_seen")
        found = point["methods"]
        assert (found["clf_local"]["mean"], found["full"]["mean"]) == pytest.approx((np.mean(local), np.mean(full)))
        assert found["clf_local"]["sd"] == pytest.approx(np.std(local, ddof=1))
        assert found["clf_local"]["difference"]["mean"] == pytest.approx(np.mean(local) - np.mean(full))
        if np.ptp(np.subtract(local, full)) > 0:
            expected = stats.ttest_rel(local, full).pvalue
            assert found["clf_local"]["difference"]["seeds_p_uncorrected"] == pytest.approx(expected)
    for kind in ("seeds_p", "examples_p"):
        tests = [point["methods"]["clf_local"]["difference"] for point in results["points"]]
        alone = [test[f"{kind}_uncorrected"] for test in tests]
        small, large = sorted(alone)  # of two tests Holm doubles the smaller, and the larger is no smaller than that
        expected = [min(1.0, 2 * p) if p == small else max(min(1.0, 2 * small), large) for p in alone]
        assert [test[kind] for test in tests] == pytest.approx(expected)
    text = (root / "table.md").read_text()
    assert "Holm's correction over all pairs of methods at all values" in text
    assert "data.shards=1, run.rounds=1 (5 clients): 1; data.shards=2, run.rounds=2 (10 clients): 2." in text


def test_the_figure_has_a_point_per_number_of_clients(root: Path) -> None:
    svg = (root / "figures/sweep.svg").read_text()
    for text in (">5<", ">10<", ">1 round<", ">2 rounds<", ">clf-L<", ">full*<", ">clients<"):
        assert text in svg, text
    assert (root / "figures/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_reused_and_what_was_stopped_goes_on(root: Path) -> None:
    done = root / "shards-1/full/seed-0/summary.json"
    before = done.stat().st_mtime_ns
    lost = root / "shards-2/full/seed-1/summary.json"
    content = json.loads(lost.read_text())
    lost.unlink()  # as if it had been stopped before its end
    assert confed("compare", *TINY, *OVER, "--out", root) == 0
    assert done.stat().st_mtime_ns == before
    again = json.loads(lost.read_text())
    assert again["global_seen"] == content["global_seen"]
    for verb in ("resume", "report"):
        (root / "results.json").unlink()
        assert confed(verb, root) == 0
        assert (root / "results.json").is_file()
    assert confed("report", root, "--figures") == 2


def test_another_budget_is_not_passed_off_as_the_first(root: Path, capsys: Capture) -> None:
    kept = (root / "sweep.json").read_text()
    arguments = ["--over", "data.shards=2,3", "--with", "run.rounds=5,5", "--seeds", "2", "--out", root]
    error = refusal(capsys, "compare", *TINY, *arguments)
    assert "was begun with data.shards=2, run.rounds=2, not data.shards=2, run.rounds=5" in " ".join(error.split())
    assert (root / "sweep.json").read_text() == kept


def test_a_faulty_value_is_refused_before_anything_runs(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out"
    assert "run.rounds" in refusal(capsys, "compare", *TINY, "--over", "run.rounds=1,0", "--out", folder)
    assert not folder.exists()
    assert "section.key=VALUE,VALUE" in refusal(capsys, "compare", *TINY, "--over", "rounds", "--out", folder)
    assert "a recipe comes before its settings" in refusal(
        capsys, "compare", "algorithm.lam=0.1,0.3", "--split", "iid,dirichlet"
    )


def test_a_setting_that_every_row_has_for_itself_is_refused(tmp_path: Path, capsys: Capture) -> None:
    over = ["feddat_scene_equal", "--methods", "feddat", "--out", tmp_path / "out", "--over"]
    error = refusal(capsys, "compare", *over, "algorithm.alpha=0.0,1.0")
    assert "algorithm.alpha changes nothing" in error
    assert "methods.feddat.alpha" in error
    assert not (tmp_path / "out").exists()


def test_values_may_be_any_toml() -> None:
    assert parse_axis("data.shards=1,2") == Axis("data.shards", ("1", "2"))
    assert parse_axis("local.betas=[0.9, 0.99],[0.8,0.9]") == Axis("local.betas", ("[0.9, 0.99]", "[0.8,0.9]"))
    assert parse_axis("a.b={x=1,y=2},{x=3}").values == ("{x=1,y=2}", "{x=3}")
    points = points_of(parse_axis("data.preset=domain,function"), [parse_axis("run.rounds=3,4")])
    assert [point.overrides for point in points] == [
        ["data.preset=domain", "run.rounds=3"],
        ["data.preset=function", "run.rounds=4"],
    ]
    assert [point.folder for point in points] == ["preset-domain", "preset-function"]
    assert [p.folder for p in points_of(parse_axis("a.b=[1],1"))] == ["b-1", "b-1-1"]
    for wrong in ("a.b", "a=1", "a.b="):
        refuses(r"section\.key=VALUE", parse_axis, wrong)
    refuses(r"the values of a\.b must differ, got 1, 1", points_of, parse_axis("a.b=1,1"))
    refuses(r"a value for each of the 2 of a\.b, got 1", points_of, parse_axis("a.b=1,2"), [parse_axis("c.d=1")])


def test_a_line_for_each_value_of_another_setting() -> None:
    points = points_of(
        parse_axis("a.lam=0.1,0.3"), [parse_axis("run.rounds=2,3")], parse_axis("data.split=iid,dirichlet")
    )
    assert [(p.folder, dict(p.settings)) for p in points] == [
        (f"lam-{lam}-split-{split}", {"a.lam": lam, "run.rounds": rounds, "data.split": split})
        for split in ("iid", "dirichlet")
        for lam, rounds in (("0.1", "2"), ("0.3", "3"))
    ]
    for by, message in (("data.split=iid,iid", "must differ"), ("a.lam=1", "every setting must be given once")):
        with refused(message):
            points_of(parse_axis("a.lam=0.1,0.3"), (), Axis(by.split("=")[0], tuple(by.split("=")[1].split(","))))


def divided(split: Literal["even", "odd"] = "even", *, seed: int = 0) -> FederatedDataset:
    """Data that can be split in two ways."""
    del seed
    dataset = gaps(8)
    return dataset if split == "even" else replace(dataset, clients=dict(list(dataset.clients.items())[::-1]))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rates, two ways of splitting the data, a method that has rates and one that has none."""
    folder = tmp_path_factory.mktemp("lines")
    recipe = recipe_file(folder, "sums", "gaps")
    recipe.write_text(recipe.read_text().replace("modal_examples:gaps", "test_sweep:divided"))
    settings = ["algorithm.name=modality_dropout", "algorithm.rate=0.1,0.5", "run.gallery=0", "run.evaluate_every=0"]
    more = ["--split", "even,odd", "--methods", "local,modality_dropout", "--reference", "local", "--workers", "1"]
    assert confed("compare", recipe, *settings, *more, "--out", folder / "out") == 0
    return folder / "out"


def test_what_the_setting_does_not_concern_is_run_once(lines: Path) -> None:
    for split in ("even", "odd"):
        one, other = (lines / f"rate-{rate}-split-{split}" for rate in ("0.1", "0.5"))
        timings = [(grid / "local/seed-0/timings.jsonl").read_bytes() for grid in (one, other)]
        assert timings[0] == timings[1]
        settings = [(grid / "modality_dropout/seed-0/recipe.toml").read_text() for grid in (one, other)]
        assert "rate = 0.1" in settings[0]
        assert "rate = 0.5" in settings[1]
        assert not list(lines.rglob("*.part"))
    splits = [(lines / f"rate-0.1-split-{s}/local/seed-0/recipe.toml").read_text() for s in ("even", "odd")]
    assert "even" in splits[0]
    assert "odd" in splits[1]


def test_the_figure_has_a_line_per_split(lines: Path) -> None:
    results = json.loads((lines / "results.json").read_text())
    assert results["by"] == "data.split"
    svg = (lines / "figures/sweep.svg").read_text()
    for text in (">Modality dropout, even<", ">Modality dropout, odd<", ">improvement relative to Local only, %<"):
        assert text in svg, text
    rows = list(csv.DictReader((lines / "table.csv").read_text().splitlines()))
    assert [(r["algorithm.rate"], r["data.split"]) for r in rows[::2]] == [
        ("0.1", "even"), ("0.5", "even"), ("0.1", "odd"), ("0.5", "odd"),
    ]  # fmt: skip
    for point in results["points"]:
        own, base = (
            json.loads((lines / point["folder"] / m / "seed-0/summary.json").read_text())["personal"]
            for m in ("modality_dropout", "local")
        )
        if all(base.values()):
            wanted = np.mean([(own[client] - base[client]) / base[client] for client in base])
            assert point["methods"]["modality_dropout"]["relative"]["0"] == pytest.approx(wanted)
    message = r"for each data\.split, not of mine over algorithm\.rate; give another folder"
    with refused(message):
        open_sweep(lines, Sweep("mine", "algorithm.rate", points_of(Axis("algorithm.rate", ("0.1",)))), {})


def test_no_mean_improvement_where_the_reference_is_at_0(lines: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(lines, copy)
    for file in copy.glob("*/*/seed-0/summary.json"):
        summary = json.loads(file.read_text())
        zero = file.parts[-4] == "rate-0.5-split-even" and file.parts[-3] == "local"
        summary["personal"] = dict.fromkeys(summary["personal"], 0.5) | ({"ears": 0.0} if zero else {})
        file.write_text(json.dumps(summary))
    table, _ = write_sweep(copy)
    place = [column.full_title for column in table.columns].index("relative")
    shown = {(row[0].text, row[1].text): row[place].text for row in table.rows if row[4].text != "Local only"}
    assert shown == {("0.1", "even"): "0.0", ("0.5", "even"): "–", ("0.1", "odd"): "0.0", ("0.5", "odd"): "0.0"}
    (note,) = (text for text in table.notes if "no mean over clients" in text)
    assert note.startswith("algorithm.rate=0.5, data.split=even (3 clients): Relative to Local only, no mean")
    assert "ears is at 0 with it" in note
    assert ">(no point where it is 0 at a client)<" in (copy / "figures/sweep.svg").read_text()


def test_its_grids_are_studies_as_any_other(root: Path) -> None:
    study = load(root / "shards-2")
    assert (len(study.clients), study.seeds, study.methods) == (10, (0, 1), ("clf_local", "full"))
    assert (root / "shards-2/report.html").is_file()


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
    models = {"a": "MCAN", "b": "MCAN", "c": "BAN", "d": "MFB"}
    studies = load_models(tmp_path, models)
    tables = model_tables(studies)
    write_models(tmp_path, studies, tables, models)
    assert list(studies.studies) == ["MCAN (a)", "MCAN (b)"]
    notes = "\n".join(tables["models"][OVERALL].notes)
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
    finish(root, 1)
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
    notes = model_tables(models)["models"][OVERALL].notes
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
