"""Headline values of a run's summary: what tables compare, of questions and of multi-label data."""

from collections.abc import Mapping
from typing import Any

from confed.results.runs import Summary, average, counted, number
from confed.results.traits import traits_of

# Names of the privacy ledgers' fields in a run's history and summary ------------------------------------------

FIELD = "update_privacy"
"""Of a line of ``metrics.jsonl`` and of ``summary.json``."""


EXAMPLES = "example_privacy"
"""Of ``summary.json``: the guarantee of single examples."""


SHOWN = 8
"""Rounds in the report's table, spread evenly; and clients, those that paid most, times four."""


# Headline values of a run's summary: what tables compare ------------------------------------------------------

"""In the order of tables; see :mod:`confed.metrics.multilabel`."""


VALIDATION = "validation"
"""An unseen place of this name is looked at while training; it counts in no test result over several places."""


HEADLINES: Mapping[str, str] = {
    "personal_mean": "personal",
    "personal_worst": "personal",
    "global_seen_mean": "global_seen",
    "global_unseen_mean": "global_unseen",
}


PARTS = {"deployed_mean": "deployed", **HEADLINES}


LABELS: Mapping[str, tuple[str, str]] = {
    f"{view} {metric}".strip(): (view, metric) for view in ("", "unseen", "personal") for metric in ("C-AP", "O-F1")
}
"""Means of multi-label runs -> view and metric; see :func:`confed.results.headline.label_value`."""


def headline(summary: Summary, name: str) -> float | None:
    """One of the means that head a summary; worked out from its parts where the summary does not state it."""
    if name in LABELS:
        view, metric = LABELS[name]
        return label_value(summary, metric, view)
    stated = number(summary.get(name))
    if stated is not None:
        return stated
    parts = list(counted(summary, PARTS[name]).values())
    return min(parts, default=None) if name == "personal_worst" else average(parts)


def membership(summary: Summary) -> str:
    """Share of a federation's sites that the means of a run are over, such as "1 of 2 sites"; empty where all are."""
    sites = summary.get("membership")
    if not isinstance(sites, Mapping) or not sites["missing"]:
        return ""
    return f"{len(sites['evaluated'])} of {len(sites['evaluated']) + len(sites['missing'])} sites"


def over_clients(words: str, summary: Summary) -> str:
    """Words for a mean over clients, which say over which where some sites have no result: "mean over 1 of 2 sites"."""
    sites = membership(summary)
    if not sites:
        return words
    return words.replace("over clients", f"over {sites}") if "over clients" in words else f"{words}, {sites}"


LABEL_METRICS = tuple(f"{kind}-{name}" for kind in "CO" for name in ("AP", "P", "R", "F1"))
"""The columns, in order."""


def is_labelled(summary: Summary) -> bool:
    """Whether a run's summary has multi-label results."""
    return isinstance(summary.get("multilabel"), Mapping)


def label_value(summary: Summary, metric: str, view: str = "", level: str = "") -> float | None:
    """One value of a run, a fraction; None where there is none."""
    label_summary = summary.get("multilabel")
    if not isinstance(label_summary, Mapping):
        return None
    values: Any = label_summary.get(view or label_summary.get("headline", ""))
    if level and isinstance(values, Mapping):
        values = values.get(level)
    return number(values.get(metric)) if isinstance(values, Mapping) else None


def is_bound(summary: Summary) -> bool:
    """Whether a run is a bound on what a federation could reach; bounds are not ranked."""
    return traits_of(summary).centralised
