"""Status of a run for another process of this machine: files that one process writes and the other reads."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.system.events import Caution, Event, Note, RunProgress, SiteStates, SiteStatus, from_json, to_json

OFTEN = 0.5
"""Seconds between two versions of what the sites are doing."""


class StatusFile:
    """Status files as the leading process writes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shown = -float("inf")
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, event: Event) -> None:
        """Progress callback: notes and steps of the run as lines of files, of the sites' states the newest only."""
        if isinstance(event, SiteStates):
            self._write_sites(event.sites)
        elif isinstance(event, Note):
            self._append("notes.txt", " ".join(event.text.split()))
        elif isinstance(event, RunProgress | Caution):
            self._append("progress.jsonl", json.dumps(to_json(event)))

    def _append(self, name: str, line: str) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write_sites(self, sites: Mapping[str, SiteStatus]) -> None:
        """Writes the sites' states, at most twice a second."""
        if time.monotonic() - self._shown >= OFTEN:
            self._shown = time.monotonic()
            states = {name: asdict(status) for name, status in sites.items()}
            write_atomically(self._folder / "sites.json", json.dumps(states).encode())

    def failed(self, error: Exception) -> None:
        """The run cannot go on, and would not if it were started again."""
        self._outcome({"error": f"{type(error).__name__}: {error}", "faulty": isinstance(error, ValueError)})

    def ended(self) -> None:
        """The run is done."""
        self._outcome({"error": None, "faulty": False})

    def _outcome(self, outcome: Mapping[str, Any]) -> None:
        write_atomically(self._folder / "outcome.json", json.dumps(outcome).encode())


class StatusReader:
    """Status files as the watching process reads them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = [folder / name for name in ("progress.jsonl", "notes.txt")]
        self._read = {path: path.stat().st_size if path.is_file() else 0 for path in files}

    def steps(self) -> list[RunProgress | Caution | Note]:
        """The steps of the run since the last call."""
        return [from_json(json.loads(line)) for line in self._news("progress.jsonl")]

    def notes(self) -> list[str]:
        """The notes since the last call."""
        return [line.decode() for line in self._news("notes.txt")]

    def _news(self, name: str) -> list[bytes]:
        path = self._folder / name
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(self._read[path])
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[path] += whole
        return data[:whole].splitlines()

    def sites(self) -> dict[str, SiteStatus]:
        """What the sites were doing last."""
        path = self._folder / "sites.json"
        if not path.is_file():
            return {}
        return {name: SiteStatus(**status) for name, status in json.loads(path.read_bytes()).items()}

    def begin(self) -> None:
        """Forgets how an earlier run ended, and what its sites did."""
        for name in ("outcome.json", "sites.json"):
            (self._folder / name).unlink(missing_ok=True)

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended: ``error`` (None if it is done) and ``faulty`` (a fault of the input); None before."""
        path = self._folder / "outcome.json"
        return json.loads(path.read_bytes()) if path.is_file() else None
