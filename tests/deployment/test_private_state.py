"""Private state of servers and sites: files that others cannot read, one server per folder, damaged keys and lists."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from repository import SUPPORT

pytest.importorskip("flwr")

from confed.cli import main
from confed.deployment.provision import SITES, make_key, read_sites
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.supernode import Line, read_key
from confed.engines.remote.sites import Roll
from confed.privacy.secure_sum.plan import Plan
from confed.system import folder_lock
from confed.system.folder_lock import exclusive
from damaged_json import DEEP, OTHER
from led_recipe import SITES_OF, recipe_of


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

    @contextmanager
    def link(*_: Any, waiting: Path, **__: Any) -> Iterator[tuple[LoopbackGrid, int]]:
        waiting.mkdir()  # as the real one does, which takes seconds to close
        yield LoopbackGrid({}), 1

    def nobody_comes(roll: Roll, *_: Any) -> list[Any]:
        roll.log("out", "warm", "fit", b"", b"")
        state = federation / "state"
        (state.with_name("state.replies") / "reply").write_bytes(b"")
        folders = [path for path in federation.iterdir() if path.name.startswith("state")]
        seen.update(path.name for folder in folders for path in (folder, *folder.rglob("*")))
        modes.extend(open_to_others(*folders))
        raise KeyboardInterrupt

    monkeypatch.setattr("confed.engines.flower.superlink.link", link)
    monkeypatch.setattr(Roll, "gather", nobody_comes)
    before = os.umask(0o022)
    try:
        assert ended(server(federation)) == 130
    finally:
        assert os.umask(before) == 0o022
    assert seen >= {"state", "state.post", "state.replies", "reply", "audit.jsonl", "recipe.toml"}
    assert not modes


def test_what_a_site_writes_is_its_owners_alone(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = federation / "own" / "private"

    def served(line: Line, *_: Any) -> None:
        (private / "made while serving").mkdir()
        (private / "made while serving" / "file").write_bytes(b"")

    monkeypatch.setattr(Line, "serve", served)
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
    monkeypatch.setattr("confed.engines.flower.superlink.link", lambda *_, **__: touched.append("link"))
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
        with pytest.raises(ValueError, match=f"{path} is no private key of a site: ") as caught:
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
    with pytest.raises(ValueError, match="secure sum") as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)
