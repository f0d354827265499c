"""Checkpoints: atomic, verified, falling back; client states with versions."""

import errno
import gc
import os
import random
import resource
import shutil
import signal
import stat
import struct
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from children import forked, status_of
from confed.federation import checkpoint, directory_store
from confed.federation.checkpoint import (
    Checkpoint,
    Checkpoints,
    CheckpointWriter,
    CorruptCheckpoint,
    DirectoryStore,
    write_atomically,
)
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import encode_state
from refusals import refuses


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


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "delete"])
def test_a_damaged_client_state_spoils_its_checkpoint_only(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.store.begin(round)
        checkpoints.store.save("ann", _state(round))
        checkpoints.save(Checkpoint(round, _servers(round), 0))
    victim = tmp_path / "clients/000002.states"
    data = victim.read_bytes()
    victim.write_bytes({"cut": data[:-1], "flip": data[:-1] + bytes([data[-1] ^ 1])}.get(damage, b""))
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


def test_states_of_an_unfinished_round_are_forgotten(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
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
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["000003", "000004"]


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


CLIENTS = 6


@cache
def cohort(round: int) -> list[int]:
    return random.Random(round).sample(range(CLIENTS), 2)


def numbered_state(client: int, round: int) -> ClientState:
    # Of two sizes, so that a client's state may move from one kind of file to the other.
    values = torch.tensor([float(client), float(round), *[0.0] * (2 * ((client + round) % 2))])
    return ClientState({"private": {"w": values}}, {"round": round})


def server(round: int) -> ServerState:
    return ServerState(round, {"w": torch.full((3,), float(round))}, {"m": {"w": torch.full((3,), -float(round))}})


def rounds(checkpoints: Checkpoints, save: Callable[[Checkpoint], None], first: int, last: int) -> Iterator[int]:
    """What a run does: clients' states, then a checkpoint."""
    for round in range(first, last + 1):
        checkpoints.store.begin(round)
        for client in cohort(round):
            assert_newest(checkpoints, client, round - 1)
            checkpoints.store.save(str(client), numbered_state(client, round))
        save(Checkpoint(round, {"main": server(round)}, 10 * round))
        yield round


def assert_newest(checkpoints: Checkpoints, client: int, round: int) -> None:
    part = [r for r in range(1, round + 1) if client in cohort(r)]
    found = checkpoints.store.load(str(client))
    assert found.scalars == ({"round": part[-1]} if part else {})
    if part:
        assert found.tensors["private"]["w"].tolist()[:2] == [client, part[-1]]


def files(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    # Space of states that nobody needs is given back sooner or later.
    for pack in root.rglob("*.states"):
        del found[str(pack.relative_to(root))]
    for version in Checkpoints(root).rounds():
        store = DirectoryStore(root / "clients")
        store.begin(version)
        found |= {f"{client} at {version}": store.load(client).scalars for client in store.clients()}
    return found


@pytest.fixture(params=[2**22, 1, 400])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All states of a round in a file, each in one of its own, or some of them together."""
    monkeypatch.setattr(directory_store, "_FULL", request.param)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("always", [(), (3, 4)])
def test_the_files_are_those_of_a_run_without_a_thread(tmp_path: Path, always: tuple[int, ...]) -> None:
    plain, behind = Checkpoints(tmp_path / "plain", 2, always), Checkpoints(tmp_path / "behind", 2, always)
    list(rounds(plain, plain.save, 1, 15))
    writer = CheckpointWriter(behind, waiting=2)
    list(rounds(behind, writer.save, 1, 9))
    writer.close()
    list(rounds(behind, writer.save, 10, 15))  # it may be used again
    writer.close()
    assert files(tmp_path / "behind") == files(tmp_path / "plain")


def test_the_checkpoint_on_disk_stays_while_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    writer, gate = CheckpointWriter(checkpoints, waiting=3), threading.Event()
    write = checkpoints.write

    def slow(checkpoint: Checkpoint) -> None:
        assert checkpoint.round == 1 or gate.wait(30)
        write(checkpoint)

    monkeypatch.setattr(checkpoints, "write", slow)
    for round in range(1, 4):
        checkpoints.store.begin(round)
        checkpoints.store.save("a", numbered_state(0, round))
        writer.save(Checkpoint(round, {"main": server(round)}, 0))
        while round == 1 and not checkpoints.rounds():
            time.sleep(0.001)
    again = Checkpoints(tmp_path, keep=1)
    assert again.rounds() == [1]
    assert again.load(1).round == 1
    again.store.begin(1)
    assert again.store.load("a").scalars == {"round": 1}, "a process killed now goes on from round 1"
    gate.set()
    writer.close()
    for round in (4, 5):
        checkpoints.store.begin(round)
        checkpoints.store.save("a", numbered_state(0, round))
    assert [path.stem for path in sorted(tmp_path.glob("clients/*.states"))] == ["000003", "000004", "000005"]


def test_an_error_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    writer = CheckpointWriter(checkpoints)
    list(rounds(checkpoints, writer.save, 1, 5))
    writer.close()

    def full(checkpoint: Checkpoint) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write", full)
    with pytest.raises(OSError, match="No space left"):
        list(rounds(checkpoints, writer.save, 6, 9))
    writer.close()  # said once
    again = Checkpoints(tmp_path, keep=1)
    assert again.latest()[0].round == 5
    for client in range(CLIENTS):
        assert_newest(again, client, 5)


def interrupted(call: Callable[[], None], step: int) -> bool:
    """Whether Ctrl-C, which comes before the n-th bytecode instruction of a call, came before its end."""
    left = step

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()  # that of coverage
    gc.disable()  # an exception in a callback of the collector would be printed, not raised
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def test_ctrl_c_at_any_moment_of_saving_leaves_nothing_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "write", lambda self, checkpoint: None)
    step, more = 0, True
    while more:
        step += 1
        writer = CheckpointWriter(Checkpoints(tmp_path / "run"), waiting=2)
        writer.save(Checkpoint(1, {"main": server(1)}, 0))
        second = Checkpoint(2, {"main": server(2)}, 0)
        more = interrupted(partial(writer.save, second), step)
        closing = threading.Thread(target=writer.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive(), f"interrupted at step {step}"
    assert step > 50


@pytest.mark.parametrize("runs", [False, True])
def test_ctrl_c_while_the_thread_starts_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        monkeypatch.undo()
        if runs:
            start(thread)
        raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path / "run")
    writer = CheckpointWriter(checkpoints)
    first = Checkpoint(1, {"main": server(1)}, 0)
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        writer.save(first)
    assert not checkpoints.rounds()
    writer.save(first)  # as a run does when it is stopped
    writer.close()
    assert checkpoints.rounds() == [1]


def test_large_checkpoints_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SMALL", 8)
    checkpoints = Checkpoints(tmp_path)
    CheckpointWriter(checkpoints).save(Checkpoint(1, {"main": server(1)}, 0))
    assert checkpoints.load(1).round == 1
    assert not any(thread.name == "confed-checkpoints" for thread in threading.enumerate())


def begun(checkpoints: Checkpoints) -> int:
    """The first round to do, as a run finds it: what came before the first checkpoint is taken back."""
    if checkpoints.rounds():
        return checkpoints.latest()[0].round + 1
    checkpoints.store.rewind(0)
    return 1


@pytest.mark.usefixtures("layout")
def test_a_kill_before_the_first_checkpoint_leaves_no_state(tmp_path: Path) -> None:
    (client, other) = cohort(1)
    killed = Checkpoints(tmp_path)
    killed.store.begin(1)
    killed.store.save(str(client), numbered_state(client, 1))
    again = Checkpoints(tmp_path)
    assert begun(again) == 1
    assert not again.store.load(str(client)).scalars
    list(rounds(again, again.save, 1, 3))
    last = Checkpoints(tmp_path)
    assert last.latest()[0].round == 3
    for number in (client, other):
        assert_newest(last, number, 3)


@pytest.mark.usefixtures("layout")
def test_a_killed_process_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng, reached = random.Random(seed), 0
    kill = 0
    while kill < 6 or (reached <= 2 and kill < 60):  # a slow machine needs more processes to get that far
        child = forked(partial(_run_until_killed, tmp_path, rng.random()))
        assert status_of(child) == signal.SIGPROF, f"seed {seed}, kill {kill}"
        checkpoints = Checkpoints(tmp_path)
        if checkpoints.rounds():
            newest = checkpoints.rounds()[-1]
            found, problems = checkpoints.latest()
            assert (found.round, problems) == (newest, []), f"seed {seed}, kill {kill}"
            assert found.round >= reached, f"seed {seed}, kill {kill}: an earlier process had got further"
            assert torch.equal(found.servers["main"].params["w"], server(found.round).params["w"])
            for client in range(CLIENTS):
                assert_newest(checkpoints, client, found.round)
            reached = found.round
        rng = random.Random(f"{seed}/{kill}")
        kill += 1
    assert reached > 2, f"seed {seed}"


def _run_until_killed(root: Path, seed: float) -> None:
    rng = random.Random(seed)
    # Ends the process at once as SIGKILL does, after some processor time, however busy the machine is.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, rng.uniform(0.005, 0.08))
    checkpoints = Checkpoints(root)
    first = begun(checkpoints)
    write = checkpoints.write

    def uneven(checkpoint: Checkpoint) -> None:
        time.sleep(rng.choice((0, 0, 0.003)))
        write(checkpoint)
        time.sleep(rng.choice((0, 0.003)))

    checkpoints.write = uneven  # type: ignore[method-assign]
    for _ in rounds(checkpoints, CheckpointWriter(checkpoints, rng.choice((1, 2))).save, first, 10**6):
        time.sleep(rng.choice((0, 0, 0.002)))


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


@pytest.mark.parametrize("full", [2**22, 1])
def test_a_deleted_file_that_all_checkpoints_need_is_named(
    tmp_path: Path, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_store, "_FULL", full)
    saved(tmp_path, [["a", "b"], ["a"], ["a"]])
    name = "000001.states" if full > 1 else "000001-1.states"  # which has the state of "b" alone
    (tmp_path / "clients" / name).unlink()
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
    (tmp_path / "clients/000001.states").unlink()
    other = DirectoryStore(tmp_path / "clients")
    other.begin(1)
    for client in clients:
        other.save(client, state(1.0))
    with pytest.raises(CorruptCheckpoint, match=told.removeprefix("others ")):
        Checkpoints(tmp_path).load(1)


def test_what_is_needed_is_the_same_counted_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_store, "_FULL", 600)  # the third state of a version lies in another file
    rng, newest, store = random.Random(0), dict[str, str](), DirectoryStore(tmp_path)
    for version in range(1, 60):
        store.kept = [version - 1]
        store.begin(version)
        for client in rng.sample("abcdefghijkl", 3):
            for again in range(rng.choice((1, 2))):  # a method with several actions a round
                store.save(client, state(version + again))
        newest |= {client: f"{version:06d}" for client in store.clients() if store.newest(client) == version}
        needed = store.needed(version)
        counts = Counter[str]()
        for name, text in needed.items():
            counts[name[:6]] += int(text.split()[0])
        assert counts == Counter(newest.values())
        assert needed == DirectoryStore(tmp_path).needed(version)
    assert any("-" in name for name in needed)
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
    store, large, path = DirectoryStore(tmp_path), 2**16, tmp_path / "000001.states"
    store.begin(1)
    for client in range(30):
        store.save(f"c{client}", state(1.0, large // 4))
    before = path.stat()
    for version in (2, 3):
        store.begin(version)
        for client in range(16):
            store.save(f"c{client}", state(1.0))
    tracemalloc.start()
    store.settle()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    after = path.stat()
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


def filled(root: Path, rounds: int = 3, clients: int = 4) -> DirectoryStore:
    store = DirectoryStore(root)
    for version in range(1, rounds + 1):
        store.begin(version)
        for client in range(clients):
            store.save(f"c{client}", state(10.0 * version + client))
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
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 32.0, "c3": 23.0}
    store = DirectoryStore(tmp_path)
    store.begin(3)
    store.save("c3", state(99.0))
    store.verify(3)
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 32.0, "c3": 99.0}


def test_a_file_cut_between_states_leaves_the_checkpoint_before(tmp_path: Path):
    saved(tmp_path, [["a", "b", "c"], ["a", "b", "c"]])
    path = tmp_path / "clients/000002.states"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    checkpoint, problems = Checkpoints(tmp_path).latest()
    assert checkpoint.round == 1
    assert problems == [f"{path}: holds the newest states of 1 clients, the checkpoint needs 3"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_with_an_earlier_seal_is_read_and_goes_on(tmp_path: Path, number: int):
    filled(tmp_path)
    path = tmp_path / "000003.states"
    record = path.stat().st_size // 4
    seal, data = struct.pack("<4sHQ", b"seal", 0, 2**30), path.read_bytes()
    path.write_bytes(data[: 2 * record] + seal * number + data[2 * record :] + seal)
    assert values(tmp_path, 3) == {f"c{n}": 30.0 + n for n in range(4)}
    store = DirectoryStore(tmp_path)
    store.begin(3)
    store.save("c3", state(99.0))
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 32.0, "c3": 99.0}


def test_a_file_per_client_of_earlier_versions_is_refused(tmp_path: Path):
    saved(tmp_path, [["a"]])
    (tmp_path / "clients/4f/a").mkdir(parents=True)
    (tmp_path / "clients/4f/a/000001.safetensors").touch()
    with pytest.raises(
        CorruptCheckpoint, match=r"clients: states .* must lie in files \.states, found a file per client"
    ):
        Checkpoints(tmp_path).latest()


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
    store, clients = DirectoryStore(tmp_path), 50
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
    reader, writer = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    reader.begin(3)
    assert reader.load("c3").scalars == {"value": 13.0}
    for version in (2, 3):
        writer.begin(version)
        for client in ("c0", "c1", "c2"):
            writer.save(client, state(10.0 * version))
    writer.settle()
    assert reader.load("c3").scalars == {"value": 13.0}
    with pytest.raises(CorruptCheckpoint, match=r"000001\.states: 'c0': the state is missing"):
        reader._state("c0", (1, 0))
    assert reader.versions("c0") == [2, 3]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path):
    store = filled(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "000003.states").stat().st_size + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.save("c0", state(99.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert store.load("c0").scalars == {"value": 30.0}
    store.save("c2", state(98.0))
    assert values(tmp_path, 3) == {"c0": 30.0, "c1": 31.0, "c2": 98.0, "c3": 33.0}


def test_large_states_lie_in_files_that_go_as_a_whole(tmp_path: Path):
    store, large = DirectoryStore(tmp_path), 2**20 + 1
    for version in (1, 2, 3):
        store.begin(version)
        for client in ("a", "b"):
            store.save(client, state(10.0 * version, large))
    assert {p.name for p in tmp_path.iterdir()} == {
        "000002.states", "000002-1.states", "000003.states", "000003-1.states"
    }  # fmt: skip
    assert values(tmp_path, 3) == {"a": 30.0, "b": 30.0}
    store.save("a", state(31.0))  # again in the same version, behind the other
    store.begin(3)
    assert values(tmp_path, 3) == {"a": 31.0, "b": 30.0}
    assert "000003.states" not in {p.name for p in tmp_path.iterdir()}
    assert store.sizes() == [len(encode_state(store.load(client))) for client in ("a", "b")]


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
    for path in (tmp_path / "a").iterdir():
        assert state(22.0).tensors["personal"]["w"].numpy().tobytes() not in path.read_bytes()


def test_nothing_is_left_of_removed_groups_in_older_states(tmp_path: Path):
    store = DirectoryStore(tmp_path)
    for version in (1, 2, 3):
        store.begin(version)
        store.save("a", state(77.0))
        store.save("b", state(1.0))
    store.save("a", ClientState())
    store.scrub("a", "personal", before=4)
    secret = state(77.0).tensors["personal"]["w"].numpy().tobytes()
    assert not [path.name for path in tmp_path.iterdir() if secret in path.read_bytes()]
    assert values(tmp_path, 3) == {"a": None, "b": 1.0}


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
    refuses("name", DirectoryStore(tmp_path).save, "x" * 300, state(1.0))
