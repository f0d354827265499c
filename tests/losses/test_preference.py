"""Distillation and pairwise preference against golden values, invariants and numeric gradients."""

import itertools
import math

import numpy as np
import pytest
import torch

from confed.losses.distillation import knowledge_preserving
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
from confed.losses.proximal import half_squared_distance
from refusals import refuses

STUDENT = torch.tensor([[2, 1, 0, -1], [0.5, -0.5, 1.5, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[1, 2, 0.5, -1], [0, 0, 2, 1]], dtype=torch.float64)


def random_pair(b: int, c: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(b, c, generator=rng), torch.randn(b, c, generator=rng)


@pytest.mark.parametrize(("t", "golden"), [(1, 0.240056), (2, 0.240317), (3, 0.233960), (4, 0.229437)])
def test_preference_distillation_has_its_golden_values(t, golden):
    assert knowledge_preserving(STUDENT, TEACHER, t).item() == pytest.approx(golden, abs=1e-6)


def test_golden_distillation_in_the_other_direction():
    assert knowledge_preserving(TEACHER, STUDENT, 3.0).item() == pytest.approx(0.242265, abs=1e-6)


def test_distillation_ignores_classes_masked_on_both_sides():
    mask = torch.full((2, 1), -math.inf, dtype=torch.float64)
    wide = torch.cat((STUDENT, mask), dim=1).requires_grad_()
    loss = knowledge_preserving(wide, torch.cat((TEACHER, mask), dim=1), 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.240317, abs=1e-6)
    assert torch.isfinite(wide.grad).all()


def test_distillation_has_the_students_numerical_gradient():
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: knowledge_preserving(s, TEACHER, 2.0), student)
    knowledge_preserving(student, teacher, 2.0).backward()
    assert teacher.grad is None


@pytest.mark.parametrize(("space", "golden"), [("prob", (2.187366, 0.656691)), ("logit", (2.374261, 2.630770))])
def test_all_pairs_have_their_golden_values(space, golden):
    assert pairwise_preference(STUDENT, TEACHER, space=space).tolist() == pytest.approx(golden, abs=1e-6)


def test_filter_has_its_golden_values():
    diff, gain = (forgotten(STUDENT, TEACHER, mode) for mode in ("diff", "gain"))
    expected_diff = [[0.064148, 0.473991, 0.287490, 0.174371], [0.091590, 0.248967, 0.248967, 0.410477]]
    expected_gain = [[0.209586, 0.609917, 0.145694, 0.034803], [0.080602, 0.076167, 0.630247, 0.212985]]
    torch.testing.assert_close(diff.softmax(1), torch.tensor(expected_diff).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(gain.softmax(1), torch.tensor(expected_gain).double(), atol=1e-6, rtol=0)
    chosen = most_forgotten(gain, 2)
    assert chosen.tolist() == [[1, 0], [2, 3]]
    assert pairwise_preference(STUDENT, TEACHER, chosen).tolist() == pytest.approx((0.753209, 0.054189), abs=1e-6)
    assert pairwise_preference(STUDENT, TEACHER, torch.tensor([[1, 2], [3, 1]])).tolist() == pytest.approx(
        (0.292370, 0.090163), abs=1e-6
    )


@pytest.mark.parametrize(("selected", "answers"), [(torch.tensor([[1, 0], [2, 3]]), 2), (None, 4)])
def test_reductions_divide_by_answers_and_by_pairs(selected, answers):
    total, rows, mean = (pairwise_preference(STUDENT, TEACHER, selected, reduction=r) for r in ("sum", "rows", "mean"))
    torch.testing.assert_close(rows, total / answers)
    torch.testing.assert_close(mean, total / answers**2)


def test_where_student_equals_teacher_the_loss_is_zero():
    _, teacher = random_pair(6, 30)
    chosen = most_forgotten(forgotten(teacher, teacher, "gain"), 5)
    assert torch.equal(chosen, teacher.topk(5).indices)
    assert torch.equal(forgotten(teacher, teacher, "diff"), torch.zeros(6, 30))
    assert pairwise_preference(teacher, teacher, chosen).abs().max() == 0


def test_one_answer_without_entropy_stays_finite():
    certain = torch.tensor([[1000.0, 0.0, 0.0, -math.inf]])
    unsure = STUDENT[:1].float()
    for student, teacher in ((certain, unsure), (unsure, certain), (certain, certain)):
        for mode in ("p_s", "p_t", "diff", "gain"):
            assert torch.isfinite(forgotten(student, teacher, mode)).all()


def test_random_scores_follow_their_generator():
    first, second = (forgotten(STUDENT, TEACHER, "random", torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert torch.equal(first, forgotten(STUDENT, TEACHER, "random", torch.Generator().manual_seed(1)))
    assert not torch.equal(first, second)
    refuses("needs a torch", forgotten, STUDENT, TEACHER, "random")


def test_gradient_is_numeric_and_reaches_only_the_student():
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    chosen = torch.tensor([[1, 0, 3], [2, 3, 0]])
    for space in ("prob", "logit"):
        for selected in (chosen, None):
            assert torch.autograd.gradcheck(
                lambda s, space=space, selected=selected: pairwise_preference(s, TEACHER, selected, space),
                student,
            )
    pairwise_preference(student, teacher, chosen).sum().backward()
    assert teacher.grad is None
    assert not forgotten(student, teacher, "gain").requires_grad


def test_single_precision_under_autocast():
    student, teacher = random_pair(4, 8)
    exact = pairwise_preference(student, teacher), knowledge_preserving(student, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = pairwise_preference(student, teacher), knowledge_preserving(student, teacher)
        half = pairwise_preference(student.bfloat16(), teacher.bfloat16())
    assert half.dtype == torch.float32
    for a, b in zip(exact, mixed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: knowledge_preserving(STUDENT, TEACHER[:1]), r"one shape \(B, C\), got \(2, 4\) and \(1, 4\)"),
        (lambda: knowledge_preserving(STUDENT, TEACHER, 0.0), "temperature must be positive, got 0"),
        (lambda: forgotten(STUDENT, TEACHER, "loss"), "mode must be one of .* got 'loss'"),
        (lambda: most_forgotten(STUDENT, 5), r"n must lie in \[1, 4\].* got 5"),
        (lambda: pairwise_preference(STUDENT, TEACHER, space="log"), "space must be one of prob, logit"),
        (lambda: pairwise_preference(STUDENT, TEACHER, reduction="max"), "reduction must be one of"),
        (lambda: pairwise_preference(STUDENT, TEACHER, torch.tensor([1, 2])), "selected must have shape"),
        (lambda: pairwise_preference(STUDENT, TEACHER, g="step"), "g must be one of logistic, linear, arctan, erf"),
        (lambda: sorted_preference(STUDENT, TEACHER, "logit", g="erf"), r"need g 'linear'.* got 'erf'"),
        (lambda: sampled_preference(STUDENT, TEACHER, 0, torch.Generator()), "samples must be at least 1, got 0"),
        (
            lambda: sampled_preference(STUDENT[:, :1], TEACHER[:, :1], 4, torch.Generator()),
            "at least 2 answers, got 1",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    refuses(message, call)


def test_half_squared_distance_and_its_gradient():
    parameters = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)]
    anchor = [torch.tensor([0.0, 4.0]), torch.tensor([[6.0]])]
    distance = half_squared_distance(parameters, anchor)
    assert distance.item() == 0.5 * (1 + 4 + 9)
    distance.backward()
    assert [p.grad.tolist() for p in parameters] == [[1.0, -2.0], [[-3.0]]]
    with pytest.raises(RuntimeError):
        half_squared_distance([], [])


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
