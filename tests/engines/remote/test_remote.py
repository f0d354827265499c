"""A federation across machines, without a transport: what is refused, lost, late, repeated, and gone on with."""

import errno
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedper import FedPer
from confed.algorithms.split_learning import SplitLearning
from confed.engines.local import InProcess
from confed.engines.perform import Setup
from confed.engines.remote import server
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits, Refused, Request, open_body, schema_of, seal, version_of
from confed.engines.remote.server import Pauses, Remote
from confed.engines.remote.sites import Connection, Timeouts
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.directory_store import DirectoryStore
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import Store
from confed.system.release import PROTOCOL
from confed.testing.toy import toy_setup
from hostile_reply import with_tensors
from memory_transport import CLIENTS, PATIENT, QUICK, Letters, Tamper, Without, remote_of, rounds, same

# What is refused --------------------------------------------------------------------------------------------------


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["body.weight"][0, 0] = math.nan


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["body.bias"] = torch.zeros(3)


def wrong_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["body.bias"] = tensors["body.bias"].double()


def extra_private(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head.weight"] = torch.zeros(3, 8)


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["body.bias"]


def garbage(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return head, body[:50]


def foreign_head(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return json.dumps({**json.loads(head), "id": "another/0/0/client-0"}).encode(), body


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (with_tensors(not_a_number), "'body.weight' holds a NaN"),
        (with_tensors(wrong_shape), r"'body.bias' must be .* of shape \(8,\)"),
        (with_tensors(wrong_dtype), "'body.bias' must be torch.float32"),
        (with_tensors(extra_private), r"unexpected: \['head.weight'\]"),
        (with_tensors(missing), r"missing: \['body.bias'\]"),
        (garbage, "not a safetensors body"),
        (foreign_head, "the reply is to 'another"),
        (lambda kind, head, body: (b"{}", body), "a head must have the fields"),
        (lambda kind, head, body: (b"\xff", body), "a head must be JSON"),
    ],
)  # fmt: skip
def test_a_bad_update_is_named_and_left_out(tmp_path: Path, tamper: Tamper, says: str) -> None:
    setup = toy_setup(FedPer(), rounds=1)
    letters = Letters(setup, tmp_path)
    letters.tamper[1] = tamper
    records = rounds(setup, remote_of(letters))
    assert records[0].errors.keys() == {"client-1"}
    assert re.search(says, records[0].errors["client-1"])
    assert same(records[0].servers, rounds(setup, Without(setup, "client-1", 0))[0].servers)


def test_a_replayed_and_a_reordered_reply_are_refused(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=2)
    letters = Letters(setup, tmp_path)
    remembered: list[tuple[bytes, bytes]] = []

    def replay(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        remembered.append((head, body))
        return remembered[0]  # in the second round, the reply of the first

    letters.tamper[0] = replay
    records = rounds(setup, remote_of(letters))
    assert [set(record.errors) for record in records] == [set(), {"client-0"}]
    other = Letters(setup, tmp_path / "again")
    firsts: list[tuple[bytes, bytes]] = []

    def note(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        firsts.append((head, body))
        return head, body

    other.tamper[0] = note
    other.tamper[2] = lambda kind, head, body: firsts[0]  # what client-0 answered
    assert set(rounds(setup, remote_of(other))[0].errors) == {"client-2"}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_fuzzed_messages_are_refused_and_nothing_else(data: st.DataObject) -> None:
    known = {"a": (torch.float32, (2, 3)), "b": (torch.int64, ())}
    good = seal(Message({"a": torch.ones(2, 3), "b": torch.tensor(3)}, {"loss": 0.5}))
    body = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(body[: data.draw(st.integers(0, len(body)))]) + data.draw(st.binary(max_size=9))
    try:
        message = open_body(body, Limits(), known, frozenset(known), known)
    except Refused:
        pass
    else:
        assert schema_of(message.tensors) == known
        assert all(torch.isfinite(t.double()).all() for t in message.tensors.values())
    text = data.draw(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
    for kind in (Request, Answer):
        with pytest.raises(Refused):
            kind.from_bytes(text, Limits())


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**39, 2**39], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F8", "shape": [4], "data_offsets": [0, 4]}},
        {"a": [1, 2]},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "__metadata__": {"scalars": '{"x": [1]}'}},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "__metadata__": {"scalars": '{"x": NaN}'}},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "__metadata__": 3},
    ],
)  # fmt: skip
def test_headers_that_lie_are_refused(header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(Refused):
        open_body(len(text).to_bytes(8, "little") + text + bytes(4), Limits(), {}, frozenset())


def test_large_bodies_and_heads_are_refused() -> None:
    body = seal(Message({"a": torch.zeros(100)}))
    with pytest.raises(Refused, match="at most 99 bytes"):
        open_body(body, Limits(body=99), {}, frozenset())
    with pytest.raises(Refused, match="at most 0 named"):
        open_body(body, Limits(tensors=0), {}, frozenset())
    with pytest.raises(Refused, match="at most 5 bytes"):
        Answer.from_bytes(Answer("a", None, False, 0.0).to_bytes(), Limits(head=5))


# What a site does not do --------------------------------------------------------------------------------------------


def asked(site: Site, action: str, client: str = "client-0", message: Message | None = None) -> str | None:
    request = Request("id", client, action, 0, version_of(0, 0), version_of(0, 0) - 1)
    head, _ = site.handle(request.to_bytes(), seal(message or Message()))
    return Answer.from_bytes(head, Limits()).error


def test_a_site_runs_the_methods_actions_for_its_own_client_only(tmp_path: Path) -> None:
    setup = toy_setup(FedPer())
    site = Site(setup, client_named(setup, "client-0"), tmp_path)
    assert "no action 'examine'" in str(asked(site, "examine"))
    assert "no action 'load'" in str(asked(site, "load"))
    assert "an action has a Python name" in str(asked(site, "../../x"))
    assert "the request is for 'client-1'" in str(asked(site, "fit", "client-1"))
    private = Message({"head.weight": torch.zeros(3, 8)})
    assert "'head.weight' must not travel" in str(asked(site, "fit", message=private))
    assert "shared tensors missing" in str(asked(site, "fit"))
    assert not (tmp_path / "state").is_dir() or not list((tmp_path / "state").rglob("*.states"))
    with pytest.raises(ValueError, match="no client is called 'x'"):
        client_named(setup, "x")


def test_a_full_disk_is_the_replys_error_and_leaves_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = toy_setup(FedPer(), rounds=2)
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters)
    first = rounds(setup, remote, stop=1)[0]
    kept = {p: p.read_bytes() for p in (tmp_path / "client-1" / "state").rglob("*.states")}
    append = DirectoryStore._append

    def full(store: DirectoryStore, client_id: str, data: bytes) -> tuple[int, int]:
        if client_id == "client-1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(store, client_id, data)

    monkeypatch.setattr(DirectoryStore, "_append", full)
    second = rounds(setup, remote, first.servers, 1)[0]
    assert "No space left on device" in second.errors["client-1"]
    assert set(second.losses) == {"client-0", "client-2"}
    assert {p: p.read_bytes() for p in (tmp_path / "client-1" / "state").rglob("*.states")} == kept


def another_version(setup: Setup) -> Site:
    site = Site(setup, client_named(setup, "client-1"), Path("another"))
    site.fingerprint = replace(site.fingerprint, protocol=PROTOCOL + 2)
    return site


def another_recipe(setup: Setup, **other: Any) -> Site:
    return Site(replace(setup, **other), client_named(setup, "client-1"), Path("another"))


def another_backbone(setup: Setup) -> Site:
    def build() -> torch.nn.Module:
        model = setup.build()
        with torch.no_grad():
            model.get_parameter("stem.weight")[0, 0] += 1e-3
        return model

    return another_recipe(setup, build=build)


@pytest.mark.parametrize(
    ("stranger", "says"),
    [
        (another_version, "the protocol must be the same or one apart"),
        (partial(another_recipe, seed=3), "the recipe"),
        (partial(another_recipe, algorithm=toy_setup(FedPer(accumulator="float64")).algorithm), "the recipe"),
        (another_backbone, "such as those of its frozen backbone"),
    ],
    ids=["version", "seed", "method", "backbone"],
)
def test_a_site_of_another_run_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: Callable[[Setup], Site], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    setup = toy_setup(FedPer(), rounds=1)
    letters = Letters(setup, tmp_path)
    letters.sites[1] = stranger(setup)
    remote = Remote(setup, letters, timeouts=QUICK)
    assert [info.id for info in remote.sites.gather(CLIENTS, wait=0.05)] == ["client-0", "client-2"]
    assert says in remote.sites.status["client-1"].note
    assert says in str(letters.sites[1].problem)
    assert rounds(setup, remote)[0].errors == {"client-1": "ConnectionError: the site is not connected"}


def test_two_sites_cannot_be_the_same_client(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = Letters(setup, tmp_path, ("client-0", "client-0", "client-1"))
    remote = Remote(setup, letters, timeouts=QUICK)
    assert len(remote.sites.gather((), wait=0.02)) == 2
    assert "another site is connected as 'client-0'" in remote.sites.status["client-0"].note


# What goes on -------------------------------------------------------------------------------------------------------


def test_a_site_that_is_late_is_left_out_and_catches_up(tmp_path: Path) -> None:
    """It did compute, but its reply was not accepted: it goes on from where the server knows it to be."""
    setup = toy_setup(FedPer(), rounds=4)
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters)
    first = rounds(setup, remote, stop=1)[-1]
    letters.silent = {1}
    second = rounds(setup, remote, first.servers, 1, stop=2)[-1]
    assert second.errors == {"client-1": "TimeoutError: no reply within 0.05 s"}
    assert len(letters.forgotten) == 1
    to, _, head, body = next(letter for letter in reversed(letters.sent) if letter[0] == 1)
    letters.sites[to].handle(head, body)  # the late work is done all the same
    letters.silent = set()
    rest = rounds(setup, remote, second.servers, 2)
    assert same(rest[-1].servers, rounds(setup, Without(setup, "client-1", 1))[-1].servers)


def test_a_killed_site_is_asked_again_and_answers_from_memory(tmp_path: Path) -> None:
    setup = toy_setup(FedPer(), rounds=3)
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters, PATIENT)
    killed: list[int] = []

    def kill(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if len(killed) == 1:
            letters.sites[1] = letters.site("client-1")  # a new process with the old folder
            letters.since[1] = "anew"
            killed.append(2)
            return None  # type: ignore[return-value]  # the reply never left
        killed.append(1)
        return head, body

    letters.tamper[1] = kill
    records = rounds(setup, remote)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    assert not any(record.errors for record in records)
    again = [head for to, kind, head, _ in letters.sent if to == 1 and kind == "fit"]
    assert len(again) == 4
    assert len(set(again)) == 3  # the second request was sent twice


def test_a_round_waits_for_the_minimum(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=2)
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters, Timeouts(minimum=3, deadline=60, away=0.0, interval=1e-4))
    first = rounds(setup, remote, stop=1)[-1]
    del letters.since[2]
    looks = 0

    def connections() -> Mapping[int, Connection]:
        nonlocal looks
        looks += 1
        if looks == 20:
            letters.since[2] = "back"
        return {number: Connection(since) for number, since in letters.since.items()}

    letters.connections = connections  # type: ignore[method-assign]
    second = rounds(setup, remote, first.servers, 1)[-1]
    assert looks >= 20
    assert not second.errors
    assert same(second.servers, rounds(setup, InProcess(setup))[-1].servers)


def test_a_round_waits_so_long_and_who_was_away_catches_up(tmp_path: Path) -> None:
    setup, patience = toy_setup(FedPer(), rounds=3), 0.3
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters, Timeouts(deadline=60, away=patience, interval=1e-4))
    records = rounds(setup, remote, stop=1)
    del letters.since[2]
    began = time.monotonic()
    records += rounds(setup, remote, records[-1].servers, 1, stop=2)
    assert patience <= time.monotonic() - began < 20
    assert set(records[-1].errors) == {"client-2"}
    letters.since[2] = "back"
    remote.sites.gather(CLIENTS, wait=5)
    records += rounds(setup, remote, records[-1].servers, 2)
    assert not records[-1].errors
    assert same(records[-1].servers, rounds(setup, Without(setup, "client-2", 1))[-1].servers)


def test_a_run_ends_below_the_minimum_of_usable_replies(tmp_path: Path) -> None:
    setup = toy_setup(FedPer(), rounds=2)
    letters = Letters(setup, tmp_path)
    letters.tamper |= {0: with_tensors(not_a_number), 1: garbage}
    with pytest.raises(
        RuntimeError, match="round 1 needs 2 usable replies and can have 1 at most; client-1: ValueError"
    ):
        rounds(setup, remote_of(letters, replace(QUICK, minimum=2)))
    letters = Letters(setup, tmp_path / "again")
    letters.tamper |= {0: with_tensors(not_a_number)}
    records = rounds(setup, remote_of(letters, replace(QUICK, minimum=2)))
    assert [set(record.errors) for record in records] == [{"client-0"}, {"client-0"}]
    letters.tamper |= dict.fromkeys(range(3), garbage)
    with pytest.raises(RuntimeError, match="every client failed in round 1"):
        rounds(setup, remote_of(letters, QUICK))


@pytest.mark.parametrize("algorithm", [FedPer(), SplitLearning()], ids=["fedper", "split_learning"])
def test_a_server_killed_in_a_round_resumes_the_same_round(tmp_path: Path, algorithm: FedPer) -> None:
    setup = toy_setup(algorithm, rounds=3)
    letters = Letters(setup, tmp_path / "sites")
    remote = remote_of(letters, PATIENT)
    one = rounds(setup, remote, stop=1)[-1]
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    checkpoints.save(Checkpoint(1, one.servers, 0))
    remote.checkpoints = checkpoints.rounds()
    two = rounds(setup, remote, one.servers, 1, stop=2)[-1]
    with pytest.raises(RuntimeError, match="killed"):
        rounds(setup, Dying(remote, 2), two.servers, 2)
    again = remote_of(letters, PATIENT)
    last, _ = checkpoints.latest()
    again.begin(last.round, checkpoints.rounds())
    rest = rounds(setup, again, last.servers, last.round)
    assert same(rest[-1].servers, rounds(setup, InProcess(setup))[-1].servers)


class Dying:
    """A server that dies when it has read so many replies."""

    def __init__(self, remote: Remote, replies: int) -> None:
        self.remote, self.replies, self.timeline = remote, replies, remote.timeline

    def __call__(self, calls: list[Call], store: Store, round: int) -> Iterator[Reply]:
        for reply in self.remote(calls, store, round):
            if self.replies == 0:
                raise RuntimeError("killed")
            self.replies -= 1
            yield reply


def test_timeouts_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="minimum must be at least 1, got 0"):
        Timeouts(minimum=0)
    with pytest.raises(ValueError, match="deadline must be positive, got 0"):
        Timeouts(deadline=0)
    with pytest.raises(ValueError, match="away must not be negative, got -1"):
        Timeouts(away=-1)


# Pauses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answered", "late"), [(0.02, 0.006), (0.3, 0.04), (60.0, 0.25), (0.0, 0.0)])
def test_short_answers_are_met_soon_long_ones_seldom_sought(
    answered: float, late: float, monkeypatch: pytest.MonkeyPatch
):
    clock, looks = [100.0], 1
    monkeypatch.setattr(server.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(server.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    waiting = Pauses(0.25)
    while clock[0] < 100 + answered:
        waiting.sleep()
        looks += 1
    assert clock[0] - 100 - answered <= late
    assert looks <= 60 + answered / 0.25


def test_nothing_sleeps_where_the_transport_tells_what_arrives(monkeypatch: pytest.MonkeyPatch):
    slept, waited, able = list[float](), list[float](), [True]
    monkeypatch.setattr(server.time, "sleep", slept.append)
    waiting = Pauses(0.25, lambda seconds: waited.append(seconds) or able[0])
    waiting.sleep()
    assert (waited, slept) == ([0.25], [])
    able[0] = False  # a grid of Flower's own
    waiting.sleep()
    assert len(slept) == 1
