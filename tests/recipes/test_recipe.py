"""Recipes: keys of now and of before, names, times of arrival, and objects in the place of names."""

import json
import os
import re
import subprocess
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import confed
from command_line import Capture, Patch, refused
from command_line import confed as command
from confed.algorithms.fedp3 import FedP3
from confed.cli.catalogue import listing, packaged
from confed.datasets.scenes import PRESETS
from confed.deployment.provision import Federation
from confed.federation.local import Local, Schedule
from confed.federation.server_optimizer import ServerOptimizer
from confed.models.hub_names import hub_name
from confed.recipes.objects import digest_of, overrides_of
from confed.recipes.recipe import Recipe, RunSection, load_recipe, packaged_recipes, parse_recipe
from confed.registry import SESSION, models, tasks
from confed.results.settings import flat
from confed.results.sweep import read_sweep
from confed.runs.build import prepare
from confed.studies.cells import BatchOptions, script_of
from confed.studies.study import free_folder, open_study, parse_axis, points_of, read_study
from confed.tasks.multilabel import Multilabel
from refusals import refuses
from repository import ROOT
from tiny_runs import TINY, Halved, Linear, linear
from toy_federation import squares


def test_packaged_recipes_are_sound_and_come_back_from_toml(tmp_path: Path) -> None:
    assert "fedvqa_scenes" in packaged_recipes()
    for one in packaged():
        recipe = load_recipe(f"recipes/{one.name}.toml", [f"data.{key}=somewhere" for key in one.missing])
        path = tmp_path / f"{one.name}.toml"
        path.write_text(recipe.to_toml())
        again = load_recipe(path)
        assert again.to_toml() == recipe.to_toml()
        assert again.methods == recipe.methods


def test_overrides_reach_the_main_method_and_single_rows() -> None:
    recipe = load_recipe("fedvqa_scenes", ["algorithm.lam=0.5", "methods.fedprox.mu=0.3", "run.rounds=2"])
    assert recipe.method("fedp3").sections["algorithm"]["lam"] == 0.5
    assert recipe.method("fedprox").sections["algorithm"]["mu"] == 0.3
    assert recipe.method("fedavg").sections["algorithm"]["name"] == "fedavg"
    assert recipe.run.rounds == 2
    other = load_recipe("fedvqa_scenes", ["algorithm.name=fedprox", "algorithm.mu=0.1"])
    assert other.construct("algorithm").mu == 0.1  # another name brings its own keywords


def test_a_key_of_the_recipe_can_be_taken_away() -> None:
    overrides = ["model.name=ctran", "~model.embeddings", "~methods.fedavg.task.known"]
    recipe = load_recipe("fedlgt_scenes", overrides[::-1])
    assert (recipe.sections["model"]["name"], recipe.sections["model"]["embeddings"]) == ("ctran", None)
    assert recipe.method("fedavg").sections["task"]["known"] == recipe.sections["task"]["known"] == 0.75
    again = load_recipe("fedlgt_scenes", ["model.name=ctran"])
    assert again.sections["model"]["embeddings"] == "scene_labels"


def test_a_row_may_draw_its_clients_in_another_way_and_as_many() -> None:
    recipe = load_recipe("fedvqa_scenes", ['methods.fedavg.run.sampling="size"'])
    assert (recipe.method("fedavg").run.sampling, recipe.method("local").run.sampling) == ("size", "uniform")


def test_rows_that_are_taken_away_do_not_miss_in_a_shorter_study() -> None:
    recipe = load_recipe("feddat_rivals", ["~methods.feddpa", 'study.methods=["fedavg"]'])
    assert recipe.methods == ("fedavg",)
    assert load_recipe("fedlgt_ablation", ["~study.table"]).table == ()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("algorithm.lamda=1", r"unknown key algorithm\.lamda=1; did you mean 'lam'\? valid keys: .*top_n"),
        ("algorithm.lam=much", r"algorithm\.lam: .*valid number.*got 'much'"),
        ("algorithm.filter=best", r"algorithm\.filter: .*'gain'.*got 'best'"),
        ("algorithm.top_n=1", r"top_n must be at least 2 .*got 1"),
        ("algorithm.name=fedpp3", r"no algorithm is called 'fedpp3'; did you mean 'fedp3'"),
        ("local.lr=0", r"local\.lr must be positive, got 0"),
        ("run.rouns=3", r"unknown key run\.rouns=3; did you mean 'rounds'"),
        ("run.keep_checkpoints=foo", r"run\.keep_checkpoints: .*valid integer.*'joins'; got 'foo'"),
        ("run.joins.x=soon", r"run\.joins\.x: .*valid integer.*got 'soon'"),
        ("model.answers=3", r"unknown key model\.answers=3"),
        ("data.root=x", r"unknown key data\.root='x'"),
        ("modle.name=x", r"unknown section \[modle\]; did you mean 'model'\?"),
        ("methods.mine.mu=1", r"\[methods\.mine\] is not one of the study's methods"),
        ("methods.fedprox.nu=1", r"unknown key methods\.fedprox\.nu=1; valid keys: mu, accumulator"),
        ("~algorithm.lamda", r"'~algorithm\.lamda': the recipe does not give that key, only name, "),
        ("~modle.name", r"'~modle\.name': the recipe has no section \[modle\]"),
        ("~run.rounds=3", r"must be ~section\.key, got '~run\.rounds=3'"),
        ("~run", r"must be ~section\.key, got '~run'"),
        ("nonsense", r"an override must be section\.key=value, got 'nonsense'"),
        ("methods.fedavg.run.rounds=3", r"methods\.fedavg\.run may have the key sampling only, got rounds"),
        ('study.methods=["fedavg","local","fedavg"]', r"study\.methods must name each row once, got 'fedavg' 2 times"),
        ("~model.name", r"model\.name must be given"),
    ],
)
def test_errors_name_the_key_what_came_and_what_is_valid(override: str, complaint: str) -> None:
    refuses(complaint, load_recipe, "fedvqa_scenes", [override])


def test_missing_recipe_and_broken_toml(tmp_path: Path) -> None:
    refuses(r"no recipe at 'nowhere\.toml': `confed list recipes`", load_recipe, "nowhere.toml")
    path = tmp_path / "broken.toml"
    path.write_text("[algorithm\n")
    refuses(r"broken\.toml: not TOML", load_recipe, path)


@pytest.mark.parametrize(
    "row", ["..", ".hidden", ":Method", "a/b", "summary.json", "Report.html", "table.tex", "compare.md.part", "figures"]
)
def test_a_row_is_called_like_no_folder_and_no_file_of_a_study(row: str) -> None:
    refuses(rf"study\.methods: a row.*got '{row}'", load_recipe, "fedvqa_scenes", [f'study.methods=["{row}"]'])


def test_rows_may_be_versions_signs_and_classes() -> None:
    recipe = load_recipe("fedvqa_scenes", [])
    for row in ("v1.5", "+noise", "confed.algorithms.fedavg:FedAvg", "fedavg_json"):
        assert recipe.with_rows([row], {row: {"name": "fedavg"}}).methods == (row,)


@pytest.mark.parametrize("name", ["fedvqa_gqa_a", "fedvqa_gqa_b"])
def test_gqa_recipes_have_the_table_of_the_built_in_benchmark(name: str) -> None:
    recipe = load_recipe(name, ["data.root=somewhere"])
    assert recipe.table == load_recipe("fedvqa_scenes").table
    assert recipe.with_rows(recipe.table).methods == recipe.table  # every row is sound


def test_cohort_sizes_follow_from_counts_and_shares() -> None:
    for cohort, clients, size in ((0.0, 7, 7), (0.1, 100, 10), (0.001, 100, 1), (50, 20, 20)):
        assert RunSection(cohort=cohort).cohort_size(clients) == size


def test_keywords_of_a_new_constructor_may_stand_before_its_name() -> None:
    before = load_recipe("fedlgt_scenes", ["model.dropout=0.3", "model.name=ctran_mini", "task.threshold=0.4"])
    after = load_recipe("fedlgt_scenes", ["model.name=ctran_mini", "model.dropout=0.3", "task.threshold=0.4"])
    assert before.sections == after.sections
    other = load_recipe("fedvqa_scenes", ["model.max_length=9", "model.name=mcan_s_mini"])
    assert other.sections["model"]["name"] == "mcan_s_mini"
    assert other.sections["model"]["max_length"] == 9


def test_bicsls_official_recipe_judges_all_rows_by_one_metric() -> None:
    recipe = load_recipe("bicsl_vqa2_official")
    found: dict[str, str] = {}
    for row in recipe.methods:
        options = dict(recipe.method(row).sections["task"])
        found[row] = tasks[options.pop("name")](answers=3, **options).metric
    assert set(found.values()) == {"vqa_accuracy"}
    assert len(found) == 5


def test_another_source_takes_no_revision_over(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        '[algorithm]\nname = "fedavg"\n[model]\nname = "hf"\nsource = "owner/a"\nrevision = "aaaaaa"\n'
        '[data]\nname = "scenes"\n[task]\nname = "chat"\n[study]\nmethods = ["fedavg", "other"]\n'
        '[methods.other]\nname = "fedavg"\n[methods.other.model]\nsource = "owner/b"\n'
    )
    recipe = load_recipe(file)
    assert recipe.method("fedavg").sections["model"]["revision"] == "aaaaaa"
    assert recipe.method("other").sections["model"]["revision"] == ""
    assert load_recipe(file, ["model.source=owner/c"]).sections["model"]["revision"] == ""
    kept = load_recipe(file, ["model.source=owner/c", "model.revision=cccccc"])
    assert kept.sections["model"]["revision"] == "cccccc"


def test_a_model_of_answers_and_a_named_task_leave_the_task() -> None:
    assert load_recipe("fedvqa_scenes", ["model.name=vilt_tiny"]).sections["task"]["name"] == "vqa"
    named = load_recipe("fedvqa_scenes", ["task.name=chat", "model.name=hf", "model.source=smolvlm_mini"])
    assert named.sections["task"]["name"] == "chat"


PLAIN = '[algorithm]\nname = "fedavg"\n[model]\nname = "vilt_tiny"\n[data]\nname = "scenes"\n[task]\nname = "vqa"\n'
OLD = '[local]\nschedule = "linear"\nhorizon = 30\n[run]\nbuffer = 2\nfeatures = "off"\nfeatures_disk = 1.0\n'
ROW = '[study]\nmethods = ["fedavg"]\n[methods.fedavg.local]\nwarmup = 0.2\n'
RENAMED = "run.buffer is now run.async.buffer, run.features is now run.features.keep"


def test_a_file_with_old_keys_is_read_with_one_warning() -> None:
    with pytest.warns(UserWarning, match=RENAMED) as told:
        recipe = parse_recipe(PLAIN + OLD + ROW)
    assert len(told) == 1
    assert recipe.local.schedule == Schedule("linear", horizon=30)
    assert recipe.method("fedavg").local.schedule == Schedule("linear", horizon=30, warmup=0.2)
    assert (recipe.run.async_.buffer, recipe.run.features.keep, recipe.run.features.disk) == (2, "off", 1.0)
    assert parse_recipe(recipe.to_toml()) == recipe


def test_overrides_and_python_have_them_too() -> None:
    with pytest.warns(UserWarning, match="run.buffer is now run.async.buffer, local.warmup is now"):
        changed = load_recipe("feddat_scene_equal", ["run.buffer=3", "local.warmup=0.2"])
    assert (changed.run.async_.buffer, changed.local.schedule) == (3, Schedule("cosine", warmup=0.2))
    with pytest.warns(UserWarning, match="local.schedule is now local.schedule.kind"):
        made = Recipe(model="vilt_tiny", data="scenes", local={"schedule": "step"})
    assert made.local.schedule == Schedule("step")


def test_recipes_of_before_and_of_now_have_the_same_settings() -> None:
    before = {"run": {"buffer": 0, "features": "auto"}, "local": {"schedule": "cosine"}}
    now = {"run": {"async": {"buffer": 0}, "features": {"keep": "auto"}}, "local": {"schedule": {"kind": "cosine"}}}
    assert flat(before) == flat(now)


@pytest.mark.parametrize(("given", "faulty"), [("false", False), ("true", True)])
def test_a_removed_key_may_have_its_only_value(given: str, faulty: bool) -> None:
    made = PLAIN.replace("vilt_tiny", "resnet_multilabel").replace("vqa", "multilabel").replace("scenes", "voc")
    content = made.replace('"voc"\n', f'"voc"\nroot = "."\ndifficult = {given}\n')
    if faulty:
        refuses(r"data.difficult is no option of 'voc' any more, it is always False", parse_recipe, content)
    else:
        assert "difficult" not in parse_recipe(content).sections["data"]


HOSTILE = ["/abs", "../../x", "a\nrm -rf ~\n", "-rf", ".x", "a\u202eb", "nul", "", "a" * 101]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_of_a_recipe_is_refused_in_one_line(name: str, tmp_path: Path, capfd: Capture):
    file = tmp_path / "recipe.toml"
    file.write_text(f"name = {json.dumps(name)}\n" + load_recipe("fedvqa_scenes").single.to_toml().partition("\n")[2])
    before = sorted(tmp_path.iterdir())
    assert command("run", file, "run.rounds=1") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: a recipe's name must ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["[1]", "1", "{a = 1}", "true"])
def test_a_name_that_is_no_text_is_refused(name: str) -> None:
    refuses("a recipe's name must be a text", parse_recipe, f"name = {name}\n")


def test_a_name_given_in_python_and_by_an_index_is_checked(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", TINY).with_rows(["fedavg"])
    refuses("a recipe's name", replace, recipe, name="../x")
    refuses("a recipe's name", Recipe, model="vilt_tiny", data="scenes", name="../x")
    open_study(recipe, tmp_path / "study", [0])
    index = tmp_path / "study" / "summary.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "recipe": "../x"}))
    refuses("a recipe's name", read_study, tmp_path / "study")


@pytest.mark.parametrize("row", ["-rf", ".x", "nul", "a" * 101, "a\nb", "a/b"])
def test_a_hostile_row_of_a_study_is_refused(row: str) -> None:
    refuses(r"study\.methods: a row", load_recipe("fedvqa_scenes", TINY).with_rows, [row], {row: {"name": "fedavg"}})
    refuses(r"study\.models: a model's row", load_recipe("fedvqa_scenes", TINY).with_model, row)


@pytest.mark.parametrize("label", ["a\nb", "a\u202eb", "", "a" * 101, "\x1b[2J"])
def test_a_label_that_is_no_title_is_refused(label: str) -> None:
    recipe = load_recipe("fedvqa_scenes", TINY)
    refuses(r"methods\.fedavg\.label must", recipe.with_rows, ["fedavg"], {"fedavg": {"label": label}})
    with refused(r"models\.vilt_tiny\.label must"):
        replace(recipe, variants={"vilt_tiny": {"label": label}}).with_model("vilt_tiny")


def test_values_and_folders_of_a_sweep_are_single_names(tmp_path: Path) -> None:
    points = points_of(parse_axis(f'data.unseen=["{"../" * 60}x"],["/etc"]'))
    assert all(len(point.folder) < 100 and "/" not in point.folder for point in points)
    entry = {"settings": {"a.b": "1"}, "folder": "-rf"}
    content = {"recipe": "x", "over": "a.b", "points": [entry], "references": [], "margin": 0.01}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    refuses("a study's folder must begin with neither", read_sweep, tmp_path)


@pytest.mark.parametrize("site", ["nul", "CON", "com1"])
def test_a_site_is_no_device_of_windows(site: str) -> None:
    refuses("a site's name must be no device", Federation, (site,), "localhost", 8443, "")


def test_a_job_script_has_no_line_of_a_folders_name(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("a\ntouch stolen\n", 'a" --wrap="touch stolen'):
        refuses("a job script needs folders without", script_of, tmp_path / name, [1], BatchOptions())
    strange = tmp_path / "my run; touch $(stolen) `x`:1"
    strange.mkdir()
    monkeypatch.chdir(strange)
    script = script_of(strange, [1], BatchOptions())
    assert 'job-name="confed-my run_ touch __stolen_ _x__1"' in script
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "CONFED": "echo"}, capture_output=True, check=True)
    assert str(strange) in done.stdout.decode()
    assert not (strange / "stolen").exists()


def test_a_folder_of_runs_is_one_part_whatever_the_name(tmp_path: Path) -> None:
    assert free_folder("a/../../b", tmp_path).parent == tmp_path


@pytest.mark.parametrize("text", ["hub:../../x", "hub:/etc", "hub:a/b/c", "hub:", "hub:a/../b", "hub:a b/c"])
def test_a_prefix_makes_no_path_a_name_of_the_hub(text: str) -> None:
    assert hub_name(text) is None
    assert hub_name("hub:owner/name") == "owner/name"


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


TEXT = ["algorithm.name=fedp3", "algorithm.lam=0.1", "local.lr=0.01", "~run.cohort", 'study.methods=["fedavg"]']


def test_objects_are_written_as_files_have_them() -> None:
    given = confed.Recipe(
        algorithm=FedP3(lam=0.1, server=ServerOptimizer(optimizer="adam")),
        model={"name": "vilt_tiny", "width": 16},
        data={"name": squares, "train": 5},
        local=Local(lr=0.5),
        run={"rounds": 3, "joins": {"warm": 2}},
        name="mine",
    )
    again = parse_recipe(given.to_toml())
    assert again == given
    assert given.name == "mine"
    assert given.session_only == ()
    assert given.construct("algorithm") == FedP3(lam=0.1, server=ServerOptimizer(optimizer="adam"))
    assert (given.sections["data"]["name"], given.local.lr, given.run.joins) == ("squares", 0.5, {"warm": 2})


def test_classes_and_functions_are_named_by_their_modules() -> None:
    recipe = confed.Recipe(algorithm=Halved(share=0.25), model=linear, data=squares, task="vqa")
    assert recipe.sections["algorithm"]["name"] == "tiny_runs:Halved"
    assert recipe.sections["model"]["name"] == "tiny_runs:linear"
    assert recipe.construct("algorithm") == Halved(share=0.25)
    assert confed.Recipe(algorithm=Halved, model=linear, data=squares).construct("algorithm") == Halved()


def test_objects_without_a_name_are_told_apart_by_their_values() -> None:
    data, model = squares(4, 2), Linear(4)
    recipe = confed.Recipe(model=model, data=data)
    assert recipe.session_only == tuple(recipe.sections[s]["name"] for s in ("model", "data"))
    assert all(name.startswith(SESSION) for name in recipe.session_only)
    assert confed.Recipe(model=Linear(4), data=squares(4, 2)).sections == recipe.sections
    assert (
        confed.Recipe(model=Linear(4, seed=1), data=squares(4, 2, seed=1)).sections["model"] != recipe.sections["model"]
    )
    setup, run_data = prepare(recipe)
    assert run_data.dataset.name == "squares"
    built = setup.model()
    assert built is not model  # which the run must not change
    assert torch.equal(built.head.weight, model.head.weight)
    assert parse_recipe(recipe.to_toml()).sections == recipe.sections


def test_a_name_of_another_session_is_an_error_that_says_so() -> None:
    text = confed.Recipe(model=Linear(4), data=squares(4, 2)).to_toml().replace("session:Linear", "session:Gone")
    refuses(r"the model 'session:Gone@\w+' is an object of the Python session that wrote", parse_recipe, text)
    assert not any(name.startswith(SESSION) for name in models.names())


def test_the_task_follows_the_data() -> None:
    from coloured_labels import colours, colours_dataset

    assert confed.Recipe(model=colours, data=colours_dataset()).sections["task"]["name"] == "multilabel"
    assert confed.Recipe(model=colours, data=colours_dataset, task=Multilabel).sections["task"]["name"] == "multilabel"
    assert confed.Recipe(model=linear, data=squares).sections["task"]["name"] == "vqa"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": 3}, "model must be a name, a mapping .* or a torch.nn.Module; got int"),
        ({"algorithm": nn.Linear}, "algorithm must be a name, .* or an Algorithm; got type"),
        ({"data": np.zeros(3)}, "data must be .* a FederatedDataset, DataFrame or Dataset; got ndarray"),
        ({"run": 3}, r"run must be a mapping of its keys \(rounds, cohort"),
        ({"run": {"ruonds": 3}}, "unknown key run.ruonds=3; did you mean 'rounds'"),
        ({"model": {"name": "vilt_tiny", "width": np.zeros(3)}}, "model.width must be a number, a text"),
    ],
)
def test_other_objects_are_refused(given: dict[str, object], text: str) -> None:
    with refused(text):
        confed.Recipe(**{"model": "vilt_tiny", "data": "squares", **given})  # type: ignore[arg-type]


def test_overrides_as_a_mapping_are_those_of_the_command_line() -> None:
    mapping = {
        "algorithm.name": "fedp3", "algorithm.lam": 0.1, "local.lr": 0.01, "study.methods": ["fedavg"],
    }  # fmt: skip
    text = [entry for entry in TEXT if not entry.startswith("~")]
    assert load_recipe("fedvqa_scenes", mapping) == load_recipe("fedvqa_scenes", text)
    assert load_recipe("fedvqa_scenes", {"local.lr": None}).local.lr == Local().lr
    assert load_recipe("fedvqa_scenes").changed({"run.seed": 3}).run.seed == 3
    refuses(r"the key of an override must be 'section\.key', got 'lr'", load_recipe, "fedvqa_scenes", {"lr": 1})
    refuses(r"'~local\.clip': the recipe does not give that key", load_recipe, "fedvqa_scenes", {"local.clip": None})


def test_settings_name_sections_and_keys_of_run() -> None:
    found = overrides_of({"algorithm": FedP3(lam=0.3), "local": {"lr": 1.0}, "rounds": 2, "data.train": 4})
    assert found["algorithm.name"] == "fedp3"
    assert found["algorithm.lam"] == 0.3
    assert (found["local.lr"], found["run.rounds"], found["data.train"]) == (1.0, 2, 4)
    refuses("unknown setting 'ruonds'; did you mean 'rounds'", overrides_of, {"ruonds": 2})


def test_the_digest_is_of_values() -> None:
    first, again, other = ({"a": [torch.arange(3), "x"], "b": np.eye(2)} for _ in range(3))
    other["b"][0, 1] = 1.0  # type: ignore[index]
    assert digest_of(first) == digest_of(again) != digest_of(other)
    assert digest_of(torch.ones(2, dtype=torch.bfloat16)) != digest_of(torch.zeros(2, dtype=torch.bfloat16))
