"""Paired tests against scipy, enumeration and hand computation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from confed.metrics.statistics import (
    across_clients,
    bootstrap,
    holm,
    hurt,
    mcnemar,
    mean,
    paired_t,
    smallest_p,
    wilcoxon,
)

A = [71.2, 70.1, 73.5, 69.8, 72.4, 74.0]
B = [70.0, 70.3, 71.9, 69.1, 71.0, 71.8]


def test_mean_by_hand():
    summary = mean([1.0, 2.0, 6.0])
    assert (summary.mean, summary.sd, summary.n) == pytest.approx((3.0, math.sqrt(7), 3))
    assert math.isnan(mean([4.0]).sd)


def test_paired_t_equals_scipy():
    test, theirs = paired_t(A, B), stats.ttest_rel(A, B)
    interval = theirs.confidence_interval(0.95)
    assert (test.statistic, test.p) == pytest.approx((theirs.statistic, theirs.pvalue))
    assert (test.low, test.high) == pytest.approx((interval.low, interval.high))


def test_paired_t_by_hand():
    # Differences 1, 2, 3: mean 2, sd 1, t = 2 √3 with 2 degrees of freedom; t_.975 = 4.302653.
    test = paired_t([1, 2, 3], [0, 0, 0])
    assert test.statistic == pytest.approx(2 * math.sqrt(3))
    assert test.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert test.p == pytest.approx(1 - math.sqrt(12 / 14))  # the distribution function has a closed form at 2


def test_paired_t_of_equal_differences():
    same, shifted = paired_t(A, A), paired_t([2, 2, 2], [3, 3, 3])
    assert (same.p, same.statistic, same.low, same.high) == (1, 0, 0, 0)
    assert (shifted.p, shifted.statistic, shifted.low) == (0, -math.inf, -1)


def test_mcnemar_by_hand():
    # 1 example only a is right, 5 only b: 2 (C(6,0) + C(6,1)) / 2^6 = 14/64.
    a, b = [1] * 1 + [0] * 5 + [1, 1, 0], [0] * 1 + [1] * 5 + [1, 1, 0]
    test = mcnemar(a, b)
    assert (test.only_a, test.only_b, test.n) == (1, 5, 9)
    assert test.p == pytest.approx(14 / 64)
    assert test.smallest_p == 2 / 64
    assert mcnemar([True, False], [True, False]).p == 1


@pytest.mark.parametrize("seed", range(3))
def test_wilcoxon_equals_scipy_without_ties(seed):
    rng = np.random.default_rng(seed)
    for n in (5, 12, 50, 80):
        a, b = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
        theirs = stats.wilcoxon(a, b)
        assert (wilcoxon(a, b).statistic, wilcoxon(a, b).p) == pytest.approx((theirs.statistic, theirs.pvalue))


def test_wilcoxon_with_ties_equals_enumeration():
    d = np.array([1, 1, 2, -1, 3, 3, 0, -2], dtype=float)
    test = wilcoxon(d, np.zeros(8))
    ranks = stats.rankdata(np.abs(d[d != 0]))
    sums = [sum(r for r, up in zip(ranks, signs, strict=True) if up) for signs in itertools.product((0, 1), repeat=7)]
    assert test.statistic == min(ranks[d[d != 0] > 0].sum(), ranks[d[d != 0] < 0].sum())
    assert test.p == pytest.approx(min(1, 2 * np.mean(np.array(sums) <= test.statistic)))
    assert test.n == 7


def test_smallest_attainable_p():
    # Five seeds that all favour one method: the extreme case of the sign patterns.
    assert wilcoxon([1, 2, 3, 4, 5], [0] * 5).p == smallest_p(5) == 0.0625
    assert wilcoxon([1] * 5, [0] * 5).p == 0.0625
    assert wilcoxon([1, 1], [1, 1]).p == smallest_p(0) == 1


def test_bootstrap_is_seeded_and_close_to_normal_theory():
    rng = np.random.default_rng(0)
    a, b = (rng.random(1000) < 0.55).astype(float), (rng.random(1000) < 0.5).astype(float)
    test = bootstrap(a, b, seed=1)
    assert test == bootstrap(a, b, seed=1)
    assert test != bootstrap(a, b, seed=2)
    d = a - b
    half = 1.96 * d.std() / math.sqrt(1000)
    assert (test.low, test.high) == pytest.approx((d.mean() - half, d.mean() + half), abs=0.004)
    assert test.p == pytest.approx(paired_t(a, b).p, abs=0.03)


def test_bootstrap_draws_examples_with_replacement():
    # Two examples with differences 0 and 1: means 0, .5 and 1 with shares 1/4, 1/2, 1/4.
    test = bootstrap([0, 1], [0, 0], resamples=20_000, confidence=0.4)
    assert (test.low, test.high) == (0.5, 0.5)
    assert bootstrap([0, 1], [0, 0], resamples=20_000).p == pytest.approx(0.5, abs=0.02)
    assert bootstrap([1, 1], [0, 0], resamples=99).p == pytest.approx(2 / 100)


def test_holm_by_hand():
    # Sorted: .01·4 = .04, .02·3 = .06, .03·2 = .06, .5·1 = .5.
    result = holm({"moon": 0.03, "prox": 0.01, "feddc": 0.5, "kd": 0.02})
    assert result.adjusted == pytest.approx({"moon": 0.06, "prox": 0.04, "feddc": 0.5, "kd": 0.06})
    assert list(result.adjusted) == ["moon", "prox", "feddc", "kd"]
    assert result.rejected == ("prox",)


def test_fairness_by_hand():
    clients = across_clients({"home": 0.5, "sports": 0.9, "nature": 0.7})
    assert (clients.worst, clients.worst_client, clients.bottom) == (0.5, "home", 0.5)
    assert (clients.mean, clients.spread, clients.sd) == pytest.approx((0.7, 0.4, 0.2))
    many = across_clients({str(i): float(i) for i in range(20)})
    assert many.bottom == 0.5


def test_hurt_by_hand():
    method, local = {"a": 0.5, "b": 0.6, "c": 0.9, "d": 0.1}, {"a": 0.75, "b": 0.6, "c": 0.8, "d": 0.2}
    result = hurt(method, local)
    assert (result.share, result.clients, result.worst) == (0.5, ("a", "d"), 0.25)
    assert hurt(method, local, margin=0.2).clients == ("a",)
    assert hurt(local, local).worst == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean([]), "values must be a list of at least 1 numbers"),
        (lambda: mean([1.0, math.nan]), "values must be finite, got nan"),
        (lambda: paired_t([1], [1]), "a must be a list of at least 2 numbers"),
        (lambda: paired_t([1, 2], [1, 2, 3]), "a and b must be paired, got 2 and 3 values"),
        (lambda: paired_t([1, 2], [1, 2], confidence=95), r"confidence must lie in \(0, 1\), got 95"),
        (lambda: mcnemar([0.3, 1], [1, 1]), "a must hold only 0 and 1 .* got 0.3"),
        (lambda: bootstrap([1], [1], resamples=0), "resamples must be at least 1, got 0"),
        (lambda: holm({"x": 1.5}), r"p\['x'\] must lie in \[0, 1\], got 1.5"),
        (lambda: hurt({"a": 1}, {"b": 1}), r"the same clients, got \['a'\] and \['b'\]"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
