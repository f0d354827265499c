"""The divergence of mutual distillation: by hand, on the positions that count, in parts of a large vocabulary."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from confed.losses.distillation import Direction, divergence


def logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def by_hand(student: Tensor, teacher: Tensor, temperature: float, direction: Direction, where: Tensor) -> float:
    """One position at a time, with plain exponentials."""
    total = 0.0
    for row, position in where.nonzero().tolist():
        p, q = ((z[row, position] / temperature).exp() for z in (teacher, student))
        p, q = p / p.sum(), q / q.sum()
        if direction == "student_teacher":
            p, q = q, p
        total += float((p * (p / q).log()).sum())
    return temperature**2 * total / len(student)


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
@pytest.mark.parametrize("at_once", [10**9, 40, 7])
def test_divergence_is_the_sum_over_positions_that_count(direction: Direction, at_once: int) -> None:
    student, teacher = logits(1, 3, 4, 11), logits(2, 3, 4, 11)
    where = torch.tensor([[True, True, False, False], [True, True, True, True], [True, False, False, False]])
    found = divergence(student, teacher, 2.0, direction, where, at_once)
    assert found.item() == pytest.approx(by_hand(student, teacher, 2.0, direction, where), rel=1e-9)


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_give_the_same_value_and_gradient(direction: Direction, masked: bool) -> None:
    where = (logits(3, 4, 6) > 0) if masked else None
    found: list[tuple[Tensor, Tensor]] = []
    for at_once in (10**9, 64):
        student = logits(1, 4, 6, 23).float().requires_grad_()
        loss = divergence(student, logits(2, 4, 6, 23).float(), 1.5, direction, where, at_once)
        (0.7 * loss).backward()
        assert student.grad is not None
        found.append((loss.detach(), student.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    if where is not None:
        assert not found[1][1][~where].any()


class Sizes(TorchDispatchMode):
    """Values of every tensor that is made, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not any(
            isinstance(a, Tensor) and a.untyped_storage().data_ptr() == found.untyped_storage().data_ptr() for a in args
        ):
            self.made.append(found.numel())
        return found


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
@pytest.mark.parametrize("masked", [False, True])
def test_of_a_large_vocabulary_only_the_gradient_is_whole(direction: Direction, masked: bool) -> None:
    shape, at_once = (4, 8, 1000), 3000
    student, teacher = logits(1, *shape).requires_grad_(), logits(2, *shape)
    where = (logits(3, 4, 8) > 0) if masked else None
    counted = {}
    for most in (at_once, 10**9):
        with Sizes() as sizes:
            divergence(student, teacher, 1.5, direction, where, most).backward()
        counted[most] = [size for size in sizes.made if size > at_once]
        student.grad = None
    assert counted[at_once] == [student.numel()]
    assert len(counted[10**9]) > 4  # what is counted is there


def test_nothing_to_compare_is_zero() -> None:
    student = logits(1, 2, 3, 5).requires_grad_()
    for at_once in (10**9, 4):
        nothing = torch.zeros(2, 3, dtype=torch.bool)
        loss = divergence(student, logits(2, 2, 3, 5), where=nothing, at_once=at_once)
        assert loss.item() == 0


@pytest.mark.usefixtures("faulty_arguments")
def test_positions_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"where must have the logits' shape without classes, \(2, 3\), got \(3, 2\)"):
        divergence(logits(1, 2, 3, 5), logits(2, 2, 3, 5), where=torch.ones(3, 2, dtype=torch.bool))
