"""Other choices of g, and the cheap evaluations of all pairs, against NumPy loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from confed.losses.preference import (
    MATCHUPS,
    forgotten,
    matchup,
    most_forgotten,
    pairwise_preference,
    sampled_preference,
    sorted_error,
    sorted_preference,
)

# g by its textbook formula, written with the standard library.
G = {
    "logistic": lambda x: 1 / (1 + math.exp(-2 * x)),
    "linear": lambda x: (1 + x) / 2,
    "arctan": lambda x: 0.5 + math.atan(math.pi * x / 2) / math.pi,
    "erf": lambda x: 0.5 * (1 + math.erf(math.sqrt(math.pi) * x / 2)),
}
every_g = pytest.mark.parametrize("g", list(G))


def pair(b: int, c: int, seed: int = 0, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    student, teacher = (spread * torch.randn(b, c, generator=rng, dtype=torch.float64) for _ in range(2))
    return student, teacher


def by_hand(student: torch.Tensor, teacher: torch.Tensor, g: str) -> list[float]:
    """Eq. 8.7 as a double loop over ordered pairs."""
    totals = []
    for s, t in zip(student.numpy(), teacher.numpy(), strict=True):
        p_s, p_t = (np.exp(z - z.max()) / np.exp(z - z.max()).sum() for z in (s, t))
        both = itertools.product(range(len(s)), repeat=2)
        totals.append(sum(abs(G[g](p_t[i] - p_t[j]) - G[g](p_s[i] - p_s[j])) for i, j in both))
    return totals


def brute(student: torch.Tensor, teacher: torch.Tensor, g: str) -> torch.Tensor:
    """All pairs as one tensor of B x C x C values, for autograd."""
    p_s, p_t = student.softmax(1), teacher.softmax(1)
    return (matchup(p_t, g) - matchup(p_s, g)).abs().sum(dim=(1, 2))


@every_g
def test_g_is_sigmoid_like_with_the_papers_slope_at_zero(g: str) -> None:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
    value, slope = MATCHUPS[g]
    m = value(x)
    assert m.tolist() == pytest.approx([G[g](v) for v in x.tolist()])
    (by_autograd,) = torch.autograd.grad(m.sum(), x)
    torch.testing.assert_close(slope(x, m), by_autograd)
    torch.testing.assert_close(m + m.flip(0), torch.ones_like(m))
    assert (by_autograd > 0).all()
    assert by_autograd[20] == pytest.approx(0.5)


@every_g
def test_all_pairs_and_selected_pairs_of_every_g(g: str, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = pair(3, 9)
    assert pairwise_preference(student, teacher, g=g).tolist() == pytest.approx(by_hand(student, teacher, g))
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: pairwise_preference(s, teacher, g=g), student)
    chosen = most_forgotten(forgotten(student, teacher), 4)
    small = pairwise_preference(student, teacher, chosen, g=g)
    monkeypatch.setattr("confed.losses.preference._PAIRS_AT_ONCE", 10)  # a large selection is taken in blocks
    large = pairwise_preference(student, teacher, chosen, g=g)
    torch.testing.assert_close(small, large)
    for a, b in zip(torch.autograd.grad(small.sum(), student), torch.autograd.grad(large.sum(), student), strict=True):
        torch.testing.assert_close(a, b)


def test_sorted_linear_pairs_equal_the_double_loop_exactly() -> None:
    for seed, answers in ((0, 2), (1, 7), (2, 40)):
        student, teacher = pair(4, answers, seed)
        found = sorted_preference(student, teacher, g="linear")
        assert found.tolist() == pytest.approx(by_hand(student, teacher, "linear"), rel=1e-12)
        mean = sorted_preference(student, teacher, reduction="mean", g="linear")
        torch.testing.assert_close(mean, found / answers**2)
    # The linear g needs no bounds, so raw logits can be compared too.
    torch.testing.assert_close(
        sorted_preference(student, teacher, "logit", g="linear"),
        pairwise_preference(student, teacher, space="logit", g="linear"),
    )


@every_g
def test_sorted_pairs_and_their_gradient_keep_their_bound(g: str) -> None:
    assert sorted_error(g) < 1e-4
    for seed, spread in itertools.product(range(3), (0.1, 2.0, 6.0)):
        student, teacher = pair(4, 30, seed, spread)
        student.requires_grad_()
        exact, found = brute(student, teacher, g), sorted_preference(student, teacher, g=g)
        assert ((found - exact).abs() <= (sorted_error(g) + 1e-10) * exact).all()
        (wanted,) = torch.autograd.grad(exact.sum(), student)
        (got,) = torch.autograd.grad(found.sum(), student)
        assert (got - wanted).norm() <= 10 * (sorted_error(g) + 1e-10) * wanted.norm()


def test_sorted_pairs_have_equal_differences_cancel() -> None:
    student, _ = pair(3, 12)
    student.requires_grad_()
    for g in G:
        loss = sorted_preference(student, student.detach(), g=g)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert loss.abs().max() < 1e-12
        assert gradient.abs().max() < 1e-12
    # Answers 1 and 2 have one difference (0), as have the answers that neither model knows.
    teacher = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64))
    tied = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2]], dtype=torch.float64)).requires_grad_()
    for g in G:
        (wanted,) = torch.autograd.grad(brute(tied, teacher, g).sum(), tied)
        (got,) = torch.autograd.grad(sorted_preference(tied, teacher, g=g).sum(), tied)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def test_sampled_pairs_are_unbiased_and_so_is_their_gradient() -> None:
    student, teacher = pair(2, 12)
    student.requires_grad_()
    rng = torch.Generator().manual_seed(3)
    draws, gradients = [], []
    for _ in range(800):
        estimate = sampled_preference(student, teacher, 5, rng)
        draws.append(estimate.detach())
        gradients.append(torch.autograd.grad(estimate.sum(), student)[0])
    exact = brute(student, teacher, "logistic")
    (slope,) = torch.autograd.grad(exact.sum(), student)
    # The largest of 26 deviations in standard errors: beyond 4 with probability 0.2 %.
    for found, wanted in ((torch.stack(draws), exact.detach()), (torch.stack(gradients), slope)):
        error = found.std(dim=0) / math.sqrt(len(found))
        assert ((found.mean(dim=0) - wanted).abs() <= 4 * error).all()


def test_sampled_pairs_never_take_an_answer_with_itself() -> None:
    # Of two answers there are two ordered pairs with one value: any number of samples is exact.
    student, teacher = pair(3, 2)
    found = sampled_preference(student, teacher, 3, torch.Generator().manual_seed(0))
    assert found.tolist() == pytest.approx(by_hand(student, teacher, "logistic"))
    mean = sampled_preference(student, teacher, 3, torch.Generator().manual_seed(0), reduction="mean")
    torch.testing.assert_close(mean, found / 4)
