"""Paired tests against scipy, enumeration and hand computation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from confed.metrics.equivalence import tost
from confed.metrics.fairness import across_clients, hurt
from confed.metrics.resampling import bootstrap_of
from confed.metrics.statistics import (
    detectable,
    holm,
    mean,
    paired_t,
    smallest_p,
    wilcoxon,
)

A = [71.2, 70.1, 73.5, 69.8, 72.4, 74.0]
B = [70.0, 70.3, 71.9, 69.1, 71.0, 71.8]


def test_mean_and_deviation_equal_a_computation_by_hand():
    summary = mean([1.0, 2.0, 6.0])
    assert (summary.mean, summary.sd, summary.n) == pytest.approx((3.0, math.sqrt(7), 3))
    assert math.isnan(mean([4.0]).sd)


def test_paired_t_equals_scipy():
    test, theirs = paired_t(A, B), stats.ttest_rel(A, B)
    interval = theirs.confidence_interval(0.95)
    assert (test.statistic, test.p) == pytest.approx((theirs.statistic, theirs.pvalue))
    assert (test.low, test.high) == pytest.approx((interval.low, interval.high))


def test_paired_t_of_equal_differences_has_no_p_value():
    same, shifted = paired_t(A, A), paired_t([2, 2, 2], [3, 3, 3])
    assert (same.p, same.statistic, same.low, same.high) == (None, None, 0, 0)
    assert (shifted.p, shifted.statistic, shifted.low) == (None, None, -1)
    # One side alone without spread, such as a row without anything random, leaves the test as it is.
    test = paired_t([2, 2, 2], [3, 3.5, 4])
    assert test.p == pytest.approx(stats.ttest_rel([2, 2, 2], [3, 3.5, 4]).pvalue)


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


def test_bootstrap_of_resampled_differences_by_hand():
    # Two examples with differences 0 and 1: means 0, .5 and 1 with shares 1/4, 1/2, 1/4.
    test = bootstrap_of(0.5, np.array([0, 0.5, 0.5, 1] * 5000), 2, confidence=0.4)
    assert (test.low, test.high) == (0.5, 0.5)
    assert test.p == pytest.approx(0.5, abs=0.02)
    assert bootstrap_of(1.0, np.ones(99), 2).p == pytest.approx(2 / 100)


def test_holm_equals_a_computation_by_hand():
    # Sorted: .01·4 = .04, .02·3 = .06, .03·2 = .06, .5·1 = .5.
    result = holm({"moon": 0.03, "prox": 0.01, "feddc": 0.5, "kd": 0.02})
    assert result.adjusted == pytest.approx({"moon": 0.06, "prox": 0.04, "feddc": 0.5, "kd": 0.06})
    assert list(result.adjusted) == ["moon", "prox", "feddc", "kd"]
    assert result.rejected == ("prox",)
    # Of six tests that could have been made: .01·6, .02·5, .03·4, .5·3.
    more = holm({"moon": 0.03, "prox": 0.01, "feddc": 0.5, "kd": 0.02}, tests=6)
    assert more.adjusted == pytest.approx({"moon": 0.12, "prox": 0.06, "feddc": 1.0, "kd": 0.1})


@pytest.mark.parametrize(("n", "deviations"), [(3, 3.26), (5, 1.68)])
def test_what_seeds_can_show_is_found_in_four_of_five_cases(n: int, deviations: float) -> None:
    effect = detectable(0.01, n)
    assert effect == pytest.approx(0.01 * deviations, rel=2e-3)
    rng = np.random.default_rng(0)
    drawn = rng.normal(effect, 0.01, (20_000, n))
    assert (stats.ttest_1samp(drawn, 0, axis=1).pvalue <= 0.05).mean() == pytest.approx(0.8, abs=0.01)


def test_fairness_equals_a_computation_by_hand():
    clients = across_clients({"home": 0.5, "sports": 0.9, "nature": 0.7})
    assert (clients.worst, clients.worst_client, clients.bottom) == (0.5, "home", 0.5)
    assert (clients.mean, clients.spread, clients.sd) == pytest.approx((0.7, 0.4, 0.2))
    many = across_clients({str(i): float(i) for i in range(20)})
    assert many.bottom == 0.5


def test_hurt_clients_equal_a_count_by_hand():
    method, local = {"a": 0.5, "b": 0.6, "c": 0.9, "d": 0.1}, {"a": 0.75, "b": 0.6, "c": 0.8, "d": 0.2}
    result = hurt(method, local)
    assert (result.share, result.clients, result.worst) == (0.5, ("a", "d"), 0.25)
    assert hurt(method, local, margin=0.2).clients == ("a",)
    assert hurt(local, local).worst == 0


def test_paired_t_of_students_sleep_data():
    # Student (1908): hours of sleep gained by ten patients with two drugs; as in R's documentation of t.test.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    test = paired_t(first, second)
    assert test.statistic == pytest.approx(-4.0621, abs=5e-5)
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert (test.low, test.high) == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)
    assert test.difference == pytest.approx(-1.58)


# Data "clinical" of the R package ETC with what R's equivalence::tost gives, margin 0.6, level 0.05.
TREATED = [2.84, 2.51, 2.41, 2.95, 3.14, 3.79, 4.14, 3.85, 3.02, 3.45, 5.37, 3.81, 4.19, 3.16, 3.84]
CONTROL = [2.60, 2.82, 2.18, 3.46, 4.01, 3.04, 3.47, 4.06, 2.91, 3.59, 4.51, 3.16, 3.86, 3.31, 3.02]
TREATED_2 = [4.00, 3.26, 4.14, 3.42, 3.25, 4.34, 4.97, 4.31, 3.11, 3.41, 5.02, 4.21, 4.59, 5.30, 4.32]
CONTROL_2 = [3.76, 3.66, 3.65, 3.60, 3.48, 2.87, 3.24, 3.92, 3.99, 4.21, 4.21, 3.31, 3.61, 2.97, 2.73]


def test_tost_equals_published_values():
    test = tost(TREATED, CONTROL, margin=0.6)
    assert test.difference == pytest.approx(0.1646666666666667)
    assert (test.low, test.high) == pytest.approx((-0.0744336620516462, 0.4037669953849797))
    assert test.p == pytest.approx(0.003166881489265175)
    other = tost(TREATED_2, CONTROL_2, margin=0.6)
    assert (other.low, other.high) == pytest.approx((0.1261653305099018, 0.999168002823431))
    assert other.p == other.no_better_p == pytest.approx(0.4412034046017588)
    assert other.no_worse_p < 0.001


def test_tost_is_two_one_sided_tests_and_an_interval():
    d = np.subtract(A, B)
    for margin in (0.5, 1.2, 2.5):
        test = tost(A, B, margin)
        assert test.no_worse_p == pytest.approx(stats.ttest_1samp(d, -margin, alternative="greater").pvalue)
        assert test.no_better_p == pytest.approx(stats.ttest_1samp(d, margin, alternative="less").pvalue)
        assert (test.p < 0.05) == (-margin < test.low and test.high < margin)
        assert test.no_worse_p == pytest.approx(tost(B, A, margin).no_better_p)


def test_differences_that_are_equal_on_paper_have_no_spread():
    # 0.53 - 0.51 and its like are 0.02 only up to 1e-17: without rounding t is 7e14, and p is tiny.
    b = [0.51, 0.62, 0.73, 0.44, 0.55]
    a = [round(x + 0.02, 2) for x in b]
    assert len({x - y for x, y in zip(a, b, strict=True)}) > 1
    test = paired_t(a, b)
    assert (test.difference, test.sd, test.low, test.high) == (0.02, 0, 0.02, 0.02)
    assert (test.statistic, test.p) == (None, None)
    assert tost(b, a, margin=0.021).p is None


def test_tost_of_equal_differences_has_no_p_value():
    for test in (tost([3, 3], [2, 2], margin=1.5), tost([1, 1], [2, 2], margin=1.0), tost(A, A, margin=1.0)):
        assert (test.no_worse_p, test.no_better_p, test.p) == (None, None, None)
    assert tost([3, 3], [2, 2], margin=1.5).low == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean([]), "values must be a list of at least 1 numbers"),
        (lambda: mean([1.0, math.nan]), "values must be finite, got nan"),
        (lambda: paired_t([1], [1]), "a must be a list of at least 2 numbers"),
        (lambda: paired_t([1, 2], [1, 2, 3]), "a and b must be paired, got 2 and 3 values"),
        (lambda: paired_t([1, 2], [1, 2], confidence=95), r"confidence must lie in \(0, 1\), got 95"),
        (lambda: bootstrap_of(1.0, np.zeros(0), 1), "resampled must hold at least 1 difference, got none"),
        (lambda: tost([1, 2], [1, 2], margin=0), "margin must be a positive number, got 0"),
        (lambda: tost([1, 2], [1, 2], margin=1, alpha=0.5), r"alpha must lie in \(0, 0.5\), got 0.5"),
        (lambda: holm({"x": 1.5}), r"p\['x'\] must lie in \[0, 1\], got 1.5"),
        (lambda: hurt({"a": 1}, {"b": 1}), r"the same clients, got \['a'\] and \['b'\]"),
        (lambda: hurt({"a": 1, "b": math.nan}, {"a": 1, "b": 1}), r"values\['b'\] must be finite, got nan"),
        (lambda: hurt({"a": 1}, {"a": math.inf}), r"reference\['a'\] must be finite, got inf"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
