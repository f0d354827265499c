"""Private state of servers and sites: files that others cannot read, one server per folder, damaged keys and lists."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from command_line import confed
from confed.cli import main
from confed.deployment.flower_app import apps
from confed.deployment.provision import SITES, make_key, read_sites
from confed.deployment.server import run_server
from confed.deployment.site import site_of, write_site_run
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.supernode import SuperNode, read_key
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.sites import SiteRegistry, Timeouts
from confed.inference.ask import ask
from confed.inference.load import load_exported
from confed.privacy.secure_sum.plan import Plan
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.system import folder_lock
from confed.system.folder_lock import exclusive
from damaged_json import DEEP, OTHER
from led_recipe import SITES_OF, recipe_of
from repository import SUPPORT


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, every site's key and the list of sites."""
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)
    (tmp_path / "recipe.toml").write_text(recipe_of("fedavg").to_toml())
    (tmp_path / SITES).write_text(json.dumps({name: make_key(tmp_path / f"{name}.key") for name in SITES_OF}))
    return tmp_path


def server(folder: Path) -> list[str]:
    state, sites = str(folder / "state"), str(folder / SITES)
    more = ["--allow-code", "toy_federation", "--port", "0"]
    return ["server", str(folder / "recipe.toml"), "--insecure", "--sites", sites, "--state", state, *more]


def ended(arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def open_to_others(*folders: Path) -> list[str]:
    """Files that others can read without a folder above them, from these on, that keeps others out."""
    found: list[str] = []
    for folder in folders:
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            found.append(str(folder))
        found += [str(path) for path in folder.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    return found


def test_what_a_server_writes_is_its_owners_alone(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    seen = set[str]()

    class Unserved(LoopbackGrid):
        admit = renew_certificate = None

    @contextmanager
    def open_superlink(*_: Any, waiting: Path, **__: Any) -> Iterator[tuple[LoopbackGrid, int]]:
        waiting.mkdir()  # as the real one does, which takes seconds to close
        yield Unserved({}), 1

    def nobody_comes(sites: SiteRegistry, *_: Any) -> list[Any]:
        sites.log("out", "warm", "fit", b"", b"")
        state = federation / "state"
        (state.with_name("state.replies") / "reply").write_bytes(b"")
        folders = [path for path in federation.iterdir() if path.name.startswith("state")]
        seen.update(path.name for folder in folders for path in (folder, *folder.rglob("*")))
        modes.extend(open_to_others(*folders))
        raise KeyboardInterrupt

    monkeypatch.setattr("confed.engines.flower.superlink.open_superlink", open_superlink)
    monkeypatch.setattr(SiteRegistry, "gather", nobody_comes)
    before = os.umask(0o022)
    try:
        assert ended(server(federation)) == 130
    finally:
        assert os.umask(before) == 0o022
    assert seen >= {"state", "state.post", "state.replies", "reply", "audit.jsonl", "recipe.toml"}
    assert not modes


def test_what_a_site_writes_is_its_owners_alone(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = federation / "own" / "private"

    def served(line: SuperNode, *_: Any) -> None:
        (private / "made while serving").mkdir()
        (private / "made while serving" / "file").write_bytes(b"")

    monkeypatch.setattr(SuperNode, "serve", served)
    arguments = ["client", str(federation / "recipe.toml"), "--insecure", "--site", "warm", "--private", str(private)]
    before = os.umask(0o022)
    try:
        assert ended([*arguments, "--key", str(federation / "warm.key"), "--allow-code", "toy_federation"]) == 0
    finally:
        assert os.umask(before) == 0o022
    assert (private / "made while serving" / "file").is_file()
    assert not open_to_others(private)


def test_a_second_server_is_told_who_works_in_the_folder(
    federation: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[object] = []
    monkeypatch.setattr("confed.engines.flower.superlink.open_superlink", lambda *_, **__: touched.append("link"))
    with exclusive(federation / "state"):
        files = sorted(federation.rglob("*"))
        assert ended(server(federation)) == 2
        assert sorted(federation.rglob("*")) == files
    said = " ".join(capsys.readouterr().err.split())
    assert f"another process is working in {federation / 'state'}: process {os.getpid()} on " in said
    assert "Traceback" not in said
    assert not touched


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", DEEP.encode()])
def test_a_damaged_key_is_named_in_one_line(content: bytes, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    make_key(whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    for number, damaged in enumerate((content, b"".join(lines[:-3]), b"".join([lines[0], *lines[3:]]))):
        path = tmp_path / f"key{number}"
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} is no private key") as caught:
            read_key(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [*(text for text in OTHER if text != "{}"), "\ud800", '{"a": 1}', '{"a": null}'])
def test_a_damaged_list_of_sites_is_named_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / SITES
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=str(path)) as caught:
        read_sites(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *OTHER, "[3]", '{"blocks": 3}', '{"blocks": [3]}', '{"blocks": [], "members": 3}',
        f'{{"blocks": {DEEP}', '{"blocks": [{"names": [], "senders": []}], "members": ["a"], "label": "x", '
        '"threshold": 1, "bits": 32, "fraction": 1, "reach": 1.0}', '{"blocks": [], "members": [], "threshold": true}',
    ],
)  # fmt: skip
def test_a_plan_of_another_form_is_named_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="secure aggregation") as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)


# Models that stay at a site ---------------------------------------------------------------------------------------

SMALL = [
    "study.methods=[]", "data.name=toy_federation:squares", "data.train=8", "data.test=4", "model.name=vilt_tiny",
    "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=2", "run.workers=1", "run.gallery=0",
    "local.lr=0.02",
]  # fmt: skip
NAMES = ("warm", "cold", "both")
PERSONAL = Path("models/personal")
GLOBAL = Path("models/global/trained.safetensors")


def federated(root: Path, method: str, *more: str, policy: str | None = None) -> None:
    """Leads a federation whose sites keep their files in ``root/NAME``, and simulates the same run."""
    recipe = load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *SMALL, *more])
    root.mkdir(exist_ok=True)
    (root / "recipe.toml").write_text(recipe.to_toml())
    _, client = apps(root / "recipe.toml")
    own = {} if policy is None else {"evaluations": policy}
    configs = {number: {"site": name, "private": str(root / name), **own} for number, name in enumerate(NAMES)}
    grid = LoopbackGrid(dict.fromkeys(configs, client), configs)
    run_server(recipe, root / "state", FlowerTransport(grid), timeouts=Timeouts(minimum=3))
    run(recipe, root / "simulated")


def same(one: Path, other: Path) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8)).save(tmp_path / "x.png")
    return tmp_path / "x.png"


@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_every_site_has_the_simulator_s_models(
    method: str, tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federated(tmp_path, method)
    for name in NAMES:
        own = tmp_path / name / "run"
        same(
            own / PERSONAL / name / "trained.safetensors",
            tmp_path / "simulated" / PERSONAL / name / "trained.safetensors",
        )
        assert site_of(tmp_path / name) == (own, name)
        assert [path.name for path in (own / PERSONAL).iterdir()] == [name]  # and nobody else's
        if (tmp_path / "simulated" / GLOBAL).is_file():
            same(own / GLOBAL, tmp_path / "simulated" / GLOBAL)
        else:
            assert not (own / GLOBAL).exists()
    question = "which colour is this?"
    expected = ask(tmp_path / "simulated", picture, question, "cold")
    asked = ["predict", str(tmp_path / "cold"), "--image", str(picture), "--question", question, "--json"]
    assert confed(*asked) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert confed("export", str(tmp_path / "cold"), str(tmp_path / "exported"), "--json") == 0
    assert load_exported(tmp_path / "exported", "cold").ask(picture, question)["answers"] == expected["answers"]


def test_a_site_without_evaluations_keeps_its_models(tmp_path: Path) -> None:
    federated(tmp_path, "fedper", policy="off")
    for name in NAMES:
        file = PERSONAL / name / "trained.safetensors"
        same(tmp_path / name / "run" / file, tmp_path / "simulated" / file)


def test_earlier_models_are_set_aside_and_missing_ones_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], picture: Path
) -> None:
    private = tmp_path / "private"
    (private / "state").mkdir(parents=True)
    (private / "audit.jsonl").touch()
    assert confed("predict", str(private), "--image", str(picture), "--question", "what?") == 2
    assert "is a site's folder without final models yet" in " ".join(capsys.readouterr().err.split())

    from confed.federation.state import ClientState
    from confed.runs.build import prepare

    for rounds in (1, 1, 3):
        recipe = load_recipe("fedvqa_scenes", ["algorithm.name=fedavg", *SMALL, f"run.rounds={rounds}"])
        setup, _ = prepare(recipe)
        info = setup.population.info(0)
        names = {name: tensor for name, tensor in setup.model().state_dict().items() if name.startswith("classifier")}
        write_site_run(private, recipe, setup, info, names, ClientState())
    assert sorted(path.name for path in private.glob("run*")) == ["run", "run-2"]
    assert load_recipe(private / "run" / "recipe.toml").run.rounds == 3
    assert load_recipe(private / "run-2" / "recipe.toml").run.rounds == 1
