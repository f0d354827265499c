"""Release dossier of a finished run: one page and one file, computed, with a digest and a signature.

The file ``dossier.json`` holds ``content``, its SHA-256 (of JSON with sorted keys, without blanks, in UTF-8) and, where
a key was given, an Ed25519 signature of :data:`HEADING` and that text.
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.federation.structure import heads_of
from confed.metrics.statistics import LEVEL, holm
from confed.release.account import sent_by_site, tensor_kinds
from confed.release.case import Case
from confed.release.gains import Gain, gains, references
from confed.release.limits import Release, read_limits
from confed.release.probe import Estimate, Finding, Probe, probes
from confed.release.standout import Standing, standing
from confed.report.figures.style import Drawing
from confed.results.summary import EXAMPLE_PRIVACY, PRIVACY
from confed.system import format as formats
from confed.system.events import Note, Progress, ignore
from confed.system.release import VERSION

HEADING = b"confed dossier 1\n"
"""Comes before what is signed, so that no other signature of the key can be one of a dossier."""
WITHIN, BEYOND, UNSET = "Within the limits you set.", "Beyond the limits you set: {}.", "No limits set: figures only."


@dataclass(frozen=True)
class NotExamined:
    """Something a dossier does not say."""

    what: str
    why: str
    seconds: float | None = None  # what it would have taken


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
        run: a run folder.
        limits: limits, or a TOML file with ``[release]``; without any the dossier has figures only.
        out: folder for ``dossier.html`` and ``dossier.json``; by default ``dossier/`` in the run folder.
        minutes: time that may be spent; what does not fit is listed with what it would take.
        key: file with an Ed25519 private key (PEM or OpenSSH, no password) to sign with.
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
        findings = list(self._findings())
        figures: list[tuple[str, Estimate]] = []
        for probe, finding in findings:
            figures += [(probe.title, measured) for measured in finding.measures]
        figures += [("Guarantees and sizes", measured) for measured in guarantees(case)]
        judged = judge(figures, release)
        gained, standings = self._gains(), self._standing()
        sentence, details = verdict(judged, release, len(self.left))
        names = [] if case.sends_nothing else case.sent_names()
        probes_made: list[dict[str, Any]] = []
        for probe, finding in findings:
            made = {"name": probe.name, "title": probe.title, "attacker": probe.attacker}
            probes_made.append({**made, "notes": list(finding.notes)})
        content = {
            "format": 1,
            "made_by": f"confed {VERSION}",
            "sentence": sentence,
            "details": details,
            "limits": release.chosen,
            "run": described(case),
            "same_bits": same_bits,
            "figures": judged,
            "probes": probes_made,
            "sent": [asdict(row) for row in sent_by_site(case.history, case.summary.examples, case.sites)],
            "kinds": tensor_kinds(
                {n: case.workspace.tensors[n] for n in names}, [*heads_of(case.workspace.model).values()]
            ),
            "gains": [{**asdict(row), "sentence": row.sentence} for row in gained],
            "standing": [asdict(row) for row in standings],
            "not_examined": [asdict(row) for row in self.left],
        }
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

    def _findings(self) -> Iterator[tuple[Probe, Finding]]:
        for probe in probes():
            if reason := probe.excluded(self.case):
                self.left.append(NotExamined(probe.title, reason))
            elif self._fits(probe.title, probe.seconds(self.case)):
                yield probe, probe.look(self.case, (self.ends - time.monotonic()) / 2)

    def _gains(self) -> Sequence[Gain]:
        what, traits = "What each site gained", self.case.algorithm.traits
        if traits.centralised or not traits.communicates:
            self.left.append(NotExamined(what, "the run is itself a reference: all in one place, or each alone"))
            return ()
        found = references(self.case)
        fits = self._fits(what, (2 - len(found)) * 1.5 * self.case.training_seconds)
        return gains(self.case, found, ignore) if fits else ()

    def _standing(self) -> Sequence[Standing]:
        what = "Sites that stand out"
        if self.case.unseen_updates:
            self.left.append(NotExamined(what, self.case.unseen_updates))
            return ()
        for site in self.case.sites if len(self.case.sites) > 1 else ():
            if site not in self.case.left_out and self._fits(f"The model without {site}", self.case.training_seconds):
                self.case.without(site)
        return standing(self.case)


def guarantees(case: Case) -> list[Estimate]:
    """Differential privacy as the run's ledgers have it, infinite without noise, and the fewest records of a site."""
    measures: list[Estimate] = []
    for name, key, unit in (("record_epsilon", EXAMPLE_PRIVACY, "record"), ("client_epsilon", PRIVACY, "site")):
        spent = case.summary.privacy(key).get("epsilon", {}).values()
        largest = max((math.inf if value is None else float(value) for value in spent), default=math.inf)
        title = f"ε per {unit}, the largest of all sites"
        measures.append(Estimate(name, title, largest, count=len(spent), limit=name))
    sizes = [sizes["train"] for site, sizes in case.summary.examples.items() if site in case.sites]
    if sizes:
        title = "training records of the smallest site"
        measures.append(Estimate("least_members", title, min(sizes), count=len(sizes), limit="least_members"))
    return measures


def judge(figures: Sequence[tuple[str, Estimate]], release: Release) -> list[dict[str, Any]]:
    """Figures against limits, as JSON, in which an infinite value is the word "infinite".

    The verdict is "within", "beyond", "not settled" or "": an attack is beyond a limit only where chance is excluded
    after Holm's correction over all attacks of the dossier, and not settled where it is not.
    """
    adjusted = holm({str(number): m.p for number, (_, m) in enumerate(figures) if m.p is not None}).adjusted
    rows: list[dict[str, Any]] = []
    for number, (probe, measured) in enumerate(figures):
        corrected, limit, verdict = adjusted.get(str(number)), release.chosen.get(measured.limit), ""
        if limit is not None:
            over = measured.value < limit if measured.limit == "least_members" else measured.value > limit
            certain = corrected is None or corrected <= LEVEL
            verdict = "within"
            if over:
                verdict = "beyond" if certain else "not settled"
        value = "infinite" if math.isinf(measured.value) else measured.value
        judged = {"p_corrected": corrected, "release_limit": limit, "verdict": verdict}
        rows.append({"probe": probe, **asdict(measured), "value": value, **judged})
    return rows


def verdict(judged: Sequence[Mapping[str, Any]], release: Release, left: int) -> tuple[str, str]:
    """The first sentence, and what follows it: at most 60 words. A limit without a figure is not kept."""
    details = f"{formats.counted(len(judged), 'figure')}; {left} not examined."
    if not release.chosen:
        return UNSET, details
    marks = {"beyond": "", "not settled": " (not settled)"}
    names = [f"{row['limit']}{marks[row['verdict']]}" for row in judged if row["verdict"] in marks]
    examined = {row["limit"] for row in judged}
    names += [f"{name} (not examined)" for name in release.chosen if name not in examined]
    names = [name.replace("_", " ") for name in dict.fromkeys(names)]
    shown = names[:6] + ([f"and {len(names) - 6} more"] if len(names) > 6 else [])
    sentence = BEYOND.format(", ".join(shown)) if names else WITHIN
    return sentence, f"{formats.counted(len(release.chosen), 'limit')} against {details}"


def described(case: Case) -> dict[str, Any]:
    """What was run, as JSON."""
    sections, local = case.recipe.sections, case.setup.local
    protections = {
        name: getattr(case.algorithm, name) for name in ("record_privacy", "update_privacy", "secure_sum", "robust")
    }
    return {
        "folder": case.folder.resolve().name,
        "method": case.summary.label,
        "model": sections["model"]["name"],
        "trainable": sections["model"].get("trainable", "all"),
        "data": sections["data"]["name"],
        "seed": case.setup.seed,
        "rounds": case.setup.rounds,
        "local": {"epochs": local.epochs, "batch_size": local.batch_size, "lr": local.lr},
        "released": "one global model" if case.algorithm.global_model == "alone" else "each site's own model",
        "sites": case.sites,
        "protections": {name: str(value) for name, value in protections.items() if value is not None},
        "digests": dict(case.summary.digests),
    }


# Digest and signature -----------------------------------------------------------------------------------------


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and without blanks, in UTF-8."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def read_key(path: Path) -> Any:
    """An Ed25519 private key from a file; a fault is a ValueError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    try:
        data = path.read_bytes()
        load: Callable[..., Any] = load_ssh_private_key if b"OPENSSH" in data[:40] else load_pem_private_key
        key = load(data, None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} must hold an Ed25519 private key without a password: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} must hold an Ed25519 private key, got {type(key).__name__}")
    return key


def seal(content: Mapping[str, Any], key: Any = None) -> dict[str, Any]:
    """The content with its digest, and with a signature where there is a key."""
    data = canonical(content)
    sealed: dict[str, Any] = {"content": content, "sha256": hashlib.sha256(data).hexdigest()}
    if key is not None:
        public = key.public_key().public_bytes_raw()
        sealed["signature"] = {
            "kind": "Ed25519",
            "public_key": base64.b64encode(public).decode(),
            "value": base64.b64encode(key.sign(HEADING + data)).decode(),
        }
    return sealed


def check_seal(sealed: Mapping[str, Any], public_key: str = "") -> None:
    """Check of a dossier's digest and signature.

    Args:
        sealed: content of ``dossier.json``.
        public_key: in base64, whose signature it must be; "" checks the signature only if there is one.

    Raises:
        ValueError: the content was changed, or it is not signed by that key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = canonical(sealed["content"])
    if hashlib.sha256(data).hexdigest() != sealed["sha256"]:
        raise ValueError("the dossier's content is not what its digest is of: it was changed")
    signature = sealed.get("signature")
    if public_key and (signature is None or signature["public_key"] != public_key):
        raise ValueError("the dossier is not signed by the expected key")
    if signature is not None:
        try:
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(signature["public_key"]))
            key.verify(base64.b64decode(signature["value"]), HEADING + data)
        except InvalidSignature:
            raise ValueError("the dossier's signature does not fit its content") from None
