"""Files of client states that a checkpoint needs: written down, and missed when they are not there."""

import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from confed.federation import checkpoint
from confed.federation.atomic import write_atomically
from confed.federation.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint
from confed.federation.directory_store import DirectoryStore, StatePacks
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import encode_state


def state(value: float, size: int = 4) -> ClientState:
    return ClientState({"personal": {"w": torch.full((size,), value)}}, {"value": value})


def saved(root: Path, cohorts: list[list[str]], keep: int = 2) -> Checkpoints:
    """A checkpoint after each round, in which these clients saved a state with its number."""
    checkpoints = Checkpoints(root, keep)
    for round, cohort in enumerate(cohorts, 1):
        checkpoints.store.begin(round)
        for client in cohort:
            checkpoints.store.save(client, state(round))
        checkpoints.save(Checkpoint(round, {"main": ServerState(round, {"w": torch.ones(1)})}, 0))
    return checkpoints


def test_a_deleted_last_file_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    saved(tmp_path, [["a", "b", "c"], ["a", "b"]])
    (tmp_path / "clients/000002.states").unlink()
    again = Checkpoints(tmp_path)
    found, problems = again.latest()
    assert found.round == 1
    assert problems == [f"{tmp_path}/clients/000002.states: missing, with the states of 2 clients"]
    assert again.store.load("a").scalars == {"value": 1}


@pytest.mark.parametrize("packed", [0, checkpoint.PACKED])
def test_a_deleted_file_that_all_checkpoints_need_is_named(
    tmp_path: Path, packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PACKED", packed)
    saved(tmp_path, [["a", "b"], ["a"], ["a"]])
    (victim,) = tmp_path.glob("clients/000001.states" if packed else "clients/*/b/000001.safetensors")
    victim.unlink()
    name = "clients/000001.states" if packed else r"clients/\*/\*/000001.safetensors"
    with pytest.raises(CorruptCheckpoint, match=rf"no sound checkpoint in [^;]*{name}: missing, with the states of 1 "):
        Checkpoints(tmp_path).latest()


def test_a_needed_file_is_named_where_older_states_are_left(tmp_path: Path) -> None:
    # The newest states of "a" and "b" are gone; their older ones count as newest in another file.
    saved(tmp_path, [["a", "b", "c"], ["c"], ["a", "b"], ["c"]])
    (tmp_path / "clients/000003.states").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"000003\.states: missing, with the states of 2 clients"):
        Checkpoints(tmp_path).load(4)


@pytest.mark.parametrize(("clients", "told"), [(["a"], "1 clients, the checkpoint needs 2"), (["a", "x"], "others 2")])
def test_a_sound_file_of_other_clients_is_found(tmp_path: Path, clients: list[str], told: str) -> None:
    saved(tmp_path, [["a", "b"]])
    StatePacks(tmp_path / "clients").write(1, [(client, encode_state(state(1.0))) for client in clients])
    StatePacks(tmp_path / "clients").check(1)
    with pytest.raises(CorruptCheckpoint, match=told.removeprefix("others ")):
        Checkpoints(tmp_path).load(1)


def test_what_is_needed_is_the_same_counted_afterwards(tmp_path: Path) -> None:
    rng, newest, store = random.Random(0), dict[str, str](), DirectoryStore(tmp_path, packed=300)
    for version in range(1, 60):
        store.kept = [version - 1]
        store.begin(version)
        for client in rng.sample("abcdefghijkl", 3):
            size = rng.choice((4, 100))  # in a file with others, or in its own; and from the one to the other
            for again in range(rng.choice((1, 2))):  # a method with several actions a round
                store.save(client, state(version + again, size))
            newest[client] = f"{version:06d}.states" if size == 4 else f"*/*/{version:06d}.safetensors"
        store.seal()
        needed = store.needed(version)
        assert {name: int(text.split()[0]) for name, text in needed.items()} == Counter(newest.values())
        assert needed == DirectoryStore(tmp_path).needed(version)
    store.rewind(58)
    assert store.needed(58) == DirectoryStore(tmp_path).needed(58)


def test_checkpoints_without_a_list_of_files_are_read(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [["a"]])
    found = checkpoints.load(1)
    assert found.states is not None
    checkpoints.write(Checkpoint(1, found.servers, 0))  # as versions before wrote it
    assert Checkpoints(tmp_path).latest()[0].states is None


@pytest.mark.parametrize("states", ["3", '{"000001.states": 3}', '{"000001.states": ""}', '{"000001.states": "x y"}'])
def test_a_list_of_another_form_leaves_the_checkpoint_before(tmp_path: Path, states: str) -> None:
    saved(tmp_path, [["a"], ["a"]])
    path = tmp_path / "round-000002/checkpoint.json"
    text = path.read_text()
    begin, end = text.index('"states": ') + 10, text.index(', "digest"')
    path.write_text(f"{text[:begin]}{states}}}")
    assert text[end:].startswith(', "digest"')
    found, problems = Checkpoints(tmp_path).latest()
    assert (found.round, len(problems)) == (1, 1)


def test_a_copy_without_a_client_needs_its_own_files(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "whole", [["a", "b"], ["b"]])
    checkpoints.copy(2, tmp_path / "without", without=["b"])
    copied = Checkpoints(tmp_path / "without")
    assert copied.latest()[1] == []
    assert copied.store.clients() == ["a"]
    shutil.rmtree(tmp_path / "without/clients")
    with pytest.raises(CorruptCheckpoint, match=r"000001\.states: missing"):
        Checkpoints(tmp_path / "without").latest()


def test_a_file_is_written_anew_a_state_at_a_time(tmp_path: Path) -> None:
    store, large = DirectoryStore(tmp_path, checkpoint.PACKED), 2**16
    store.begin(1)
    for client in range(30):
        store.save(f"c{client}", state(1.0, large // 4))
    store.begin(2)
    packs = store._packs
    for client in range(16):
        packs.drop(f"c{client}", 1, lambda job: job())
    before = store._packs.path(1).stat()
    tracemalloc.start()
    packs.settle()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    after = packs.path(1).stat()
    assert after.st_size < before.st_size / 2
    assert after.st_mode & 0o777 == 0o600
    assert peak < 8 * large
    assert store.load("c29").scalars == {"value": 1.0}


def test_pieces_that_fail_leave_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, [b"o", b"ld"], mode=0o600)

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, pieces())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
