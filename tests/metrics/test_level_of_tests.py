"""Tests that reports use find a difference in 5 % of cases where there is none, and their intervals cover 95 %."""

from itertools import product
from types import ModuleType

import numpy as np
import pytest

from confed.metrics.stratified import LEAST_EXAMPLES
from repository import script_module


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
