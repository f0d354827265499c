"""Sign-flip test and its interval: of a mean over places, whatever their sizes."""

import itertools

import numpy as np
import pytest
from scipy import stats

from confed.metrics.statistics import smallest_p
from confed.metrics.stratified import Strata, flip_interval, macro_mean, sign_flip


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
        with pytest.raises(ValueError, match=complaint):
            test(strata)


def test_no_difference_at_all() -> None:
    found = sign_flip([np.zeros((2, 10)), np.zeros((2, 3))])
    assert (found.p, found.won, found.lost, found.difference) == (1.0, 0, 0, 0.0)
