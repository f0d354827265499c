"""Sessions of split learning at sites: in memory while a process lives, done again from disk by the next one."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.split_learning import SplitLearning
from confed.engines.local import InProcess, RoundRecord
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.remote import site_session
from confed.engines.remote.client import Site
from confed.engines.remote.protocol import Answer, Limits, Request, open_body, seal
from confed.engines.remote.site_session import SessionLog
from confed.federation import directory_store
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import DirectoryStore
from confed.federation.families import split
from confed.federation.local import Local
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import ClientState, MemoryStore, Store
from confed.federation.wire import encode_state
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, PATIENT, Letters, remote_of, rounds, same

METHODS = [
    BiCSL(), BiCSL(staleness=1), BiCSL(averaged="backbone", keep_moments=True), SplitLearning(hidden=5),
]  # fmt: skip
NAMES = ["bicsl", "a batch ahead", "own answers and moments", "split_learning"]


def setup_of(algorithm: Algorithm) -> Setup:
    """With dropout and batch normalisation, whose random numbers and running values must be the same ones."""
    return toy_setup(algorithm, rounds=2, local=Local(epochs=2, batch_size=4, lr=0.05, optimizer="adamw"))


class Anew:
    """The simulator's calls without any session: in a new process each, from the state on disk."""

    def __init__(self, setup: Setup, root: Path) -> None:
        self.setup, self.timeline = setup, InProcess(setup).timeline
        self.stores = {name: DirectoryStore(root / name) for name in CLIENTS}

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call in calls:
            own = self.stores[call.client.id]
            own.begin(own.version + 1)
            yield answer(self.setup, Workspace(self.setup.model(), lasting=False), call, own, round)


def state_of(store: DirectoryStore, name: str) -> bytes:
    """A client's newest state on disk, as bytes."""
    newest = store.newest(name)
    fresh = DirectoryStore(store.root)
    fresh.begin(newest)
    return encode_state(fresh.load(name) if newest >= 0 else ClientState())


class Visited:
    """A site whose process is another one from some requests on.

    Args:
        letters: the post.
        name: who it is.
        dies: numbers of its requests, from 0, in front of which its process is killed; None for all.
    """

    def __init__(self, letters: Letters, name: str, dies: set[int] | None) -> None:
        self.letters, self.name, self.dies, self.asked = letters, name, dies, -1
        self.site = letters.site(name)

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        self.asked += 1
        if self.dies is None or self.asked in self.dies:
            self.site = self.letters.site(self.name)
        return self.site.handle(head, body)


def visited(setup: Setup, root: Path, dies: set[int] | None, number: int = 1) -> list[RoundRecord]:
    letters = Letters(setup, root)
    letters.sites[number] = Visited(letters, CLIENTS[number], dies)  # type: ignore[assignment]
    return rounds(setup, remote_of(letters, PATIENT))


SIMULATED: dict[str, list[RoundRecord]] = {}
"""Method with its settings -> the simulator's rounds, made once."""


def as_simulated(records: list[RoundRecord], setup: Setup) -> None:
    key = repr((setup.algorithm, setup.local, setup.rounds, setup.seed))
    if key not in SIMULATED:
        SIMULATED[key] = rounds(setup, InProcess(setup))
    expected = SIMULATED[key]
    assert not any(record.errors for record in records)
    assert [record.losses for record in records] == [record.losses for record in expected]
    for one, other in zip(records, expected, strict=True):
        assert same(one.servers, other.servers)


@pytest.mark.parametrize("algorithm", METHODS, ids=NAMES)
def test_a_session_gives_the_simulators_bits_and_states(
    tmp_path: Path, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(algorithm)
    letters, anew = Letters(setup, tmp_path / "sites"), Anew(setup, tmp_path / "anew")
    remote = remote_of(letters, PATIENT)
    written: list[str] = []
    with monkeypatch.context() as patched:
        save, revived = DirectoryStore.save, split._revived
        patched.setattr(DirectoryStore, "save", lambda *given: (written.append(given[1]), save(*given))[1])
        patched.setattr(split, "_revived", lambda *given: pytest.fail("a half was made from a state"))
        one = rounds(setup, remote, stop=1)
        after = [state_of(site.store, site.client.id) for site in letters.sites.values()]
        rest = rounds(setup, remote, one[-1].servers, 1)
        assert len(written) <= setup.rounds * len(CLIENTS)  # where there is anything, at the end of the round
        patched.setattr(split, "_revived", revived)
    as_simulated([*one, *rest], setup)
    first = rounds(setup, anew, stop=1)
    assert after == [state_of(anew.stores[name], name) for name in CLIENTS]
    rounds(setup, anew, first[-1].servers, 1)
    assert [state_of(site.store, site.client.id) for site in letters.sites.values()] == [
        state_of(anew.stores[name], name) for name in CLIENTS
    ]


@pytest.mark.parametrize("algorithm", METHODS, ids=NAMES)
@pytest.mark.parametrize("moments", [(0, 5), pytest.param((1, 2, 3, 4, 6, 7, 8, 9, 10, 11), marks=pytest.mark.slow)])
def test_a_killed_site_of_split_learning_keeps_the_bits(
    tmp_path: Path, algorithm: Algorithm, moments: tuple[int, ...]
) -> None:
    setup = setup_of(algorithm)
    for number in moments:
        as_simulated(visited(setup, tmp_path / str(number), {number}), setup)
    as_simulated(visited(setup, tmp_path / "often", {3, 4, 7, 9, 15, 16}), setup)


@pytest.mark.parametrize("algorithm", METHODS, ids=NAMES)
def test_a_new_process_does_at_most_two_calls_again(
    tmp_path: Path, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(algorithm)
    again: list[int] = []
    enter = site_session.SiteSession.enter

    def counted(self: Any, request: Request, *rest: Any) -> int:
        again.append(enter(self, request, *rest))
        return again[-1]

    monkeypatch.setattr(site_session.SiteSession, "enter", counted)
    as_simulated(visited(setup, tmp_path, None), setup)
    assert max(again) in (1, 2)


@pytest.mark.parametrize("algorithm", METHODS, ids=NAMES)
@pytest.mark.parametrize("limit", ["SNAPSHOT", pytest.param("LOGGED", marks=pytest.mark.slow)])
def test_snapshots_change_no_bit_and_shorten_the_log(
    tmp_path: Path, algorithm: Algorithm, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_session, limit, 0)
    setup = setup_of(algorithm)
    lengths: list[int] = []
    add = SessionLog.add

    def noted(self: SessionLog, record: site_session.Record, body: bytes) -> None:
        add(self, record, body)
        lengths.append(len(self.records))

    monkeypatch.setattr(SessionLog, "add", noted)
    as_simulated(visited(setup, tmp_path, {4, 9}), setup)
    assert len(lengths) > 60
    # Two periods of two calls, or of three where the batch ahead has to be one of a call that writes.
    assert max(lengths) <= 6


class Stopped(BaseException):
    """The process is killed here."""


@pytest.mark.parametrize("moment", ["before the log", "in the log", "before the reply is kept", "before it is sent"])
def test_a_call_in_which_a_site_is_killed_is_done_once(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, count = setup_of(BiCSL(averaged="backbone", keep_moments=True)), [0]
    letters = Letters(setup, tmp_path)
    wanted = 6  # the fifth step
    add, remember, out = SessionLog.add, Site._remember, Site.handle

    def due(site: str) -> bool:
        return site.endswith("client-1") and count[0] == wanted

    def adding(self: SessionLog, record: site_session.Record, body: bytes) -> None:
        if due(record.client) and moment == "before the log":
            raise Stopped
        before = self._path.read_bytes() if self._path.is_file() else b""
        add(self, record, body)
        if due(record.client) and moment == "in the log":
            whole = self._path.read_bytes()
            assert whole.startswith(before)
            self._path.write_bytes(whole[: (len(before) + len(whole)) // 2])
            raise Stopped

    def remembering(self: Site, *given: Any) -> None:
        if due(self.client.id) and moment == "before the reply is kept":
            raise Stopped
        remember(self, *given)

    def handling(self: Site, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        count[0] += self.client.id == "client-1"
        reply = out(self, head, body)
        if due(self.client.id) and moment == "before it is sent":
            raise Stopped
        return reply

    monkeypatch.setattr(SessionLog, "add", adding)
    monkeypatch.setattr(Site, "_remember", remembering)
    monkeypatch.setattr(Site, "handle", handling)
    receive, killed = letters.receive, list[str]()

    def received(sent: str) -> Any:
        try:
            return receive(sent)
        except Stopped:
            killed.append(sent)
            letters.sites[1] = letters.site("client-1")
            letters.since[1] = "anew"
            return None

    letters.receive = received  # type: ignore[method-assign]
    as_simulated(rounds(setup, remote_of(letters, PATIENT)), setup)
    assert len(killed) == 1


def talk(setup: Setup, root: Path, stop: int, name: str = "client-0") -> tuple[Letters, list[tuple[bytes, bytes]]]:
    """A federation that ends in the middle of its first round; and the requests to a site in it."""

    class Enough(Exception):
        pass

    letters, asked = Letters(setup, root), list[tuple[bytes, bytes]]()
    site = letters.sites[CLIENTS.index(name)]
    handle = site.handle

    def counted(head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if len(asked) == stop:
            raise Enough
        if Request.from_bytes(head, Limits()).action != "hello":
            asked.append((head, body))
        return handle(head, body)

    site.handle = counted  # type: ignore[method-assign]
    with pytest.raises(Enough):
        rounds(setup, remote_of(letters, PATIENT))
    site.handle = handle  # type: ignore[method-assign]
    return letters, asked


def test_a_repeated_request_is_done_once(tmp_path: Path) -> None:
    letters, asked = talk(setup_of(BiCSL()), tmp_path / "one", 7)
    site, log = letters.sites[0], tmp_path / "one" / "client-0" / "session"

    def done() -> list[tuple[int, str]]:
        read = SessionLog(log, "client-0", site._digest_of)
        read.read()
        return [(record.version, record.asked) for record in read.records]

    before, data = done(), log.read_bytes()
    assert len(before) == 7
    first, again = site.handle(*asked[-1]), site.handle(*asked[-1])
    assert first[1] == again[1]
    assert log.read_bytes() == data
    # Asked for two calls earlier, it takes those back, and does them again with the same result.
    replies = [site.handle(*request)[1] for request in asked[-3:]]
    assert replies[-1] == first[1]
    assert done() == before
    # As does another process with the same folder.
    assert letters.site("client-0").handle(*asked[-2])[1] == replies[-2]
    assert done()[-2:] == before[-3:-1]
    assert site.handle(*asked[-1])[1] == first[1]
    assert done()[-2:] == before[-2:]
    # A reply that was not written to its end is not sent.
    reply = log.with_name("reply")
    reply.write_bytes(reply.read_bytes()[:-50])
    assert letters.site("client-0").handle(*asked[-1])[1] == first[1]
    assert reply.read_bytes().endswith(first[1])


def test_a_log_with_other_fields_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "session"
    data = json.dumps({"client": "client-0", "colour": "blue"}).encode()
    log.write_bytes(len(data).to_bytes(8, "little") + blake2b(data, digest_size=16).digest() + data)
    read = SessionLog(log, "client-0", lambda record, body: "")
    read.read()
    assert read.records == []


def test_two_processes_that_answer_in_turn_know_of_each_other(tmp_path: Path) -> None:
    """As with Flower's SuperNode, which may start several; the folder's lock holds for a message."""
    setup = setup_of(SplitLearning(hidden=5))
    letters = Letters(setup, tmp_path)

    class Turns:
        def __init__(self) -> None:
            self.sites, self.number = [letters.site("client-1") for _ in range(2)], 0

        def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
            self.number += 1
            return self.sites[self.number // 3 % 2].handle(head, body)

    letters.sites[1] = Turns()  # type: ignore[assignment]
    as_simulated(rounds(setup, remote_of(letters, PATIENT)), setup)


def test_what_another_process_did_in_its_place_counts(tmp_path: Path) -> None:
    setup = setup_of(BiCSL())
    letters, asked = talk(setup, tmp_path / "one", 6)
    other = talk(setup, tmp_path / "two", 6)[0]
    last = Request.from_bytes(asked[-1][0], Limits())
    gradients = open_body(asked[-1][1], Limits(), {}, frozenset()).tensors
    ones, twice = ({name: torch.full_like(t, v) for name, t in gradients.items()} for v in (1.0, 2.0))
    body = seal(Message(twice, {"loss": 1.0}))
    # The server has gone back by a call, and asks another process for it, with other gradients.
    assert error_of(letters.site("client-0").handle(asked[-1][0], body)) is None
    assert error_of(other.sites[0].handle(asked[-1][0], body)) is None
    following = replace(last, version=last.version + 1, base=last.version).to_bytes()
    body = seal(Message(ones, {"loss": 1.0}))
    assert letters.sites[0].handle(following, body)[1] == other.sites[0].handle(following, body)[1]


def error_of(reply: tuple[bytes, bytes]) -> str | None:
    return Answer.from_bytes(reply[0], Limits()).error


def test_a_client_does_not_go_on_from_the_session_of_another(tmp_path: Path) -> None:
    setup = setup_of(BiCSL())
    letters, asked = talk(setup, tmp_path / "one", 5)
    one, other = (tmp_path / "one" / name / "session" for name in ("client-0", "client-1"))
    mine = other.read_bytes()
    assert mine != one.read_bytes()
    last = Request.from_bytes(asked[-1][0], Limits())
    following = replace(last, client="client-1", version=last.version + 1, base=last.version).to_bytes()
    gradients = open_body(asked[-1][1], Limits(), {}, frozenset()).tensors
    body = seal(Message({name: torch.ones_like(t) for name, t in gradients.items()}, {"loss": 1.0}))
    other.write_bytes(one.read_bytes())
    for site in (letters.sites[1], letters.site("client-1")):
        said = error_of(site.handle(following, body))
        assert said is not None
        assert f"what this site did up to version {last.version} of round 1 is lost" in said
    other.write_bytes(mine)
    assert error_of(letters.site("client-1").handle(following, body)) is None


@pytest.mark.parametrize("damage", ["a byte", "cut", "gone", "empty"])
def test_a_log_that_does_not_reach_as_far_as_the_server_is_named(tmp_path: Path, damage: str) -> None:
    letters, asked = talk(setup_of(BiCSL()), tmp_path, 6)
    log = tmp_path / "client-0" / "session"
    data = bytearray(log.read_bytes())
    if damage == "a byte":
        data[len(data) // 2] ^= 1
    log.write_bytes(bytes(data[: -len(data) // 3] if damage == "cut" else b"" if damage == "empty" else data))
    if damage == "gone":
        log.unlink()
    last = Request.from_bytes(asked[-1][0], Limits())
    following = replace(last, version=last.version + 1, base=last.version)
    for site in (letters.sites[0], letters.site("client-0")):  # the process that has it all in memory, too
        said = error_of(site.handle(following.to_bytes(), seal(Message())))
        assert said is not None
        assert "is lost" in said


def test_what_failed_in_a_session_leaves_no_trace(tmp_path: Path) -> None:
    setup = setup_of(BiCSL())
    site = talk(setup, tmp_path / "one", 6)[0].sites[0]
    other, asked = talk(setup, tmp_path / "two", 7)
    wrong = Message({"v_mha": torch.ones(2, 3), "v_apn": torch.ones(2, 3)}, {"loss": 1.0})
    assert "needs gradients of the shapes" in str(error_of(site.handle(asked[-1][0], seal(wrong))))
    assert site.handle(*asked[-1])[1] == other.sites[0].handle(*asked[-1])[1]


@pytest.mark.parametrize("written", [0, 100])
def test_a_full_disk_leaves_no_step_that_is_not_in_the_log(
    tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(BiCSL())
    site = talk(setup, tmp_path / "one", 6)[0].sites[0]
    other, asked = talk(setup, tmp_path / "two", 7)
    add = SessionLog.add

    def full(self: SessionLog, record: site_session.Record, body: bytes) -> None:
        if written:
            with self._path.open("ab") as file:
                file.write(body[:written])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SessionLog, "add", full)
    assert "No space left" in str(error_of(site.handle(*asked[-1])))
    monkeypatch.setattr(SessionLog, "add", add)
    assert site.handle(*asked[-1])[1] == other.sites[0].handle(*asked[-1])[1]
    following = Request.from_bytes(asked[-1][0], Limits())
    following = replace(following, version=following.version + 1, base=following.version)
    gradients = open_body(asked[-1][1], Limits(), {}, frozenset()).tensors
    body = seal(Message({name: torch.ones_like(t) for name, t in gradients.items()}, {"loss": 1.0}))
    assert site.handle(following.to_bytes(), body)[1] == other.sites[0].handle(following.to_bytes(), body)[1]


def test_the_log_goes_with_the_run(tmp_path: Path) -> None:
    setup = setup_of(BiCSL())
    letters = Letters(setup, tmp_path)
    remote = remote_of(letters, PATIENT)
    rounds(setup, remote)
    assert all((tmp_path / name / "session").is_file() for name in CLIENTS)
    remote.sites.farewell(0.5)
    assert not any((tmp_path / name / "session").exists() for name in CLIENTS)


def test_a_held_state_is_read_again_once_its_file_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    decode = directory_store.decode_state
    monkeypatch.setattr(directory_store, "decode_state", lambda data: (read.append(""), decode(data))[1])
    store, other = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    held = site_session.HeldState(store)
    held.begin(3)
    assert not held.load("a")
    held.save("a", ClientState({"own": {"x": torch.ones(2)}}))
    for _ in range(3):
        assert torch.equal(held.load("a").tensors["own"]["x"], torch.ones(2))
    assert not read
    held.load("a").tensors["own"]["x"] = torch.zeros(2)  # the copy's
    assert torch.equal(held.load("a").tensors["own"]["x"], torch.ones(2))
    other.begin(3)
    other.save("a", ClientState({"own": {"x": torch.full((2,), 5.0)}}))
    assert torch.equal(held.load("a").tensors["own"]["x"], torch.full((2,), 5.0))
    assert len(read) == 1
    store.rewind(2)
    assert not held.load("a")
    assert not held.load("b")
    assert isinstance(MemoryStore().load("a"), ClientState)
