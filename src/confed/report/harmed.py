"""Clients that a method leaves worse off than a baseline, over the seeds that both have."""

from collections.abc import Mapping
from typing import NamedTuple

from confed.metrics.fairness import Hurt, hurt
from confed.results.runs import StudyResults
from confed.results.views import View

BySeed = Mapping[str, Mapping[int, float]]
"""Client -> seed -> value."""


class Hurting(NamedTuple):
    """Clients that are worse off than with a reference.

    Attributes:
        found: the clients, in the mean over ``seeds``.
        seeds: those that both sides have for all clients.
        every: whether the method has no other seeds.
    """

    found: Hurt
    seeds: tuple[int, ...]
    every: bool


def by_seed(study: StudyResults, method: str, view: View = View.PERSONAL) -> dict[str, dict[int, float]]:
    """Client -> seed -> value, of the clients that stayed to the end."""
    values: dict[str, dict[int, float]] = {}
    for run in study.of(method):
        for client, value in run.summary.counted(view).items():
            values.setdefault(client, {})[run.seed] = value
    return values


def hurting(own: BySeed, reference: BySeed) -> Hurting | None:
    """Clients worse off than with the reference; None if the two share no seed, or not the same clients."""
    every = [set(values) for values in (*own.values(), *reference.values())]
    seeds = sorted(set[int].intersection(*every)) if own.keys() == reference.keys() and every else []
    if not seeds:
        return None
    of: list[dict[str, float]] = []
    for side in (own, reference):
        of.append({c: sum(values[s] for s in seeds) / len(seeds) for c, values in side.items()})
    harmed = hurt(*of, margin=1e-9)  # equal on paper is not worse
    return Hurting(harmed, tuple(seeds), len(seeds) == len(every[0]))


def reference_row(study: StudyResults) -> str | None:
    """Reference for clients: the row of local training, else of FedAvg, that has results; or None."""
    ended = {}
    for m in study.methods:
        for run in study.of(m):
            if run.complete:
                ended[m] = run.summary
    traits = {method: summary.traits for method, summary in ended.items()}
    alone = [method for method, its in traits.items() if not its.communicates]
    rows = alone or [method for method, its in traits.items() if its.reference == 1]
    return next((m for m in rows if ended[m].algorithm == m), rows[0]) if rows else None
