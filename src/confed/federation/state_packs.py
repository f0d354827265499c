"""Small client states of a round in one file, appended one after the other.

A file per client costs a folder, a name and a rename, several times what writing a small state takes. Here the states
that clients save in one round are records of one file. A record is written by one call and begins with its length, so
that a process killed in the middle leaves a part that is no record. When a checkpoint is to be written, the file is
sealed: a file whose seal is missing or belongs to other records was cut or changed.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from struct import Struct, error
from zlib import crc32

from confed.federation.atomic import private_folder, write_atomically

__all__ = ["SUFFIX", "CutPack", "StatePacks"]

SUFFIX = ".states"
"""Ending of the files; their names are versions."""

_HEAD = Struct("<4sHQ")
"""Kind of a record, and bytes of the client's name and of the state; of a seal the checksum of the heads before it."""

_STATE, _SEAL = b"stat", b"seal"

_OWNER = 0o600
"""Mode of the files: only the owner may read what belongs to clients."""

Place = tuple[int, int]
"""Offset and length of a state in its file."""


class CutPack(Exception):
    """A file of states is not as it was when it was sealed; the message names it."""


class StatePacks:
    """Files of states, one per version, with an index in memory: about 250 bytes per client.

    Space of states that nobody needs is given back when they are half of a file, by writing the others anew, one after
    the other: one state is in memory at a time.

    Args:
        root: the folder; made by whoever writes the first state.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._packs: dict[int, dict[str, Place]] = {}
        self._versions: dict[str, list[int]] = {}
        self._open: tuple[int, int] | None = None
        self._process = os.getpid()
        self._heads, self._unsealed = 0, False
        self._dropped: deque[tuple[int, str]] = deque()
        self._read = False

    def versions(self, client: str) -> list[int]:
        """Versions of a client's state, ascending."""
        self._index()
        return list(self._versions.get(client, ()))

    def clients(self) -> list[str]:
        """The clients that have a state."""
        self._index()
        return list(self._versions)

    def path(self, version: int) -> Path:
        """The file of a version."""
        return self.root / f"{version:06d}{SUFFIX}"

    def load(self, client: str, version: int) -> bytes:
        """A state's bytes.

        Raises:
            CutPack: they are not there.
        """
        with suppress(OSError, LookupError):
            if (found := self._bytes(client, version)) is not None:
                return found
        self.forget()  # another process may have written the file anew
        self._index()
        with suppress(OSError, LookupError):
            if (found := self._bytes(client, version)) is not None:
                return found
        raise CutPack(f"{self.path(version)}: the state of {client!r} is missing")

    def save(self, client: str, version: int, data: bytes) -> None:
        """Appends a state; one that the client has of this version counts no more."""
        self._index()
        descriptor = self._descriptor(version)
        begin = os.lseek(descriptor, 0, os.SEEK_END)
        head = _head(client, len(data))
        _append(descriptor, head + data, begin)
        self._heads, self._unsealed = crc32(head, self._heads), True
        self._packs.setdefault(version, {})[client] = (begin + len(head), len(data))
        known = self._versions.setdefault(client, [])
        if version not in known:
            known.append(version)
            known.sort()

    def seal(self) -> None:
        """Declares that a checkpoint may rely on all states saved so far."""
        if self._open is not None and self._unsealed:
            descriptor = self._open[1]
            _append(descriptor, _HEAD.pack(_SEAL, 0, self._heads), os.lseek(descriptor, 0, os.SEEK_END))
            self._unsealed = False

    def drop(self, client: str, version: int, later: Callable[[Callable[[], None]], None]) -> None:
        """Removes a version of a client's state.

        Args:
            client: whose.
            version: which.
            later: calls a function when no checkpoint on disk needs the state any more, perhaps in another thread.
        """
        self._versions[client].remove(version)
        later(partial(self._dropped.append, (version, client)))

    def settle(self) -> None:
        """Gives back the space of dropped states, where they are half of a file."""
        changed = set[int]()
        while self._dropped:
            version, client = self._dropped.popleft()
            if self._packs.get(version, {}).pop(client, None) is not None:
                changed.add(version)
        for version in changed:
            places = self._packs[version]
            if not places:
                self._remove(version)
            elif 2 * sum(length for _, length in places.values()) < self.path(version).stat().st_size:
                with suppress(OSError):  # a full disk: the file stays as it was
                    self._rewrite(version)

    def begin(self, version: int) -> None:
        """No state of an earlier version is saved from now on."""
        if self._open is not None and self._open[0] != version:
            self.seal()
            self._close()
        self.settle()

    def rewind(self, version: int) -> None:
        """Removes what is newer than a version."""
        self._index()
        for newer in [v for v in self._packs if v > version]:
            self._remove(newer)
        left = {client: [v for v in known if v <= version] for client, known in self._versions.items()}
        self._versions = {client: known for client, known in left.items() if known}

    def replace(self, client: str, version: int, data: bytes) -> None:
        """Another state in place of a client's, on disk when this returns."""
        self._rewrite(version, {client: data})

    def check(self, version: int) -> None:
        """Check that the files up to a version have the records that they had when they were sealed.

        Raises:
            CutPack: one is not, or cannot be read.
        """
        for path in sorted(self.root.glob(f"*{SUFFIX}")):
            if path.stem.isdecimal() and int(path.stem) <= version:
                heads, sealed = 0, False
                for kind, client, (_, length) in _records(path):
                    sealed = sealed or (kind == _SEAL and length == heads)
                    heads = crc32(_head(client, length), heads) if kind == _STATE else heads
                if not sealed:
                    raise CutPack(f"{path}: it was cut or changed after it was sealed")

    def write(self, version: int, states: Iterable[tuple[str, bytes]]) -> None:
        """A whole sealed file of a version, in one step, from clients and their states."""
        private_folder(self.root)
        write_atomically(self.path(version), _pieces(states), mode=_OWNER)
        self.forget()

    def forget(self) -> None:
        """The index is read anew when it is next needed."""
        if self._open is None:
            self._read, self._packs, self._versions = False, {}, {}

    def _index(self) -> None:
        if self._read:
            return
        self._read = True
        for path in sorted(self.root.glob(f"*{SUFFIX}")):
            if not path.stem.isdecimal():
                continue
            version = int(path.stem)
            # Of several states of one version the last one counts.
            own = {client: place for kind, client, place in _records(path) if kind == _STATE}
            self._packs[version] = own
            for client in own:
                self._versions.setdefault(client, []).append(version)

    def _bytes(self, client: str, version: int) -> bytes | None:
        """A state's bytes; None where something else lies there."""
        offset, length = self._packs[version][client]
        expected = _head(client, length)
        begin = offset - len(expected)
        with self.path(version).open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), offset - begin + length, begin)
        return found[len(expected) :] if found.startswith(expected) else None

    def _rewrite(self, version: int, instead: Mapping[str, bytes] | None = None) -> None:
        if self._open is not None and self._open[0] == version:
            self._close()
        other, offset, places = dict(instead or {}), 0, dict[str, Place]()

        def states() -> Iterator[tuple[str, bytes]]:
            nonlocal offset
            for client in list(self._packs[version]):
                data = other[client] if client in other else self.load(client, version)
                offset += len(_head(client, len(data)))
                places[client] = (offset, len(data))
                offset += len(data)
                yield client, data

        # On disk before it takes the place of a file on which checkpoints rely.
        write_atomically(self.path(version), _pieces(states()), sync=True, mode=_OWNER)
        self._packs[version] = places

    def _remove(self, version: int) -> None:
        if self._open is not None and self._open[0] == version:
            self._close()
        self.path(version).unlink(missing_ok=True)
        self._packs.pop(version, None)

    def _descriptor(self, version: int) -> int:
        if self._open is None or self._open[0] != version:
            self._close()
            path = self.path(version)
            there = list(_records(path)) if version in self._packs else []
            private_folder(self.root)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _OWNER)
            # Behind a part of a record that a killed process left nothing could be read.
            os.ftruncate(descriptor, _end(there[-1]) if there else 0)
            self._open, self._heads = (version, descriptor), _heads(there)
        return self._open[1]

    def _close(self) -> None:
        # Forgotten first: a signal's exception may come between, and closed twice it might be another file.
        opened, self._open, self._unsealed = self._open, None, False
        if opened is not None and self._process == os.getpid():  # nor in a fork, whose files are others
            os.close(opened[1])

    def __del__(self) -> None:
        self._close()


def _append(descriptor: int, data: bytes, end: int) -> None:
    """Writes all of it at the end of a file, or nothing."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def _head(client: str, length: int) -> bytes:
    name = client.encode(errors="surrogatepass")
    return _HEAD.pack(_STATE, len(name), length) + name


def _heads(records: Iterable[tuple[bytes, str, Place]]) -> int:
    """Checksum of the heads of states."""
    found = 0
    for kind, client, (_, length) in records:
        found = crc32(_head(client, length), found) if kind == _STATE else found
    return found


def _pieces(states: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
    heads = 0
    for client, data in states:
        head = _head(client, len(data))
        heads = crc32(head, heads)
        yield head
        yield data
    yield _HEAD.pack(_SEAL, 0, heads)


def _end(record: tuple[bytes, str, Place]) -> int:
    kind, _, (offset, length) = record
    return offset if kind == _SEAL else offset + length


def _records(path: Path) -> Iterator[tuple[bytes, str, Place]]:
    """The whole records of a file: kind, client, and offset and length, or the count of a seal."""
    with path.open("rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            try:
                kind, named, length = _HEAD.unpack(file.read(_HEAD.size))
            except error:
                return
            offset += _HEAD.size
            if kind == _SEAL:
                yield kind, "", (offset, length)
                continue
            if kind != _STATE or offset + named + length > size:
                return
            try:
                client = file.read(named).decode(errors="surrogatepass")
            except UnicodeDecodeError:
                return
            yield kind, client, (offset + named, length)
            offset += named + length
            file.seek(offset)
