import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from children import forked, status_of
from confed.federation import checkpoint
from confed.federation.checkpoint import Checkpoint, Checkpoints, CheckpointWriter
from confed.federation.directory_store import DirectoryStore
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import encode_state

CLIENTS = 6


@cache
def cohort(round: int) -> list[int]:
    return random.Random(round).sample(range(CLIENTS), 2)


def state(client: int, round: int) -> ClientState:
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
            checkpoints.store.save(str(client), state(client, round))
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


LAYOUTS = {"files": 0, "packs": checkpoint.PACKED, "both": 268}
"""Bytes of a state up to which it lies with others; those of the test have about this many."""


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoint, "PACKED", LAYOUTS[request.param])
    return request.param


def test_states_lie_in_both_kinds_of_files() -> None:
    sizes = {len(encode_state(state(client, round))) for client in range(CLIENTS) for round in range(1, 30)}
    assert min(sizes) <= LAYOUTS["both"] < max(sizes)


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
        checkpoints.store.save("a", state(0, round))
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
    assert len(list(tmp_path.glob("clients/*.states"))) == 2


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
    killed.store.save(str(client), state(client, 1))
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
