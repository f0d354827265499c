"""Client states on disk: verified, with versions; small ones in a file per round, others in files of their own."""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from confed.federation.atomic import private_folder, remove_unfinished, write_atomically
from confed.federation.file_names import file_name, name_of_file, path_of
from confed.federation.needed_states import NeededStates, missing
from confed.federation.state import ClientState
from confed.federation.state_packs import CutPack, StatePacks
from confed.federation.wire import decode_state, encode_state

__all__ = ["CorruptCheckpoint", "DirectoryStore", "private_folder", "remove_unfinished", "write_atomically"]


class CorruptCheckpoint(Exception):
    """A file of a checkpoint is missing or damaged; the message names it."""


class DirectoryStore:
    """Client states in a directory, by client and version.

    A version is the number of rounds finished when the state's round is over. A run killed in the middle of
    a round leaves newer versions behind; :meth:`rewind` removes them, so that a client resumes from exactly
    the state that the server's checkpoint belongs to.

    Args:
        root: the directory; made if missing.
        packed: bytes of a state up to which it goes into the file of its round
            (:mod:`confed.federation.state_packs`), and not into one of its own. Either is read in any case.

    Attributes:
        version: set by :meth:`begin`; :meth:`save` writes it, and :meth:`load` does not look beyond it.
        kept: versions of the checkpoints that must stay loadable.
        later: calls a function that removes what no checkpoint needs, once that is so; by default at once.
    """

    def __init__(self, root: Path, packed: int = 0) -> None:
        self.root, self.packed = root, packed
        self.version = 0
        self.kept: Sequence[int] = ()
        self.later: Callable[[Callable[[], None]], None] = at_once
        self._packs = StatePacks(root)
        self._files: bool | None = None
        self._needed: NeededStates | None = None

    def begin(self, version: int) -> None:
        """See :class:`confed.federation.state.Store`."""
        self.version = version
        self._packs.begin(version)

    def load(self, client_id: str) -> ClientState:
        """The newest state that is not newer than ``version``; an empty one if there is none.

        A damaged file is a :class:`CorruptCheckpoint`.
        """
        version = max((v for v in self._versions(client_id) if v <= self.version), default=None)
        return ClientState() if version is None else self._state(client_id, version)

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
        needed = {max((v for v in older if v <= kept), default=-1) for kept in self.kept}
        # The version before this one: a run stopped in the middle of a round saves the round before.
        needed.add(max(older, default=-1))
        for version in older:
            if version not in needed:
                self._drop(client_id, version)

    def stamp(self, client_id: str) -> tuple[int, ...] | None:
        """Identity of the file that :meth:`load` reads; None where there is none, or it is one of many states.

        A file that is written anew is another one.
        """
        version = max((v for v in self._versions(client_id) if v <= self.version), default=None)
        if version is None:
            return None
        try:
            found = self._path(client_id, version).stat()
        except OSError:
            return None
        return version, found.st_ino, found.st_size, found.st_mtime_ns

    def needed(self, version: int) -> dict[str, str]:
        """The files with the clients' newest states that are not newer than a version.

        Returns:
            Name of a file, or pattern of files of one version -> clients and checksum
            (:meth:`confed.federation.needed_states.NeededStates.record`).
        """
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

        Args:
            client_id: whose.
            group: of tensors in the client's state.
            before: versions from this one on stay as they are.

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
        """Check of every client's state of that version.

        Args:
            version: the number of finished rounds.
            needed: what :meth:`needed` returned when the checkpoint was written; None where it was not noted.

        Raises:
            CorruptCheckpoint: names the file that is missing or damaged.
        """
        try:
            self._packs.check(version)
        except (CutPack, OSError) as error:
            raise CorruptCheckpoint(str(error)) from error
        if needed is not None and (wrong := missing(needed, self._found(version).record())) is not None:
            raise CorruptCheckpoint(f"{self.root / wrong[0]}: {wrong[1]}")
        for client in self.clients():
            if versions := [v for v in self._versions(client) if v <= version]:
                self._state(client, max(versions))

    def copy(self, version: int, target: Path, without: Collection[str] = ()) -> None:
        """Copies every client's newest state that is not newer than ``version`` into another directory.

        Args:
            version: the number of finished rounds.
            target: the other store's directory.
            without: clients whose states are not copied.
        """
        other, packs = DirectoryStore(target), dict[int, list[str]]()
        for client in self.clients():
            versions = [v for v in self._versions(client) if v <= version]
            if versions and client not in without:
                newest = max(versions)
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
        return [len(self._data(client, self.newest(client))) for client in self.clients() if self.newest(client) >= 0]

    def newest(self, client_id: str) -> int:
        """The newest version that the client has a state of; -1 if it has none."""
        return max(self._versions(client_id), default=-1)

    def versions(self, client_id: str) -> list[int]:
        """The versions that the client has a state of, ascending."""
        return self._versions(client_id)

    def _versions(self, client_id: str) -> list[int]:
        packed = self._packs.versions(client_id)
        return sorted({*packed, *_versions_in(self._folder(client_id))}) if self._filed() else packed

    def _found(self, version: int) -> NeededStates:
        """The files with the clients' newest states that are not newer than a version, looked for."""
        newest = ((client, [v for v in self._versions(client) if v <= version]) for client in self.clients())
        return NeededStates((client, self._name(client, max(versions))) for client, versions in newest if versions)

    def _name(self, client_id: str, version: int) -> str:
        """The file with a client's state, relative to the folder; a pattern for those of one version."""
        own = self._filed() and self._path(client_id, version).is_file()
        return f"*/*/{version:06d}.safetensors" if own else self._packs.path(version).name

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
