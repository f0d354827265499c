"""Client states on disk: verified, with versions; small ones in a file per round, others in files of their own.

A file per client costs a folder, a name and a rename, several times what writing a small state takes. Here the states
that clients save in one round are records of one file. A record is written by one call and begins with its length, so
that a process killed in the middle leaves a part that is no record. When a checkpoint is to be written, the file is
sealed: a file whose seal is missing or belongs to other records was cut or changed.
"""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from struct import Struct, error
from zlib import crc32

from confed.federation.atomic import private_folder, remove_unfinished, write_atomically
from confed.federation.file_names import file_name, name_of_file, path_of
from confed.federation.state import ClientState
from confed.federation.wire import decode_state, encode_state

# Small client states of a round in one file, appended one after the other -------------------------------------

SUFFIX = ".states"  # ending of the files; their names are versions
_HEAD = Struct("<4sHQ")
"""Kind of a record, and bytes of the client's name and of the state; of a seal the checksum of the heads before it."""

_STATE, _SEAL = b"stat", b"seal"

_OWNER = 0o600  # mode of the files: only the owner may read what belongs to clients
Place = tuple[int, int]  # offset and length of a state in its file


class CutPack(Exception):
    """A file of states is not as it was when it was sealed; the message names it."""


class StatePacks:
    """Files of states, one per version, with an index in memory: about 250 bytes per client.

    Space of states that nobody needs is given back when they are half of a file, by writing the others anew, one after
    the other: one state is in memory at a time.
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
        """A state's bytes."""
        for _ in range(2):
            with suppress(OSError, LookupError):
                if (content := self._bytes(client, version)) is not None:
                    return content
            self.forget()  # another process may have written the file anew
            self._index()
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
        versions = self._versions.setdefault(client, [])
        if version not in versions:
            versions.append(version)
            versions.sort()

    def seal(self) -> None:
        """Declares that a checkpoint may rely on all states saved so far."""
        if self._open is not None and self._unsealed:
            descriptor = self._open[1]
            _append(descriptor, _HEAD.pack(_SEAL, 0, self._heads), os.lseek(descriptor, 0, os.SEEK_END))
            self._unsealed = False

    def drop(self, client: str, version: int, later: Callable[[Callable[[], None]], None]) -> None:
        """Removes a version of a client's state."""
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
        for client, versions in list(self._versions.items()):
            self._versions[client] = [older for older in versions if older <= version]
            if not self._versions[client]:
                del self._versions[client]

    def replace(self, client: str, version: int, data: bytes) -> None:
        """Another state in place of a client's, on disk when this returns."""
        self._rewrite(version, {client: data})

    def check(self, version: int) -> None:
        """Check that the files up to a version have the records that they had when they were sealed."""
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
            places = {client: place for kind, client, place in _records(path) if kind == _STATE}
            self._packs[version] = places
            for client in places:
                self._versions.setdefault(client, []).append(version)

    def _bytes(self, client: str, version: int) -> bytes | None:
        """A state's bytes; None where something else lies there."""
        offset, length = self._packs[version][client]
        expected = _head(client, length)
        begin = offset - len(expected)
        with self.path(version).open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), offset - begin + length, begin)
        return content[len(expected) :] if content.startswith(expected) else None

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
            records = list(_records(path)) if version in self._packs else []
            private_folder(self.root)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _OWNER)
            # Behind a part of a record that a killed process left nothing could be read.
            os.ftruncate(descriptor, _end(records[-1]) if records else 0)
            self._open, self._heads = (version, descriptor), _heads(records)
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
    checksum = 0
    for kind, client, (_, length) in records:
        checksum = crc32(_head(client, length), checksum) if kind == _STATE else checksum
    return checksum


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


# Manifest of the files of client states that a checkpoint needs -----------------------------------------------


def newest_until(versions: Iterable[int], most: int) -> int:
    """The newest version that is not newer than another; -1 where there is none."""
    return max((version for version in versions if version <= most), default=-1)


class CheckpointManifest:
    """Clients whose newest state lies in each file, kept up to date at a constant cost per saved state."""

    def __init__(self, states: Iterable[tuple[str, str]] = ()) -> None:
        self._files: dict[str, tuple[int, int]] = {}
        for client, name in states:
            self.add(client, name)

    def add(self, client: str, name: str) -> None:
        """The client's newest state lies in this file."""
        self._count(client, name, 1)

    def remove(self, client: str, name: str) -> None:
        """It lies there no more."""
        self._count(client, name, -1)

    def record(self) -> dict[str, str]:
        """Name of a file -> number of clients, and a checksum of their names that no order changes."""
        return {name: f"{count} {names:016x}" for name, (count, names) in self._files.items()}

    def _count(self, client: str, name: str, more: int) -> None:
        count, names = self._files.get(name, (0, 0))
        digest = hashlib.blake2b(client.encode(errors="surrogatepass"), digest_size=8).digest()
        if count + more:
            self._files[name] = count + more, names ^ int.from_bytes(digest, "big")
        else:
            del self._files[name]


def missing(needed: Mapping[str, str], stored: Mapping[str, str]) -> tuple[str, str] | None:
    """A file that has not the states that a checkpoint needs, and what is wrong with it; None if all have them."""
    want, present = _clients(needed), _clients(stored)
    # Older states of clients whose newest are missing count in their files: those with too few are the culprits.
    for name in sorted({*needed, *stored}, key=lambda name: (present[name] - want[name], name)):
        if not present[name]:
            return name, f"missing, with the states of {want[name]} {'client' if want[name] == 1 else 'clients'}"
        if needed.get(name) != stored[name]:
            others = "" if present[name] != want[name] else "others "
            return (
                name,
                f"holds the newest states of {present[name]} clients, the checkpoint needs {others}{want[name]}",
            )
    return None


def _clients(record: Mapping[str, str]) -> Counter[str]:
    return Counter({name: int(text.split()[0]) for name, text in record.items()})


# Client states on disk: verified, with versions ---------------------------------------------------------------

__all__ = ["remove_unfinished"]


class CorruptCheckpoint(Exception):
    """A file of a checkpoint is missing or damaged; the message names it."""


class DirectoryStore:
    """Client states in a directory, by client and version.

    A version is the number of rounds finished when the state's round is over. A run killed in the middle of
    a round leaves newer versions behind; :meth:`rewind` removes them, so that a client resumes from exactly
    the state that the server's checkpoint belongs to.
    """

    def __init__(self, root: Path, packed: int = 0) -> None:
        self.root, self.packed = root, packed
        self.version = 0  # set by begin; save writes it, and load does not look beyond it
        self.kept: Sequence[int] = ()  # versions of the checkpoints that must stay loadable
        # calls a function that removes what no checkpoint needs, once that is so; by default at once
        self.later: Callable[[Callable[[], None]], None] = at_once
        self._packs = StatePacks(root)
        self._files: bool | None = None
        self._needed: CheckpointManifest | None = None

    def begin(self, version: int) -> None:
        """See :class:`confed.federation.state.Store`."""
        self.version = version
        self._packs.begin(version)

    def load(self, client_id: str) -> ClientState:
        """The newest state that is not newer than ``version``; an empty one if there is none.

        A damaged file is a :class:`CorruptCheckpoint`.
        """
        version = newest_until(self._versions(client_id), self.version)
        return ClientState() if version < 0 else self._state(client_id, version)

    def save(self, client_id: str, state: ClientState) -> None:
        """Writes this version of the client's state and drops versions that no checkpoint needs."""
        data = encode_state(state)
        versions = [v for v in self._versions(client_id) if v <= self.version]
        before = self._name(client_id, max(versions)) if versions and self._needed is not None else None
        if len(data) <= self.packed:
            file_name(client_id)  # refuses names that no file system has, here as for files
            self._packs.save(client_id, self.version, data)
            if self._filed():
                self._path(client_id, self.version).unlink(missing_ok=True)
        else:
            self._write(client_id, self.version, data)
        if self._needed is not None:
            if before is not None:
                self._needed.remove(client_id, before)
            self._needed.add(client_id, self._name(client_id, self.version))
        older = [v for v in versions if v < self.version]
        needed = {newest_until(older, version) for version in self.kept}
        # The version before this one: a run stopped in the middle of a round saves the round before.
        needed.add(max(older, default=-1))
        for version in older:
            if version not in needed:
                self._drop(client_id, version)

    def stamp(self, client_id: str) -> tuple[int, ...] | None:
        """Identity of the file that :meth:`load` reads; None where there is none, or it is one of many states.

        A file that is written anew is another one.
        """
        version = newest_until(self._versions(client_id), self.version)
        if version < 0:
            return None
        try:
            status = self._path(client_id, version).stat()
        except OSError:
            return None
        return version, status.st_ino, status.st_size, status.st_mtime_ns

    def needed(self, version: int) -> dict[str, str]:
        """The files with the clients' newest states that are not newer than a version."""
        if version != self.version:  # a run that is stopped in the middle of a round saves the round before
            return self._found(version).record()
        if self._needed is None:
            self._needed = self._found(version)
        return self._needed.record()

    def seal(self) -> None:
        """Declares that a checkpoint is to be written which relies on the states saved so far."""
        self._packs.seal()

    def settle(self) -> None:
        """Gives back the space of what was removed."""
        self._packs.settle()

    def scrub(self, client_id: str, group: str, before: int) -> None:
        """Removes a group of tensors, and the scalar of its name, from a client's older versions.

        A damaged file is a :class:`CorruptCheckpoint`.
        """
        for version in [v for v in self._versions(client_id) if v < before]:
            state = self._state(client_id, version)
            if group in state.tensors or group in state.scalars:
                state.tensors.pop(group, None)
                state.scalars.pop(group, None)
                if version in self._packs.versions(client_id):
                    self._packs.replace(client_id, version, encode_state(state))
                else:
                    write_atomically(self._path(client_id, version), encode_state(state), sync=True)

    def rewind(self, version: int) -> None:
        """Makes ``version`` the newest, removing what was written after it."""
        self.version, self._needed = version, None
        self._files = None  # another process may have written the first one
        self._packs.rewind(version)
        for folder in self.root.glob("*/*"):
            for path in folder.glob("*.safetensors"):
                if int(path.stem) > version:
                    path.unlink()

    def verify(self, version: int, needed: Mapping[str, str] | None = None) -> None:
        """Check of every client's state of that version."""
        try:
            self._packs.check(version)
        except (CutPack, OSError) as error:
            raise CorruptCheckpoint(str(error)) from error
        if needed is not None and (wrong := missing(needed, self._found(version).record())) is not None:
            raise CorruptCheckpoint(f"{self.root / wrong[0]}: {wrong[1]}")
        for client in self.clients():
            if (newest := newest_until(self._versions(client), version)) >= 0:
                self._state(client, newest)

    def copy(self, version: int, target: Path, without: Collection[str] = ()) -> None:
        """Copies every client's newest state that is not newer than ``version`` into another directory."""
        other, packs = DirectoryStore(target), dict[int, list[str]]()
        for client in self.clients():
            newest = newest_until(self._versions(client), version)
            if newest >= 0 and client not in without:
                if newest in self._packs.versions(client):
                    packs.setdefault(newest, []).append(client)
                else:
                    other._write(client, newest, self._data(client, newest))
        for newest, clients in packs.items():
            other._packs.write(newest, ((client, self._data(client, newest)) for client in clients))

    def clients(self) -> list[str]:
        """The clients that have a state."""
        return sorted({*(name_of_file(folder.name) for folder in self.root.glob("*/*")), *self._packs.clients()})

    def sizes(self) -> list[int]:
        """Bytes of each client's newest state."""
        newest = {client: self.newest(client) for client in self.clients()}
        return [len(self._data(client, version)) for client, version in newest.items() if version >= 0]

    def newest(self, client_id: str) -> int:
        """The newest version that the client has a state of; -1 if it has none."""
        return max(self._versions(client_id), default=-1)

    def versions(self, client_id: str) -> list[int]:
        """The versions that the client has a state of, ascending."""
        return self._versions(client_id)

    def _versions(self, client_id: str) -> list[int]:
        packed = self._packs.versions(client_id)
        return sorted({*packed, *_versions_in(self._folder(client_id))}) if self._filed() else packed

    def _found(self, version: int) -> CheckpointManifest:
        """The files with the clients' newest states that are not newer than a version, looked for."""
        newest = ((client, newest_until(self._versions(client), version)) for client in self.clients())
        return CheckpointManifest((client, self._name(client, number)) for client, number in newest if number >= 0)

    def _name(self, client_id: str, version: int) -> str:
        """The file with a client's state, relative to the folder; a pattern for those of one version."""
        has_file = self._filed() and self._path(client_id, version).is_file()
        return f"*/*/{version:06d}.safetensors" if has_file else self._packs.path(version).name

    def _filed(self) -> bool:
        """Whether clients have files of their own."""
        if self._files is None:
            self._files = any(path.is_dir() for path in self.root.glob("*"))
        return self._files

    def _data(self, client_id: str, version: int) -> bytes:
        path = self._path(client_id, version) if self._filed() else None
        if path is not None and path.is_file():
            return path.read_bytes()
        return self._packs.load(client_id, version)

    def _state(self, client_id: str, version: int) -> ClientState:
        try:
            data = self._data(client_id, version)
        except (CutPack, OSError) as error:
            raise CorruptCheckpoint(str(error)) from error
        try:
            return decode_state(data)
        except ValueError as error:
            where = self._path(client_id, version)
            if not where.is_file():
                raise CorruptCheckpoint(f"{self._packs.path(version)}: {client_id!r}: {error}") from error
            raise CorruptCheckpoint(f"{where}: {error}") from error

    def _write(self, client_id: str, version: int, data: bytes) -> None:
        path = self._path(client_id, version)
        try:
            write_atomically(path, data)
        except FileNotFoundError:  # the client's first state
            private_folder(self.root)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        self._files = True

    def _drop(self, client_id: str, version: int) -> None:
        if version in self._packs.versions(client_id):
            self._packs.drop(client_id, version, self.later)
        if self._filed():
            self.later(partial(self._path(client_id, version).unlink, missing_ok=True))

    def _path(self, client_id: str, version: int) -> Path:
        return self._folder(client_id) / f"{version:06d}.safetensors"

    def _folder(self, client_id: str) -> Path:
        # Two letters of a hash spread millions of clients over 256 folders.
        fan = hashlib.blake2b(client_id.encode(errors="surrogatepass"), digest_size=1).hexdigest()
        return path_of(self.root / fan, client_id)


def _versions_in(folder: Path) -> list[int]:
    """Versions of a client's state."""
    try:
        return [int(name[:-12]) for name in os.listdir(folder) if name.endswith(".safetensors")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def at_once(job: Callable[[], None]) -> None:
    """A call of the function."""
    job()
