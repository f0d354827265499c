"""Properties of a site: how frequent each answer is among its records, from the last update that it sent.

The attacker runs the model as the site sent it on public records: where it answers c more often than the others'
models do, the site has more of c. Its estimate of site k's share of c is s_c + m_kc - m_c, with the mean probability
m_kc that the model gives to c, its mean m_c over sites, and the mean s_c of the other sites' true shares, which it is
taken to know.
"""

import numpy as np
import torch

from confed.analysis.case import TRAIN, VALIDATION, Case, sent_model
from confed.federation.randomness import derive
from confed.release.probe import Estimate, Finding, Probe

DRAWS = 4000


def explained_shares(answered: np.ndarray, shares: np.ndarray, seed: int = 0) -> list[Estimate]:
    """Figures of mean probabilities and of true shares, both (K, C), with a test that permutes scaled differences."""
    sites = len(shares)
    others = (shares.sum(0) - shares) / (sites - 1)
    estimate = np.clip(others + answered - answered.mean(0), 0, 1)
    explained = 1 - np.abs(shares - estimate).sum() / max(np.abs(shares - others).sum(), 1e-9)
    told, truth = (((x - x.mean(0)) / np.sqrt(x.mean(0) + 1e-6)).ravel() for x in (answered, shares))
    rng = np.random.default_rng(derive(seed, 0, "", "cells of shares"))
    draws = np.array([told @ rng.permutation(truth) for _ in range(DRAWS)])
    p = (1 + int((draws >= told @ truth).sum())) / (DRAWS + 1)
    title = "difference of label shares explained"
    measures = [Estimate("properties", title, float(explained), None, None, 0.0, p, shares.size, "properties")]
    alone = np.flatnonzero((shares > 0).sum(0) == 1)
    if len(alone):
        right = float((answered[:, alone].argmax(0) == shares[:, alone].argmax(0)).mean())
        title = "answers that one site alone has, its name told"
        measures.append(Estimate("properties_owner", title, right, None, None, 1 / sites, None, len(alone)))
    return measures


def label_shares(case: Case, site: str) -> np.ndarray:
    """How frequent each answer is among a site's training records, (C,)."""
    labels = case.table(site, TRAIN).columns["label"]
    counts = torch.bincount(labels[labels >= 0], minlength=case.classes).double()
    return (counts / counts.sum()).numpy()


def _excluded(case: Case) -> str:
    if case.unlabelled_updates:
        return case.unlabelled_updates
    shares = np.stack([label_shares(case, site) for site in case.sites])
    return "all sites have the same label shares" if np.ptp(shares, axis=0).max() < 1e-6 else ""


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    answered: list[np.ndarray] = []
    public, last = case.records(VALIDATION, 400), case.replay[0].last
    for call, reply in last.values():
        outputs = [output.logits for _, _, output in case.outputs(sent_model(call, reply), public, VALIDATION)]
        answered.append(torch.cat(outputs).double().softmax(-1).mean(0).numpy())
    shares = np.stack([label_shares(case, site) for site in last])
    words = (
        "Explained: 1 names every share exactly, 0 no better than the other sites' mean; negative is worse. Public "
        "records are at most 400 of all sites' validation records."
    )
    return Finding(explained_shares(np.stack(answered), shares, case.setup.seed), [words])


PROBE = Probe(
    "properties", "Properties of a site",
    "Sees what each site sends in the last round, has public records, and knows how frequent answers are elsewhere.",
    _excluded, lambda case: 5.0, _look,
)  # fmt: skip
