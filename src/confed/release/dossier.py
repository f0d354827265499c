"""Release dossier of a finished run: one page and one file, computed, with a digest and a signature."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confed.analysis.case import Case
from confed.federation.checkpoint import write_atomically
from confed.federation.structure import heads_of
from confed.release.federation import federation_content
from confed.release.gains import Standing, gains, references, sent_by_site, standing, tensor_kinds
from confed.release.limits import Release, read_limits
from confed.release.probe import Estimate, Finding, Probe, probes
from confed.release.seal import read_key, seal
from confed.release.verdict import NotExamined, judged
from confed.report.figures.style import Drawing
from confed.results.folder import kind_of
from confed.system.events import Note, Progress, ignore


@dataclass(frozen=True)
class Dossier:
    """A release dossier.

    Attributes:
        sentence: one of three: within the limits, beyond them and which, no limits set.
        content: everything as JSON, which the digest is of.
        page: the page's file.
        file: ``dossier.json``.
    """

    sentence: str
    content: Mapping[str, Any]
    page: Path
    file: Path


def dossier(
    run: Path | str,
    limits: Release | Path | str | None = None,
    *,
    out: Path | str | None = None,
    minutes: float = 30.0,
    key: Path | str | None = None,
    progress: Progress = ignore,
) -> Dossier:
    """What a finished run gives away and what its sites gained, held against limits.

    Args:
        run: a run folder, or a federation's at its server, of which the sites' signed statements are told.
        limits: limits, or a TOML file with ``[release]``; without any the dossier has figures only.
        out: folder for ``dossier.html`` and ``dossier.json``; by default ``dossier/`` in the run folder.
        minutes: time that may be spent; what does not fit is listed with what it would take.
        key: file with a private key to sign with, on Ed25519 or a site's on P-384 (PEM or OpenSSH, no password).
        progress: called with every event.

    Raises:
        ValueError: no finished run, a faulty limit or key, or minutes that are not positive.

    Example:
        >>> found = confed.dossier("runs/first", confed.Release(least_members=5), minutes=0.001)
        >>> found.sentence, found.file.name
        ('Within the limits you set.', 'dossier.json')
    """
    from confed.release.page import page_of

    if not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    release = limits if isinstance(limits, Release) else Release()
    if isinstance(limits, Path | str):
        release = read_limits(Path(limits))
    signing = None if key is None else read_key(Path(key))
    drawings: Mapping[str, Sequence[Drawing]] = {}
    if kind_of(Path(run)) == "federation":
        content = federation_content(Path(run), release)
    else:
        examination = Examination(Case(Path(run), 60 * minutes), time.monotonic() + 60 * minutes, progress)
        content, drawings = examination.content(release)
    folder = Path(run) / "dossier" if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    file, page, sealed = folder / "dossier.json", folder / "dossier.html", seal(content, signing)
    write_atomically(file, json.dumps(sealed, indent=1, ensure_ascii=False).encode())
    write_atomically(page, page_of(sealed, drawings).encode())
    return Dossier(content["sentence"], content, page, file)


class Examination:
    """Everything that is looked at, one after the other, as far as the time reaches."""

    def __init__(self, case: Case, ends: float, progress: Progress) -> None:
        self.case, self.ends, self.progress = case, ends, progress
        self.left: list[NotExamined] = []

    def content(self, release: Release) -> tuple[dict[str, Any], dict[str, Sequence[Drawing]]]:
        """The dossier as JSON, and each probe's drawings."""
        case = self.case
        if case.replayed:
            self.progress(Note("The run once more"))
        same_bits = case.replay[1] if case.replayed else None
        findings: list[tuple[Probe, Finding]] = []
        for probe in probes():
            if reason := probe.excluded(case):
                self.left.append(NotExamined(probe.title, reason))
            elif self._fits(probe.title, probe.seconds(case)):
                findings.append((probe, probe.look(case, (self.ends - time.monotonic()) / 2)))
        figures: list[tuple[str, Estimate]] = []
        attacks: list[dict[str, Any]] = []
        for probe, finding in findings:
            figures += [(probe.title, measured) for measured in finding.measures]
            attack = {"name": probe.name, "title": probe.title, "attacker": probe.attacker}
            attacks.append({**attack, "notes": list(finding.notes)})
        sent = [asdict(row) for row in sent_by_site(case.run_records, case.summary.examples, case.sites)]
        names = [] if case.sends_nothing else case.sent_names()
        tensors = {name: case.workspace.tensors[name] for name in names}
        kinds = tensor_kinds(tensors, [*heads_of(case.workspace.model).values()])
        gained, standings = self._gains(), [asdict(row) for row in self._standing()]  # these put down what is left out
        content = judged(
            case.folder, case.finished, case.sites, figures, self.left, release, same_bits=same_bits, probes=attacks,
            sent=sent, kinds=kinds, gains=gained, standing=standings,
        )  # fmt: skip
        return content, {probe.name: finding.drawings for probe, finding in findings}

    def _fits(self, what: str, seconds: float) -> bool:
        """Whether something fits into the time that is left; if not it is put down."""
        fits = seconds <= self.ends - time.monotonic()
        if fits:
            self.progress(Note(what))
        else:
            known = seconds if math.isfinite(seconds) else None
            self.left.append(NotExamined(what, "it does not fit into the time", known))
        return fits

    def _gains(self) -> list[dict[str, Any]]:
        what, traits = "What each site gained", self.case.algorithm.traits
        if traits.centralised or not traits.communicates:
            self.left.append(NotExamined(what, "the run is itself a reference: all in one place, or each alone"))
            return []
        found = references(self.case)
        fits = self._fits(what, (2 - len(found)) * 1.5 * self.case.training_seconds)
        rows = gains(self.case, found, ignore) if fits else []
        return [{**asdict(row), "sentence": row.sentence} for row in rows]

    def _standing(self) -> Sequence[Standing]:
        what = "Sites that stand out"
        if self.case.unseen_updates:
            self.left.append(NotExamined(what, self.case.unseen_updates))
            return ()
        for site in self.case.sites if len(self.case.sites) > 1 else ():
            if site not in self.case.left_out and self._fits(f"The model without {site}", self.case.training_seconds):
                self.case.without(site)
        return standing(self.case)
