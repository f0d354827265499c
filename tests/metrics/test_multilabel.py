"""Multi-label metrics: by hand, against scikit-learn's values, and against slow loops over the definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confed.metrics import multilabel
from confed.metrics.multilabel import (
    LabelCounts,
    bin_counts,
    binned_average_precision,
    class_average_precision,
    flair_metrics,
    label_counts,
    mean_over_classes,
    multilabel_metrics,
    overall_average_precision,
)
from refusals import refuses

# Nine examples of five classes, with ties and probabilities of exactly one half; class 3 has no positives.
NUMBER = np.arange(45).reshape(9, 5)
SCORES = (NUMBER * 37 + 11) % 20 / 20
TRUTH = ((NUMBER * NUMBER + 3 * NUMBER) % 7 < 2) & (np.arange(5) != 3)
MASK = (NUMBER * 5 + 1) % 4 != 0


def slow_ap(scores, truth):
    """The definition: over distinct thresholds from the largest down, the gain in recall times the precision."""
    total, before, positives = 0.0, 0.0, int(truth.sum())
    if not positives:
        return float("nan")
    for threshold in sorted(set(scores.tolist()), reverse=True):
        predicted = hits = 0
        for score, real in zip(scores.tolist(), truth.tolist(), strict=True):
            predicted += score >= threshold
            hits += score >= threshold and bool(real)
        total += (hits / positives - before) * hits / predicted
        before = hits / positives
    return total


def slow_binned_ap(scores, truth, thresholds):
    """Precision and recall at each threshold in turn, an entry being predicted above it."""
    at = [-1e-7, *(i / (thresholds - 1) for i in range(1, thresholds - 1)), 1 + 1e-7]
    precision, recall = [], []
    for threshold in at:
        hits = sum(bool(t) for s, t in zip(scores, truth, strict=True) if s > threshold)
        predicted = sum(s > threshold for s in scores)
        precision.append(hits / predicted if predicted else 0.0)
        recall.append(hits / truth.sum() if truth.sum() else 0.0)
    return sum((recall[i] - recall[i + 1]) * precision[i] for i in range(thresholds - 1))


@st.composite
def problems(draw):
    """Scores with many ties, positives that may be missing, and a mask that may hide a whole class."""
    n, c = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.integers(0, draw(st.sampled_from([2, 5, 1000])), (n, c)) / 1000
    return scores, rng.random((n, c)) < draw(st.floats(0, 1)), rng.random((n, c)) < draw(st.floats(0, 1))


def test_values_of_scikit_learn():
    # scikit-learn 1.9.1: average_precision_score, precision_score and recall_score with zero_division=0.
    found = multilabel_metrics(SCORES, TRUTH)
    assert list(found) == ["C-AP", "C-P", "C-R", "C-F1", "O-AP", "O-P", "O-R", "O-F1"]
    golden = [0.3398412698412698, 0.31, 0.5, 0.382716049382716]
    golden += [0.3405342687902633, 0.3181818181818182, 0.6363636363636364, 0.4242424242424242]
    assert list(found.values()) == pytest.approx(golden, abs=1e-15)
    per_class = [0.44285714285714284, 0.39285714285714285, 0.47619047619047616, np.nan, 0.3873015873015873]
    assert class_average_precision(SCORES, TRUTH) == pytest.approx(per_class, abs=1e-15, nan_ok=True)
    two = multilabel_metrics(SCORES, TRUTH, top=2)
    assert [two[key] for key in ("C-P", "O-P", "C-R", "O-R")] == pytest.approx(
        [0.31, 0.3333333333333333, 0.4333333333333333, 0.5454545454545454]
    )
    assert (two["C-AP"], two["O-AP"]) == (found["C-AP"], found["O-AP"])


def test_a_mask_leaves_out_entries_as_scikit_learn_does():
    per_class = [0.45, 0.2, 0.45, np.nan, 0.3666666666666667]
    assert class_average_precision(SCORES, TRUTH, MASK) == pytest.approx(per_class, abs=1e-15, nan_ok=True)
    assert overall_average_precision(SCORES, TRUTH, MASK) == pytest.approx(0.29072911215768354, abs=1e-15)
    found = multilabel_metrics(SCORES, TRUTH, MASK, undefined="omit")
    assert found["C-AP"] == pytest.approx(np.nanmean(per_class))
    kept, predicted = TRUTH & MASK, (SCORES >= 0.5) & MASK
    assert found["O-P"] == pytest.approx((kept & predicted).sum() / predicted.sum())
    assert found["O-R"] == pytest.approx((kept & predicted).sum() / kept.sum())


def test_f1_is_that_of_the_means_and_not_the_mean_of_f1():
    # Class 0: P 1, R 1/2; class 1: P 1/2, R 1.
    counts = LabelCounts(np.array([1, 1]), np.array([1, 2]), np.array([2, 1]))
    values = counts.summary()
    assert (values["C-P"], values["C-R"], values["C-F1"]) == (0.75, 0.75, 0.75)
    assert counts.f1 == pytest.approx([2 / 3, 2 / 3])
    assert values["O-F1"] == pytest.approx(2 / 3)


def test_classes_without_positives_count_as_zero_or_not_at_all():
    # Class 0 is perfect, class 1 has no positives and one prediction, class 2 has a positive and no prediction.
    probabilities, truth = np.array([[0.9, 0.9, 0.1], [0.1, 0.1, 0.2]]), np.array([[1, 0, 0], [0, 0, 1]])
    zero = multilabel_metrics(probabilities, truth)
    assert [zero[f"C-{k}"] for k in ("AP", "P", "R")] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    omit = multilabel_metrics(probabilities, truth, undefined="omit")
    assert [omit[f"C-{k}"] for k in ("AP", "P", "R")] == pytest.approx([1.0, 0.5, 0.5])
    assert {k: v for k, v in zero.items() if k[0] == "O"} == {k: v for k, v in omit.items() if k[0] == "O"}
    nothing = np.zeros((2, 3), bool)
    for undefined in ("zero", "omit"):
        assert set(multilabel_metrics(probabilities, nothing, undefined=undefined).values()) == {0.0}
        assert set(multilabel_metrics(probabilities, truth, nothing, undefined=undefined).values()) == {0.0}


def test_the_largest_probabilities_and_ties():
    probabilities = np.array([[0.9, 0.8, 0.8, 0.7], [0.6, 0.4, 0.3, 0.2]])
    counts = label_counts(probabilities, np.ones((2, 4)), top=2)
    assert counts.predicted.tolist() == [2, 1, 1, 0]
    # Among the entries that count: without the first class the two 0.8 are the largest.
    mask = np.array([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert label_counts(probabilities, np.ones((2, 4)), mask, top=1).predicted.tolist() == [1, 1, 1, 0]
    assert label_counts(probabilities, np.ones((2, 4)), top=4).predicted.tolist() == [2, 1, 1, 1]


def test_one_half_is_predicted_except_by_flairs_benchmark():
    half, truth = np.full((1, 1), 0.5), np.ones((1, 1))
    assert label_counts(half, truth).predicted.tolist() == [1]
    assert label_counts(half, truth, strict=True).predicted.tolist() == [0]
    assert flair_metrics(half, truth)["O-R"] == 0.0


@settings(max_examples=60, deadline=None)
@given(problems())
def test_average_precision_is_its_definition(problem):
    scores, truth, mask = problem
    for kept in (None, mask):
        inside = np.ones_like(mask) if kept is None else mask
        columns = range(scores.shape[1])
        slow = [slow_ap(scores[:, c][inside[:, c]], truth[:, c][inside[:, c]]) for c in columns]
        assert class_average_precision(scores, truth, kept) == pytest.approx(slow, abs=1e-12, nan_ok=True)
        overall = slow_ap(scores[inside], truth[inside])
        assert overall_average_precision(scores, truth, kept) == pytest.approx(np.nan_to_num(overall), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(2, 9))
def test_binned_average_precision_is_its_definition(problem, thresholds):
    scores, truth, mask = problem
    bins = bin_counts(scores, truth, mask, thresholds=thresholds)
    slow = [slow_binned_ap(s[m], t[m], thresholds) for s, t, m in zip(scores.T, truth.T, mask.T, strict=True)]
    assert binned_average_precision(bins) == pytest.approx(slow, abs=1e-12)
    overall = binned_average_precision(bins.sum(1, keepdims=True))
    assert overall == pytest.approx([slow_binned_ap(scores[mask], truth[mask], thresholds)], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 12))
def test_counts_add_up(problem, cut):
    scores, truth, mask = problem
    parts = [(scores[:cut], truth[:cut], mask[:cut]), (scores[cut:], truth[cut:], mask[cut:])]
    whole, (first, second) = label_counts(scores, truth, mask), [label_counts(*part) for part in parts]
    assert (first + second).summary("omit") == whole.summary("omit")
    assert np.array_equal(sum(bin_counts(*part) for part in parts), bin_counts(scores, truth, mask))


def test_the_size_of_the_blocks_changes_nothing(monkeypatch):
    rng = np.random.default_rng(5)
    scores, truth = rng.random((40, 6)).round(2), rng.random((40, 6)) < 0.3
    mask = rng.random((40, 6)) < 0.8
    expected = [multilabel_metrics(scores, truth, mask, top=3), flair_metrics(scores, truth, mask)]
    monkeypatch.setattr(multilabel, "BLOCK", 7)
    found = [multilabel_metrics(scores, truth, mask, top=3), flair_metrics(scores, truth, mask)]
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-15)


def test_tensors_of_any_precision_are_read():
    scores, truth = torch.tensor(SCORES), torch.tensor(TRUTH)
    assert multilabel_metrics(scores, truth.int(), torch.tensor(MASK)) == multilabel_metrics(SCORES, TRUTH, MASK)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        low = scores.to(kind)
        assert multilabel_metrics(low, truth.float()) == multilabel_metrics(low.double().numpy(), TRUTH)


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multilabel_metrics(np.where(NUMBER == 7, np.nan, SCORES), TRUTH), "NaN"),
        (lambda: overall_average_precision(np.where(NUMBER == 7, np.nan, SCORES), TRUTH), "NaN"),
        (lambda: multilabel_metrics(SCORES, TRUTH[:-1]), "truth must have the shape"),
        (lambda: label_counts(SCORES, TRUTH, MASK[:, :2]), "mask must have the shape"),
        (lambda: label_counts(SCORES[0], TRUTH[0]), r"\(N, C\)"),
        (lambda: label_counts(SCORES, TRUTH, top=0), "top must be at least 1, got 0"),
        (lambda: mean_over_classes(np.ones(2), np.ones(2), "skip"), "undefined must be one of zero, omit, got 'skip'"),
        (lambda: bin_counts(np.full((1, 1), 1.5), np.ones((1, 1))), r"lie in \[0, 1\], got 1.5"),
        (lambda: bin_counts(SCORES, TRUTH, thresholds=1), "at least 2, got 1"),
        (lambda: binned_average_precision(np.zeros((3, 2))), r"\(2, C, T - 1\)"),
    ],
)
def test_faulty_input_is_named(call, message):
    refuses(message, call)
