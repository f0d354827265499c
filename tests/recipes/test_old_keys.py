"""Keys that recipes had before: in files, rows, overrides and Python, with their new names in one warning."""

import pytest

from confed.federation.local import Schedule
from confed.recipes.recipe import Recipe, load_recipe, parse_recipe
from confed.results.settings import flat

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
        with pytest.raises(ValueError, match=r"data.difficult is no option of 'voc' any more, it is always False"):
            parse_recipe(content)
    else:
        assert "difficult" not in parse_recipe(content).sections["data"]
