"""Damaged files: readers name the file or the thing in one ValueError, and a damaged checkpoint is passed over."""

import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from confed.data.bounded_files import load_npy, load_npz
from confed.data.card_files import read_card
from confed.data.ml_files.coco import coco_records
from confed.data.region_files import RegionIndex, StoredRegions, write_regions
from confed.datasets.sensor_series import sensor_series
from confed.deployment.provision import read_sites
from confed.engines.flower.supernode import read_public
from confed.engines.remote.client import EvaluationRecord, Journal
from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, remove_unfinished
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import _digest, decode, decode_state, encode_state  # pyright: ignore[reportPrivateUsage]
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.privacy.secure_sum.plan import Plan
from confed.recipes.recipe import load_recipe
from confed.results.runs import load
from confed.studies.tuned import read_tuned
from repository import ROOT

DEEP = "[" * 100_000
BENCHMARKS = ROOT / "benchmarks"


def _checkpoints(root: Path) -> Path:
    for round in (1, 2):
        server = ServerState(round, {"w": torch.full((2,), float(round))}, {"m": {"w": torch.zeros(2)}})
        Checkpoints(root).save(Checkpoint(round, {"main": server}, 0))
    return root / "round-000002" / "checkpoint.json"


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda r: [r],
    "another round": lambda r: {**r, "round": 1},
    "a server of another round": lambda r: {**r, "servers": {"main": 7}},
    "servers that are a number": lambda r: {**r, "servers": 1},
    "no servers": lambda r: {**r, "servers": {}, "sha256": {}},
    "a longer history": lambda r: {**r, "history_bytes": "0"},
    "without moments": lambda r: {**r, "sha256": {"main": {"params": r["sha256"]["main"]["params"]}}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_record_of_a_checkpoint_is_passed_over(tmp_path: Path, change: Callable[..., Any]) -> None:
    path = _checkpoints(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    found, problems = Checkpoints(tmp_path).latest()
    assert found.round == 1
    assert ["checkpoint.json" in problem for problem in problems] == [True]


def test_a_nested_record_is_passed_over_and_one_without_a_digest_is_read(tmp_path: Path) -> None:
    path = _checkpoints(tmp_path)
    record = json.loads(path.read_text())
    del record["digest"]  # as earlier versions wrote it
    path.write_text(json.dumps(record))
    assert Checkpoints(tmp_path).load(2).servers["main"].params["w"].tolist() == [2, 2]
    path.write_text(DEEP)
    with pytest.raises(CorruptCheckpoint, match="RecursionError"):
        Checkpoints(tmp_path).load(2)


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
        {"index": '[["private", "w", "F32", [2, 2]]]'}, {"index": "7"}, {"groups": "3"}, {"index": DEEP},
    ],
)  # fmt: skip
def test_a_client_state_whose_index_does_not_fit_is_refused(change: dict[str, str]) -> None:
    assert decode_state(_state(lambda m: None)).tensors["private"]["w"].shape == (2, 3)
    with pytest.raises(ValueError, match="client's state"):
        decode_state(_state(lambda m: m.update(change)))


@pytest.mark.parametrize("scalars", [DEEP, "[1]", "7"])
def test_scalars_of_a_message_that_are_none(scalars: str) -> None:
    with pytest.raises(ValueError, match=r"scalars must be|must be a message"):
        decode(save({"w": torch.ones(1)}, {"scalars": scalars}))


@pytest.mark.parametrize("line", ["7", "[]", "{}", DEEP, '{"run": "r", "round": "1"}', '{"run": 1, "round": 1}'])
def test_a_damaged_line_of_a_book_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "evaluations.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"evaluations\.jsonl is damaged"):
        EvaluationRecord(tmp_path, "r", EvaluationPolicy(), Journal(tmp_path, "r"), None)
    (tmp_path / "used.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"used\.jsonl is damaged"):
        Journal(tmp_path, "r")


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -1.0, 1e300, 1e-300, 2**400, "2", True, None])
def test_noise_that_is_none_makes_no_update_look_cheap(tmp_path: Path, noise: object) -> None:
    line = {"run": "r", "round": 1, "action": "fit", "noise": noise}
    (tmp_path / "privacy.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"privacy\.jsonl is damaged: noise must be a noise multiplier"):
        Journal(tmp_path, "r")


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
    with pytest.raises(ValueError, match=r"has a damaged summary|metrics\.jsonl: "):
        load(tmp_path)


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
    with pytest.raises(ValueError, match="NumPy's format"):
        load_npy(file)
    packed = tmp_path / "a.npz"
    np.savez_compressed(packed, a=np.arange(100))
    with zipfile.ZipFile(packed) as archive:
        begin = archive.infolist()[0].header_offset + 30 + len("a.npy") + 20
    data = bytearray(packed.read_bytes())
    data[begin : begin + 40] = b"\xff" * 40
    packed.write_bytes(data)
    with pytest.raises(ValueError, match=r"complete \.npz"):
        load_npz(packed, ["a"])


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
    with pytest.raises(ValueError, match="must be a safetensors file of region features"):
        StoredRegions(file)


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


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    begun = tmp_path / "checkpoint" / ".round-000003.123.tmp"
    begun.mkdir(parents=True)
    (begun / ".main-0.safetensors.123.tmp").write_bytes(b"")
    (tmp_path / ".summary.json.123.tmp").write_bytes(b"")
    stays = [tmp_path / f".x.{os.getpid()}.tmp", tmp_path / "summary.json"]
    for path in stays:
        path.write_bytes(b"")
    remove_unfinished(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(stays)
    assert not begun.exists()


def test_mutated_inputs_find_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from fuzz_inputs import main  # type: ignore[import-not-found]

    monkeypatch.setattr(sys, "argv", ["fuzz_inputs.py", "--seed", "7", "--count", "500"])
    status = main()
    told = capsys.readouterr().out
    assert status == 0, told
    assert "500 inputs to 50 readers" in told
