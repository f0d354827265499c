"""Log of a site's session on disk: the requests that it has done since its newest snapshots, in order.

What a client has in hand between two calls of split learning is the size of its model, a request the size of a batch's
gradients at the cut. A site therefore keeps the first in memory and writes down the second, before its reply counts; a
process that takes over does the requests again, from the state that they began with, and has the same in hand, bit for
bit. A record that was not written to its end, because the process was killed, does not count.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from confed.federation.atomic import write_atomically

Proof = Callable[["Record", bytes], str]
"""Digest of a request from its record and its body."""


@dataclass(frozen=True)
class Record:
    """One request of a session, as done by its site.

    Attributes:
        client: whose session it is.
        round: number of finished rounds.
        found: version of the state on disk that it began with; -1 for none.
        left: version of the state on disk when it was done; the same where it changed nothing there.
        session: whether it was a call of the session, rather than one in between that left another state.
        whole: whether that state holds everything that the session needs.
        size: bytes of the body.
        heard: digest of what came in the round up to this request; empty where it does not matter.
        at: where the body begins; not written.
    """

    client: str
    action: str
    round: int
    version: int
    base: int
    asked: str
    found: int
    left: int
    session: bool
    whole: bool
    size: int
    heard: str = ""
    at: int = field(default=0, compare=False)

    @property
    def end(self) -> int:
        """Where the record ends in the file."""
        return self.at + self.size


class SessionLog:
    """Records of one session in a file.

    Attributes:
        records: in the order in which they were done; each begins where the one before ended.
    """

    def __init__(self, path: Path, client: str, proof: Proof) -> None:
        self._path, self._client, self._proof = path, client, proof
        self.records: list[Record] = []
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
            self.records.append(_placed(record, end + len(head)))
        self._stamp = self._look()

    def clear(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)
        self.records, self._stamp = [], None

    def body(self, record: Record) -> bytes:
        """A request's body."""
        with open(self._path, "rb") as file:
            file.seek(record.at)
            return file.read(record.size)

    def _anew(self, kept: list[Record], record: Record, body: bytes) -> None:
        pieces, records, end = list[bytes](), list[Record](), 0
        for old, content in [*((old, self.body(old)) for old in kept), (record, body)]:
            head = _head(old)
            pieces += (head, content)
            records.append(_placed(old, end + len(head)))
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


def _placed(record: Record, at: int) -> Record:
    return Record(**{**asdict(record), "at": at})


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
