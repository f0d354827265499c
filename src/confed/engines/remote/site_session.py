"""A site's session: live objects in memory, requests on disk, and their repetition by a process that takes over.

What a client has in hand between two calls of split learning is the size of its model, a request the size of a batch's
gradients at the cut. A site therefore keeps the first in memory and writes down the second, before its reply counts; a
process that takes over does the requests again, from the state that they began with, and has the same in hand, bit for
bit. A record that was not written to its end, because the process was killed, does not count.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from confed.engines.perform import Setup, Workspace, perform
from confed.engines.remote.protocol import Refused, Request, digest, version_of
from confed.federation.atomic import write_atomically
from confed.federation.checkpoint import DirectoryStore
from confed.federation.client_info import ClientInfo
from confed.federation.directory_store import newest_until
from confed.federation.messages import Call
from confed.federation.state import ClientState
from confed.federation.wire import decode, encode_state
from confed.privacy.secure_sum.member import GROUP

Proof = Callable[["Record", bytes], str]  # digest of a request from its record and its body


@dataclass(frozen=True)
class Record:
    """One request of a session, as done by its site."""

    client: str  # whose session it is
    action: str
    round: int  # number of finished rounds
    version: int
    base: int
    asked: str
    found: int  # version of the state on disk that it began with; -1 for none
    left: int  # version of the state on disk when it was done; the same where it changed nothing there
    session: bool  # whether it was a call of the session, rather than one in between that left another state
    whole: bool  # whether that state holds everything that the session needs
    size: int  # bytes of the body
    heard: str = ""  # digest of what came in the round up to this request; empty where it does not matter
    at: int = field(default=0, compare=False)  # where the body begins; not written

    @property
    def end(self) -> int:
        return self.at + self.size


class SessionLog:
    """Records of one session in a file."""

    def __init__(self, path: Path, client: str, proof: Proof) -> None:
        self._path, self._client, self._proof = path, client, proof
        self.records: list[Record] = []  # in the order in which they were done; each begins where the one before ended
        self._stamp: tuple[int, ...] | None = ()

    def read(self) -> bool:
        """Reads the file where another process may have written to it; whether it had."""
        if self._look() == self._stamp:
            return False
        self.records = self._sound()
        self._stamp = self._look()
        return True

    @property
    def newest(self) -> int:
        """Version of the last record; -1 where there is none."""
        return self.records[-1].version if self.records else -1

    @property
    def needed(self) -> tuple[int, ...]:
        """Versions of the state on disk without which the records cannot be done again."""
        if not self.records:
            return ()
        first = self.records[0]
        between = (record.left for record in self.records if not record.session)
        return (first.left if first.whole else first.found, *between)

    def rewind(self, version: int) -> bool:
        """Drops what was done after a version; whether there was any."""
        if self.newest <= version:
            return False
        self.records = [record for record in self.records if record.version <= version]
        if self._path.is_file():
            os.truncate(self._path, self.records[-1].end if self.records else 0)
        self._stamp = self._look()
        return True

    def add(self, record: Record, body: bytes) -> None:
        """Writes down a request that was done: after the last one where it goes on from there, else as the first."""
        if record.base != self.newest or record.round != self.records[-1].round:
            self._anew([], record, body)
        elif record.whole and (before := [n for n, old in enumerate(self.records) if old.whole]) and before[-1] > 0:
            # The snapshot before this one stays: the server may not accept the reply to come.
            self._anew(self.records[before[-1] :], record, body)
        else:
            head = _head(record)
            end = self.records[-1].end
            with open(self._path, "r+b") as file:
                file.seek(end)
                file.writelines((head, body))
                file.truncate()
            self.records.append(replace(record, at=end + len(head)))
        self._stamp = self._look()

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
        self.records, self._stamp = [], None

    def body(self, record: Record) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(record.at)
            return file.read(record.size)

    def _anew(self, before: list[Record], record: Record, body: bytes) -> None:
        pieces, records, end = list[bytes](), list[Record](), 0
        for old, content in [*((old, self.body(old)) for old in before), (record, body)]:
            head = _head(old)
            pieces += (head, content)
            records.append(replace(old, at=end + len(head)))
            end = records[-1].end
        write_atomically(self._path, pieces)
        self.records = records

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _sound(self) -> list[Record]:
        """The records up to the first that is damaged, or does not go on from the one before."""
        records = list[Record]()
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return []
        with file:
            while (record := _read(file.read, file.tell)) is not None:
                body = file.read(record.size)
                goes_on = not records or (record.base, record.round) == (records[-1].version, records[-1].round)
                if record.client != self._client or not goes_on or record.asked != self._proof(record, body):
                    break
                records.append(record)
        return records


def _head(record: Record) -> bytes:
    told = asdict(record)
    del told["at"]
    data = json.dumps(told).encode()
    return len(data).to_bytes(8, "little") + blake2b(data, digest_size=16).digest() + data


def _read(read: Callable[[int], bytes], tell: Callable[[], int]) -> Record | None:
    """A record's head; None at the end of the file, or where it is damaged."""
    start = read(24)
    data = read(min(int.from_bytes(start[:8], "little"), 2**20)) if len(start) == 24 else b""
    if not data or blake2b(data, digest_size=16).digest() != start[8:]:
        return None
    told: dict[str, Any] = json.loads(data)
    try:
        return Record(**told, at=tell())
    except TypeError:  # of a version that writes other fields
        return None


SNAPSHOT = 60.0
"""Seconds of work after which a session leaves a snapshot, so that a process that takes over has less to do again."""

LOGGED = 2**26  # bytes of requests after which it does so, too: the log holds about three times as much at most


class HeldState:
    """A store whose state, once read or written, is held in memory for as long as its file is the same."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self._held: tuple[tuple[object, ...], ClientState] | None = None

    def begin(self, version: int) -> None:
        self._store.begin(version)

    def load(self, client_id: str) -> ClientState:
        stamp = self._store.stamp(client_id)
        if self._held is None or self._held[0] != stamp:
            state = self._store.load(client_id)
            self._held = None if stamp is None else (stamp, state)
            return state.copy()
        return self._held[1].copy()

    def save(self, client_id: str, state: ClientState) -> None:
        self._held = None
        self._store.save(client_id, state)
        stamp = self._store.stamp(client_id)
        self._held = None if stamp is None else (stamp, state.copy())

    def forget(self) -> None:
        """Nothing is held any more."""
        self._held = None


class SiteSession:
    """The session of a site's client, in this process and on disk."""

    def __init__(
        self, setup: Setup, workspace: Workspace, client: ClientInfo, store: DirectoryStore, path: Path, proof: Proof,
        asking: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._setup, self._workspace, self._client, self._store = setup, workspace, client, store
        self._log, self._asking = SessionLog(path, client.id, proof), asking
        self.states = HeldState(store)
        self._at: int | None = None
        self._begun_from, self._worked, self._logged, self._began = -1, 0.0, 0, 0.0
        self._heard = ""
        self._log.read()

    def newest(self, most: int) -> int:
        """Version that the last request on disk up to a version left behind; -1 where there is none."""
        self._look()
        return newest_until((record.version for record in self._log.records), most)

    @property
    def needed(self) -> tuple[int, ...]:
        """Versions of the client's state that must stay loadable."""
        return self._log.needed

    def rewind(self, version: int) -> None:
        """Takes back what was done after a version, in memory and on disk."""
        self._look()
        if self._log.rewind(version):
            self._drop()

    def enter(self, request: Request, request_digest: str, body: bytes) -> int:
        """Begins a call: afterwards the client has in hand what the request goes on from."""
        self._began, self._begun_from = time.perf_counter(), self._version(request.base)
        self._heard = self._hears(request, body)
        again = self._take_up(request) if request.session else 0
        self._asking(request_digest, self._heard)
        return again

    def _take_up(self, request: Request) -> int:
        """Brings back what a call of the session goes on from; how many requests were done again."""
        again = 0
        if self._at != request.base:
            self._drop()
            again = self._restore(request)
        self._at = None  # until what comes of the call is on disk
        live = self._workspace.session(self._client.id, request.round).live
        due = self._worked > SNAPSHOT or self._logged > LOGGED
        live.writing, live.written = live.writing or due, False
        return again

    def leave(self, request: Request, request_digest: str, body: bytes) -> None:
        """Ends a call that did not fail: what was done is on disk when this returns."""
        left, alive = self._version(request.version), self._at
        if not request.session:
            goes_on = self._log.newest == request.base and self._log.records[-1].round == request.round
            if left != request.version or not goes_on:
                return
            whole = False
        elif whole := self._workspace.idle(self._client.id):  # nothing is in hand
            self.states.forget()
        else:
            live = self._workspace.session(self._client.id, request.round).live
            whole = live.written and left == request.version
            self._worked, self._logged = self._worked + time.perf_counter() - self._began, self._logged + len(body)
            if whole:
                live.writing, self._worked, self._logged = False, 0.0, 0
        record = Record(
            self._client.id, request.action, request.round, request.version, request.base, request_digest,
            self._begun_from, left, request.session, whole, len(body), self._heard,
        )  # fmt: skip
        self._log.add(record, body)
        self._at = request.version if request.session or alive == request.base else None

    def fail(self) -> None:
        """Ends a call of the session that failed: what the client had in hand may be anything."""
        self._drop()

    def end(self) -> None:
        """The run is over: nothing goes on from here."""
        self._drop()
        self._log.clear()

    def _hears(self, request: Request, body: bytes) -> str:
        """Digest of what the client's values follow from: its state as the round began, and what came since."""
        if self._setup.secret is None:
            return ""
        before = self._log.records[-1] if self._log.records else None
        if before is not None and before.round == request.round:
            heard = before.heard
        else:
            state = self._state(self._begun_from)
            state.tensors.pop(GROUP, None)  # keys of secure aggregation, which are removed later
            state.scalars.pop(GROUP, None)
            heard = digest(b"", encode_state(state))
        return digest(json.dumps([heard, request.action, request.round]).encode(), body)

    def _look(self) -> None:
        """Drops what is in hand where another process has done requests since."""
        if self._log.read():
            self._drop()

    def _drop(self) -> None:
        self._workspace.close(self._client.id)
        self.states.forget()
        self._at, self._worked, self._logged = None, 0.0, 0

    def _version(self, base: int) -> int:
        """The newest version of the state that is not newer than a version; -1 where there is none."""
        return newest_until(self._store.versions(self._client.id), base)

    def _restore(self, request: Request) -> int:
        """Does the requests on disk again, up to the one that this request goes on from; how many there were."""
        records = self._log.records
        if self._log.newest != request.base or records[-1].round != request.round:
            # The session begins with this request, or its state is whole without any record.
            if request.base < version_of(request.round, 0) or self._begun_from == request.base:
                return 0
            raise Refused(f"what this site did up to version {request.base} of round {request.round + 1} is lost")
        whole = [number for number, record in enumerate(records) if record.whole]
        start = whole[-1] if whole else -1
        state = self._state(records[start].left if whole else records[0].found)
        for record in records[start + 1 :]:
            if not record.session:
                state = self._state(record.left)
                continue
            self._asking(record.asked, record.heard)
            call = Call(self._client, record.action, decode(self._log.body(record)), session=True)
            self._workspace.session(self._client.id, record.round).live.writing = True
            state = perform(self._setup, self._workspace, call, state.copy(), record.round)[1]
        # Without a snapshot the next process, which may come with the next request, would do all of this again.
        self._workspace.session(self._client.id, request.round).live.writing = True
        return len(records) - start - 1

    def _state(self, version: int) -> ClientState:
        if version < 0:
            return ClientState()
        if version not in self._store.versions(self._client.id):
            raise Refused(f"the state of version {version} is lost")
        now = self._store.version
        self._store.version = version
        try:
            return self._store.load(self._client.id)
        finally:
            self._store.version = now
