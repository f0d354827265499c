"""Recipes: defaults, overrides, and errors that name the key and the valid ones."""

from pathlib import Path

import pytest

from confed.cli.catalogue import packaged
from confed.recipes.recipe import RunSection, load_recipe, packaged_recipes
from confed.registry import tasks
from refusals import refuses


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
        ("local.batch_size=0", r"local\.batch_size must be at least 1, got 0"),
        ("run.rounds=0", r"run\.rounds must be at least 1, got 0"),
        ("run.rouns=3", r"unknown key run\.rouns=3; did you mean 'rounds'"),
        ("run.keep_checkpoints=foo", r"run\.keep_checkpoints: .*valid integer.*'joins'; got 'foo'"),
        ("run.joins.x=soon", r"run\.joins\.x: .*valid integer.*got 'soon'"),
        ("run.workers=-1", r"run\.workers must not be negative"),
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
