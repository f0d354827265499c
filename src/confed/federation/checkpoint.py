"""Checkpoints and client states on disk: atomic, verified, safetensors and JSON only."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors.torch import load, save

from confed.federation.file_names import name_of_file, path_of
from confed.federation.params import Params
from confed.federation.reading import FAULTS
from confed.federation.state import ClientState, ServerState
from confed.federation.wire import decode_state, encode_state

__all__ = [
    "Checkpoints", "CorruptCheckpoint", "DirectoryStore", "private_folder", "remove_unfinished", "write_atomically",
]  # fmt: skip

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
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = 0
        self.kept: Sequence[int] = ()

    def begin(self, version: int) -> None:
        """See :class:`confed.federation.state.Store`."""
        self.version = version

    def load(self, client_id: str) -> ClientState:
        """The newest state that is not newer than ``version``; an empty one if there is none.

        Raises:
            CorruptCheckpoint: the file is damaged.
        """
        versions = [v for v in self._versions(client_id) if v <= self.version]
        if not versions:
            return ClientState()
        path = self._path(client_id, max(versions))
        try:
            return decode_state(path.read_bytes())
        except ValueError as error:
            raise CorruptCheckpoint(f"{path}: {error}") from error

    def save(self, client_id: str, state: ClientState) -> None:
        """Writes this version of the client's state and drops versions that no checkpoint needs."""
        path = self._path(client_id, self.version)
        private_folder(self.root)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode_state(state))
        older = [v for v in self._versions(client_id) if v < self.version]
        needed = {max((v for v in older if v <= kept), default=-1) for kept in self.kept}
        # The version before this one: a run stopped in the middle of a round saves the round before.
        needed.add(max(older, default=-1))
        for version in older:
            if version not in needed:
                self._path(client_id, version).unlink()

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
        folder = self._path(client_id, 0).parent
        return [int(path.stem) for path in folder.glob("*.safetensors")] if folder.is_dir() else []

    def _path(self, client_id: str, version: int) -> Path:
        # Two letters of a hash spread millions of clients over 256 folders.
        fan = hashlib.blake2b(client_id.encode(errors="surrogatepass"), digest_size=1).hexdigest()
        return path_of(self.root / fan, client_id) / f"{version:06d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: every server's state after ``round`` rounds, and how much of the history is its own."""

    round: int
    servers: Mapping[str, ServerState]
    history_bytes: int


class Checkpoints:
    """The checkpoints of a run, newest last.

    Args:
        root: the directory ``checkpoint/`` of a run folder.
        keep: how many of the newest to keep.
        always: rounds whose checkpoints are kept besides.
    """

    def __init__(self, root: Path, keep: int = 2, always: Collection[int] = ()) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep={keep}")
        self.root, self.keep, self.always = root, keep, always
        self.store = DirectoryStore(root / "clients")

    def rounds(self) -> list[int]:
        """Rounds of the checkpoints on disk, ascending."""
        return sorted(int(p.name[6:]) for p in self.root.glob("round-*") if p.is_dir() and p.name[6:].isdecimal())

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in one step (a directory renamed into place) and remove the oldest.

        Raises:
            OSError: the checkpoint cannot be written; nothing of it stays.
        """
        target = self.root / f"round-{checkpoint.round:06d}"
        temporary = self.root / f".{target.name}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            files: dict[str, dict[str, str]] = {}
            for name, server in checkpoint.servers.items():
                groups = {"params": server.params, **{f"slot:{slot}": t for slot, t in server.slots.items()}}
                files[name] = {
                    group: self._write(temporary / f"{quote(name)}-{number}.safetensors", tensors)
                    for number, (group, tensors) in enumerate(groups.items())
                }
            record: dict[str, Any] = {
                "round": checkpoint.round,
                "history_bytes": checkpoint.history_bytes,
                "servers": {name: server.round for name, server in checkpoint.servers.items()},
                "sha256": files,
            }
            record["digest"] = _digest(record)
            write_atomically(temporary / "checkpoint.json", json.dumps(record, indent=1).encode(), sync=True)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.prune()

    def prune(self) -> None:
        """Removes what is neither among the newest ``keep`` nor always kept; tells the store which versions matter."""
        rounds = self.rounds()
        kept = [round for round in rounds if round in self.always or round in rounds[-self.keep :]]
        for old in set(rounds) - set(kept):
            shutil.rmtree(self.root / f"round-{old:06d}", ignore_errors=True)
        self.store.kept = kept

    def load(self, round: int) -> Checkpoint:
        """One checkpoint, verified.

        Raises:
            CorruptCheckpoint: names the file that is missing or damaged.
        """
        folder = self.root / f"round-{round:06d}"
        path = folder / "checkpoint.json"
        try:
            record = _record(path, round)
            servers = {
                name: self._server(folder, name, finished, record["sha256"][name])
                for name, finished in record["servers"].items()
            }
            self.store.verify(round)
            return Checkpoint(record["round"], servers, record["history_bytes"])
        except (OSError, *FAULTS) as error:  # JSON of another form among them
            raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {str(error)[:300]}") from error

    def latest(self, history_bytes: int | None = None) -> tuple[Checkpoint, list[str]]:
        """The newest sound checkpoint, and what was wrong with newer ones; the store is rewound to it.

        Args:
            history_bytes: how long the history is; a checkpoint that belongs to a longer one is not sound.

        Raises:
            CorruptCheckpoint: there is no sound checkpoint.
        """
        problems: list[str] = []
        for round in reversed(self.rounds()):
            try:
                checkpoint = self.load(round)
                wanted = checkpoint.history_bytes
                if history_bytes is not None and history_bytes < wanted:
                    raise CorruptCheckpoint(f"round {round} needs {wanted} bytes of history, there are {history_bytes}")
            except CorruptCheckpoint as error:
                problems.append(str(error))
                continue
            for newer in self.rounds():
                if newer > round:
                    shutil.rmtree(self.root / f"round-{newer:06d}")
            self.store.rewind(round)
            self.prune()
            return checkpoint, problems
        detail = "; ".join(problems) or "there is none"
        raise CorruptCheckpoint(f"no sound checkpoint in {self.root}: {detail}")

    def copy(self, round: int, target: Path, without: Collection[str] = ()) -> None:
        """Copies one checkpoint with the states that belong to it into another run's ``checkpoint/``.

        Args:
            round: the checkpoint's.
            target: the other directory.
            without: clients whose states are not copied.
        """
        self.store.copy(round, target / "clients", without)
        name = f"round-{round:06d}"
        shutil.rmtree(target / name, ignore_errors=True)
        shutil.copytree(self.root / name, target / name)

    @staticmethod
    def _write(path: Path, tensors: Params) -> str:
        data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        write_atomically(path, data, sync=True)
        return hashlib.sha256(data).hexdigest()

    @staticmethod
    def _server(folder: Path, name: str, finished: int, groups: Mapping[str, str]) -> ServerState:
        loaded: dict[str, Params] = {}
        for number, (group, digest) in enumerate(groups.items()):
            path = folder / f"{quote(name)}-{number}.safetensors"
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise CorruptCheckpoint(f"{path}: its SHA-256 differs from the one recorded")
            loaded[group] = dict(sorted(load(data).items()))
        slots = {g.removeprefix("slot:"): t for g, t in loaded.items() if g.startswith("slot:")}
        return ServerState(finished, loaded["params"], slots)


def _record(path: Path, round: int) -> dict[str, Any]:
    """A ``checkpoint.json``, checked.

    Args:
        path: the file.
        round: of which round it must be.

    Raises:
        ValueError: it is of another form or round, or its digest differs from the one recorded; files of earlier
            versions of confed have none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        named = record["servers"].keys() == record["sha256"].keys() and bool(record["servers"])
        numbers = [record["history_bytes"], *record["servers"].values()]
        digests = [digest for groups in record["sha256"].values() for digest in groups.values()]
        sound = named and all("params" in groups for groups in record["sha256"].values())
        sound = sound and record["round"] == round and all(type(n) is int and n >= 0 for n in numbers)
        sound = sound and all(isinstance(digest, str) for digest in digests)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no checkpoint's record: {type(error).__name__}: {error}") from error
    if not sound:
        raise ValueError(f"no record of a checkpoint of round {round}")
    if record.pop("digest", None) not in (None, _digest(record)):
        raise ValueError("its digest differs from the one recorded")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _verify(path: Path) -> None:
    try:
        decode_state(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
