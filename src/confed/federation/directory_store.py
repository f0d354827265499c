"""Client states on disk, verified, with versions: those of a round are records of one file, or of a few.

A file per client costs a folder, a name and a rename, several times what writing a small state takes. A record begins
with its length, so that a process killed in the middle leaves a part that is no record. Every state has a digest
(``wire.py``), and every checkpoint says of how many clients the newest states lie in each file.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from struct import Struct, error

from confed.federation.atomic import private_folder, write_atomically
from confed.federation.file_names import file_name
from confed.federation.state import ClientState
from confed.federation.wire import decode_state, encode_state

SUFFIX = ".states"
_HEAD = Struct("<4sHQ")  # kind of a record, bytes of the client's name and of the state
_STATE, _SEAL = b"stat", b"seal"  # seals are of earlier versions, and have a head only
_FULL = 2**22  # bytes of a file from which on another one is begun: large states can then be removed as whole files
_OWNER = 0o600  # mode of the files: only the owner may read what belongs to clients

File = tuple[int, int]  # the version of its states, and its number among the files of that version
Place = tuple[int, int]  # offset and length of a state in its file


class CorruptCheckpoint(Exception):
    """A file of a checkpoint is missing or damaged; the message names it."""


def newest_until(versions: Iterable[int], most: int) -> int:
    """The newest version that is not newer than another; -1 where there is none."""
    return max((version for version in versions if version <= most), default=-1)


class DirectoryStore:
    """Client states in a directory, by client and version.

    A version is the number of rounds finished when the state's round is over. A run killed in the middle of
    a round leaves newer versions behind; :meth:`rewind` removes them, so that a client resumes from exactly
    the state that the server's checkpoint belongs to. Space of states that nobody needs is given back when they are
    half of a file, by writing the others anew, one after the other: one state is in memory at a time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = 0  # set by begin; save writes it, and load does not look beyond it
        self.kept: Sequence[int] = ()  # versions of the checkpoints on disk, which must stay loadable
        self.expected: Sequence[int] = ()  # versions of checkpoints on their way there
        self._known: _Index | None = None
        self._changed = set[File]()  # files from which some states were dropped
        self._needed: CheckpointManifest | None = None

    def begin(self, version: int) -> None:
        """See :class:`confed.federation.state.Store`."""
        self.version = version
        self.settle()

    def load(self, client_id: str) -> ClientState:
        """The newest state that is not newer than ``version``; an empty one if there is none.

        A damaged file is a :class:`CorruptCheckpoint`.
        """
        file = self._index.newest(client_id, self.version)
        return ClientState() if file is None else self._state(client_id, file)

    def save(self, client_id: str, state: ClientState) -> None:
        """Writes this version of the client's state and drops versions that no checkpoint needs."""
        file_name(client_id)  # refuses names that no file system has: exports have a folder per client
        data, index = encode_state(state), self._index
        before = [file for file in index.files_of.get(client_id, ()) if file[0] <= self.version]
        file = self._append(client_id, data)
        if self._needed is not None:
            if before:
                self._needed.add(client_id, _name(before[-1]), -1)
            self._needed.add(client_id, _name(file))
        self.expected = [version for version in self.expected if version > max(self.kept, default=0)]
        older = [version for version, _ in before if version < self.version]
        # The version before this one: a run stopped in the middle of a round saves the round before.
        needed = {max(older, default=-1), *(newest_until(older, v) for v in (*self.kept, *self.expected))}
        for outdated in before:
            if outdated != file and outdated[0] not in needed:
                self._drop(client_id, outdated)

    def stamp(self, client_id: str) -> tuple[object, ...] | None:
        """Identity of what :meth:`load` reads, also where another process wrote it; None where there is nothing."""
        self._refresh()
        index = self._index
        file = index.newest(client_id, self.version)
        return None if file is None else (file, index.places[file][client_id], index.seen[file])

    def needed(self, version: int) -> dict[str, str]:
        """The files with the clients' newest states that are not newer than a version."""
        if version != self.version:  # a run that is stopped in the middle of a round saves the round before
            return self._manifest(version).record()
        if self._needed is None:
            self._needed = self._manifest(version)
        return self._needed.record()

    def settle(self, share: float = 0.5) -> None:
        """Gives back the space of dropped states, where what is needed is less than a share of a file."""
        for file in self._index.places.keys() & self._changed:
            if self._live(file) < share * self._index.path(file).stat().st_size:
                with suppress(OSError, ValueError):  # a full disk or a damaged file: it stays as it was
                    self._rewrite(file)
        self._changed.clear()

    def scrub(self, client_id: str, group: str, before: int) -> None:
        """Removes a group of tensors, and the scalar of its name, from a client's older versions.

        A damaged file is a :class:`CorruptCheckpoint`.
        """
        self.settle(share=1)
        for file in [file for file in self._index.files_of.get(client_id, ()) if file[0] < before]:
            state = self._state(client_id, file)
            replaced = self._live(file) < self._index.path(file).stat().st_size  # by another of the same version
            if group in state.tensors or group in state.scalars or replaced:
                state.tensors.pop(group, None)
                state.scalars.pop(group, None)
                self._rewrite(file, {client_id: encode_state(state)})

    def rewind(self, version: int) -> None:
        """Makes ``version`` the newest, removing what was written after it."""
        self.version, self.expected, self._needed = version, (), None
        self._refresh()
        for file in [file for file in self._index.seen if file[0] > version]:
            self._index.path(file).unlink(missing_ok=True)
            self._known = None

    def verify(self, version: int, needed: Mapping[str, str] | None = None) -> None:
        """Check of every client's state of that version."""
        self._known = None
        if needed is not None and (wrong := missing(needed, self._manifest(version).record())) is not None:
            raise CorruptCheckpoint(f"{self.root / wrong[0]}: {wrong[1]}")
        for client, file in self._newest(version):
            self._state(client, file)

    def copy(self, version: int, target: Path, without: Collection[str] = ()) -> None:
        """Copies every client's newest state that is not newer than ``version`` into another directory."""
        clients, other = dict[File, list[str]](), _Index(target)
        for client, file in self._newest(version):
            if client not in without:
                clients.setdefault(file, []).append(client)
        for file, names in clients.items():
            other.write(file, ((client, self._data(client, file)) for client in names))

    def clients(self) -> list[str]:
        """The clients that have a state."""
        return sorted(client for client, files in self._index.files_of.items() if files)

    def sizes(self) -> list[int]:
        """Bytes of each client's newest state."""
        index = self._index
        return [index.places[index.files_of[client][-1]][client][1] for client in self.clients()]

    def newest(self, client_id: str) -> int:
        """The newest version that the client has a state of; -1 if it has none."""
        return max(self.versions(client_id), default=-1)

    def versions(self, client_id: str) -> list[int]:
        """The versions that the client has a state of, ascending, also those that another process wrote."""
        self._refresh()
        return [version for version, _ in self._index.files_of.get(client_id, ())]

    @property
    def _index(self) -> "_Index":
        if self._known is None:
            self._known = _Index(self.root)
            self._known.read()
        return self._known

    def _refresh(self) -> None:
        """The index is read anew where another process has changed files."""
        if self._known is not None and self._known.seen != _listing(self.root):
            self._known = None

    def _newest(self, version: int) -> Iterator[tuple[str, File]]:
        """Every client with the file of its newest state that is not newer than a version."""
        for client in self.clients():
            if (file := self._index.newest(client, version)) is not None:
                yield client, file

    def _manifest(self, version: int) -> "CheckpointManifest":
        manifest = CheckpointManifest()
        for client, file in self._newest(version):
            manifest.add(client, _name(file))
        return manifest

    def _append(self, client_id: str, data: bytes) -> File:
        index = self._index
        file = index.last_file(self.version)
        head, begin = _head(client_id, len(data)), index.ends.get(file, 0)
        if not begin:
            private_folder(self.root)
        with open(index.path(file), "ab", opener=partial(os.open, mode=_OWNER)) as opened:
            if opened.tell() > begin:  # behind a part of a record that a killed process left nothing could be read
                opened.truncate(begin)
            opened.writelines((head, data))
            opened.flush()
            index.seen[file] = _identity(os.fstat(opened.fileno()))
        index.add(client_id, file, (begin + len(head), len(data)))
        return file

    def _drop(self, client_id: str, file: File) -> None:
        """Takes a state out of the index, and removes a file that holds no other one."""
        index = self._index
        if file in index.files_of[client_id]:  # no state of the same version has taken its place
            index.files_of[client_id].remove(file)
        del index.places[file][client_id]
        if index.places[file]:
            self._changed.add(file)
        else:
            index.remove(file)

    def _live(self, file: File) -> int:
        """Bytes of the records that count in a file."""
        places = self._index.places[file].items()
        return sum(len(_head(client, length)) + length for client, (_, length) in places)

    def _rewrite(self, file: File, instead: Mapping[str, bytes] | None = None) -> None:
        other = instead or {}
        states = ((c, other[c] if c in other else self._data(c, file)) for c in list(self._index.places[file]))
        self._index.write(file, states)

    def _data(self, client_id: str, file: File) -> bytes:
        """A state's bytes; a ValueError where another record, or none, lies in its place."""
        place = self._index.places.get(file, {}).get(client_id)
        if place is not None:
            head = _head(client_id, place[1])
            with self._index.path(file).open("rb") as opened:
                opened.seek(place[0] - len(head))
                if opened.read(len(head)) == head:
                    return opened.read(place[1])
        raise ValueError("the state is missing")

    def _state(self, client_id: str, file: File, again: bool = True) -> ClientState:
        try:
            return decode_state(self._data(client_id, file))
        except (OSError, ValueError) as problem:
            self._known = None  # another process may have written the file anew
            if again:
                return self._state(client_id, file, again=False)
            raise CorruptCheckpoint(f"{self._index.path(file)}: {client_id!r}: {problem}") from problem


class _Index:
    """Where states lie in the files of a folder: about 300 bytes per client."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places: dict[File, dict[str, Place]] = {}
        self.ends: dict[File, int] = {}  # of the last whole record
        self.seen: dict[File, tuple[int, ...]] = {}  # by which another file of the same name is told
        self.files_of: dict[str, list[File]] = {}  # ascending, of each version the file with the last state
        self._last: dict[int, int] = {}  # number of a version's last file

    def read(self) -> None:
        if next(self.root.glob("*/*/*.safetensors"), None) is not None:
            raise CorruptCheckpoint(
                f"{self.root}: states of clients must lie in files {SUFFIX}, found a file per client, as confed wrote "
                "before; let the version that began this run finish it"
            )
        self.seen = _listing(self.root)
        for file in sorted(self.seen):
            self._scan(file)

    def path(self, file: File) -> Path:
        return self.root / _name(file)

    def newest(self, client: str, most: int) -> File | None:
        return next((file for file in reversed(self.files_of.get(client, ())) if file[0] <= most), None)

    def last_file(self, version: int) -> File:
        """The file to which the next state of a version is appended."""
        number = self._last.get(version, 0)
        return version, number + (self.ends.get((version, number), 0) >= _FULL)

    def add(self, client: str, file: File, place: Place) -> None:
        """A state lies there; one that the client has of this version counts no more."""
        self.places.setdefault(file, {})[client] = place
        self.ends[file], self._last[file[0]] = sum(place), file[1]
        others = [other for other in self.files_of.get(client, ()) if other[0] != file[0]]
        self.files_of[client] = sorted([*others, file])

    def write(self, file: File, states: Iterable[tuple[str, bytes]]) -> None:
        """A whole file in one step; on disk before it takes the place of one on which checkpoints rely."""
        private_folder(self.root)
        write_atomically(self.path(file), _pieces(states), sync=True, mode=_OWNER)
        self._scan(file)
        self.seen[file] = _identity(self.path(file).stat())

    def remove(self, file: File) -> None:
        self.path(file).unlink(missing_ok=True)
        for entries in (self.places, self.ends, self.seen):
            entries.pop(file, None)

    def _scan(self, file: File) -> None:
        self.places[file] = {}
        with suppress(error, UnicodeDecodeError, FileNotFoundError):  # cut, damaged or removed meanwhile
            for client, place in records(self.path(file)):
                self.add(client, file, place)


def _name(file: File) -> str:
    version, number = file
    return f"{version:06d}-{number}{SUFFIX}" if number else f"{version:06d}{SUFFIX}"


def _listing(root: Path) -> dict[File, tuple[int, ...]]:
    files = dict[File, tuple[int, ...]]()
    for path in root.glob(f"*{SUFFIX}"):
        version, _, number = path.stem.partition("-")
        if version.isdecimal() and (number or "0").isdecimal():
            with suppress(FileNotFoundError):
                files[int(version), int(number or 0)] = _identity(path.stat())
    return files


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _head(client: str, length: int) -> bytes:
    name = client.encode(errors="surrogatepass")
    return _HEAD.pack(_STATE, len(name), length) + name


def _pieces(states: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
    for client, data in states:
        yield _head(client, len(data))
        yield data


def records(path: Path) -> Iterator[tuple[str, Place]]:
    """The whole records of a file: client, and offset and length of the state."""
    with path.open("rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            file.seek(offset)
            kind, named, length = _HEAD.unpack(file.read(_HEAD.size))
            offset += _HEAD.size
            if kind == _SEAL:
                continue
            if kind != _STATE or offset + named + length > size:
                return
            yield file.read(named).decode(errors="surrogatepass"), (offset + named, length)
            offset += named + length


class CheckpointManifest:
    """Clients whose newest state lies in each file, kept up to date at a constant cost per saved state."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}

    def add(self, client: str, name: str, count: int = 1) -> None:
        """The client's newest state lies in this file, or with a count of -1 no more."""
        clients, names = self._files.get(name, (0, 0))
        digest = hashlib.blake2b(client.encode(errors="surrogatepass"), digest_size=8).digest()
        if clients + count:
            self._files[name] = clients + count, names ^ int.from_bytes(digest, "big")
        else:
            del self._files[name]

    def record(self) -> dict[str, str]:
        """Name of a file -> number of clients, and a checksum of their names that no order changes."""
        return {name: f"{count} {names:016x}" for name, (count, names) in self._files.items()}


def missing(needed: Mapping[str, str], stored: Mapping[str, str]) -> tuple[str, str] | None:
    """A file that has not the states that a checkpoint needs, and what is wrong with it; None if all have them."""
    want, present = _clients(needed), _clients(stored)
    differing = [name for name in {*needed, *stored} if needed.get(name) != stored.get(name)]
    if not differing:
        return None
    # Older states of clients whose newest are missing count in their files: those with too few are the culprits.
    name = min(differing, key=lambda name: (present[name] - want[name], name))
    if not present[name]:
        return name, f"missing, with the states of {want[name]} {'client' if want[name] == 1 else 'clients'}"
    others = "" if present[name] != want[name] else "others "
    return name, f"holds the newest states of {present[name]} clients, the checkpoint needs {others}{want[name]}"


def _clients(record: Mapping[str, str]) -> Counter[str]:
    return Counter({name: int(text.split()[0]) for name, text in record.items()})
