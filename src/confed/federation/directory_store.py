"""Client states on disk: atomic, verified files, one per client and version."""

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from confed.federation.file_names import name_of_file, path_of
from confed.federation.state import ClientState
from confed.federation.wire import decode_state, encode_state

__all__ = ["CorruptCheckpoint", "DirectoryStore", "private_folder", "remove_unfinished", "write_atomically"]

_LOCK = "lock.json"
"""See :mod:`confed.system.folder_lock`, which this package may not import."""


class CorruptCheckpoint(Exception):
    """A file of a checkpoint is missing or damaged; the message names it."""


def write_atomically(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Atomic write: under a temporary name, then renamed; a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the file cannot be written; the temporary one is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> None:
    """A folder that only its owner can read; an existing one stays as it is."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def remove_unfinished(folder: Path, pattern: str = "**/.*.tmp") -> None:
    """Removal of temporary files that killed processes left.

    Args:
        folder: where no other process is writing: this one has locked it.
        pattern: which files and folders; those of locks, and of this process, stay.
    """
    own = f".{os.getpid()}.tmp"
    for path in list(folder.glob(pattern)):
        if path.name.endswith(own) or path.name.startswith(f".{_LOCK}."):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class DirectoryStore:
    """Client states in a directory, one file per client and version.

    A version is the number of rounds finished when the state's round is over. A run killed in the middle of
    a round leaves newer versions behind; :meth:`rewind` removes them, so that a client resumes from exactly
    the state that the server's checkpoint belongs to.

    Args:
        root: the directory; made if missing.

    Attributes:
        version: set by :meth:`begin`; :meth:`save` writes it, and :meth:`load` does not look beyond it.
        kept: versions of the checkpoints that must stay loadable.
        remove: removes the file of a version that no checkpoint needs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = 0
        self.kept: Sequence[int] = ()
        self.remove: Callable[[Path], None] = partial(Path.unlink, missing_ok=True)

    def begin(self, version: int) -> None:
        """See :class:`confed.federation.state.Store`."""
        self.version = version

    def load(self, client_id: str) -> ClientState:
        """The newest state that is not newer than ``version``; an empty one if there is none.

        Raises:
            CorruptCheckpoint: the file is damaged.
        """
        folder = self._folder(client_id)
        versions = [v for v in _versions_in(folder) if v <= self.version]
        if not versions:
            return ClientState()
        path = folder / f"{max(versions):06d}.safetensors"
        try:
            return decode_state(path.read_bytes())
        except ValueError as error:
            raise CorruptCheckpoint(f"{path}: {error}") from error

    def save(self, client_id: str, state: ClientState) -> None:
        """Writes this version of the client's state and drops versions that no checkpoint needs."""
        folder = self._folder(client_id)
        path, data = folder / f"{self.version:06d}.safetensors", encode_state(state)
        try:
            write_atomically(path, data)
        except FileNotFoundError:  # the client's first state
            private_folder(self.root)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        older = [v for v in _versions_in(folder) if v < self.version]
        needed = {max((v for v in older if v <= kept), default=-1) for kept in self.kept}
        # The version before this one: a run stopped in the middle of a round saves the round before.
        needed.add(max(older, default=-1))
        for version in older:
            if version not in needed:
                self.remove(folder / f"{version:06d}.safetensors")

    def scrub(self, client_id: str, group: str, before: int) -> None:
        """Removes a group of tensors, and the scalar of its name, from a client's older versions.

        Args:
            client_id: whose.
            group: of tensors in the client's state.
            before: versions from this one on stay as they are.

        Raises:
            CorruptCheckpoint: a file is damaged.
        """
        for version in [v for v in self._versions(client_id) if v < before]:
            path = self._path(client_id, version)
            try:
                state = decode_state(path.read_bytes())
            except ValueError as error:
                raise CorruptCheckpoint(f"{path}: {error}") from error
            if group in state.tensors or group in state.scalars:
                state.tensors.pop(group, None)
                state.scalars.pop(group, None)
                write_atomically(path, encode_state(state), sync=True)

    def rewind(self, version: int) -> None:
        """Makes ``version`` the newest, removing what was written after it."""
        self.version = version
        for folder in self.root.glob("*/*"):
            for path in folder.glob("*.safetensors"):
                if int(path.stem) > version:
                    path.unlink()

    def verify(self, version: int) -> None:
        """Check of every client's file of that version.

        A damaged file is a :class:`CorruptCheckpoint` that names it.
        """
        for folder in sorted(self.root.glob("*/*")):
            versions = [v for v in self._versions(name_of_file(folder.name)) if v <= version]
            if versions:
                _verify(folder / f"{max(versions):06d}.safetensors")

    def copy(self, version: int, target: Path, without: Collection[str] = ()) -> None:
        """Copies every client's newest state that is not newer than ``version`` into another directory.

        Args:
            version: the number of finished rounds.
            target: the other store's directory.
            without: clients whose states are not copied.
        """
        other = DirectoryStore(target)
        for client in self.clients():
            versions = [v for v in self._versions(client) if v <= version]
            if versions and client not in without:
                path = other._path(client, max(versions))
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, self._path(client, max(versions)).read_bytes())

    def clients(self) -> list[str]:
        """The clients that have a state."""
        return sorted(name_of_file(folder.name) for folder in self.root.glob("*/*"))

    def newest(self, client_id: str) -> int:
        """The newest version that the client has a state of; -1 if it has none."""
        return max(self._versions(client_id), default=-1)

    def _versions(self, client_id: str) -> list[int]:
        return _versions_in(self._folder(client_id))

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


def _verify(path: Path) -> None:
    try:
        decode_state(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
