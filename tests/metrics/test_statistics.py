"""Statistics of comparisons against SciPy and computations by hand: over seeds, strata, swaps and resampled labels."""

import itertools
import math
from itertools import product
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from confed.metrics.fairness import across_clients, hurt
from confed.metrics.label_resampling import draws, resampled_class_precision, resampled_overall_f1
from confed.metrics.multilabel import class_average_precision, label_counts
from confed.metrics.statistics import (
    bootstrap_of,
    detectable,
    holm,
    mean,
    paired_t,
    smallest_p,
    swap_test,
    tost,
    wilcoxon,
)
from confed.metrics.stratified import LEAST_EXAMPLES, Strata, flip_interval, macro_mean, sign_flip
from refusals import refuses
from repository import script_module

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
def test_errors_of_statistics(call, message):
    refuses(message, call)


def answers(rng: np.random.Generator, shape: tuple[int, ...], chance: float = 0.6) -> np.ndarray:
    return (rng.random(shape) < chance).astype(float)


def test_interval_holds_the_mean_over_places() -> None:
    # A large place where the method is a little better, a small one where it is much worse.
    large, small = np.zeros((1, 1000)), np.zeros((1, 100))
    large[0, :60], large[0, 60:90] = 1, -1
    small[0, :24], small[0, 24:30] = -1, 1
    found = flip_interval([large, small])
    assert found is not None
    assert found.difference == pytest.approx((0.03 - 0.18) / 2)
    assert found.low < found.difference < found.high < 0
    pooled = (30 - 18) / 1100
    assert pooled > 0 > found.high
    # Its standard error is that of an average of two independent means.
    error = np.sqrt(large.var() / 1000 + small.var() / 100) / 2
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(error, rel=0.05)
    assert sign_flip([large, small]).difference == found.difference


def accepted(strata: Strata, points: float) -> bool:
    """Whether the sign-flip test at 5 % does not reject a difference, from all sign patterns."""
    parts = np.concatenate([(d.mean(0) - points) / (d.shape[1] * len(strata)) for d in strata])
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(parts))))
    return bool((np.abs(signs @ parts) >= abs(parts.sum()) - 1e-12).mean() > 0.05)


def test_the_interval_holds_what_the_test_does_not_reject() -> None:
    rng = np.random.default_rng(8)
    strata = [rng.normal(0.4, 1, (2, n)) for n in (4, 4, 5)]
    found = flip_interval(strata, resamples=100_000)
    assert found is not None
    assert found.n == 13
    assert found.difference == pytest.approx(macro_mean(strata))
    width = found.high - found.low
    for end, inwards in ((found.low, 1), (found.high, -1)):
        assert accepted(strata, end + 0.03 * inwards * width)
        assert not accepted(strata, end - 0.03 * inwards * width)


def test_an_interval_that_no_signs_support_is_not_given() -> None:
    five = np.array([[1.0, 0.0, 1.0, 1.0, -1.0]])
    assert flip_interval([five]) is None  # 2 of 32 patterns are more than 5 %
    assert flip_interval([np.zeros((1, 50))]) is None
    assert flip_interval([np.array([[1.0, 0.0, 1.0]]), np.ones((1, 50))]) is None  # three examples of a place
    six = flip_interval([np.array([[1.0, 0.0, 1.0, 1.0, -1.0, 0.5]])])
    assert six is not None
    assert six.low < six.difference < six.high
    assert six.mirrored.mirrored == six
    assert (six.mirrored.low, six.mirrored.high) == (-six.high, -six.low)


def test_one_place_and_one_seed_is_mcnemar() -> None:
    rng = np.random.default_rng(1)
    a, b = answers(rng, (1, 300), 0.7), answers(rng, (1, 300))
    found, won, lost = sign_flip([a - b]), int((a > b).sum()), int((a < b).sum())
    assert found.exact
    assert (found.won, found.lost, found.n) == (won, lost, 300)
    assert found.p == pytest.approx(stats.binomtest(won, won + lost).pvalue)
    assert found.smallest_p == pytest.approx(smallest_p(won + lost))


def test_sign_flips_agree_with_scipy_on_unequal_places() -> None:
    rng = np.random.default_rng(2)
    strata = [rng.normal(0.3, 1, (2, 5)), rng.normal(0.3, 1, (2, 3)), rng.normal(0.3, 1, (2, 4))]
    parts = np.concatenate([d.mean(0) / (d.shape[1] * 3) for d in strata])
    expected = stats.permutation_test((parts,), np.sum, permutation_type="samples", n_resamples=2**12)
    found = sign_flip(strata)
    assert found.exact
    assert found.p == pytest.approx(expected.pvalue)
    assert found.difference == pytest.approx(macro_mean(strata))


def test_random_signs_agree_with_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    strata = [answers(rng, (1, 80), 0.66) - answers(rng, (1, 80)), answers(rng, (1, 30)) - answers(rng, (1, 30))]
    exact = sign_flip(strata)
    monkeypatch.setattr("confed.metrics.stratified._EXACT_UP_TO", 0)
    drawn, again = sign_flip(strata), sign_flip(strata)
    assert exact.exact
    assert not drawn.exact
    assert drawn.p == again.p == pytest.approx(exact.p, abs=0.02)
    assert drawn.p >= drawn.smallest_p == 1 / 10_001


def test_seeds_with_other_examples_are_averaged() -> None:
    rng = np.random.default_rng(7)
    whole = answers(rng, (2, 300)) - answers(rng, (2, 300))
    partly = whole.copy()
    partly[0, 200:], partly[1, :100] = np.nan, np.nan  # 100 examples are common to both seeds
    expected = (whole[0, :200].mean() + whole[1, 100:].mean()) / 2
    examples = flip_interval([partly])
    assert examples is not None
    assert examples.difference == macro_mean([partly]) == pytest.approx(expected)
    assert examples.low < expected < examples.high
    # Its spread is that of each example's part, and a little more than with all examples.
    part = np.nansum(partly / 200, axis=0) / 2
    assert (examples.high - examples.low) / (2 * 1.96) == pytest.approx(np.sqrt(300 * part.var()), rel=0.06)
    signs = sign_flip([partly])
    assert signs.n == 300
    assert signs.difference == pytest.approx(expected)
    disjoint = np.full((2, 400), np.nan)
    disjoint[0, :200], disjoint[1, 200:] = whole[0, :200], whole[1, 100:]
    assert macro_mean([disjoint]) == pytest.approx(expected)


def test_thousands_of_places_draw_less() -> None:
    rng = np.random.default_rng(6)
    strata = [answers(rng, (1, 4)) - answers(rng, (1, 4)) for _ in range(800)]
    found = flip_interval(strata)
    assert found is not None
    assert found.low < found.difference < found.high
    assert sign_flip([rng.normal(size=(1, 4)) for _ in range(800)]).smallest_p == pytest.approx(1 / 1001)


@pytest.mark.parametrize(
    ("strata", "complaint"),
    [
        ([], "each place needs differences"),
        ([np.zeros((1, 0))], "each place needs differences"),
        ([np.zeros((1, 3)), np.zeros((2, 3))], r"the same seeds, got \[1, 2\]"),
        ([np.array([[np.inf]])], "must be finite"),
        ([np.array([[np.nan, np.nan], [0, 1]])], "every seed needs one at every place"),
    ],
)
def test_faulty_differences_are_refused(strata: list[np.ndarray], complaint: str) -> None:
    for test in (flip_interval, sign_flip):
        refuses(complaint, test, strata)


def test_no_difference_at_all() -> None:
    found = sign_flip([np.zeros((2, 10)), np.zeros((2, 3))])
    assert (found.p, found.won, found.lost, found.difference) == (1.0, 0, 0, 0.0)


def spread(kept: np.ndarray) -> float:
    return float(kept.max() - kept.min())


def test_p_value_is_that_of_all_exchanges() -> None:
    rng = np.random.default_rng(1)
    a, b, names = rng.normal(size=8), rng.normal(size=8) * 0.3, np.arange(8)
    observed = spread(a) - spread(b)
    every = []
    for signs in product((False, True), repeat=8):
        mask = np.array(signs)
        every.append(spread(np.where(mask, b, a)) - spread(np.where(mask, a, b)))
    exact = np.mean(np.abs(every) >= abs(observed) - 1e-12)
    found = swap_test([[(a, b, names)]], spread, draws=20_000)
    assert found.difference == pytest.approx(observed)
    assert found.p == pytest.approx(exact, abs=0.015)
    assert swap_test([[(b, a, names)]], spread, draws=20_000) == found.mirrored


def test_it_holds_its_level_in_small_places() -> None:
    rng = np.random.default_rng(2)
    rejected = 0
    for repeat in range(300):
        places = []
        for size in (3, 3, 40):
            both = rng.normal(size=(2, size)) + rng.normal(size=size)
            places.append([(both[0], both[1], np.arange(size))])
        rejected += swap_test(places, spread, seed=repeat, draws=99).p <= 0.05
    assert rejected / 300 < 0.09  # 5 % and three standard errors
    wide, narrow = 3 * rng.normal(size=60), rng.normal(size=60)
    assert swap_test([[(wide, narrow, np.arange(60))]], spread).p < 0.01


def test_an_example_is_exchanged_in_all_seeds_at_once() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=30), rng.normal(size=30) + 0.8
    order = rng.permutation(30)
    one = swap_test([[(a, b, np.arange(30))]], spread)
    twice = swap_test([[(a, b, np.arange(30)), (a[order], b[order], order)]], spread)
    assert twice == one  # the same examples again are no further evidence


def test_places_without_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="every place must have test examples"):
        swap_test([[(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))]], spread)


@pytest.fixture
def predictions() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    truth = rng.random((40, 6)) < np.array([0.5, 0.3, 0.2, 0.1, 0.05, 0.0])
    # Rounded, so that scores tie.
    scores = np.round(np.clip(0.4 * truth + 0.6 * rng.random((40, 6)), 0, 1), 1)
    return scores.astype(np.float32), truth.astype(np.uint8)


def repeated(array: np.ndarray, times: np.ndarray) -> np.ndarray:
    return np.repeat(array, times.astype(int), axis=0)


def test_draws_are_counts_of_all_examples() -> None:
    blocks = list(draws(7, 1000, seed=1))
    drawn = np.concatenate(blocks, axis=1)
    assert drawn.shape == (7, 1000)
    assert (drawn.sum(0) == 7).all()
    assert np.allclose(drawn.mean(1), 1, atol=0.15)
    assert np.allclose(drawn.var(1), 6 / 7, atol=0.15)
    assert all((a == b).all() for a, b in zip(blocks, draws(7, 1000, seed=1), strict=True))


def test_large_test_sets_are_drawn_in_blocks() -> None:
    blocks = list(draws(1 << 21, 5))
    assert [block.shape[1] for block in blocks] == [2, 2, 1]
    assert all((block.sum(0) == 1 << 21).all() for block in blocks)


@pytest.mark.parametrize("undefined", ["zero", "omit"])
def test_class_precision_is_that_of_repeated_examples(predictions: tuple[np.ndarray, np.ndarray], undefined) -> None:
    scores, truth = predictions
    found = resampled_class_precision(scores, truth, undefined, resamples=50, seed=2)
    (drawn,) = draws(40, 50, seed=2)
    for value, times in zip(found, drawn.T, strict=True):
        s, y = repeated(scores, times), repeated(truth, times)
        each = np.nan_to_num(class_average_precision(s, y))
        assert value == pytest.approx(each.sum() / (6 if undefined == "zero" else 5), abs=1e-6)


def test_overall_f1_is_that_of_repeated_examples(predictions: tuple[np.ndarray, np.ndarray]) -> None:
    scores, truth = predictions
    found = resampled_overall_f1(scores, truth, 0.5, resamples=50, seed=2)
    (drawn,) = draws(40, 50, seed=2)
    for value, times in zip(found, drawn.T, strict=True):
        s, y = repeated(scores, times), repeated(truth, times)
        assert value == pytest.approx(label_counts(s, y).summary()["O-F1"])


def test_nothing_positive_is_zero() -> None:
    scores, truth = np.full((3, 2), 0.2, np.float32), np.zeros((3, 2), np.uint8)
    assert resampled_class_precision(scores, truth, "omit", resamples=4).tolist() == [0.0] * 4
    assert resampled_overall_f1(scores, truth, 0.5, resamples=4).tolist() == [0.0] * 4


ONES = np.ones((2, 2), np.float32)


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resampled_class_precision(ONES, np.ones((2, 3))), r"one shape \(N, C\), got \(2, 2\) and \(2, 3\)"),
        (lambda: resampled_overall_f1(ONES * np.nan, ONES, 0.5), "got NaN"),
        (lambda: list(draws(0)), "at least one example"),
    ],
)
def test_errors_name_what_is_wrong(call, message) -> None:
    refuses(message, call)


@pytest.fixture(scope="module")
def levels() -> ModuleType:
    return script_module("benchmarks/level_of_tests.py")


def test_unequal_places_keep_the_level_of_sign_flips_only(levels: ModuleType) -> None:
    found = levels.over_examples((4, 4, 300, 300), 1, 0.0, 0.0, 400, bootstrap=True)
    assert found["flips"].percent < 9.2  # 5 % and more than three standard errors
    assert found["flips cover"].percent > 90.8
    assert found["bootstrap"].percent > 9.2
    assert found["bootstrap covers"].percent < 90.8


def test_an_interval_of_unequal_places_covers_an_effect(levels: ModuleType) -> None:
    found = levels.over_examples((4, 10, 30, 80, 200), 3, 1 / 3, 0.3, 250)
    assert found["flips cover"].percent > 90.8
    assert found["flips"].percent > 15  # and the test finds it more often than chance


def test_seeds_keep_the_level_of_the_t_test_only(levels: ModuleType) -> None:
    found = levels.over_seeds((4, 10, 30, 80, 200), 5, 300)
    assert 1 < found["paired t"].percent < 9
    assert found["t covers"].percent > 91
    assert found["Wilcoxon"].percent > 10


@pytest.mark.slow
def test_levels_of_all_patterns(levels: ModuleType) -> None:
    """Within 3 to 7 % and at least 93 % up to three standard errors of 400 repeats; too few examples: below 7 %."""
    repeats = 400
    error = 300 * np.sqrt(0.05 * 0.95 / repeats)
    for sizes, (seeds, missing) in product(levels.PATTERNS.values(), levels.SEEDS.values()):
        for effect in (0.0, 0.3):
            found = levels.over_examples(sizes, seeds, missing, effect, repeats)
            if not effect:
                assert found["flips"].percent < 7 + error
                assert found["flips"].percent > (3 - error if seeds > 1 else 1)
            if min(sizes) < LEAST_EXAMPLES:
                assert found["no interval"].percent == 100
            else:
                assert found["flips cover"].percent > 93 - error
        if seeds > 1 and not missing:
            over_seeds = levels.over_seeds(sizes, seeds, repeats)
            assert 3 - error < over_seeds["paired t"].percent < 7 + error
            assert over_seeds["t covers"].percent > 93 - error
    for examples, classes in ((60, 5), (300, 10)):
        of_labels = levels.of_labels(examples, classes, 300)
        assert max(of_labels[name].percent for name in ("C-AP", "O-F1")) < 9
        assert min(of_labels[f"{name} covers"].percent for name in ("C-AP", "O-F1")) > 91
