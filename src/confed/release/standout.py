"""Sites that stand out: norms and cosines of their updates, how the others' records fare, and who matters most.

A value stands out where it is more than 3.5 robust standard deviations from the median of the sites (Iglewicz and
Hoaglin 1993, "How to detect and handle outliers"); with fewer than five sites that is not said of any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from confed.analysis.case import VALIDATION, Case, flattened, sent_model
from confed.federation.params import Params

LEAST_SITES, FAR = 5, 3.5
LOOKED_AT = 300  # validation records that updates are tried on


@dataclass(frozen=True)
class Standing:
    """One site among the others."""

    site: str
    rounds: int  # in which it sent an update
    norm: float  # of its updates, the mean over rounds
    cosine: float | None  # between its update and the sum of the others', the mean over rounds
    losses: tuple[float, ...]  # of its updates on all sites' validation records, in the first, a middle, the last round
    influence: float | None  # how far the model moves without the site, as a share of how far training moved it
    far: tuple[str, ...]  # the figures with which it stands out


def robust_z(values: Sequence[float]) -> np.ndarray:
    """Distances from the median in robust standard deviations, 0.6745 (x - median) / MAD."""
    centred = np.asarray(values, dtype=np.float64) - np.median(values)
    spread = np.median(np.abs(centred))
    return np.zeros_like(centred) if spread == 0 else 0.6745 * centred / spread


def standing(case: Case) -> list[Standing]:
    """All sites that sent updates; influence is given of those without which the run was trained."""
    watched = case.replay[0]
    sites = [site for site in case.sites if site in watched.norms]
    columns: dict[str, list[float | None]] = {
        "norm": [float(np.mean(watched.norms[site])) for site in sites],
        "cosine": [float(np.mean(watched.cosines[site])) if site in watched.cosines else None for site in sites],
        "influence": [influence_of(case, site) if site in case.left_out else None for site in sites],
    }
    far: dict[str, list[str]] = {site: [] for site in sites}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        if len(known) == len(sites) >= LEAST_SITES:
            for site in np.array(sites)[np.abs(robust_z(known)) > FAR].tolist():
                far[site].append(name)
    rows: list[Standing] = []
    for site, norm, cosine, influence in zip(sites, *columns.values(), strict=True):
        losses = _losses(case, site)
        rows.append(Standing(site, len(watched.norms[site]), norm or 0.0, cosine, losses, influence, tuple(far[site])))
    return rows


def _losses(case: Case, site: str) -> tuple[float, ...]:
    """Mean loss of a site's model, as it sent it, on all sites' validation records."""
    rows, watched = case.records(VALIDATION, LOOKED_AT), case.replay[0]
    if case.unasked or case.algorithm.global_model != "alone" or case.algorithm.traits.changes or not rows:
        return ()
    seen = [of_round[site] for of_round in (watched.first, watched.middle, watched.last) if site in of_round]
    return tuple(float(case.losses(sent_model(*pair), rows, VALIDATION).mean()) for pair in seen)


def influence_of(case: Case, site: str) -> float | None:
    """Distance between the released model and the one without a site, over the distance from the start of training."""
    without, apart, moved = case.without(site), 0.0, 0.0
    for owner in case.released.keys() & without.keys():
        apart += _distance(case.released[owner], without[owner])
        moved += _distance(case.released[owner], case.workspace.initial)
    return None if moved == 0 else apart / moved


def _distance(a: Params, b: Params) -> float:
    names = sorted(name for name in a.keys() & b.keys() if a[name].is_floating_point())
    return float(torch.dist(flattened(a, names), flattened(b, names)))
