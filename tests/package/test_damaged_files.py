"""Files of other shapes are named in one line; leftovers go; private folders are private; texts hold no codes."""

import io
import json
import os
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from confed.api.progress import Display, StatusPage
from confed.data.card_files import read_card
from confed.engines.remote.client import Journal
from confed.engines.remote.protocol import Fingerprint, Limits
from confed.engines.remote.sites import SiteRegistry, Timeouts
from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, DirectoryStore, remove_unfinished
from confed.federation.messages import Message
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import decode, decode_state, encode, encode_state
from confed.recipes.recipe import load_recipe
from confed.report.figures.style import Drawing
from confed.report.html import page
from confed.report.tables.table import Cell, Column, Table, to_csv, to_html, to_markdown, to_rich
from confed.results.folder import RunFolder, kind_of, read_jsonl, run_folders
from confed.studies.study import read_study
from confed.system.events import (
    Caution,
    JobEnded,
    JobProgress,
    JobsPlanned,
    JobStarted,
    RunProgress,
    SiteStates,
    SiteStatus,
    ignore,
)
from confed.system.plain_text import cell_text, visible
from damaged_json import DEEP, OTHER


def _checkpoints(root: Path) -> Checkpoints:
    checkpoints = Checkpoints(root / "checkpoint")
    for number in (1, 2):
        checkpoints.store.begin(number)
        checkpoints.store.save("a", ClientState(tensors={"private": {"w": torch.full((2,), float(number))}}))
        checkpoints.save(Checkpoint(number, {"main": ServerState(number, {"w": torch.ones(2)})}, 0))
    return checkpoints


@pytest.mark.parametrize(
    "content",
    [*OTHER, '{"round": 2, "history_bytes": "x", "servers": {}, "sha256": {}}', '{"servers": [1], "sha256": 3}',
     '{"round": 2, "history_bytes": 0, "servers": {"main": 2}, "sha256": {"main": {"params": 1}}}', "\xff"],
)  # fmt: skip
def test_a_damaged_record_of_a_checkpoint_falls_back_to_the_one_before(content: str, tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    (tmp_path / "checkpoint/round-000002/checkpoint.json").write_text(content, encoding="latin-1")
    found, problems = checkpoints.latest(0)
    assert found.round == 1
    assert "round-000002" in problems[0]
    assert checkpoints.store.load("a").tensors["private"]["w"].tolist() == [1, 1]
    (tmp_path / "checkpoint/round-000001/checkpoint.json").write_text(content, encoding="latin-1")
    with pytest.raises(CorruptCheckpoint, match="no sound checkpoint"):
        checkpoints.latest(0)


def test_leftovers_of_killed_writes_are_cleared(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    (tmp_path / "checkpoint/.round-000003.99.tmp").mkdir()
    (tmp_path / "checkpoint/.round-000003.99.tmp/main-0.safetensors").touch()
    (tmp_path / "checkpoint/round-x").mkdir()
    (tmp_path / "checkpoint/clients/.000003.states.99.tmp").touch()
    (tmp_path / "checkpoint/clients/aa/a").mkdir(parents=True)
    (tmp_path / "checkpoint/clients/aa/a/.000003.safetensors.99.tmp").touch()
    (tmp_path / ".summary.json.99.tmp").touch()
    remove_unfinished(tmp_path)
    assert list(tmp_path.rglob("*.tmp")) == []
    assert checkpoints.rounds() == [1, 2]
    assert checkpoints.latest(0)[0].round == 2


def test_states_are_their_owners_alone_and_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "clients")
    state = ClientState(
        tensors={"private": {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64)}}, scalars={"x": 1.0}
    )
    store.save("a", state)
    assert stat.S_IMODE(os.stat(tmp_path / "clients").st_mode) == 0o700
    assert len({encode_state(state) for _ in range(20)}) == 1
    again = decode_state(encode_state(state))
    assert again.scalars == state.scalars
    assert torch.equal(again.tensors["private"]["b"], torch.ones(3))


def _with_header(header: str) -> bytes:
    data = header.encode()
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize("scalars", ["3", "[1]", DEEP, "x", '"x"'])
def test_bytes_of_another_form_are_no_message(scalars: str) -> None:
    with pytest.raises(ValueError, match=r"message|dictionary"):
        decode(_with_header(json.dumps({"__metadata__": {"scalars": scalars}})))
    with pytest.raises(ValueError):  # noqa: PT011 - which of the two sentences depends on the header
        decode(_with_header(DEEP))
    assert decode(encode(Message({}, {"a": 1.0}))).scalars == {"a": 1.0}


@pytest.mark.parametrize(
    "index",
    ["3", "[3]", '[["private", "w", "F32"]]', '[["nobody", "w", "F32", [1]]]', '[["private", "w", "F9", [1]]]', DEEP],
)
def test_a_state_with_another_index_is_refused(index: str) -> None:
    from confed.federation.wire import _digest, save

    packed, metadata = {"F32": torch.ones(1)}, {"index": index, "groups": '["private"]', "scalars": "{}"}
    with pytest.raises(ValueError, match="state"):
        decode_state(save(packed, {**metadata, "digest": _digest(packed, metadata)}))


@pytest.mark.parametrize("content", OTHER)
def test_indexes_cards_and_recipes_of_another_form(content: str, tmp_path: Path) -> None:
    for name in ("summary.json", "card.json"):
        (tmp_path / name).write_text(content)
    (tmp_path / "recipe.toml").write_text(f"x = {content}")
    for read in (kind_of, run_folders, read_study):
        try:
            read(tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017 - some of these contents are good enough for some readers
    with pytest.raises(ValueError, match="card"):
        read_card(tmp_path / "card.json")
    with pytest.raises(ValueError):  # noqa: PT011 - which of the two sentences depends on the header
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize("line", ["3", "null", "{}", '{"secret": 1, "asked": 2}', '{"noise": "x", "round": 1}', DEEP])
def test_a_book_with_another_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "privacy.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"privacy\.jsonl is damaged"):
        Journal(tmp_path, "x")
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    if line[0] != "{":
        with pytest.raises(ValueError, match=r"metrics\.jsonl|object in every line"):
            read_jsonl(tmp_path / "metrics.jsonl")


HOSTILE = "\x1b[2J\x9b31m\u202e\x00\ud800=x"
NOBODY: Any = None


def test_control_characters_are_made_visible() -> None:
    assert visible("a\tb\nc é 日本") == "a\tb\nc é 日本"
    assert visible(HOSTILE) == "\\u001b[2J\\u009b31m\\u202e\\u0000\\ud800=x"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"), ("@SUM(A1)", "'@SUM(A1)"), ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"), ("-x", "'-x"),
        ("\t=1", "'\t=1"), ("-0.5", "-0.5"), ("+1e-3", "+1e-3"), ("site", "site"), ("", ""), ("\r=1", "\\u000d=1"),
    ],
)  # fmt: skip
def test_cells_are_no_formulas(text: str, cell: str) -> None:
    assert cell_text(text) == cell


def test_tables_pages_and_drawings_hold_no_control_characters() -> None:
    from rich.console import Console

    columns = (Column("=client", words=True), Column(HOSTILE))
    table = Table(HOSTILE, columns, (((Cell(HOSTILE), Cell("1", 1.0)), (Cell("=2+2"), Cell("-1", -1.0))),), (HOSTILE,))
    console = Console(width=200, record=True, file=io.StringIO(), color_system=None)
    console.print(to_rich(table))
    drawing = Drawing("x", 3.0, 2.0, lambda figure, palette: figure.suptitle(HOSTILE.replace("\ud800", "")))
    ElementTree.fromstring(drawing.svg())
    document = page.document(HOSTILE, to_html(table), [])
    for text in (console.export_text(), to_markdown(table), to_csv(table), document, drawing.svg().decode()):
        assert not set(text) & set("\x1b\x9b\u202e\x00\ud800")
        text.encode()
    assert "\n'=2+2,-1" in to_csv(table)


def test_status_pages_and_logs_hold_no_control_characters(tmp_path: Path) -> None:
    from rich.console import Console

    said = io.StringIO()
    console = Console(width=400, file=said, color_system=None)
    page = StatusPage(console, tmp_path / HOSTILE.replace("\x00", "").replace("\ud800", ""))
    page(RunProgress(0, 1, "training", HOSTILE))
    page(Caution(f"{HOSTILE} left out"))
    sites = {HOSTILE: SiteStatus(HOSTILE, HOSTILE)}
    page(SiteStates(sites))
    console.print(page._table(sites))
    with Display(console, rounds=True) as display:
        display(JobsPlanned([f"{HOSTILE}, seed 0", HOSTILE]))
        display(JobStarted(0))
        display(JobProgress(0, 0, RunProgress(0, 1, "training", f"loss {HOSTILE}")))
    with Display(console) as display:
        display(JobsPlanned([HOSTILE]))
        display(JobStarted(0))
        display(JobProgress(0, 0, Caution(f"{HOSTILE} damaged")))
        display(JobEnded(0, 0, "failed", HOSTILE))
    assert said.getvalue().count("u009b31m") >= 9
    assert not set(said.getvalue()) & set("\x1b\x9b\u202e\x00\ud800")
    roll = SiteRegistry(NOBODY, Fingerprint("", "", "", ""), Timeouts(), Limits(), tmp_path / "audit.jsonl", ignore)
    roll.log("in", f"{HOSTILE}\x7f", HOSTILE, b"", b"")
    folder = RunFolder(tmp_path)
    folder.append(folder.metrics, {"errors": {HOSTILE: HOSTILE}})
    folder.write_json(folder.summary, {HOSTILE: HOSTILE})
    for name in ("audit.jsonl", "metrics.jsonl", "summary.json"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert not set(text) & set("\x1b\x9b\u202e\x00\x7f\ud800")
    assert json.loads((tmp_path / "audit.jsonl").read_text())["site"] == f"{HOSTILE}\x7f"
    assert json.loads((tmp_path / "summary.json").read_text()) == {HOSTILE: HOSTILE}


def test_what_the_command_says_holds_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    from confed.cli.app import complain, print_json

    complain(HOSTILE)
    print_json({"name": "\x9b31m"})
    out, err = capsys.readouterr()
    assert "\x1b" not in err + out
    assert "\x9b" not in out
    assert json.loads(out) == {"name": "\x9b31m"}
