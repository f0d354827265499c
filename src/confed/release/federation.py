"""Dossier of a federation at its server: what the run folder shows, and what the sites have said and signed.

A server has no records and keeps no updates, so that no probe can be tried there. What a site told of its journals
(messages, costs in privacy, secrets used) is in ``journals.json`` under the server's countersignature. What a site
found out itself with ``confed dossier --key KEY`` counts where its file lies in ``statements/SITE.json`` and is signed
with the key that the coordinator's manifest has for the site; every other one is refused, and the reason listed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from confed.deployment.manifest import MANIFEST, verified
from confed.engines.remote.journal_chains import countersigned_at
from confed.engines.remote.protocol import Refused
from confed.federation.file_names import file_name
from confed.federation.reading import FAULTS, read_bounded
from confed.inference.finished_run import FinishedRun
from confed.release.gains import sent_by_site, tensor_kinds
from confed.release.limits import Release
from confed.release.probe import Estimate, probes
from confed.release.seal import check_seal
from confed.release.verdict import NotExamined, judged
from confed.results.folder import MEMBERS
from confed.results.stored import read_records

STATEMENTS = "statements"
"""Folder of the sites' own dossiers, in the run folder of the server."""
MOST_FIGURES = 200  # of one site


def federation_content(folder: Path, release: Release) -> dict[str, Any]:
    """The dossier as JSON, with the same entries as that of a run, and the sites' statements."""
    finished = FinishedRun(folder)
    members = json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
    sites = [member["id"] for member in members]
    left = [NotExamined(probe.title, "records and updates are at the sites") for probe in probes()]
    left.append(NotExamined("What each site gained", "what a site reaches alone is not known here"))
    left.append(NotExamined("Sites that stand out", "the server keeps no updates"))
    figures: list[tuple[str, Estimate]] = []
    keys, why = keys_of_sites(folder)
    statements: list[dict[str, Any]] = []
    for site in sites:
        journals, fault = _journals(folder, site)
        sentence, signed = f"none in {STATEMENTS}", False
        if (folder / STATEMENTS / f"{file_name(site)}.json").is_file():
            try:
                sentence, estimates = _told(folder, site, keys.get(site, ""), why)
                figures += [(f"Told by {site}", estimate) for estimate in estimates]
                signed = True
            except (ValueError, *FAULTS) as error:
                sentence = f"refused: {error}"
        if not signed:
            left.append(NotExamined(f"Statement of {site}", sentence))
        if fault:
            left.append(NotExamined(f"Journals of {site}", fault))
        # journals: numbers of entries, countersigned by the server; dossier: its sentence, or why it was refused.
        statements.append({"site": site, "journals": journals, "dossier": sentence, "signed": signed})
    models = [finished.global_file] if finished.global_file.is_file() else []
    examples = {member["id"]: {"train": member["num_examples"]} for member in members}
    sent = [asdict(row) for row in sent_by_site(read_records(folder), examples, sites)]
    kinds = tensor_kinds(load_file(models[0]), ("head", "classifier")) if models else {}
    return judged(folder, finished, sites, figures, left, release, statements=statements, sent=sent, kinds=kinds)


def keys_of_sites(folder: Path) -> tuple[Mapping[str, str], str]:
    """Site -> its public key as the coordinator signed it, or why none is known."""
    for kit in (folder, folder.resolve().parent):
        if (kit / MANIFEST).is_file():
            try:
                return verified(kit, read_bounded(kit / "ca.crt")).sites, "the coordinator signed no key of this site"
            except (ValueError, OSError) as error:
                return {}, str(error)
    return {}, f"no signed list of the sites' keys ({MANIFEST}) lies in or beside the run folder"


def _journals(folder: Path, site: str) -> tuple[str, str]:
    """Numbers of entries of a site's journals, and why the server's signature under them does not hold; "" if so."""
    try:
        entries = countersigned_at(folder, site)
    except (Refused, *FAULTS) as error:
        return "", f"no statement under this server's signature: {error}"
    if not entries:
        return "", "no statement under this server's signature"
    return ", ".join(f"{name} {length}" for name, (length, _) in sorted(entries.items())), ""


def _told(folder: Path, site: str, key: str, why: str) -> tuple[str, Sequence[Estimate]]:
    """First sentence and figures of a site's own dossier; a ValueError where it does not hold."""
    if not key:
        raise ValueError(why)
    sealed = json.loads(read_bounded(folder / STATEMENTS / f"{file_name(site)}.json"))
    check_seal(sealed, key)
    names = [field.name for field in fields(Estimate)]
    estimates: list[Estimate] = []
    for row in sealed["content"]["figures"][:MOST_FIGURES]:
        values = {name: row[name] for name in names}
        values["value"] = math.inf if row["value"] == "infinite" else float(row["value"])
        if values["p"] is not None and not 0 <= values["p"] <= 1:
            raise ValueError(f"a p-value of the figure {row['name']} must lie in [0, 1], got {values['p']}")
        estimates.append(Estimate(**values))
    return str(sealed["content"]["sentence"]), estimates
