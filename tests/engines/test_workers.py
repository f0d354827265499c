"""Worker processes that are forked and spawned: the same bytes, and what cannot be."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from confed.engines import dispatch, workers
from confed.engines.dispatch import Batch, Encoded, Homes, join, split
from confed.engines.local import InProcess, Setup, Simulation, Workspace, simulate
from confed.engines.setup_source import SetupSource
from confed.engines.usage import cpu_seconds, peak_memory
from confed.engines.workers import Workers, start_method
from confed.federation.client_info import ClientInfo
from confed.federation.directory_store import CorruptCheckpoint
from confed.federation.messages import Call, Message
from confed.federation.state import ClientState, MemoryStore
from confed.federation.wire import encode, encode_state
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses
from setup_sources import source


def _digest(method: str, executor: str) -> tuple[str, ...]:
    """What is left of a run: losses, the server's tensors, clients' states."""
    made = source(method)
    setup, store = made.setup(), MemoryStore()
    # One spawned process is enough to show it, and starting it takes seconds.
    how = InProcess(setup) if executor == "one" else Workers(setup, 1 + (executor == "fork"), 1, executor, made)
    with Simulation(setup, store, how) as simulation:
        records = list(simulate(simulation, simulation.start(Workspace(setup.model()))))
    assert all(not record.errors for record in records)
    parts = [repr(sorted(record.losses.items())) for record in records]
    parts += [f"{n}: {t.tolist()}" for s in records[-1].servers.values() for n, t in sorted(s.params.items())]
    parts += [hashlib.sha256(encode_state(store.load(f"client-{n}"))).hexdigest() for n in range(5)]
    return tuple(parts)


def test_forked_and_spawned_workers_give_the_bits_of_one_process() -> None:
    one = _digest("scaffold", "one")  # which keeps a state at every client
    assert len(set(one[-5:])) == 5
    assert _digest("scaffold", "fork") == one
    assert _digest("scaffold", "spawn") == one


class Inline:
    """A process that is none: its function is called when it is started."""

    pid = None

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        self.start = lambda: target(*args)

    def join(self, timeout: float = 0.0) -> None:
        """It is over."""

    def is_alive(self) -> bool:
        return False


def test_a_spawned_worker_that_cannot_make_the_setup_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda how: SimpleNamespace(Process=Inline))
    monkeypatch.setattr(workers.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(workers, "keep_freed_memory", lambda: None)
    setup = source("fedavg").setup()
    why = "could not prepare the run: FileNotFoundError: no folder /data/pic"
    made = Workers(setup, 1, start="spawn", source=SetupSource("setup_sources:broken"))
    with closing(made) as lost, pytest.raises(RuntimeError, match=why):
        list(lost(fits(setup)[:1], MemoryStore(), 0))


def fits(setup: Setup) -> list[Call]:
    return [Call(setup.population.info(number), "fit", Message()) for number in range(5)]


class _Fails(MemoryStore):
    """States of which one cannot be read: a damaged file, or Ctrl-C at that moment."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self.fault = fault

    def load(self, client_id: str) -> ClientState:
        if client_id == "client-2":
            raise self.fault
        return super().load(client_id)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), CorruptCheckpoint("client-2 is damaged")])
def test_a_call_that_was_not_sent_is_not_waited_for(fault: BaseException) -> None:
    setup = source("fedavg").setup()
    with closing(Workers(setup, 2)) as some:
        with pytest.raises(type(fault)):
            list(some(fits(setup), _Fails(fault), 0))
        before = some.processes()
        assert [reply.client.id for reply in some(fits(setup), MemoryStore(), 0)] == [f"client-{n}" for n in range(5)]
        assert some.processes() == before


def test_half_a_call_ends_the_worker_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    setup = source("fedavg").setup()
    with closing(Workers(setup, 2)) as some:
        with monkeypatch.context() as patch:
            patch.setattr(dispatch.Encoded, "of", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(some(fits(setup), MemoryStore(), 0))
        replies = list(some(fits(setup), MemoryStore(), 0))
        assert [reply.client.id for reply in replies] == [f"client-{n}" for n in range(5)]
        assert not any("died" in (reply.error or "") for reply in replies)


def test_spawning_without_a_source_is_refused() -> None:
    refuses("need a source", Workers, source("fedavg").setup(), 2, start="spawn")


def test_processes_are_forked_only_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_method("auto") == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert start_method("auto") == "spawn"
    refuses("start_method must be 'spawn' or 'auto' after this process has used CUDA", start_method, "fork")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(workers.sys, "platform", "darwin")
    assert start_method("auto") == "spawn"
    assert start_method("fork") == "fork"
    monkeypatch.setattr(workers.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert start_method("auto") == "spawn"
    refuses("which cannot fork, got 'fork'", start_method, "fork")


def test_a_recipe_with_another_start_method_is_refused() -> None:
    refuses(r"run\.start_method", load_recipe, "fedvqa_scenes", ["run.start_method=thread"])


def test_time_and_memory_are_measured_without_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    from confed.engines import usage

    used = cpu_seconds()
    monkeypatch.setattr(usage, "resource", None)
    assert cpu_seconds() <= used + 1  # without the children of other tests
    sum(n * n for n in range(2_000_000))
    before = usage.cpu_seconds()
    made = source("fedavg")
    setup = made.setup()
    with Simulation(setup, MemoryStore(), Workers(setup, 2)) as simulation:
        list(simulate(simulation, simulation.start(Workspace(setup.model()))))
    assert usage.cpu_seconds() > before
    monkeypatch.setattr(usage, "Path", lambda _: Path("/nowhere/at/all"))
    assert peak_memory() > 50 * 2**20


@pytest.mark.slow  # two processes that import and read everything anew
def test_a_run_has_the_same_bytes_for_both_start_methods(tmp_path: Path) -> None:
    overrides = [
        "study.methods=[]", "algorithm.name=ditto", "data.name=toy_federation:squares", "data.train=8", "data.test=4",
        "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=2", "run.gallery=0",
        "run.workers=2",
    ]  # fmt: skip
    for how in ("fork", "spawn"):
        run(load_recipe("fedvqa_scenes", [*overrides, f"run.start_method={how}"]), tmp_path / how)
    forked = {p.relative_to(tmp_path / "fork"): p.read_bytes() for p in (tmp_path / "fork" / "models").rglob("*.*")}
    assert len(forked) == 4
    for name, content in forked.items():
        assert (tmp_path / "spawn" / name).read_bytes() == content
    for name in ("metrics.jsonl", "predictions.safetensors"):
        assert (tmp_path / "fork" / name).read_bytes() == (tmp_path / "spawn" / name).read_bytes()


# Which process takes which call -----------------------------------------------------------------------------------


def calls(names: str, session: bool = False) -> list[Call]:
    return [Call(ClientInfo(name, 1), "fit", Message(), session=session) for name in names]


def test_a_client_has_one_call_at_a_time() -> None:
    batch = Batch(calls("aabc"), 0)
    assert list(batch.ready()) == [0, 2, 3]  # the second needs the state that the first leaves
    batch.begin(0, 7)
    assert batch.position_of(7) == 0
    assert list(batch.ready()) == [2, 3]
    batch.finish(0, "came")
    assert list(batch.ready()) == [2, 3]  # which is kept when its reply is handed on
    assert batch.done.pop(0) == "came"
    assert list(batch.ready()) == [1, 2, 3]


def test_a_call_whose_process_is_lost_comes_before_the_others() -> None:
    batch = Batch(calls("abc"), 0)
    batch.begin(0, 0)
    batch.begin(1, 1)
    batch.put_back(0)
    assert batch.waiting == [0, 2]
    batch.begin(0, 2)
    batch.finish(0, "came")
    del batch.done[0]
    batch.put_back(0)  # the reply was lost with its node
    assert batch.waiting == [0, 2]


def test_sessions_stay_with_their_process_until_it_ends() -> None:
    homes = Homes()
    homes.begin(3)
    assert [homes.takes("a", 0, (0, 1)), homes.takes("b", 0, (0, 1)), homes.takes("b", 1, (0, 1))] == [
        True,
        False,
        True,
    ]
    assert [homes.takes("b", 0, (0, 1)), homes.takes("a", 0, (0, 1))] == [False, True]
    homes.leave(1)
    assert homes.of == {"a": 0}
    homes.begin(4)
    assert homes.of == {}


def test_parts_are_joined_and_split() -> None:
    parts = [b"", b"x" * 70000, b"\0\1"]
    assert split(join(parts)) == parts
    assert split(b"") == []


def test_a_message_to_many_clients_is_encoded_once() -> None:
    made: list[bytes] = []

    def keep(data: bytes) -> int:
        made.append(data)
        return len(made)

    tensor, other = torch.ones(3), torch.zeros(3)
    encoded = Encoded(keep)
    assert [encoded.of(Message({"a": tensor}, {"n": 1})) for _ in range(3)] == [1, 1, 1]
    assert encoded.of(Message({"a": tensor}, {"n": 2})) == 2
    assert encoded.of(Message({"b": tensor}, {"n": 2})) == 3
    assert encoded.of(Message({"b": other}, {"n": 2})) == 4
    assert made[3] == encode(Message({"b": other}, {"n": 2}))
