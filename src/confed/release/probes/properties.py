"""Properties of a site: how frequent each answer is among its records, from the last update that it sent.

The attacker runs the model as the site sent it on public records: where it answers c more often than the others'
models do, the site has more of c. Its estimate of site k's share of c is s_c + m_kc - m_c, with the mean probability
m_kc that the model gives to c, its mean m_c over sites, and the mean s_c of the other sites' true shares, which it is
taken to know.
"""

import numpy as np
import torch

from confed.federation.randomness import derive
from confed.release.case import EVERYBODY, TRAIN, VALIDATION, Case
from confed.release.probe import Finding, Measured, Probe

DRAWS = 4000


def explained_shares(answered: np.ndarray, shares: np.ndarray, seed: int = 0) -> list[Measured]:
    """Figures of mean probabilities and of true shares, both (K, C): sites in rows.

    The test permutes the cells' differences from their means over sites, each in units of the root of its answer's
    frequency, as counts scatter.
    """
    sites, classes = shares.shape
    others = (shares.sum(0) - shares) / (sites - 1)
    estimate = np.clip(others + answered - answered.mean(0), 0, 1)
    explained = 1 - np.abs(shares - estimate).sum() / max(np.abs(shares - others).sum(), 1e-9)
    differences = ((answered - answered.mean(0)) / np.sqrt(answered.mean(0) + 1e-6)).ravel()
    truth = ((shares - shares.mean(0)) / np.sqrt(shares.mean(0) + 1e-6)).ravel()
    rng = np.random.default_rng(derive(seed, 0, "", "cells of shares"))
    observed = float(differences @ truth)
    draws = [float(differences @ rng.permutation(truth)) for _ in range(DRAWS)]
    p = (1 + sum(draw >= observed for draw in draws)) / (DRAWS + 1)
    title = "difference of label shares explained"
    measures = [Measured("properties", title, explained, None, None, 0.0, p, sites * classes, "properties")]
    alone = np.flatnonzero((shares > 0).sum(0) == 1)
    if len(alone):
        right = (answered[:, alone].argmax(0) == shares[:, alone].argmax(0)).mean()
        title = "answers that one site alone has, its name told"
        measures.append(Measured("propert_owner", title, float(right), None, None, 1 / sites, None, len(alone)))
    return measures


def _excluded(case: Case) -> str:
    if case.unseen_updates:
        return case.unseen_updates
    if case.classes < 2 or case.algorithm.global_model != "alone":
        return "sites do not train a whole model on answers that they share"
    if len(case.replay.watched.last) < 2:
        return "fewer than two sites sent an update in the last round"
    shares = np.stack([label_shares(case, site) for site in case.replay.watched.last])
    return "all sites have the same label shares" if np.ptp(shares, axis=0).max() < 1e-6 else ""


def label_shares(case: Case, site: str) -> np.ndarray:
    """How frequent each answer is among a site's training records, (C,)."""
    labels = case.table(site, TRAIN).columns["label"]
    counts = torch.bincount(labels[labels >= 0], minlength=case.classes).double()
    return (counts / counts.sum()).numpy()


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    answered: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    public = case.records(VALIDATION, 400)
    for site, (call, reply) in case.replay.watched.last.items():
        sent = {name: tensor for name, tensor in reply.message.tensors.items() if name in call.message.tensors}
        models = {EVERYBODY: {**call.message.tensors, **sent}}
        outputs = [output.logits.float().softmax(-1) for _, _, output in case.outputs(models, public, VALIDATION)]
        answered.append(torch.cat(outputs).mean(0).double().numpy())
        shares.append(label_shares(case, site))
    measures = explained_shares(np.stack(answered), np.stack(shares), case.setup.seed)
    notes = ["Explained: 1 names every share exactly, 0 no better than the other sites' mean; negative is worse.",
             "Public records are all sites' validation records, 400 at most."]  # fmt: skip
    return Finding(measures, notes)


PROBE = Probe(
    "properties",
    "Properties of a site",
    "Sees what each site sends in the last round, has public records, and knows how frequent answers are elsewhere.",
    _excluded, lambda case: 5.0, _look,
)  # fmt: skip
