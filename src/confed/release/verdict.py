"""First sentence of a dossier: figures against limits, and what was run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confed.inference.finished_run import FinishedRun
from confed.metrics.statistics import LEVEL, holm
from confed.recipes.recipe import Recipe
from confed.release.limits import Release
from confed.release.probe import Estimate
from confed.results.summary import EXAMPLE_PRIVACY, PRIVACY, Summary
from confed.system import format as formats
from confed.system.release import VERSION

WITHIN, BEYOND, UNSET = "Within the limits you set.", "Beyond the limits you set: {}.", "No limits set: figures only."


@dataclass(frozen=True)
class NotExamined:
    """Something a dossier does not say."""

    what: str
    why: str
    seconds: float | None = None  # what it would have taken


def guarantees(summary: Summary, sites: Sequence[str]) -> list[Estimate]:
    """Differential privacy as the run's ledgers have it, infinite without noise, and the fewest records of a site."""
    measures: list[Estimate] = []
    for name, key, unit in (("record_epsilon", EXAMPLE_PRIVACY, "record"), ("client_epsilon", PRIVACY, "site")):
        spent = summary.privacy(key).get("epsilon", {}).values()
        largest = max((math.inf if value is None else float(value) for value in spent), default=math.inf)
        title = f"ε per {unit}, the largest of all sites"
        measures.append(Estimate(name, title, largest, count=len(spent), limit=name))
    sizes = [sizes["train"] for site, sizes in summary.examples.items() if site in sites]
    if sizes:
        title = "training records of the smallest site"
        measures.append(Estimate("least_members", title, min(sizes), count=len(sizes), limit="least_members"))
    return measures


def judge(figures: Sequence[tuple[str, Estimate]], release: Release) -> list[dict[str, Any]]:
    """Figures against limits, as JSON, in which an infinite value is the word "infinite".

    The verdict is "within", "beyond", "not settled" or "": an attack is beyond a limit only where chance is excluded
    after Holm's correction over all attacks of the dossier, and not settled where it is not, or where the figure is
    within but the attack weak.
    """
    adjusted = holm({str(number): m.p for number, (_, m) in enumerate(figures) if m.p is not None}).adjusted
    rows: list[dict[str, Any]] = []
    for number, (probe, measured) in enumerate(figures):
        corrected, limit, verdict = adjusted.get(str(number)), release.chosen.get(measured.limit), ""
        if limit is not None:
            over = measured.value < limit if measured.limit == "least_members" else measured.value > limit
            certain = corrected is None or corrected <= LEVEL
            verdict = "not settled" if measured.weak else "within"
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


def judged(
    folder: Path, finished: FinishedRun, sites: Sequence[str], figures: Sequence[tuple[str, Estimate]],
    left: Sequence[NotExamined], release: Release, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """Everything that a dossier says, as JSON, its figures (with the titles of their probes) held against limits."""
    of_run = [("Guarantees and sizes", measured) for measured in guarantees(finished.summary, sites)]
    rows = judge([*figures, *of_run], release)
    sentence, details = verdict(rows, release, len(left))
    return {
        "format": 1,
        "made_by": f"confed {VERSION}",
        "sentence": sentence,
        "details": details,
        "limits": release.chosen,
        "run": described(folder, finished.recipe, finished.summary, sites),
        "same_bits": None,
        "figures": rows,
        "probes": [],
        "statements": [],
        "sent": [],
        "kinds": {},
        "gains": [],
        "standing": [],
        "not_examined": [asdict(row) for row in left],
        **others,
    }


def described(folder: Path, recipe: Recipe, summary: Summary, sites: Sequence[str]) -> dict[str, Any]:
    """What was run, as JSON."""
    sections, local, algorithm = recipe.sections, recipe.local, recipe.construct("algorithm")
    protections = {
        name: getattr(algorithm, name) for name in ("record_privacy", "update_privacy", "secure_sum", "robust")
    }
    return {
        "folder": folder.resolve().name,
        "method": summary.label,
        "model": sections["model"]["name"],
        "trainable": sections["model"].get("trainable", "all"),
        "data": sections["data"]["name"],
        "seed": recipe.run.seed,
        "rounds": recipe.run.rounds,
        "local": {"epochs": local.epochs, "batch_size": local.batch_size, "lr": local.lr},
        "released": "one global model" if summary.global_model == "alone" else "each site's own model",
        "sites": list(sites),
        "protections": {name: str(value) for name, value in protections.items() if value is not None},
        "digests": dict(summary.digests),
    }
