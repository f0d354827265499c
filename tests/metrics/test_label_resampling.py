"""Bootstrap of C-AP and O-F1 over test examples, against examples repeated by hand."""

import numpy as np
import pytest

from confed.metrics.label_resampling import draws, resampled_class_precision, resampled_overall_f1
from confed.metrics.multilabel import class_average_precision, label_counts


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
    with pytest.raises(ValueError, match=message):
        call()
