"""Membership of sites: did this site take part, and from which site is a record?

The run is trained again without each site in turn. A site's test records, which nobody trained on, tell the model
without it from those with it, if its losses there are larger than theirs. Scores are a model's mean loss on the
site's records minus the mean over all models; the test draws at random which model would have been the one without.

From outputs: a linear classifier reads the released model's scores of half of the test records with their sites, and
names the sites of the other half; records about one picture are in one half.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from confed.analysis.case import TEST, Case
from confed.federation.randomness import derive
from confed.privacy.membership import auc_of
from confed.release.probe import Estimate, Finding, Probe

DRAWS = 4000


def advantage(with_site: np.ndarray, without_site: np.ndarray) -> float:
    """Largest difference of true and false positives over thresholds; smaller scores say that the site took part."""
    thresholds = np.concatenate([with_site, without_site])[:, None]
    return float(((with_site <= thresholds).mean(1) - (without_site <= thresholds).mean(1)).max())


def site_membership(losses: np.ndarray, seed: int = 0) -> Estimate:
    """The figure of mean losses (K, K + 1): column k without site k, the last one of the released model."""
    sites = len(losses)
    centred = losses - losses.mean(1, keepdims=True)

    def split(left_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mask = np.arange(sites + 1) == left_out[:, None]
        return centred[mask], centred[~mask]

    without_site, with_site = split(np.arange(sites))
    rng = np.random.default_rng(derive(seed, 0, "", "sites left out"))
    draws = np.array([auc_of(*split(rng.integers(sites + 1, size=sites))) for _ in range(DRAWS)])
    p = (1 + int((draws >= auc_of(without_site, with_site) - 1e-12).sum())) / (DRAWS + 1)
    value = advantage(with_site, without_site)
    title = "a site's part in training told, advantage"
    return Estimate("site_advantage", title, value, None, None, 0.0, p, sites, "site_advantage")


def named_sites(scores: Tensor, owners: Tensor, groups: np.ndarray, seed: int = 0) -> Estimate:
    """Share of records whose site a linear classifier names, the mean over sites, above chance; two halves."""
    from scipy.stats import norm

    count = int(owners.max()) + 1
    order = np.random.default_rng(derive(seed, 0, "", "halves")).permutation(groups.max() + 1)
    halves = torch.from_numpy(order[groups] % 2)
    scaled = torch.nan_to_num((scores - scores.mean(0)) / scores.std(0).clamp_min(1e-6)).double()
    inputs = torch.cat([scaled, torch.ones(len(scaled), 1).double()], 1)
    right = torch.zeros(len(owners)).double()
    for half in (0, 1):
        x, y = inputs[halves != half], one_hot(owners[halves != half], count).double()
        weights = torch.linalg.solve(x.T @ x + len(x) * 0.01 * torch.eye(x.shape[1]).double(), x.T @ y)
        right[halves == half] = ((inputs[halves == half] @ weights).argmax(1) == owners[halves == half]).double()
    of_sites = [right[owners == site] for site in range(count)]
    share = sum(float(part.mean()) for part in of_sites) / count - 1 / count
    error = max(math.sqrt(sum(float(part.var()) / len(part) for part in of_sites)) / count, 1e-9)
    title, p = "records whose site the outputs name, above chance", float(norm.sf(share / error))
    low, high = share - 1.96 * error, share + 1.96 * error
    return Estimate("site_from_outputs", title, share, low, high, 0.0, p, len(owners), "site_from_outputs")


def _excluded(case: Case) -> str:
    if case.algorithm.traits.centralised or case.algorithm.global_model != "alone":
        return "no model is released that would be there without a site"
    return "fewer than three sites" if len(case.sites) < 3 else case.unasked


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    rows = case.records(TEST)
    sites, sizes = list(rows), [len(chosen) for chosen in rows.values()]
    columns: list[list[float]] = []
    for models in (*map(case.without, sites), case.released):
        columns.append([float(part.mean()) for part in case.losses(models, rows, TEST).split(sizes)])
    outputs = [output.logits.float() for _, _, output in case.outputs(case.released, rows, TEST)]
    owners = torch.arange(len(sites)).repeat_interleave(torch.tensor(sizes))
    named = named_sites(torch.cat(outputs).log_softmax(-1), owners, case.groups(rows, TEST), case.setup.seed)
    words = (
        "Advantage: 1 names every model rightly, 0 none better than by guessing. A site's name in outputs may be that "
        "of its kind of pictures, and then is no fault of training."
    )
    return Finding([site_membership(np.array(columns).T, case.setup.seed), named], [words])


PROBE = Probe(
    "sites", "Membership of sites",
    "Has the released model and records of the site that were not trained on, and can train like models.",
    _excluded, lambda case: len(case.sites) * case.training_seconds if case.replayed else math.inf, _look,
)  # fmt: skip
