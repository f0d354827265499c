"""Small states of a round in one file: what killed processes leave, space, and other processes."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from confed.federation.checkpoint import PACKED, Checkpoint, Checkpoints
from confed.federation.directory_store import CorruptCheckpoint, DirectoryStore, StatePacks
from confed.federation.state import ClientState, ServerState


def state(value: float, size: int = 4) -> ClientState:
    return ClientState({"personal": {"w": torch.full((size,), value)}}, {"value": value})


def filled(root: Path, rounds: int = 3, clients: int = 4) -> DirectoryStore:
    store = DirectoryStore(root, PACKED)
    for version in range(1, rounds + 1):
        store.begin(version)
        for client in range(clients):
            store.save(f"c{client}", state(10.0 * version + client))
    store.seal()
    return store


def values(root: Path, version: int) -> dict[str, object]:
    store = DirectoryStore(root)
    store.begin(version)
    return {client: store.load(client).scalars.get("value") for client in store.clients()}


def test_a_round_has_one_file_that_its_owner_alone_can_read(tmp_path: Path):
    filled(tmp_path / "clients").settle()
    assert {p.name for p in (tmp_path / "clients").iterdir()} == {"000002.states", "000003.states"}
    assert stat.S_IMODE((tmp_path / "clients").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "clients" / "000003.states").stat().st_mode) == 0o600
    assert values(tmp_path / "clients", 3) == {f"c{n}": 30.0 + n for n in range(4)}
    assert values(tmp_path / "clients", 2) == {f"c{n}": 20.0 + n for n in range(4)}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_part_of_a_record_is_no_record_and_another_may_follow(tmp_path: Path, cut: int):
    filled(tmp_path)
    path = tmp_path / "000003.states"
    whole = path.read_bytes()[:-14]  # without its seal, as in the middle of a round
    path.write_bytes(whole[:-cut])
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 32.0, "c3": 23.0}
    store = DirectoryStore(tmp_path, PACKED)
    store.begin(3)
    store.save("c3", state(99.0))
    store.seal()
    store.verify(3)
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 32.0, "c3": 99.0}


def test_states_behind_the_seal_count_and_may_be_cut(tmp_path: Path):
    store = filled(tmp_path)
    store.save("c1", state(77.0))
    assert values(tmp_path, 3)["c1"] == 77.0
    DirectoryStore(tmp_path).verify(3)
    path = tmp_path / "000003.states"
    path.write_bytes(path.read_bytes()[:-5])
    DirectoryStore(tmp_path).verify(3)
    assert values(tmp_path, 3)["c1"] == 31.0


def test_a_file_cut_between_two_states_is_found(tmp_path: Path):
    filled(tmp_path)
    path = tmp_path / "000003.states"
    record = (path.stat().st_size - 14) // 4
    path.write_bytes(path.read_bytes()[: 2 * record])
    with pytest.raises(CorruptCheckpoint, match=r"000003\.states: it was cut or changed"):
        DirectoryStore(tmp_path).verify(3)
    DirectoryStore(tmp_path).verify(2)


@pytest.mark.parametrize("offset", [0, 4, 6, 14, 15])  # kind, length of the name, of the state, and the name
@pytest.mark.parametrize("bit", [1, 2, 128])
def test_a_changed_head_is_found_and_the_round_before_used(tmp_path: Path, offset: int, bit: int):
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.store.begin(round)
        for client in range(4):
            checkpoints.store.save(f"c{client}", state(10.0 * round + client))
        checkpoints.save(Checkpoint(round, {"main": ServerState(round, {"w": torch.ones(1)})}, 0))
    path = tmp_path / "clients" / "000002.states"
    data = bytearray(path.read_bytes())
    at = data.rindex(b"stat") + offset
    data[at] ^= bit
    path.write_bytes(data)
    again = Checkpoints(tmp_path)
    found, problems = again.latest()
    assert (found.round, len(problems)) == (1, 1)
    assert again.store.load("c3").scalars == {"value": 13.0}


def test_files_are_at_most_twice_what_is_needed(tmp_path: Path):
    store, clients = DirectoryStore(tmp_path, PACKED), 50
    newest = dict[int, float]()
    rng = torch.Generator().manual_seed(0)
    for version in range(1, 200):
        store.kept = [version - 1]
        store.begin(version)
        for client in torch.randperm(clients, generator=rng)[:5].tolist():
            newest[client] = float(version)
            store.save(f"c{client}", state(float(version), 100))
    store.begin(200)
    assert values(tmp_path, 200) == {f"c{n}": newest[n] for n in sorted(newest, key=str)}
    one = (tmp_path / "000199.states").stat().st_size / 5
    # Of every client its newest state and the one before.
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 2 * 2 * clients * one
    store.rewind(200)
    DirectoryStore(tmp_path).verify(200)


def test_a_file_written_anew_by_another_process_is_read(tmp_path: Path):
    filled(tmp_path, rounds=1)
    reader = DirectoryStore(tmp_path)
    reader.begin(3)
    assert reader.load("c3").scalars == {"value": 13.0}
    writer = StatePacks(tmp_path)
    for client in ("c0", "c1", "c2"):
        assert client in writer.clients()
        writer.drop(client, 1, lambda job: job())
    writer.settle()
    assert reader.load("c3").scalars == {"value": 13.0}
    with pytest.raises(CorruptCheckpoint, match="the state of 'c0' is missing"):
        reader._state("c0", 1)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = filled(tmp_path)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 40:
            return write(descriptor, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        store.save("c0", state(99.0))
    monkeypatch.undo()
    assert store.load("c0").scalars == {"value": 30.0}
    store.save("c2", state(98.0))
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 98.0, "c3": 33.0}


def test_states_of_earlier_versions_and_large_ones_lie_beside(tmp_path: Path):
    old = DirectoryStore(tmp_path)
    for version in (1, 2):
        old.begin(version)
        old.save("c0", state(float(version)))
    new = DirectoryStore(tmp_path, PACKED)
    new.begin(2)
    assert new.load("c0").scalars == {"value": 2.0}
    new.begin(3)
    new.save("c0", state(3.0))
    new.save("big", state(4.0, PACKED))
    new.seal()
    new.verify(3)
    assert values(tmp_path, 3) == {"c0": 3.0, "big": 4.0}
    assert values(tmp_path, 2)["c0"] == 2.0
    new.save("c0", state(5.0, PACKED))  # from one kind of file to the other
    assert values(tmp_path, 3)["c0"] == 5.0
    new.save("c0", state(6.0))
    assert values(tmp_path, 3)["c0"] == 6.0
    assert len(list(tmp_path.glob("*/big/*"))) == 1


def test_copies_and_removed_groups(tmp_path: Path):
    store = filled(tmp_path / "a")
    store.copy(3, tmp_path / "b", without={"c1"})
    assert values(tmp_path / "b", 3) == {"c0": 30.0, "c2": 32.0, "c3": 33.0}
    DirectoryStore(tmp_path / "b").verify(3)
    store.scrub("c2", "personal", before=4)
    left = DirectoryStore(tmp_path / "a")
    left.begin(3)
    assert (left.load("c2").tensors, left.load("c3").tensors.keys()) == ({}, {"personal"})
    left.verify(3)
    assert state(22.0).tensors["personal"]["w"].numpy().tobytes() not in (tmp_path / "a/000002.states").read_bytes()


def test_a_full_disk_leaves_the_file_that_was_to_be_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = filled(tmp_path, rounds=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("confed.federation.directory_store.write_atomically", full)
    for version in (2, 3, 4):
        store.begin(version)
        for client in range(3):
            store.save(f"c{client}", state(10.0 * version + client))
    store.begin(5)
    assert values(tmp_path, 4) == {"c0": 40.0, "c1": 41.0, "c2": 42.0, "c3": 13.0}


def test_names_that_no_file_system_has_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="name"):
        DirectoryStore(tmp_path, PACKED).save("x" * 300, state(1.0))
