"""Label states against the documented construction in Python's integers, their distribution, and CA-MLE's rule."""

import math

import pytest
import torch

from confed.losses.label_states import UNKNOWN, label_states, uncertain


def slow_states(labels, index, key, at_most):
    """The documented construction with Python's integers, one example and label at a time."""
    whole = (1 << 64) - 1

    def mixed(counter):
        x = counter * 0x9E3779B97F4A7C15 & whole
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & whole
        x = (x ^ x >> 27) * 0x94D049BB133111EB & whole
        return x ^ x >> 31

    rows = []
    for row, number in zip(labels.int().tolist(), index.tolist(), strict=True):
        example = mixed(mixed(number + 1) + key & whole)
        count = (mixed(example) >> 33) * (int(at_most * len(row)) + 1) >> 31
        draws = [mixed(example + c + 1 & whole) for c in range(len(row))]
        # As signed numbers, which is how they are ordered.
        order = sorted(range(len(row)), key=lambda c: draws[c] - (draws[c] >> 63 << 64))
        rows.append([label if c in order[:count] else -1 for c, label in enumerate(row)])
    return rows


def test_label_states_are_the_documented_function():
    rng = torch.Generator().manual_seed(0)
    labels = (torch.rand(40, 11, generator=rng) < 0.4).float()
    index = torch.randint(0, 2**40, (40,), generator=rng)
    for key, at_most in ((0, 0.75), (2**63 - 1, 1.0), (12345, 0.5)):
        states = label_states(labels, index, key, at_most)
        assert states.dtype == torch.int8
        assert states.tolist() == slow_states(labels, index, key, at_most)


def test_numbers_of_known_labels_are_uniform_and_so_is_which():
    c, n = 10, 24_000
    labels = torch.zeros(n, c)
    known = label_states(labels, torch.arange(n), 99) != UNKNOWN
    counts = torch.bincount(known.sum(1), minlength=c + 1).double()
    # 0 to floor(7.5), eight numbers; six standard deviations of a binomial count.
    spread = 6 * math.sqrt(n / 8 * 7 / 8)
    assert counts[8:].sum() == 0
    assert (counts[:8] - n / 8).abs().max() < spread
    per_label = known.double().sum(0)
    assert (per_label - n * 0.35).abs().max() < 6 * math.sqrt(n * 0.35 * 0.65)
    # Given two known labels every pair is equally likely: 45 pairs.
    two = known[known.sum(1) == 2].double()
    pairs = (two.T @ two).triu(1)[tuple(torch.triu_indices(c, c, 1))]
    assert (pairs - len(two) / 45).abs().max() < 6 * math.sqrt(len(two) / 45)


def test_the_share_of_known_labels_has_a_floor():
    labels, index = torch.ones(200, 1), torch.arange(200)
    assert (label_states(labels, index, 1, at_most=0.75) == UNKNOWN).all()
    assert (label_states(torch.ones(200, 5), index, 1, at_most=0.0) == UNKNOWN).all()
    known = (label_states(torch.ones(200, 4), index, 1, at_most=1.0) != UNKNOWN).sum(1)
    assert set(known.tolist()) == {0, 1, 2, 3, 4}


def test_uncertain_is_the_closed_interval():
    p = torch.tensor([0.4799, 0.48, 0.5, 0.52, 0.5201], dtype=torch.float64)
    assert uncertain(p).tolist() == [False, True, True, True, False]
    assert uncertain(p, tau=0.5, eps=0.0).tolist() == [False, False, True, False, False]
    # The nearest number to 0.48 in single precision is below it.
    assert uncertain(p.float()).tolist() == [False, False, True, True, False]


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda labels: label_states(labels, torch.arange(3), 0), "shapes"),
        (lambda labels: label_states(labels, torch.arange(2), 0, at_most=1.5), r"must lie in \[0, 1\], got 1.5"),
        (lambda labels: label_states(labels, torch.arange(2), -1), r"key must lie in \[0, 2\^63\), got -1"),
        (lambda labels: uncertain(labels, tau=2.0), "tau"),
        (lambda labels: uncertain(labels, eps=-0.1), r"eps must not be negative, got -0\.1"),
    ],
)
def test_faulty_states_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3))
