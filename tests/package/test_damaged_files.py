"""Files of other shapes are named in one line; leftovers go; private folders are private; texts hold no codes."""

import io
import json
import os
import stat
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from confed.api.progress import Display, StatusPage
from confed.data.bounded_files import load_npy, load_npz
from confed.data.ml_files.coco import coco_records
from confed.data.region_files import RegionIndex, StoredRegions, write_regions
from confed.datasets.card import read_card
from confed.datasets.sensor_series import sensor_series
from confed.deployment.provision import read_sites
from confed.engines.flower.supernode import read_public
from confed.engines.remote.client import EvaluationRecord, Journal
from confed.engines.remote.protocol import Fingerprint, Limits
from confed.engines.remote.sites import SiteRegistry, Timeouts
from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, DirectoryStore, remove_unfinished
from confed.federation.messages import Message
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import (
    _digest,  # pyright: ignore[reportPrivateUsage]
    decode,
    decode_state,
    encode,
    encode_state,
)
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.privacy.secure_sum.plan import Plan
from confed.recipes.recipe import load_recipe
from confed.report.figures.style import Drawing
from confed.report.html import page
from confed.report.tables.table import Cell, Column, Table, to_csv, to_html, to_markdown, to_rich
from confed.results.folder import RunFolder, kind_of, read_jsonl, run_folders
from confed.results.runs import load
from confed.studies.study import read_study
from confed.studies.tuned import read_tuned
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
from refusals import refuses
from repository import ROOT

DRAWS = True


def _checkpoints(root: Path) -> Checkpoints:
    checkpoints = Checkpoints(root / "checkpoint")
    for number in (1, 2):
        checkpoints.store.begin(number)
        checkpoints.store.save("a", ClientState(tensors={"private": {"w": torch.full((2,), float(number))}}))
        checkpoints.save(
            Checkpoint(
                number,
                {"main": ServerState(number, {"w": torch.full((2,), float(number))}, {"m": {"w": torch.zeros(2)}})},
                0,
            )
        )
    return checkpoints


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda r: [r],
    "another round": lambda r: {**r, "round": 1},
    "a server of another round": lambda r: {**r, "servers": {"main": 7}},
    "servers that are a number": lambda r: {**r, "servers": 1},
    "no servers": lambda r: {**r, "servers": {}, "sha256": {}},
    "a longer history": lambda r: {**r, "history_bytes": "0"},
    "without moments": lambda r: {**r, "sha256": {"main": {"params": r["sha256"]["main"]["params"]}}},
}


CONTENTS = (
    *OTHER, '{"round": 2, "history_bytes": "x", "servers": {}, "sha256": {}}', '{"servers": [1], "sha256": 3}',
    '{"round": 2, "history_bytes": 0, "servers": {"main": 2}, "sha256": {"main": {"params": 1}}}', "\xff",
)  # fmt: skip


@pytest.mark.parametrize("change", [*CONTENTS, *CHANGES.values()])
def test_a_damaged_record_falls_back_to_the_checkpoint_before(change: str | Callable[..., Any], tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    path = tmp_path / "checkpoint/round-000002/checkpoint.json"
    content = change if isinstance(change, str) else json.dumps(change(json.loads(path.read_text())))
    path.write_text(content, encoding="latin-1")
    found, problems = checkpoints.latest(0)
    assert found.round == 1
    assert ["checkpoint.json" in problem for problem in problems] == [True]
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
    (tmp_path / ".summary.json.99.tmp").touch()
    stays = [tmp_path / f".x.{os.getpid()}.tmp"]
    for path in stays:
        path.touch()
    remove_unfinished(tmp_path)
    assert sorted(tmp_path.rglob("*.tmp")) == sorted(stays)
    assert checkpoints.rounds() == [1, 2]
    assert checkpoints.latest(0)[0].round == 2


def test_states_are_private_and_equal_states_equal_bytes(tmp_path: Path) -> None:
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
    refuses(r"message|dictionary", decode, _with_header(json.dumps({"__metadata__": {"scalars": scalars}})))
    with pytest.raises(ValueError):  # noqa: PT011 - which of the two sentences depends on the header
        decode(_with_header(DEEP))
    assert decode(encode(Message({}, {"a": 1.0}))).scalars == {"a": 1.0}


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
    refuses("card", read_card, tmp_path / "card.json")
    with pytest.raises(ValueError):  # noqa: PT011 - which of the two sentences depends on the header
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize("line", ["3", "null", "{}", '{"secret": 1, "asked": 2}', '{"noise": "x", "round": 1}', DEEP])
def test_a_book_with_another_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "privacy.jsonl").write_text(f"{line}\n")
    refuses(r"privacy\.jsonl is damaged", Journal, tmp_path, "x")
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    if line[0] != "{":
        refuses(r"metrics\.jsonl|object in every line", read_jsonl, tmp_path / "metrics.jsonl")


BENCHMARKS = ROOT / "benchmarks"


def test_a_record_without_a_digest_is_read(tmp_path: Path) -> None:
    _checkpoints(tmp_path)
    path = tmp_path / "checkpoint/round-000002/checkpoint.json"
    record = json.loads(path.read_text())
    del record["digest"]  # as earlier versions wrote it
    path.write_text(json.dumps(record))
    assert Checkpoints(tmp_path / "checkpoint").load(2).servers["main"].params["w"].tolist() == [2, 2]
    path.write_text(DEEP)
    with pytest.raises(CorruptCheckpoint, match="RecursionError"):
        Checkpoints(tmp_path / "checkpoint").load(2)


def _state(change: Callable[[dict[str, str]], None]) -> bytes:
    """A state with changed metadata, whose digest is right."""
    data = encode_state(ClientState({"private": {"w": torch.ones(2, 3)}}, {"k": 1.5}))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    del metadata["digest"]
    change(metadata)
    metadata["digest"] = _digest({"F32": torch.ones(6)}, metadata)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize(
    "change",
    [
        {"index": '[["private", "w", "I64", [2, 3]]]'}, {"index": '[["other", "w", "F32", [2, 3]]]'},
        {"index": '[["private", "w", "F32", ["2", 3]]]'}, {"index": '[["private", "w", "F32", [2, 9]]]'},
        {"index": '[["private", "w", "F32", [2, 2]]]'}, {"index": '[["private", "w", "F9", [2, 3]]]'},
        {"index": '[["private", "w", "F32"]]'}, {"index": "[3]"}, {"index": "7"}, {"groups": "3"}, {"index": DEEP},
    ],
)  # fmt: skip
def test_a_client_state_whose_index_does_not_fit_is_refused(change: dict[str, str]) -> None:
    assert decode_state(_state(lambda m: None)).tensors["private"]["w"].shape == (2, 3)
    refuses("client's state", decode_state, _state(lambda m: m.update(change)))


@pytest.mark.parametrize("line", ["7", "[]", "{}", DEEP, '{"run": "r", "round": "1"}', '{"run": 1, "round": 1}'])
def test_a_damaged_line_of_a_book_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "evaluations.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"evaluations\.jsonl is damaged"):
        EvaluationRecord(tmp_path, "r", EvaluationPolicy(), Journal(tmp_path, "r"), None)
    (tmp_path / "used.jsonl").write_text(line + "\n")
    refuses(r"used\.jsonl is damaged", Journal, tmp_path, "r")


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -1.0, 1e300, 1e-300, 2**400, "2", True, None])
def test_noise_that_is_none_makes_no_update_look_cheap(tmp_path: Path, noise: object) -> None:
    line = {"run": "r", "round": 1, "action": "fit", "noise": noise}
    (tmp_path / "privacy.jsonl").write_text(json.dumps(line) + "\n")
    refuses(r"privacy\.jsonl is damaged: noise must be a noise multiplier", Journal, tmp_path, "r")


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "sites.json": (read_sites, DEEP), "card.json": (read_card, DEEP), "tuned.toml": (read_tuned, f"a = {DEEP}"),
    "recipe.toml": (load_recipe, f"a = {DEEP}"), "plan.json": (lambda path: Plan.from_json(path.read_text()), DEEP),
    "empty_plan.json": (lambda path: Plan.from_json(path.read_text()), "null"),
    "coco.json": (
        lambda path: list(coco_records(path)),
        '{"images": [{"id": 99999999999999999999, "file_name": "a"}], "annotations": [], "categories": []}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_deep_or_strange_files_are_refused_in_a_line(tmp_path: Path, name: str) -> None:
    read, content = READERS[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"\w") as caught:
        read(tmp_path / name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", '{"algorithm": "fedavg", "seed": []}'), ("summary.json", '{"algorithm": "x", "seed": 1e999}'),
        ("summary.json", '{"runs": [7]}'), ("summary.json", '{"runs": [{"method": "a"}]}'),
        ("metrics.jsonl", '{"event": "round", "loss": 3}\n'), ("metrics.jsonl", '{"event": "round", "errors": {}}\n'),
    ],
)  # fmt: skip
def test_a_run_folder_with_a_damaged_file_is_refused_in_a_line(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / name).write_text(content)
    refuses(r"has a damaged summary|metrics\.jsonl: ", load, tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "recipe.toml"])
def test_a_run_folder_with_a_nested_file_is_read_without_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / name).write_text(f"a = {DEEP}" if name == "recipe.toml" else DEEP)
    assert len(load(tmp_path).runs) == 1


def test_arrays_with_a_damaged_header_or_packing_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.ones(3))
    file.write_bytes(file.read_bytes().replace(b"(3,)", b"((((", 1))
    refuses("NumPy's format", load_npy, file)
    packed = tmp_path / "a.npz"
    np.savez_compressed(packed, a=np.arange(100))
    with zipfile.ZipFile(packed) as archive:
        begin = archive.infolist()[0].header_offset + 30 + len("a.npy") + 20
    data = bytearray(packed.read_bytes())
    data[begin : begin + 40] = b"\xff" * 40
    packed.write_bytes(data)
    refuses(r"complete \.npz", load_npz, packed, ["a"])


@pytest.mark.parametrize("change", [{"shape": [3.0, 2, 4]}, {"data_offsets": []}, {"data_offsets": [0, "9"]}])
def test_region_features_with_a_strange_header_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "regions.safetensors"
    rows = [(np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32))] * 3
    write_regions(file, RegionIndex((1, 2, 3), 2, 4), rows)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["features"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    refuses("expected a safetensors file of region features", StoredRegions, file)


@pytest.mark.parametrize("value", ["x" * 140_000, "x" * 300])
def test_a_long_value_in_a_csv_file_is_refused(tmp_path: Path, value: str) -> None:
    head = "id,client,split,series,text,label"
    (tmp_path / "examples.csv").write_text(f"{head}\n1,a,train,{value},words,yes\n")
    with pytest.raises(ValueError, match=r"examples\.csv") as caught:
        sensor_series(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_damaged_public_key_is_refused_in_a_line() -> None:
    key = "ecdsa-sha2-nistp384 " + "A" * 200_000
    with pytest.raises(ValueError, match="no public key") as caught:
        read_public(key)
    assert len(str(caught.value)) < 1000


def test_mutated_inputs_find_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from fuzz_inputs import main  # type: ignore[import-not-found]

    monkeypatch.setattr(sys, "argv", ["fuzz_inputs.py", "--seed", "7", "--count", "500"])
    status = main()
    told = capsys.readouterr().out
    assert status == 0, told
    assert "500 inputs to 50 readers" in told


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
