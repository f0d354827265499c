"""Checkpoints on disk: atomic, verified, safetensors and JSON only; a thread writes them during the next round.

Client states are in ``directory_store.py``.
"""

import hashlib
import json
import os
import queue
import shutil
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors.torch import load, save

from confed.federation.atomic import private_folder, remove_unfinished, write_atomically
from confed.federation.directory_store import CorruptCheckpoint, DirectoryStore
from confed.federation.params import Params
from confed.federation.reading import FAULTS
from confed.federation.state import ServerState

__all__ = ["private_folder", "remove_unfinished"]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint."""

    round: int  # number of finished rounds
    servers: Mapping[str, ServerState]  # every server's state
    history_bytes: int  # how much of the history is its own
    # the files of client states that it relies on (needed), set when it is written; None in checkpoints of earlier
    # versions of confed, of which a missing file is not noticed
    states: Mapping[str, str] | None = None


class Checkpoints:
    """The checkpoints of a run, newest last."""

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

        Where it cannot be written, nothing of it stays.
        """
        self.write(self.expect(checkpoint))

    def expect(self, checkpoint: Checkpoint) -> Checkpoint:
        """Has the store keep what a checkpoint relies on; returns what :meth:`write` must get."""
        self.store.expected = [*self.store.expected, checkpoint.round]
        return replace(checkpoint, states=self.store.needed(checkpoint.round))

    def write(self, checkpoint: Checkpoint) -> None:
        """As :meth:`save`, of a checkpoint that is expected; in any thread."""
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
            if checkpoint.states is not None:
                record["states"] = dict(checkpoint.states)
            _write_record(temporary / "checkpoint.json", record)
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
        """One checkpoint, verified."""
        folder = self.root / f"round-{round:06d}"
        path = folder / "checkpoint.json"
        try:
            record = _record(path, round)
            servers = {
                name: self._server(folder, name, finished, record["sha256"][name])
                for name, finished in record["servers"].items()
            }
            checkpoint = Checkpoint(record["round"], servers, record["history_bytes"], record.get("states"))
            self.store.verify(round, checkpoint.states)
            return checkpoint
        except (OSError, *FAULTS) as error:  # JSON of another form among them
            raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {str(error)[:300]}") from error

    def latest(self, history_bytes: int | None = None) -> tuple[Checkpoint, list[str]]:
        """The newest sound checkpoint, and what was wrong with newer ones; the store is rewound to it."""
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
        """Copies one checkpoint with the states that belong to it into another run's ``checkpoint/``."""
        self.store.copy(round, target / "clients", without)
        name = f"round-{round:06d}"
        shutil.rmtree(target / name, ignore_errors=True)
        shutil.copytree(self.root / name, target / name)
        path = target / name / "checkpoint.json"
        record = _record(path, round)
        if "states" in record:
            _write_record(path, {**record, "states": DirectoryStore(target / "clients").needed(round)})

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
    """A ``checkpoint.json``, checked."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        named = record["servers"].keys() == record["sha256"].keys() and bool(record["servers"])
        numbers = [record["history_bytes"], *record["servers"].values()]
        digests = list(chain.from_iterable(groups.values() for groups in record["sha256"].values()))
        sound = named and all("params" in groups for groups in record["sha256"].values())
        sound = sound and record["round"] == round and all(type(n) is int and n >= 0 for n in numbers)
        sound = sound and all(isinstance(digest, str) for digest in digests)
        sound = sound and all(int(text.split()[0]) > 0 for text in record.get("states", {}).values())
    except (KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"no checkpoint's record: {type(error).__name__}: {error}") from error
    if not sound:
        raise ValueError(f"no record of a checkpoint of round {round}")
    if record.pop("digest", None) not in (None, _digest(record)):
        raise ValueError("its digest differs from the one recorded")
    return record


def _write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a ``checkpoint.json``; in one line, as a list of many files takes long to indent."""
    write_atomically(path, json.dumps({**record, "digest": _digest(record)}).encode(), sync=True)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


SMALL = 32 * 2**20
"""Bytes of servers' tensors up to which a checkpoint is written during the next round: its bytes are held twice."""


class CheckpointWriter:
    """One thread that writes a run's checkpoints, in their order.

    A run killed at any moment goes on from the newest whole checkpoint, as without a thread; that may be one round
    further back. The version of a client's state that a checkpoint needs is removed only when the next one is whole.
    Large checkpoints are written at once.

    Ctrl-C may come at any moment, so what both threads use is :class:`queue.SimpleQueue`: the locks of other queues and
    of semaphores stay taken for good where an interrupt comes just after they were.
    """

    def __init__(self, checkpoints: Checkpoints, waiting: int = 1) -> None:
        self._checkpoints = checkpoints
        self._jobs = queue.SimpleQueue[Checkpoint | None]()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(waiting):
            self._places.put(None)
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint soon; its tensors must not change afterwards."""
        groups = chain.from_iterable((s.params, *s.slots.values()) for s in checkpoint.servers.values())
        tensors = chain.from_iterable(group.values() for group in groups)
        if sum(tensor.nbytes for tensor in tensors) > SMALL:
            self.close()
            self._checkpoints.save(checkpoint)
            return
        self._places.get()
        try:
            self._raise()
            if self._thread is None:
                self._start()
            self._jobs.put(self._checkpoints.expect(checkpoint))
        except BaseException:
            self._places.put(None)  # a place too many, where the interrupt came just after the job was given
            raise

    def close(self) -> None:
        """Waits until everything is written, and ends the thread; :meth:`save` may follow.

        What went wrong in the thread is raised here, or by the next :meth:`save`.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
            self._raise()
            self._checkpoints.store.settle()
        self._raise()

    def _start(self) -> None:
        # A queue of its own, and known only once it has started: an interrupted `start` leaves a thread that may or may
        # not run, and cannot be joined.
        jobs = queue.SimpleQueue[Checkpoint | None]()
        thread = threading.Thread(target=self._work, args=(jobs,), name="confed-checkpoints", daemon=True)
        try:
            thread.start()
        except BaseException:
            jobs.put(None)
            raise
        self._jobs, self._thread = jobs, thread

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self, jobs: "queue.SimpleQueue[Checkpoint | None]") -> None:
        while (checkpoint := jobs.get()) is not None:
            try:
                if self._error is None:
                    self._checkpoints.write(checkpoint)
            except Exception as error:
                self._error = error
            finally:
                self._places.put(None)
