"""Membership of sites: did this site take part, and from which site is a record?

The run is trained again without each site in turn. A site's test records, which nobody trained on, tell the model
without it from those with it, if its losses there are larger than theirs. Scores are a model's mean loss on the
site's records minus the mean over all models; the test draws at random which model would have been the one without.

From outputs: a linear classifier reads the released model's scores of half of the test records with their sites, and
names the sites of the other half; records about one picture are in one half.
"""

import numpy as np
import torch

from confed.federation.randomness import derive
from confed.release.case import EVERYBODY, TEST, Case
from confed.release.probe import Finding, Measured, Probe
from confed.release.roc import auc_of

DRAWS = 4000


def advantage(with_site: np.ndarray, without_site: np.ndarray) -> float:
    """Largest difference of true and false positives over thresholds; smaller scores say that the site took part."""
    thresholds = np.concatenate([with_site, without_site])
    found = (with_site[None] <= thresholds[:, None]).mean(1)
    alarms = (without_site[None] <= thresholds[:, None]).mean(1)
    return float((found - alarms).max())


def site_membership(losses: np.ndarray, seed: int = 0) -> Measured:
    """The figure of mean losses (K, K + 1): sites in rows, models in columns, the last one the released model.

    Column k is of the model without site k.
    """
    sites = len(losses)
    centred = losses - losses.mean(1, keepdims=True)

    def figures(left_out: np.ndarray) -> tuple[float, float]:
        mask = np.zeros_like(centred, dtype=bool)
        mask[np.arange(sites), left_out] = True
        return advantage(centred[~mask], centred[mask]), auc_of(centred[mask], centred[~mask])

    observed, area = figures(np.arange(sites))
    rng = np.random.default_rng(derive(seed, 0, "", "sites left out"))
    draws = [figures(rng.integers(sites + 1, size=sites))[1] for _ in range(DRAWS)]
    p = (1 + sum(draw >= area - 1e-12 for draw in draws)) / (DRAWS + 1)
    title = "a site's part in training told, advantage"
    return Measured("site_advantage", title, observed, None, None, 0.0, p, sites, "site_advantage")


def _excluded(case: Case) -> str:
    if case.algorithm.traits.centralised or case.algorithm.global_model != "alone":
        return "no model is released that would be there without a site"
    if len(case.sites) < 3:
        return "fewer than three sites"
    return case.unasked


def _seconds(case: Case) -> float:
    return len(case.sites) * case.training_seconds if case.replayed else float("inf")


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    rows = case.records(TEST)
    sites = list(rows)
    columns: list[np.ndarray] = []
    for models in (*map(case.without, sites), case.released):
        parts = case.losses(models, rows, TEST).split([len(chosen) for chosen in rows.values()])
        columns.append(np.array([float(part.mean()) for part in parts]))
    measures = [site_membership(np.stack(columns, axis=1), case.setup.seed)]
    scores: list[torch.Tensor] = []
    owners: list[int] = []
    for site, _, output in case.outputs(case.released, rows, TEST):
        scores.append(output.logits.float().log_softmax(-1) if output.logits.ndim == 2 else output.features.float())
        owners += [sites.index(site)] * len(scores[-1])
    named = named_sites(torch.cat(scores), torch.tensor(owners), case.groups(rows, TEST), case.setup.seed)
    notes = ["Advantage: 1 names every model rightly, 0 none better than by guessing. A site's name in outputs may be "
             "that of its kind of pictures, and then is no fault of training."]  # fmt: skip
    return Finding([*measures, named], notes)


def named_sites(scores: torch.Tensor, owners: torch.Tensor, groups: np.ndarray, seed: int = 0) -> Measured:
    """Share of records whose site a linear classifier names, the mean over sites, above chance; two halves."""
    from scipy.stats import norm

    count = int(owners.max()) + 1
    halves = torch.from_numpy(
        np.random.default_rng(derive(seed, 0, "", "halves")).permutation(groups.max() + 1)[groups] % 2
    )
    scaled = torch.nan_to_num((scores - scores.mean(0)) / scores.std(0).clamp_min(1e-6)).double()
    inputs = torch.cat([scaled, torch.ones(len(scaled), 1).double()], 1)
    right = torch.zeros(len(owners)).double()
    for half in (0, 1):
        fitting, tried = halves != half, halves == half
        x, y = inputs[fitting], torch.nn.functional.one_hot(owners[fitting], count).double()
        weights = torch.linalg.solve(x.T @ x + len(x) * 0.01 * torch.eye(x.shape[1]).double(), x.T @ y)
        right[tried] = ((inputs[tried] @ weights).argmax(1) == owners[tried]).double()
    of_sites = [right[owners == site] for site in range(count)]
    share = float(np.mean([float(part.mean()) for part in of_sites]))
    variance = sum(float(part.var()) / len(part) for part in of_sites) / count**2
    error, chance = max(variance**0.5, 1e-9), 1 / count
    title = "records whose site the outputs name, above chance"
    return Measured(
        "site_from_outputs", title, share - chance, share - chance - 1.96 * error, share - chance + 1.96 * error, 0.0,
        float(norm.sf((share - chance) / error)), len(owners), "site_from_outputs",
    )  # fmt: skip


PROBE = Probe(
    "sites",
    "Membership of sites",
    "Has the released model and records of the site that were not trained on, and can train like models.",
    _excluded, _seconds, _look,
)  # fmt: skip
