"""Distillation and pairwise preference against golden values, invariants and numeric gradients."""

import math

import pytest
import torch

from confed.losses.distillation import knowledge_preserving
from confed.losses.preference import (
    forgotten,
    most_forgotten,
    pairwise_preference,
    sampled_preference,
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
