"""Audit of a federation: what its folders prove, and what is left of a site after it was erased.

A site's journals are hash chains whose heads the server signs after every round
(:mod:`confed.engines.remote.journal_chains`). An audit compares both ends without a running process: the server's run
folder, and any of the sites' private folders.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confed.engines.remote.client import append
from confed.engines.remote.journal_chains import KNOWN, countersigned_at, lengths_against
from confed.engines.remote.protocol import Refused
from confed.federation.atomic import write_atomically
from confed.federation.reading import faults_of, read_bounded
from confed.results.folder import FINAL, MEMBERS
from confed.results.stored import TRAINING, read_records
from confed.system import format as formats
from confed.system.folder_lock import exclusive


@dataclass(frozen=True)
class AuditLine:
    """What an audit found of one journal of a site."""

    site: str
    journal: str
    signed: int  # entries that the server has signed
    here: int | None  # entries in the site's folder; None where that is not at hand
    verdict: str  # "sound", "not at hand", or what is wrong
    sound: bool = True


def audit(state: Path, privates: Sequence[Path] = ()) -> list[AuditLine]:
    """Audit of a server's run folder, and of sites' private folders, whose journals must begin with what was signed."""
    sites = _read(state, KNOWN, f"{state} is no server's run folder, or no round has ended: it has no {KNOWN}")
    folder_of = {_site_at(private, list(sites)): private for private in privates}
    lines: list[AuditLine] = []
    for site in sites:
        try:
            statement = countersigned_at(state, site)
        except Refused as error:
            lines.append(AuditLine(site, "all", 0, None, str(error), sound=False))
            continue
        here = lengths_against(folder_of[site], statement) if site in folder_of else {}
        kept = countersigned_at(folder_of[site], site) if site in folder_of else {}
        for journal, (signed, _) in statement.items():
            length, begins_so = here.get(journal, (None, True))
            verdict = "not at hand" if length is None else "sound"
            later = kept.get(journal, (0, ""))[0] > signed
            if not begins_so:
                verdict = "removed, cut or put back from an old copy"
            elif later:
                verdict = f"the run folder was put back from an old copy: {kept[journal][0]} entries were signed"
            lines.append(AuditLine(site, journal, signed, length, verdict, begins_so and not later))
    return lines


def _read(folder: Path, name: str, missing: str) -> Any:
    if not (folder / name).is_file():
        raise ValueError(missing)
    with faults_of(folder / name, "JSON"):
        return json.loads(read_bounded(folder / name))


def _site_at(private: Path, sites: Sequence[str]) -> str:
    """Whose private folder this is, by the server's signature in it."""
    for site in sites:
        try:
            if countersigned_at(private, site):
                return site
        except Refused:
            continue
    raise ValueError(
        f"{private} is no private folder of {', '.join(sorted(sites))}: nothing in it is signed for one of them"
    )


def erase(state: Path, site: str) -> list[str]:
    """Erasure of what a server's run folder holds of a site alone; returns what is left, in sentences."""
    members = _read(state, MEMBERS, f"{state} is no server's run folder: it has no {MEMBERS}")
    if site not in [member["id"] for member in members]:
        raise ValueError(f"{state} has no site {site!r}; there are {', '.join(m['id'] for m in members)}")
    if not (state / "summary.json").is_file():
        raise ValueError(f"the run in {state} goes on: revoke the site, let the run end, and erase it then")
    sent = read_records(state).by_round(TRAINING, "bytes_up")
    rounds = sorted(number for number, sites in sent.items() if site in sites)
    _write(state / MEMBERS, [member for member in members if member["id"] != site])
    if (state / KNOWN).is_file():
        signed = json.loads(read_bounded(state / KNOWN))
        signed.pop(site, None)
        _write(state / KNOWN, signed)
    if (state / FINAL).is_file():
        models = json.loads(read_bounded(state / FINAL))
        for model in models.values():
            model["sites"].pop(site, None)
        _write(state / FINAL, models)
    left = [f"records, tables and {name} name {site} and its figures" for name in ("metrics.jsonl", "summary.json")]
    if rounds:
        left.append(
            f"the global model holds what {site} sent in rounds {rounds[0]} to {rounds[-1]} ({len(rounds)} rounds): "
            f"`confed forget` unlearns it where the data are at hand, else the run has to be repeated without {site}"
        )
    return left


def _write(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode(), sync=True)


REMOVED = "removed.jsonl"  # the record of what retention took out of a folder
_AGEING = ("checkpoint/*", "state/*", "run-*", "steps/*")
"""Of a server's run folder and of a site's: checkpoints, states of runs, models set aside. Journals stay."""


def retain(folder: Path, days: int) -> list[str]:
    """Removal of what nothing was written to for so many days, with a record of each; chains and records stay."""
    if days < 1:
        raise ValueError(f"--days must be at least 1, got {days}")
    if (folder / MEMBERS).is_file() and not (folder / "summary.json").is_file():
        raise ValueError(f"the run in {folder} goes on, and needs its checkpoints: let it end first")
    if not (folder / MEMBERS).is_file() and not (folder / "audit.jsonl").is_file():
        raise ValueError(f"{folder} is neither a server's run folder nor a site's private one")
    removed: list[str] = []
    with exclusive(folder):
        for pattern in _AGEING:
            for path in sorted(folder.glob(pattern)):
                files = [path, *path.rglob("*")]
                last = max(file.stat().st_mtime for file in files)
                if last > time.time() - days * 86400:
                    continue
                size = sum(file.stat().st_size for file in files if file.is_file())
                name = path.relative_to(folder).as_posix()
                entry = {"time": time.time(), "removed": name, "bytes": size, "last_change": last, "days": days}
                append(folder / REMOVED, entry)  # first: what is gone is on record, whenever this is killed
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed.append(
                    f"{name}: {formats.size(size)}, last changed {time.strftime('%Y-%m-%d', time.localtime(last))}"
                )
    return removed
