"""Sites that stand out: norms and cosines of their updates, how the others' records fare, and who matters most.

A value stands out where it is more than 3.5 robust standard deviations from the median of the sites (Iglewicz and
Hoaglin 1993, "How to detect and handle outliers"); with fewer than five sites that is not said of any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from confed.federation.params import Params
from confed.release.case import EVERYBODY, VALIDATION, Case, flattened

LEAST_SITES, FAR = 5, 3.5
LOOKED_AT = 300  # validation records that updates are tried on


@dataclass(frozen=True)
class Standing:
    """One site among the others."""

    site: str
    rounds: int  # in which it sent an update
    norm: float  # of its updates, the mean over rounds
    cosine: float | None  # between its update and the sum of the others', the mean over rounds
    losses: tuple[float, ...]  # of its update on all sites' validation records, in the middle and in the last round
    influence: float | None  # how far the model moves without the site, as a share of how far training moved it
    far: tuple[str, ...]  # the figures with which it stands out


def robust_z(values: Sequence[float]) -> np.ndarray:
    """Distances from the median in robust standard deviations, 0.6745 (x - median) / MAD."""
    array = np.asarray(values, dtype=np.float64)
    centred = array - np.median(array)
    spread = np.median(np.abs(centred))
    return np.zeros_like(array) if spread == 0 else 0.6745 * centred / spread


def standing(case: Case, influence: Mapping[str, float]) -> list[Standing]:
    """All sites that sent updates, in the order of the federation."""
    watched = case.replay.watched
    sites = [site for site in case.sites if site in watched.norms]
    columns = {
        "norm": [float(np.mean(watched.norms[site])) for site in sites],
        "cosine": [float(np.mean(watched.cosines[site])) if site in watched.cosines else None for site in sites],
        "influence": [influence.get(site) for site in sites],
    }
    far: dict[str, list[str]] = {site: [] for site in sites}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        if len(known) == len(sites) >= LEAST_SITES:
            for site, distance in zip(sites, robust_z(known), strict=True):
                if abs(distance) > FAR:
                    far[site].append(name)
    rows: list[Standing] = []
    for number, site in enumerate(sites):
        rows.append(
            Standing(
                site,
                len(watched.norms[site]),
                columns["norm"][number] or 0.0,
                columns["cosine"][number],
                _losses(case, site),
                columns["influence"][number],
                tuple(far[site]),
            )  # fmt: skip
        )
    return rows


def _losses(case: Case, site: str) -> tuple[float, ...]:
    """Mean loss of a site's model, as it sent it, on all sites' validation records."""
    rows, losses = case.records(VALIDATION, LOOKED_AT), list[float]()
    if case.unseen_updates or case.unasked or not rows:
        return ()
    for seen in (case.replay.watched.middle, case.replay.watched.last):
        if site in seen and case.algorithm.global_model == "alone" and not case.algorithm.traits.changes:
            call, reply = seen[site]
            sent = {n: t for n, t in reply.message.tensors.items() if n in call.message.tensors}
            model = {**call.message.tensors, **sent}
            losses.append(float(case.losses({EVERYBODY: model}, rows, VALIDATION).mean()))
    return tuple(losses)


def influence_of(case: Case, site: str) -> float | None:
    """Distance between the released model and the one without a site, over the distance from the start of training."""
    released, without = case.released, case.without(site)
    distances: list[tuple[float, float]] = []
    for owner, params in released.items():
        if owner in without:
            distances.append((_distance(params, without[owner]), _distance(params, case.workspace.initial)))
    moved = sum(start for _, start in distances)
    return sum(apart for apart, _ in distances) / moved if moved else None


def _distance(a: Params, b: Params) -> float:
    names = sorted(name for name in a if name in b and a[name].is_floating_point())
    return float(torch.dist(flattened(a, names), flattened(b, names)))
