"""Checkpoints: atomic, verified, falling back; client states with versions."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from confed.federation import checkpoint
from confed.federation.checkpoint import (
    Checkpoint,
    Checkpoints,
    CorruptCheckpoint,
    DirectoryStore,
    write_atomically,
)
from confed.federation.state import ClientState, ServerState


def _servers(value: float) -> dict[str, ServerState]:
    return {
        "main": ServerState(1, {"w": torch.full((3,), value)}, {"moments": {"w": torch.full((3,), -value)}}),
        "aux": ServerState(1, {"v": torch.tensor([value])}),
    }


def _state(value: float) -> ClientState:
    return ClientState({"private": {"b": torch.tensor([value])}}, {"n": int(value)})


def test_servers_slots_and_history_come_back(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(Checkpoint(4, _servers(2.0), history_bytes=77))
    checkpoint, problems = Checkpoints(tmp_path).latest()
    assert (checkpoint.round, checkpoint.history_bytes, problems) == (4, 77, [])
    assert torch.equal(checkpoint.servers["main"].slots["moments"]["w"], torch.full((3,), -2.0))
    assert torch.equal(checkpoint.servers["aux"].params["v"], torch.tensor([2.0]))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for round in (1, 2, 3):
        checkpoints.save(Checkpoint(round, _servers(round), 0))
    assert checkpoints.rounds() == [2, 3]


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.save(Checkpoint(round, _servers(round), round))
    victim = tmp_path / "round-000002" / ("checkpoint.json" if damage == "json" else "main-0.safetensors")
    data = bytearray(victim.read_bytes())
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(data[:-3] if damage != "flip" else data[:-1] + bytes([data[-1] ^ 1]))
    checkpoint, problems = Checkpoints(tmp_path).latest()
    assert checkpoint.round == 1
    assert "round-000002" in problems[0]
    assert checkpoints.rounds() == [1]


@pytest.mark.parametrize("packed", [0, checkpoint.PACKED])
@pytest.mark.parametrize("damage", ["cut", "flip", "seal", "delete"])
def test_a_damaged_client_state_spoils_its_checkpoint_only(
    tmp_path: Path, damage: str, packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PACKED", packed)
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.store.begin(round)
        checkpoints.store.save("ann", _state(round))
        checkpoints.save(Checkpoint(round, _servers(round), 0))
    (victim,) = tmp_path.glob("clients/000002.states" if packed else "clients/*/ann/000002.safetensors")
    data, at = victim.read_bytes(), -15 if packed else -1  # a seal has 14 bytes
    victim.write_bytes(
        {
            "cut": data[: at - 1],
            "seal": data[:-14],
            "flip": data[:at] + bytes([data[at] ^ 1]) + data[len(data) + at + 1 :],
            "delete": b"",
        }[damage]
    )
    if damage == "delete":
        victim.unlink()
    again = Checkpoints(tmp_path)
    found, problems = again.latest()
    assert found.round == 1
    assert victim.name in problems[0]
    assert again.store.load("ann").scalars == {"n": 1}


def test_no_sound_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="there is none"):
        Checkpoints(tmp_path).latest()


@pytest.mark.parametrize("packed", [0, checkpoint.PACKED])
def test_states_of_an_unfinished_round_are_forgotten(tmp_path: Path, packed: int) -> None:
    store = DirectoryStore(tmp_path, packed)
    store.kept = [1]
    for version in (1, 2):
        store.begin(version)
        store.save("ann", _state(version))
    store.save("bob/../x", _state(9))
    assert store.load("ann").scalars == {"n": 2}
    again = DirectoryStore(tmp_path)
    again.rewind(1)
    assert again.load("ann").scalars == {"n": 1}
    assert not again.load("bob/../x")
    assert not again.load("never seen")
    assert "ann" in again.clients()


def test_a_history_shorter_than_its_checkpoint_falls_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.save(Checkpoint(round, _servers(round), 100 * round))
    checkpoint, problems = checkpoints.latest(history_bytes=150)
    assert checkpoint.round == 1
    assert "needs 200 bytes of history, there are 150" in problems[0]


def test_a_round_broken_off_leaves_the_state_of_the_round_before(tmp_path: Path) -> None:
    # Checkpoint at 1; rounds 2 and 3 finish, 4 is broken off, and an interrupt saves round 3.
    checkpoints = Checkpoints(tmp_path)
    for version in (1, 2, 3, 4):
        checkpoints.store.begin(version)
        checkpoints.store.save("ann", _state(version))
        if version == 1:
            checkpoints.save(Checkpoint(1, _servers(1), 0))
    checkpoints.save(Checkpoint(3, _servers(3), 0))
    again = Checkpoints(tmp_path)
    assert again.latest()[0].round == 3
    assert again.store.load("ann").scalars == {"n": 3}


def test_old_versions_go_when_no_checkpoint_needs_them(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for version in (1, 2, 3, 4):
        store.kept = [max(version - 1, 0)]
        store.begin(version)
        store.save("ann", _state(version))
    assert sorted(p.stem for p in tmp_path.glob("*/ann/*")) == ["000003", "000004"]


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Checkpoint(1, _servers(1), 0))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(Checkpoint(2, _servers(2), 0))
    monkeypatch.undo()
    assert Checkpoints(tmp_path).latest()[0].round == 1
    assert not list(tmp_path.glob(".*"))
