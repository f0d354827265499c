"""Release dossier of a finished run: one page and one file, computed, with a digest and a signature.

The file ``dossier.json`` holds ``content``, its SHA-256 (of JSON with sorted keys, without blanks, in UTF-8) and, where
a key was given, an Ed25519 signature of :data:`HEADING` and that text.
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.metrics.statistics import LEVEL, holm
from confed.release.account import kinds_of, sent_by_site
from confed.release.case import Case
from confed.release.gains import gains, references
from confed.release.limits import Release, read_limits
from confed.release.probe import Finding, Measured, probes
from confed.release.standout import influence_of, standing
from confed.results.summary import EXAMPLE_PRIVACY, PRIVACY
from confed.system import format as formats
from confed.system.events import Note, Progress, ignore
from confed.system.release import VERSION

HEADING = b"confed dossier 1\n"
"""Comes before what is signed, so that no other signature of the key can be one of a dossier."""
WITHIN, BEYOND, UNSET = "Within the limits you set.", "Beyond the limits you set: {}.", "No limits set: figures only."
MINUTES = 30.0


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


@dataclass(frozen=True)
class Judged:
    """A figure against its limit."""

    probe: str
    measured: Measured
    adjusted: float | None  # its p-value after Holm's correction over all attacks of the dossier
    limit: float | None
    verdict: str  # "within", "beyond", "not settled" or ""


def dossier(
    run: Path | str,
    limits: Release | Path | str | None = None,
    *,
    out: Path | str | None = None,
    minutes: float = MINUTES,
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
        >>> found = confed.dossier("runs/first", confed.Release(least_members=5), minutes=0.01)
        >>> found.sentence, found.file.name
        ('Within the limits you set.', 'dossier.json')
    """
    from confed.release.page import page_of

    if not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    ends = time.monotonic() + 60 * minutes
    release = limits if isinstance(limits, Release) else Release() if limits is None else read_limits(Path(limits))
    signing = None if key is None else read_key(Path(key))
    case = Case(Path(run), 60 * minutes)
    folder = Path(run) / "dossier" if out is None else Path(out)
    left: list[NotExamined] = []
    findings = _probe(case, ends, left, progress)
    figures = [(probe.title, measured) for probe, finding in findings for measured in finding.measures]
    figures += [("Guarantees and sizes", measured) for measured in guarantees(case)]
    judged = judge(figures, release)
    sentence, details = verdict(judged, release, left)
    content = {
        "format": 1,
        "made_by": f"confed {VERSION}",
        "run": _described(case),
        "sentence": sentence,
        "details": details,
        "limits": release.chosen,
        "figures": [_figure(row) for row in judged],
        "probes": [
            {"name": probe.name, "title": probe.title, "attacker": probe.attacker, "notes": list(finding.notes)}
            for probe, finding in findings
        ],
        "sent": [asdict(row) for row in sent_by_site(case.history, case.summary.examples, case.sites)],
        "kinds": kinds_of(*_shared(case)),
        "protections": _protections(case),
        "gains": [],
        "standing": [],
    }
    content["gains"] = [{**asdict(row), "sentence": row.sentence} for row in _gains(case, ends, left, progress)]
    content["standing"] = [asdict(row) for row in _standing(case, ends, left, progress)]
    content["not_examined"] = [asdict(row) for row in left]
    drawings = {probe.name: finding.drawings for probe, finding in findings}
    folder.mkdir(parents=True, exist_ok=True)
    file, page = folder / "dossier.json", folder / "dossier.html"
    sealed = seal(content, signing)
    write_atomically(file, json.dumps(sealed, indent=1, ensure_ascii=False).encode())
    write_atomically(page, page_of(sealed, drawings).encode())
    return Dossier(sentence, content, page, file)


def _probe(case: Case, ends: float, left: list[NotExamined], progress: Progress) -> list[tuple[Any, Finding]]:
    """All probes that apply and fit into the time; the others are put down as not examined."""
    findings: list[tuple[Any, Finding]] = []
    for probe in probes():
        remaining = ends - time.monotonic()
        reason = probe.excluded(case)
        expected = math.nan if reason else probe.seconds(case)
        if reason:
            left.append(NotExamined(probe.title, reason))
        elif expected > remaining:
            left.append(NotExamined(probe.title, "it did not fit into the time", expected))
        else:
            progress(Note(f"{probe.title}: at most {formats.duration(remaining / 2)}"))
            findings.append((probe, probe.look(case, remaining / 2)))
    return findings


def _within(case: Case, what: str, seconds: float, ends: float, left: list[NotExamined]) -> bool:
    if seconds <= ends - time.monotonic():
        return True
    left.append(NotExamined(what, "it did not fit into the time", seconds))
    return False


def _gains(case: Case, ends: float, left: list[NotExamined], progress: Progress) -> Sequence[Any]:
    what = "What each site gained"
    if case.algorithm.traits.centralised or not case.algorithm.traits.communicates:
        left.append(NotExamined(what, "the run is itself a reference: one party, or each alone"))
        return ()
    found = references(case)
    cost = (2 - len(found)) * 1.5 * case.training_seconds
    if not _within(case, what, cost, ends, left):
        return ()
    progress(Note(what))
    return gains(case, found, progress)


def _standing(case: Case, ends: float, left: list[NotExamined], progress: Progress) -> Sequence[Any]:
    what = "Sites that stand out"
    if reason := case.unseen_updates:
        left.append(NotExamined(what, reason))
        return ()
    progress(Note(what))
    influence: dict[str, float] = {}
    for site in case.sites if len(case.sites) > 1 else ():
        known = case.has_without(site)
        if known or _within(case, f"The model without {site}", case.training_seconds, ends, left):
            share = influence_of(case, site)
            influence |= {} if share is None else {site: share}
    return standing(case, influence)


def guarantees(case: Case) -> list[Measured]:
    """Differential privacy as the run's ledgers have it, infinite without noise, and the fewest records of a site."""
    sizes = [sizes["train"] for site, sizes in case.summary.examples.items() if site in case.sites]
    measures: list[Measured] = []
    for name, key, title in (
        ("record_epsilon", EXAMPLE_PRIVACY, "ε per record, the largest of all sites"),
        ("client_epsilon", PRIVACY, "ε per site, the largest of all sites"),
    ):
        spent = case.summary.privacy(key).get("epsilon", {})
        known = [math.inf if value is None else float(value) for value in spent.values()]
        measures.append(Measured(name, title, max(known, default=math.inf), count=len(known), limit=name))
    if sizes:
        title = "training records of the smallest site"
        measures.append(Measured("least_members", title, min(sizes), count=len(sizes), limit="least_members"))
    return measures


def judge(figures: Sequence[tuple[str, Measured]], release: Release) -> list[Judged]:
    """Figures against limits. An attack counts as beyond only where chance is excluded after Holm's correction."""
    p = {f"{title}/{measured.name}": measured.p for title, measured in figures if measured.p is not None}
    adjusted = holm(p).adjusted
    judged: list[Judged] = []
    for title, measured in figures:
        corrected = adjusted.get(f"{title}/{measured.name}")
        limit = release.chosen.get(measured.limit)
        verdict = ""
        if limit is not None:
            short = measured.value < limit if measured.limit == "least_members" else measured.value > limit
            certain = measured.p is None or (corrected is not None and corrected <= LEVEL)
            verdict = ("beyond" if certain else "not settled") if short else "within"
        judged.append(Judged(title, measured, corrected, limit, verdict))
    return judged


def verdict(judged: Sequence[Judged], release: Release, left: Sequence[NotExamined]) -> tuple[str, str]:
    """The first sentence, and what follows it: together at most 60 words."""
    if not release.chosen:
        return UNSET, f"{formats.counted(len(judged), 'figure')}; {len(left)} not examined."
    beyond = [_words(row.measured.limit) for row in judged if row.verdict == "beyond"]
    open_limits = [f"{_words(row.measured.limit)} (not settled)" for row in judged if row.verdict == "not settled"]
    examined = {row.measured.limit for row in judged}
    missing = [f"{_words(name)} (not examined)" for name in release.chosen if name not in examined]
    names = list(dict.fromkeys([*beyond, *open_limits, *missing]))
    details = f"{formats.counted(len(release.chosen), 'limit')} against {formats.counted(len(judged), 'figure')}; {len(left)} not examined."
    if not names:
        return WITHIN, details
    shown = names[:6] + ([f"and {len(names) - 6} more"] if len(names) > 6 else [])
    return BEYOND.format(", ".join(shown)), details


def _words(limit: str) -> str:
    return limit.replace("_", " ")


def _figure(row: Judged) -> dict[str, Any]:
    """A judged figure for JSON, in which an infinite value is the word."""
    values = {key: _plain(value) for key, value in asdict(row.measured).items()}
    return {
        "probe": row.probe, **values, "p_corrected": row.adjusted, "release_limit": row.limit, "verdict": row.verdict
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return "infinite" if isinstance(value, float) and math.isinf(value) else value


def _described(case: Case) -> dict[str, Any]:
    resolved = case.recipe.sections
    replay = case.replay if case.replayed else None
    return {
        "folder": case.folder.resolve().name,
        "method": case.summary.label,
        "model": resolved["model"]["name"],
        "trainable": resolved["model"].get("trainable", "all"),
        "data": resolved["data"]["name"],
        "seed": case.setup.seed,
        "rounds": case.setup.rounds,
        "local": {"epochs": case.setup.local.epochs, "batch_size": case.setup.local.batch_size},
        "released": "one global model" if case.algorithm.global_model == "alone" else "each site's own model",
        "sites": case.sites,
        "digests": dict(case.summary.digests),
        "replay": None if replay is None else {"same_bits": replay.equal},
    }


def _shared(case: Case) -> tuple[dict[str, Any], str]:
    """The tensors that a site sends, and how those of the head begin."""
    from confed.federation.structure import heads_of

    if case.unseen_updates.startswith(("no site", case.algorithm.title)):
        return {}, "head"
    names = case.trained_names(case.members[0])
    head = next(iter(heads_of(case.workspace.model).values()), "head")
    return {name: case.workspace.tensors[name] for name in names}, head


def _protections(case: Case) -> dict[str, str]:
    return {
        name: str(getattr(case.algorithm, name))
        for name in ("update_privacy", "secure_sum", "robust")
        if getattr(case.algorithm, name) is not None
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
