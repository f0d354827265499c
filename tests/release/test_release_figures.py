"""Formulas of probes against independent computations, with planted positives and clean controls."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from torch.nn import functional

from confed.privacy.membership import auc_of
from confed.release.probes.labels import label_counts, largest_remainders, overlap
from confed.release.probes.pictures import nearest_errors, total_variation
from confed.release.probes.properties import explained_shares
from confed.release.probes.records import Scored, curve_of, finding_of, likelihood_scores, phi, rate_at
from confed.release.probes.sites import advantage, named_sites, site_membership
from confed.release.probes.text import exposure, longest_run


def test_area_is_the_mann_whitney_statistic_over_pairs() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 70).astype(float), rng.integers(0, 8, 50).astype(float)
    expected = mannwhitneyu(members, others, method="asymptotic").statistic / (70 * 50)
    assert auc_of(members, others) == pytest.approx(expected)


def test_rate_allows_as_many_false_alarms_as_the_share_says() -> None:
    others = np.arange(100.0)
    assert rate_at(np.array([98.5, 99.5, 200.0]), others, 0.01) == pytest.approx(1.0)
    assert rate_at(np.array([97.5, 98.0, 200.0]), others, 0.01) == pytest.approx(1 / 3)
    assert rate_at(np.array([98.5, 99.5, 200.0]), others, 0.001) == pytest.approx(2 / 3)


def test_standard_error_agrees_with_delong() -> None:
    rng = np.random.default_rng(1)
    members, others = rng.normal(0.4, 1, 400), rng.normal(0, 1, 500)
    curve = curve_of(Scored(members, np.arange(400)), Scored(others, np.arange(500)))
    placed_members = (members[:, None] > others[None]).mean(1)
    placed_others = (members[:, None] > others[None]).mean(0)
    error = math.sqrt(placed_members.var(ddof=1) / 400 + placed_others.var(ddof=1) / 500)
    assert (curve.auc[2] - curve.auc[1]) / (2 * 1.96) == pytest.approx(error, rel=0.15)


def test_intervals_are_wider_where_pictures_are_shared() -> None:
    rng = np.random.default_rng(2)
    picture = np.repeat(rng.normal(0, 1, 40), 10)
    alone = curve_of(Scored(picture, np.arange(400)), Scored(picture[::-1], np.arange(400)))
    grouped = curve_of(
        Scored(picture, np.repeat(np.arange(40), 10)), Scored(picture[::-1], np.repeat(np.arange(40), 10))
    )
    assert grouped.auc[2] - grouped.auc[1] > 2 * (alone.auc[2] - alone.auc[1])


def test_phi_is_the_logit_of_the_right_answers_probability() -> None:
    logits = torch.randn(20, 5, dtype=torch.float64)
    losses = functional.cross_entropy(logits, torch.zeros(20, dtype=torch.int64), reduction="none")
    assert torch.allclose(phi(losses), torch.logit(logits.softmax(1)[:, 0]))


def test_likelihood_scores_count_models_without_the_record_only() -> None:
    without = torch.tensor([[True, False], [True, True], [False, True]])
    models = torch.tensor([[1.0, 100.0], [3.0, 4.0], [100.0, 8.0]])
    assert likelihood_scores(torch.tensor([5.0, 5.0]), models, without).tolist() == [3.0, -1.0]


def _records(leak: float, seed: int) -> float:
    """Corrected p-value of a membership attack on one of many records whose difficulties differ."""
    rng = np.random.default_rng(seed)
    members, others = rng.normal(0, 1, 400) + leak, rng.normal(0, 1, 400)
    finding = finding_of(Scored(members, np.arange(400)), Scored(others, np.arange(400)), "", seed)
    assert finding.measures[0].p is not None
    return finding.measures[0].p


def test_membership_is_found_where_planted_and_not_in_controls() -> None:
    assert max(_records(0.5, seed) for seed in range(10)) < 0.001
    assert sum(_records(0.0, seed) < 0.05 for seed in range(10)) <= 1


def test_sites_are_told_where_planted_and_not_in_controls() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(1, 0.01, (4, 5)) + np.pad(0.2 * np.eye(4), ((0, 0), (0, 1)))
    planted = site_membership(losses)
    assert planted.value == 1.0
    assert planted.p is not None
    assert planted.p < 0.01
    controls = [site_membership(np.random.default_rng(seed).normal(1, 0.01, (4, 5))).p for seed in range(10)]
    assert sum(p < 0.05 for p in controls if p is not None) <= 1


def test_advantage_is_the_largest_gap_of_distributions() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 1, 30), rng.normal(0.7, 1, 20)
    points = np.concatenate([a, b])
    expected = max((a <= x).mean() - (b <= x).mean() for x in points)
    assert advantage(a, b) == pytest.approx(expected)


def test_outputs_name_sites_where_planted_only() -> None:
    rng = torch.Generator().manual_seed(0)
    owners, noise = torch.arange(3).repeat(100), torch.randn(300, 4, generator=rng)
    planted = named_sites(noise + 3 * functional.one_hot(owners, 4), owners, np.arange(300))
    assert planted.value > 0.5
    control = named_sites(noise, owners, np.arange(300))
    assert control.p is not None
    assert control.p > 0.05


def test_own_class_is_named_and_equal_sites_tell_nothing() -> None:
    shares = np.full((4, 10), 0.1)
    shares[:, 0] = 0.0
    shares[2, 0] = 0.3
    shares /= shares.sum(1, keepdims=True)
    rng = np.random.default_rng(0)
    answered = np.clip(shares + rng.normal(0, 0.01, shares.shape), 0, 1)
    measures = {measured.name: measured for measured in explained_shares(answered, shares)}
    assert measures["properties_owner"].value == 1.0
    assert measures["properties"].value > 0.5
    assert measures["properties"].p is not None
    assert measures["properties"].p < 0.01
    unrelated = [
        explained_shares(np.random.default_rng(s).dirichlet(np.ones(10) * 50, 4), shares)[0].p for s in range(10)
    ]
    assert sum(p < 0.05 for p in unrelated if p is not None) <= 1


def test_labels_follow_from_the_gradient_of_the_bias() -> None:
    rng = torch.Generator().manual_seed(0)
    features, labels = torch.randn(32, 6, generator=rng), torch.randint(5, (32,), generator=rng)
    weight, bias = torch.randn(5, 6, generator=rng), torch.zeros(5, requires_grad=True)
    logits = features @ weight.T + bias
    functional.cross_entropy(logits, labels).backward()
    assert bias.grad is not None
    truth = torch.bincount(labels, minlength=5)
    counts = label_counts(bias.grad, logits.softmax(1).mean(0).detach(), 32)
    assert torch.equal(counts, truth)
    assert overlap(counts, truth) == 1.0
    assert overlap(torch.tensor([2, 0]), torch.tensor([1, 1])) == 0.5
    assert largest_remainders(torch.tensor([0.5, 1.7, 0.8]), 3).tolist() == [0, 2, 1]


def test_exposure_is_the_information_in_the_rank() -> None:
    assert exposure(1.0, [2.0] * 31) == 5.0
    assert exposure(3.0, [2.0] * 31) == 0.0
    assert exposure(1.0, [0.5, 2.0, 3.0]) == 1.0


def test_longest_run_counts_words_in_a_row() -> None:
    assert longest_run(["the", "red", "dog", "sits"], ["a", "red", "dog", "sits", "up"]) == 3
    assert longest_run(["a", "b"], ["c", "d"]) == 0


def test_pictures_are_compared_with_the_nearest_one() -> None:
    truth = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    assert nearest_errors(torch.full((1, 3, 4, 4), 0.9), truth).item() == pytest.approx(0.01, rel=1e-4)
    stripes = torch.tensor([0.0, 1.0]).repeat(2).expand(1, 3, 4, 4)
    assert total_variation(stripes).item() == pytest.approx(1.0)
