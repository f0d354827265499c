"""Distillation and pairwise preference against golden values, invariants and numeric gradients."""

import itertools
import math

import pytest
import torch

from confed.losses.distillation import knowledge_preserving
from confed.losses.preference import forgotten, matchup, most_forgotten, pairwise_preference
from confed.losses.proximal import half_squared_distance

STUDENT = torch.tensor([[2, 1, 0, -1], [0.5, -0.5, 1.5, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[1, 2, 0.5, -1], [0, 0, 2, 1]], dtype=torch.float64)


def random_pair(b: int, c: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(b, c, generator=rng), torch.randn(b, c, generator=rng)


@pytest.mark.parametrize(("t", "golden"), [(1, 0.240056), (2, 0.240317), (3, 0.233960), (4, 0.229437)])
def test_preference_distillation_has_its_golden_values(t, golden):
    assert knowledge_preserving(STUDENT, TEACHER, t).item() == pytest.approx(golden, abs=1e-6)


def test_preference_distillation_equals_a_computation_by_hand():
    # p_T = (3/4, 1/4), p_S = (1/2, 1/2): KL = .75 log 1.5 + .25 log .5.
    loss = knowledge_preserving(torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]]), 1.0)
    assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)
    assert knowledge_preserving(TEACHER, TEACHER, 3.0).item() == pytest.approx(0, abs=1e-12)


def test_distillation_ignores_classes_masked_on_both_sides():
    mask = torch.full((2, 1), -math.inf, dtype=torch.float64)
    wide = torch.cat((STUDENT, mask), dim=1).requires_grad_()
    loss = knowledge_preserving(wide, torch.cat((TEACHER, mask), dim=1), 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.240317, abs=1e-6)
    assert torch.isfinite(wide.grad).all()


def test_distillation_has_the_numerical_gradient_for_the_student_alone():
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: knowledge_preserving(s, TEACHER, 2.0), student)
    knowledge_preserving(student, teacher, 2.0).backward()
    assert teacher.grad is None


@pytest.mark.parametrize(("space", "golden"), [("prob", (2.187366, 0.656691)), ("logit", (2.374261, 2.630770))])
def test_all_pairs_have_their_golden_values(space, golden):
    assert pairwise_preference(STUDENT, TEACHER, space=space).tolist() == pytest.approx(golden, abs=1e-6)


def test_matchup_by_definition():
    p = STUDENT.softmax(1)
    m = matchup(p)
    for b, i, j in itertools.product(range(2), range(4), range(4)):
        assert m[b, i, j].item() == pytest.approx(1 / (1 + math.exp(-2 * (p[b, i] - p[b, j]))))
    assert m.min() >= 1 / (1 + math.exp(2))
    torch.testing.assert_close(m + m.transpose(1, 2), torch.ones_like(m))


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


def test_rows_reduction_divides_by_answers():
    """Row i holds the pairs of answer i; their mean over the rows, written out."""
    rows = (matchup(TEACHER.softmax(dim=1)) - matchup(STUDENT.softmax(dim=1))).abs().sum(dim=2)
    torch.testing.assert_close(pairwise_preference(STUDENT, TEACHER, reduction="rows"), rows.mean(dim=1))
    chosen = torch.stack([torch.randperm(STUDENT.shape[1])[:2] for _ in STUDENT])
    pair, total = (pairwise_preference(STUDENT, TEACHER, chosen, reduction=how) for how in ("rows", "sum"))
    torch.testing.assert_close(pair, total / 2)


def test_only_a_mean_is_of_the_cross_entropys_size_with_the_papers_weight():
    """With lambda 1 and 1,642 answers the sum over all pairs drowns the task's gradient; the filtered one does not."""
    rng = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(8, 1642, generator=rng)
    label = teacher.argmax(dim=1)
    student = (teacher + torch.randn(8, 1642, generator=rng)).requires_grad_()

    def size(loss: torch.Tensor) -> float:
        (gradient,) = torch.autograd.grad(loss.mean(), student)
        return float(gradient.norm())

    task = size(torch.nn.functional.cross_entropy(student, label))
    top = most_forgotten(forgotten(student, teacher, "gain"), 20)
    assert size(pairwise_preference(student, teacher)) > 30 * task
    assert 0.1 * task < size(pairwise_preference(student, teacher, top)) < 10 * task
    assert size(pairwise_preference(student, teacher, reduction="mean")) < 0.05 * task


def test_mean_reduction_divides_by_pairs():
    chosen = torch.tensor([[1, 0], [2, 3]])
    for selected, pairs in ((chosen, 4), (None, 16)):
        total = pairwise_preference(STUDENT, TEACHER, selected)
        torch.testing.assert_close(pairwise_preference(STUDENT, TEACHER, selected, reduction="mean"), total / pairs)


def test_softmax_does_not_change_the_selection_and_permuting_answers_permutes_it():
    student, teacher = random_pair(6, 30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    for mode in ("p_s", "p_t", "diff", "gain"):
        scores = forgotten(student, teacher, mode)
        chosen = most_forgotten(scores, 5)
        assert torch.equal(chosen, most_forgotten(scores.softmax(1), 5))
        permuted = most_forgotten(forgotten(student[:, order], teacher[:, order], mode), 5)
        assert torch.equal(order[permuted], chosen)


def test_where_student_equals_teacher_the_loss_is_zero_and_gain_ranks_by_the_teacher():
    _, teacher = random_pair(6, 30)
    chosen = most_forgotten(forgotten(teacher, teacher, "gain"), 5)
    assert torch.equal(chosen, teacher.topk(5).indices)
    assert torch.equal(forgotten(teacher, teacher, "diff"), torch.zeros(6, 30))
    assert pairwise_preference(teacher, teacher, chosen).abs().max() == 0


def test_one_answer_without_entropy_stays_finite():
    certain = torch.tensor([[1000.0, 0.0, 0.0, -math.inf]])
    for student, teacher in (
        (certain, STUDENT[:1].float()),
        (STUDENT[:1].float(), certain),
        (certain, certain),
    ):
        for mode in ("p_s", "p_t", "diff", "gain"):
            assert torch.isfinite(forgotten(student, teacher, mode)).all()


def test_random_scores_follow_their_generator():
    first, second = (forgotten(STUDENT, TEACHER, "random", torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert torch.equal(first, forgotten(STUDENT, TEACHER, "random", torch.Generator().manual_seed(1)))
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="needs a torch"):
        forgotten(STUDENT, TEACHER, "random")


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


def test_blocks_equal_one_selection_of_all_answers(monkeypatch):
    monkeypatch.setattr("confed.losses.preference._PAIRS_AT_ONCE", 3 * 17 * 4)
    student, teacher = (x.double() for x in random_pair(3, 17))
    student.requires_grad_()
    everything = torch.arange(17).expand(3, 17)
    blocks, whole = pairwise_preference(student, teacher), pairwise_preference(student, teacher, everything)
    torch.testing.assert_close(blocks, whole)
    (by_blocks,) = torch.autograd.grad(blocks.sum(), student)
    (by_whole,) = torch.autograd.grad(whole.sum(), student)
    torch.testing.assert_close(by_blocks, by_whole)


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
        (
            lambda: knowledge_preserving(STUDENT, TEACHER[:1]),
            r"one shape \(B, C\), got \(2, 4\) and \(1, 4\)",
        ),
        (lambda: knowledge_preserving(STUDENT, TEACHER, 0.0), "temperature must be positive, got 0"),
        (lambda: forgotten(STUDENT, TEACHER, "loss"), "mode must be one of .* got 'loss'"),
        (lambda: most_forgotten(STUDENT, 5), r"n must lie in \[1, 4\].* got 5"),
        (lambda: pairwise_preference(STUDENT, TEACHER, space="log"), "space must be one of prob, logit"),
        (lambda: pairwise_preference(STUDENT, TEACHER, reduction="max"), "reduction must be one of"),
        (lambda: pairwise_preference(STUDENT, TEACHER, torch.tensor([1, 2])), "selected must have shape"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_golden_kd_in_the_other_direction():
    student = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, -0.5, 1.5, 0.0]])
    teacher = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 2.0, 1.0]])
    assert knowledge_preserving(teacher, student, 3.0).item() == pytest.approx(0.242265, abs=1e-6)


def test_entropy_ratios_have_their_golden_values():
    # r(8.12) = log p_T - log(H_T / H_S) log p_S: the ratio follows from the scores.
    student = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, -0.5, 1.5, 0.0]])
    teacher = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 2.0, 1.0]])
    log_s, log_t = student.log_softmax(1), teacher.log_softmax(1)
    ratio = ((log_t - forgotten(student, teacher, "gain")) / log_s).exp()
    assert ratio[:, 0].tolist() == pytest.approx([1.070568, 0.944978], abs=1e-5)


def test_half_squared_distance_and_its_gradient():
    parameters = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)]
    anchor = [torch.tensor([0.0, 4.0]), torch.tensor([[6.0]])]
    distance = half_squared_distance(parameters, anchor)
    assert distance.item() == 0.5 * (1 + 4 + 9)
    distance.backward()
    assert [p.grad.tolist() for p in parameters] == [[1.0, -2.0], [[-3.0]]]
    with pytest.raises(RuntimeError):
        half_squared_distance([], [])
