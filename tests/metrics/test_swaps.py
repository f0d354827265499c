"""The randomisation test: exact on small samples, and no more rejections than its level where nothing differs."""

from itertools import product

import numpy as np
import pytest

from confed.metrics.swaps import swap_test


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
