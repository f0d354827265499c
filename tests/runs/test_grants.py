"""What recipes ask for beyond their folder, and what recipes that came from elsewhere do not get."""

import inspect
import warnings
from pathlib import Path
from typing import get_type_hints

import pytest

from confed import registry
from confed.deployment.site import site_recipe
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.grants import PATHS, asks_of, check_grants, local_paths
from confed.studies.published import Published
from refusals import refuses

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main


@pytest.fixture(autouse=True)
def nothing_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFED_GRANT", raising=False)
    monkeypatch.setattr(registry, "_GRANTED", [])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def recipe(*overrides: str) -> Recipe:
    return load_recipe("fedvqa_scenes", overrides)


def asked(*overrides: str) -> list[tuple[str, str]]:
    return [(ask.kind, ask.key) for ask in asks_of(recipe("study.methods=[]", *overrides))]


def test_every_option_that_is_a_path_is_a_key_that_is_looked_at() -> None:
    kinds = (registry.algorithms, registry.models, registry.tasks, registry.datasets)
    found = set[str]()
    for kind in kinds:
        for name in kind.names():
            entry = kind[name]
            hints = get_type_hints(entry.__init__ if inspect.isclass(entry) else entry)
            found |= {key for key, hint in hints.items() if "Path" in str(hint) and key != "return"}
    assert found
    assert found <= PATHS


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.name=coco data.root=/etc", ("disk", "data.root")),
        ("data.name=coco data.root=../elsewhere", ("disk", "data.root")),
        ("data.name=coco data.root=~/photos", ("disk", "data.root")),
        ("data.name=coco data.root=data data.train=/etc/passwd", ("disk", "data.train")),
        ("data.name=hub data.source=owner/name", ("network", "data.source")),
        ("data.name=hub data.source=https://x.example/y", ("network", "data.source")),
        ('model.name=hf model.source="hub:owner/name" task.name=chat', ("network", "model.source")),
        ("run.engine=ray run.address=10.0.0.1:6379", ("network", "run.address")),
    ],
)  # fmt: skip
def test_what_leads_out_of_the_folder_is_asked_for(override: str, expected: tuple[str, str]) -> None:
    assert asked(*override.split(" ")) == [expected]


def test_a_folder_below_and_a_default_are_not_asked_for(tmp_path: Path) -> None:
    assert asked() == []
    assert asked("data.name=coco", "data.root=data/coco") == []
    assert asked("data.name=coco", f"data.root={tmp_path / 'here' / 'x'}") == []
    (tmp_path / "here" / "link").symlink_to("/etc")
    assert asked("data.name=coco", "data.root=link") == [("disk", "data.root")]


def test_rows_and_models_of_a_study_are_looked_at(tmp_path: Path) -> None:
    study = recipe().with_rows(
        ["fedavg", "b"], {"b": {"name": "fedavg", "model": {"name": "vit_mini", "pretrained": str(tmp_path / "w")}}}
    )
    assert [(ask.kind, ask.key) for ask in asks_of(study)] == [("disk", "model.pretrained")]


def test_a_foreign_recipe_gets_nothing_that_was_not_granted(tmp_path: Path) -> None:
    foreign = recipe("data.name=coco", "data.root=/data/coco")
    with pytest.raises(ValueError, match=r"x\.json came from elsewhere and asks for disk \(data\.root") as caught:
        check_grants(foreign, "x.json")
    assert "--grant disk" in str(caught.value)
    check_grants(foreign, "x.json", given=["data.root=/data/coco"])
    check_grants(foreign, "x.json", given={"data.root": "/data/coco"})
    check_grants(foreign, "x.json", Path("/data"))
    registry.grant("network")
    refuses("--grant disk", check_grants, foreign, "x.json")
    registry.grant("disk")
    check_grants(foreign, "x.json")
    refuses("--grant must be network or disk", registry.grant, "everything")


def test_a_grant_in_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFED_GRANT", "network, disk")
    check_grants(recipe("data.name=coco", "data.root=/data/coco"), "x.json")


def published(source: str) -> Published:
    resolved = recipe("study.methods=[]", "data.name=coco", "data.root=/data/coco").to_toml()
    import tomllib

    return Published(source, {"recipe": "x", "resolved": tomllib.loads(resolved), "runs": [{"seed": 0}]})


def test_a_published_recipe_is_one_from_elsewhere(tmp_path: Path) -> None:
    for source in ("https://x.example/row.json", str(tmp_path / "row.json")):
        refuses("came from elsewhere", published(source).recipe, 0, [])
        assert published(source).recipe(0, ["data.root=/data/coco"]).run.seed == 0
    assert published("/data/row.json").recipe(0, []).run.seed == 0  # data beside it


def test_a_sites_recipe_is_one_from_elsewhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kit" / "recipe.toml"
    file.parent.mkdir()
    file.write_text(recipe("study.methods=[]", "data.name=coco", "data.root=/data/coco").to_toml())
    refuses("came from elsewhere", site_recipe, file, handed_out=True)
    assert site_recipe(file, ["root=/data/coco"], handed_out=True).run.rounds
    words = ["client", str(file), "--site", "a", "--insecure", "--key", str(tmp_path / "none")]
    for more, line in (
        ([], "came from elsewhere"),
        (["--data", "root=/x"], "none"),
        (["--grant", "disk"], "none"),
        (["--grant", "network"], "came from elsewhere"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *more])
        assert line in capfd.readouterr().err


def test_a_recipe_of_ones_own_is_told_what_it_asks_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own" / "recipe.toml"
    file.parent.mkdir()
    file.write_text(recipe("study.methods=[]", "data.name=coco", f"data.root={tmp_path / 'coco'}").to_toml())
    with pytest.raises(SystemExit):
        main(["run", str(file)])
    first, *_ = capfd.readouterr().err.splitlines()
    assert first == f"note: the recipe asks for more than its folder: disk (data.root = '{tmp_path / 'coco'}')"
    with pytest.raises(SystemExit):
        main(["run", str(file), f"data.root={file.parent / 'coco'}"])
    assert "asks for more" not in capfd.readouterr().err


def test_paths_of_this_machine_are_known(tmp_path: Path) -> None:
    found = local_paths(recipe("study.methods=[]", "data.name=coco", f"data.root={tmp_path}", "data.train=~/x"))
    assert found == sorted([str(tmp_path), "~/x"], key=len, reverse=True)
    assert local_paths(recipe("study.methods=[]")) == []
