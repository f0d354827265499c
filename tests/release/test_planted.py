"""Planted leaks of real trainings: a record repeated twenty times, and clean controls beside it."""

import numpy as np
import pytest
import torch

from confed.recipes.recipe import load_recipe
from confed.release.case import TRAIN, Case
from confed.release.probes.records import finding_of, likelihood_scores, outlying, phi
from confed.release.roc import Scored, auc_of
from confed.runs.run import run

SMALL = (
    "study.methods=[]", "algorithm.name=fedavg", "model.trainable=head", "model.head=linear", "run.rounds=4",
    "data.classes=8", "data.shots=12", "data.validation_shots=2", "data.test_per_class=4", "data.new=none",
    "data.partition=iid", "run.gallery=0", "local.lr=0.01", "local.epochs=3", "run.evaluate_every=0",
)  # fmt: skip
MODELS = 12


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run to train again on halves of its records: the other halves are non-members of the same kind."""
    folder = tmp_path_factory.mktemp("planted") / "run"
    run(load_recipe("prompts_scenes", SMALL), folder)
    return Case(folder)


def _attack(case: Case, trained_on: dict[str, torch.Tensor]) -> tuple[Scored, Scored]:
    """Scores of the records trained on, and of all others, from models that were trained on halves of everything."""
    records = case.everything
    target = phi(case.losses(case.trained(trained_on), records, TRAIN))
    phis: list[torch.Tensor] = []
    without: list[torch.Tensor] = []
    for number in range(MODELS):
        rng = torch.Generator().manual_seed(number)
        chosen = {site: rows[torch.rand(len(rows), generator=rng) < 0.5] for site, rows in records.items()}
        phis.append(phi(case.losses(case.trained(chosen), records, TRAIN)))
        without.append(torch.cat([~torch.isin(rows, chosen[site]) for site, rows in records.items()]))
    scores = likelihood_scores(target, torch.stack(phis), torch.stack(without)).numpy()
    member = torch.cat([torch.isin(rows, trained_on[site]) for site, rows in records.items()]).numpy()
    known = np.isfinite(scores)
    order = np.arange(len(scores))
    return tuple(Scored(scores[known & mask], order[known & mask]) for mask in (member, ~member))  # type: ignore[return-value]


def _hardest(case: Case, trained_on: dict[str, torch.Tensor], rank: int) -> tuple[str, int]:
    """The member of the first site that the released model is least sure of, or the next ones."""
    site = case.sites[0]
    losses = case.losses(case.released, {site: trained_on[site]}, TRAIN)
    return site, int(trained_on[site][losses.argsort(descending=True)[rank]])


def _planted_and_control(case: Case, rank: int) -> tuple[float, bool]:
    """P-value of the planted record, and whether records that nobody trained on are told from each other."""
    rng = torch.Generator().manual_seed(rank)
    once = {site: rows[torch.rand(len(rows), generator=rng) < 0.5] for site, rows in case.everything.items()}
    site, row = _hardest(case, once, rank)
    members, others = _attack(case, {**once, site: torch.cat([once[site], torch.full((19,), row)])})
    assert auc_of(members.scores, others.scores) > 0.5
    _, never = _attack(case, once)
    first, second = (Scored(never.scores[start::2], never.groups[start::2]) for start in (0, 1))
    control = finding_of(first, second, "").measures
    return outlying(members, others)[-1], any(measured.p < 0.05 for measured in control if measured.p is not None)


def test_a_repeated_record_stands_out_and_others_do_not(half: Case) -> None:
    p, flagged = _planted_and_control(half, 1)
    assert p < 0.05
    assert not flagged


@pytest.mark.slow
def test_most_repeated_records_stand_out_and_controls_do_not(half: Case) -> None:
    results = [_planted_and_control(half, rank) for rank in range(10)]
    assert sum(p < 0.05 for p, _ in results) >= 8  # a record that the mean over four sites washes out is not found
    assert sum(flagged for _, flagged in results) <= 1
