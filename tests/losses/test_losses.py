"""InfoNCE, mutual distillation, distance correlation, prompts and label states against computations by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from confed.losses.distance_correlation import distance_correlation
from confed.losses.distillation import Direction, divergence
from confed.losses.info_nce import Contrast, info_nce, same_answers, similarities
from confed.losses.label_states import UNKNOWN, label_states, uncertain
from confed.losses.low_rank import corrected, fitted, mean_by_norm, norm_of_product, stack
from confed.losses.prompts import knowledge_guidance, score_consistency, text_consistency, text_contrast
from confed.losses.transport import _by_scaling, transport_plan
from refusals import refuses

Q = [[1.0, 0, 2], [0, 1, 1], [1, 1, 0]]
K = [[1.0, 0.5, 1], [0, 2, 1], [2, 0, 0.5]]


def by_hand(v, u, tau, include, cosine, same=None):
    """Each example's loss by loops; None where its denominator is empty."""
    v, u = np.asarray(v, dtype=np.float64), np.asarray(u, dtype=np.float64)
    losses = []
    for i in range(len(v)):
        terms = []
        for j in range(len(v)):
            scale = np.linalg.norm(v[i]) * np.linalg.norm(u[j]) if cosine else 1.0
            s = float(v[i] @ u[j]) / scale / tau
            if j == i:
                positive = s
            if (j == i and include) or (j != i and not (same is not None and same[i][j])):
                terms.append(s)
        top = max(terms, default=0.0)
        losses.append(top + math.log(sum(math.exp(t - top) for t in terms)) - positive if terms else None)
    return losses


@pytest.mark.parametrize(
    ("options", "golden"),
    [
        ({"denominator": "include", "reduction": "mean"}, 0.3660727),
        ({"denominator": "include", "reduction": "sum"}, 1.0982180),
        ({"denominator": "exclude", "reduction": "sum"}, -6.3062820),
        ({"denominator": "exclude", "reduction": "sum", "similarity": "dot"}, -21.4277800),
    ],
)
def test_info_nce_has_its_golden_values(options, golden):
    loss = info_nce(torch.tensor(Q), torch.tensor(K), temperature=0.07, **options)
    assert loss.item() == pytest.approx(golden, rel=2e-6)


def test_defaults_are_the_papers():
    assert info_nce(torch.tensor(Q), torch.tensor(K)).item() == pytest.approx(-6.3062820, rel=2e-6)
    assert Contrast()(torch.tensor(Q), torch.tensor(K)).item() == pytest.approx(-6.3062820, rel=2e-6)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_combination_against_loops(include, cosine, masked):
    rng = np.random.default_rng(3)
    v, u, labels = rng.normal(size=(7, 5)), rng.normal(size=(7, 5)), torch.tensor([0, 1, 0, 2, 1, 0, 3])
    same = same_answers(labels)
    wanted = by_hand(v, u, 0.3, include, cosine, same.tolist() if masked else None)
    got = info_nce(
        torch.tensor(v),
        torch.tensor(u),
        temperature=0.3,
        denominator="include" if include else "exclude",
        similarity="cosine" if cosine else "dot",
        reduction="none",
        same=same if masked else None,
    )
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-10)


def test_symmetric_is_the_mean_of_both_directions():
    v, u = torch.tensor(Q), torch.tensor(K)
    same = same_answers(torch.tensor([1, 1, 2]))
    for options in ({}, {"denominator": "include", "reduction": "mean"}, {"same": same}):
        both = info_nce(v, u, symmetric=True, **options)
        halves = (info_nce(v, u, **options) + info_nce(u, v, **options)) / 2
        assert both.item() == pytest.approx(halves.item(), rel=1e-6)


def test_a_batch_of_one():
    one = torch.tensor([[1.0, 2.0]])
    assert info_nce(one, one, denominator="include").item() == 0
    refuses(r"'exclude' needs at least two examples.* batch of one", info_nce, one, one)


def test_rows_without_negatives_add_nothing_and_do_not_count():
    rng = torch.Generator().manual_seed(0)
    v, u = (torch.randn(4, 3, generator=rng).requires_grad_() for _ in range(2))
    same = torch.zeros(4, 4, dtype=torch.bool)
    same[1] = True  # example 1 has no negative left
    rows = info_nce(v, u, reduction="none", same=same)
    wanted = by_hand(v.detach(), u.detach(), 0.07, False, True, same.tolist())
    assert wanted[1] is None
    assert rows[1] == 0
    rest = [w for w in wanted if w is not None]
    assert info_nce(v, u, same=same).item() == pytest.approx(sum(rest), rel=1e-5)
    assert info_nce(v, u, reduction="mean", same=same).item() == pytest.approx(sum(rest) / 3, rel=1e-5)
    (gradient,) = torch.autograd.grad(info_nce(v, u, same=same), v)
    assert torch.equal(gradient[1], torch.zeros(3))
    assert gradient.isfinite().all()


@pytest.mark.parametrize("denominator", ["exclude", "include"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_all_answers_masked_is_zero_with_zero_gradients(denominator, reduction, symmetric):
    v, u = torch.tensor(Q).requires_grad_(), torch.tensor(K).requires_grad_()
    options = {"denominator": denominator, "reduction": reduction, "symmetric": symmetric}
    loss = info_nce(v, u, same=same_answers(torch.zeros(3)), **options)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    for gradient in torch.autograd.grad(loss, (v, u)):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


def test_large_dot_products_stay_finite():
    v = 16 * torch.eye(4, 8)
    for denominator in ("exclude", "include"):
        loss = info_nce(100 * v, v, similarity="dot", denominator=denominator)
        assert loss.isfinite()
    # Orthogonal wrong pairs, s_ii = 25,600 / 0.07: each row is log 3 - s_ii / tau.
    wanted = 4 * (math.log(3) - 25_600 / 0.07)
    assert info_nce(100 * v, v, similarity="dot").item() == pytest.approx(wanted, rel=1e-6)


def test_zero_vectors_have_a_finite_loss_and_gradient():
    v = torch.zeros(3, 4, requires_grad=True)
    loss = info_nce(v, torch.ones(3, 4))
    assert loss.item() == pytest.approx(3 * math.log(2), rel=1e-6)
    assert torch.autograd.grad(loss, v)[0].isfinite().all()


def test_single_precision_under_autocast():
    rng = torch.Generator().manual_seed(1)
    v, u = torch.randn(6, 32, generator=rng), torch.randn(6, 32, generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        inside = info_nce(v, u)
        half = info_nce(v.bfloat16(), u.bfloat16())
    assert inside.dtype == half.dtype == torch.float32
    assert torch.equal(inside, info_nce(v, u))
    assert torch.equal(half, info_nce(v.bfloat16().float(), u.bfloat16().float()))


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k: info_nce(q, k, temperature=0.0), "temperature must be positive, got 0.0"),
        (lambda q, k: info_nce(q, k, denominator="both"), "denominator must be one of exclude, include, got 'both'"),
        (lambda q, k: info_nce(q, k, similarity="l2"), "similarity must be one of cosine, dot, got 'l2'"),
        (lambda q, k: info_nce(q, k, reduction="max"), "reduction must be one of sum, mean, none, got 'max'"),
        (lambda q, k: info_nce(q, k, same=torch.eye(2) > 0), r"same must have shape \(3, 3\), got \(2, 2\)"),
        (lambda q, k: info_nce(q, k[:2]), r"one shape \(B, S\), got \(3, 3\) and \(2, 3\)"),
        (Contrast(mask_same_answer=True), "mask_same_answer needs"),
        (lambda q, k: Contrast().of(torch.zeros(3, 4)), r"shape \(B, B\)"),
        (lambda q, k: similarities(torch.zeros(3, 4), torch.zeros(3, 5)), r"shapes \(B, S\) and \(N, S\)"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    refuses(message, call, torch.tensor(Q), torch.tensor(K))


def logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def mutual_by_hand(student: Tensor, teacher: Tensor, temperature: float, direction: Direction, where: Tensor) -> float:
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
    assert found.item() == pytest.approx(mutual_by_hand(student, teacher, 2.0, direction, where), rel=1e-9)


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


def by_definition(x: np.ndarray, z: np.ndarray) -> float:
    """Székely et al. (2007), definitions 4 to 6, one entry at a time."""

    def centred(rows: np.ndarray) -> list[list[float]]:
        n = len(rows)
        d = [[math.dist(rows[i], rows[j]) for j in range(n)] for i in range(n)]
        row = [sum(d[i]) / n for i in range(n)]
        column = [sum(d[i][j] for i in range(n)) / n for j in range(n)]
        grand = sum(row) / n
        return [[d[i][j] - row[i] - column[j] + grand for j in range(n)] for i in range(n)]

    a, b = centred(x), centred(z)
    n = len(x)

    def covariance(p: list[list[float]], q: list[list[float]]) -> float:
        return sum(p[i][j] * q[i][j] for i in range(n) for j in range(n)) / n**2

    return math.sqrt(covariance(a, b) / math.sqrt(covariance(a, a) * covariance(b, b)))


@pytest.mark.parametrize(("rows", "seed"), [(2, 0), (5, 1), (12, 2)])
def test_it_is_the_definition(rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 4))
    z[:, :3] += x**2
    value = distance_correlation(torch.from_numpy(x), torch.from_numpy(z))
    assert float(value) == pytest.approx(by_definition(x, z), abs=1e-12)


def test_its_gradient_is_right_and_lowers_it() -> None:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(6, 2, generator=rng, dtype=torch.float64)
    z = (x + 0.3 * torch.randn(6, 2, generator=rng, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: distance_correlation(x, z), (z,))
    before = distance_correlation(x, z)
    (gradient,) = torch.autograd.grad(before, z)
    assert distance_correlation(x, z - 0.05 * gradient) < before


def test_shapes_equal_rows_and_half_precision() -> None:
    x = torch.arange(24.0).reshape(4, 2, 3)
    labels = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert 0 < distance_correlation(x, labels) < 1
    same = torch.ones(4, 3, requires_grad=True)
    value = distance_correlation(x, same)
    value.backward()
    assert value == 0
    assert same.grad is not None
    assert same.grad.isfinite().all()
    twice = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    distance_correlation(torch.tensor([[0.0], [1.0], [2.0]]), twice).backward()
    assert twice.grad is not None
    assert twice.grad.isfinite().all()
    assert distance_correlation(x.bfloat16(), x.bfloat16()).dtype == torch.float32


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(("x", "z"), [((1, 3), (1, 2)), ((3, 2), (4, 2)), ((0, 2), (0, 2))])
def test_too_few_rows_are_refused(x: tuple[int, int], z: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"at least two rows, as many of x as of z, got {x[0]}, {z[0]}"):
        distance_correlation(torch.zeros(x), torch.zeros(z))


ONE = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
OTHER = torch.tensor([[0.0, 1.0], [0.0, 1.0]])


def test_knowledge_guidance_is_the_mean_squared_distance() -> None:
    assert knowledge_guidance(ONE, OTHER).item() == 1.0  # 2 and 0
    assert math.isclose(knowledge_guidance(ONE, OTHER).item(), 2 * (1 - (ONE * OTHER).sum(1).mean().item()))


def test_text_consistency_is_the_mean_absolute_difference() -> None:
    assert text_consistency(ONE, OTHER).item() == 0.5


def test_score_consistency_is_the_divergence() -> None:
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    wanted = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert math.isclose(score_consistency(q.log()[None], p.log()[None]).item(), wanted, rel_tol=1e-6)


def test_text_contrast_of_equal_similarities_is_log_two() -> None:
    assert math.isclose(text_contrast(ONE, OTHER, OTHER, 0.5).item(), math.log(2), rel_tol=1e-6)
    near = text_contrast(ONE, ONE, OTHER, 1.0).item()
    wanted = (math.log(1 + math.exp(-1.0)) + math.log(2)) / 2
    assert math.isclose(near, wanted, rel_tol=1e-6)


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
    refuses(message, call, torch.zeros(2, 3))


def linear_programme(cost: np.ndarray, mass: float) -> float:
    """The least cost without entropy, by ``scipy.optimize.linprog``."""
    from scipy.optimize import linprog

    v, n = cost.shape
    rows = np.kron(np.eye(v), np.ones(n))
    columns = np.kron(np.ones(v), np.eye(n))
    row_sums, column_sums = np.full(v, 1 / v), np.full(n, mass / n)
    if mass == 1:
        found = linprog(cost.ravel(), A_eq=np.r_[rows, columns], b_eq=np.r_[row_sums, column_sums])
    else:
        found = linprog(cost.ravel(), A_ub=rows, b_ub=row_sums, A_eq=columns, b_eq=column_sums)
    assert found.success
    return float(found.fun)


def costs(count: int, sources: int, sinks: int) -> Tensor:
    return torch.rand(count, sources, sinks, dtype=torch.float64, generator=torch.Generator().manual_seed(sources))


# Of costs below 1 the first strength takes logarithms and the second does not.
@pytest.mark.parametrize("strength", [2e-3, 4e-3])
@pytest.mark.parametrize("mass", [1.0, 0.8, 0.4])
@pytest.mark.parametrize(("sources", "sinks"), [(4, 2), (7, 2), (5, 3)])
def test_little_entropy_costs_what_the_linear_programme_does(
    strength: float, mass: float, sources: int, sinks: int
) -> None:
    cost = costs(3, sources, sinks)
    plan = transport_plan(cost, mass=mass, strength=strength, steps=5000, tolerance=1e-9)
    for one, moved in zip(cost.numpy(), plan.numpy(), strict=True):
        assert (one * moved).sum() == pytest.approx(linear_programme(one, mass), abs=2 * strength)


@pytest.mark.parametrize("mass", [1.0, 0.7])
def test_logarithms_change_nothing(mass: float) -> None:
    """An additional problem whose costs are far apart sends all of them through logarithms."""
    cost = costs(4, 9, 2)
    far = torch.cat([cost, 1e4 * cost[:1]])
    options = {"mass": mass, "strength": 0.1, "steps": 3000, "tolerance": 1e-12}
    torch.testing.assert_close(transport_plan(far, **options)[:4], transport_plan(cost, **options))


@pytest.mark.parametrize("mass", [0.6, 0.8, 1.0])
@pytest.mark.parametrize(("strength", "above"), [(0.002, 0.05), (0.01, 0.02), (0.02, 0.02)])
def test_margins_hold_where_the_steps_do_not_suffice(strength: float, above: float, mass: float) -> None:
    cost = 0.4 + 0.6 * costs(64, 49, 2).float()
    plan, sooner = (transport_plan(cost, mass=mass, strength=strength, steps=steps) for steps in (100, 5))
    for found in (plan, sooner):
        assert float((found.sum(2) * 49).max()) <= 1 + 1.1e-4
        assert mass < 1 or float((found.sum(2) * 49).min()) >= 1 - 1.1e-4
        torch.testing.assert_close(found.sum(1), torch.full((64, 2), mass / 2), rtol=1e-5, atol=1e-7)
        assert float(found.min()) >= 0
    # The cost is near that of the programme without entropy, which is never above it.
    for one, moved in zip(cost[:8].double().numpy(), plan[:8].double().numpy(), strict=True):
        least = linear_programme(one, mass)
        assert least - 1e-4 <= (one * moved).sum() <= least + above


def test_plans_that_meet_their_margins_keep_their_bits() -> None:
    cost = 0.4 + 0.6 * costs(8, 49, 2)
    cost[-1] *= 40  # the last problem needs more steps than there are
    kernel = (-cost / 0.1).transpose(-1, -2).contiguous()
    kernel = kernel - kernel.amax((-2, -1), keepdim=True)
    plain = _by_scaling(kernel, 0.8 / 2, 1 / 49, True, 20, 1e-4).transpose(-1, -2)
    mended = transport_plan(cost, mass=0.8, strength=0.1, steps=20)
    held = (plain.sum(2) * 49 <= 1 + 1e-4).all(1)
    assert held[:7].all()
    assert not held[7]
    assert torch.equal(mended[:7], plain[:7])
    assert (mended[7].sum(1) * 49).max() <= 1 + 1e-12


def test_entropic_plan_satisfies_its_optimality_condition() -> None:
    """With equality on both sides, log T + C / strength is a sum of a function of rows and one of columns."""
    cost = costs(1, 6, 3)
    plan = transport_plan(cost, strength=0.3, steps=2000, tolerance=1e-12)[0]
    potential = plan.log() + cost[0] / 0.3
    centred = potential - potential.mean(0, keepdim=True) - potential.mean(1, keepdim=True) + potential.mean()
    assert centred.abs().max() < 1e-9


@pytest.mark.parametrize(("options", "message"), [({"mass": 0.0}, "mass must lie"), ({"strength": 0.0}, "positive")])
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    refuses(message, transport_plan, costs(1, 3, 2), **options)


Array = np.ndarray[Any, Any]
WEIGHTS = [1.0, 3.0, 2.0]


def clients(ranks: tuple[int, ...] = (2, 2, 2), m: int = 6, n: int = 5, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Factors that share a part, as those of clients that began equal do."""
    rng = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((max(ranks), n), (m, max(ranks))))
    return [
        (a[:r] + 0.6 * torch.randn(r, n, generator=rng).double(), b[:, :r] + 0.6 * torch.randn(m, r, generator=rng))
        for r in ranks
    ]


def whole(factors: list[tuple[Tensor, Tensor]], weights: list[float] = WEIGHTS) -> Array:
    return sum(w / sum(weights) * (b @ a).numpy() for (a, b), w in zip(factors, weights, strict=True))  # type: ignore[return-value]


def means(factors: list[tuple[Tensor, Tensor]], weights: list[float] = WEIGHTS) -> tuple[Array, Array]:
    return tuple(np.average([pair[i].numpy() for pair in factors], axis=0, weights=weights) for i in (0, 1))  # type: ignore[return-value]


def cosine(one: Array, other: Array) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


# LoRA-FAIR ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("seed", [3, 4])
def test_the_correction_is_the_minimiser_that_scipy_finds(strength: float, seed: int) -> None:
    factors = clients(seed=seed)
    target, (mean_a, mean_b) = whole(factors), means(factors)

    def objective(flat: Array) -> float:
        change = flat.reshape(mean_b.shape)
        return 1 - cosine(target, (mean_b + change) @ mean_a) + strength * float(np.linalg.norm(change))

    rng = np.random.default_rng(0)
    tries = [
        minimize(objective, 1e-2 * rng.normal(size=mean_b.size), method="BFGS", options={"gtol": 1e-9}) for _ in "ab"
    ]
    best = min(tries, key=lambda found: found.fun)
    a, b = corrected(factors, WEIGHTS, strength)
    np.testing.assert_allclose(a.numpy(), mean_a, atol=1e-12)
    ours = (b.numpy() - mean_b).ravel()
    assert objective(ours) <= best.fun + 1e-9
    np.testing.assert_allclose(ours, best.x, atol=2e-4)
    assert np.linalg.norm(ours) > 1e-3


def test_without_regulariser_the_correction_is_least_squares() -> None:
    factors = clients()
    target, (mean_a, mean_b) = whole(factors), means(factors)
    _, b = corrected(factors, WEIGHTS, 0.0)
    wanted = np.linalg.lstsq(mean_a.T, target.T, rcond=None)[0].T
    np.testing.assert_allclose(b.numpy(), wanted, atol=1e-9)
    assert cosine(target, b.numpy() @ mean_a) > cosine(target, mean_b @ mean_a) + 1e-3


def test_where_the_correction_leaves_the_mean() -> None:
    factors = clients()
    for given, strength in ((factors, 10.0), ([factors[0]] * 3, 0.01), ([(a, 0 * b) for a, b in factors], 0.01)):
        mean_a, mean_b = means(given)
        a, b = corrected(given, WEIGHTS, strength)
        np.testing.assert_allclose(a.numpy(), mean_a, atol=1e-9)
        np.testing.assert_allclose(b.numpy(), mean_b, atol=1e-9)


# FLoRA-NA -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_fitted_weights_are_those_that_scipy_finds(seed: int) -> None:
    factors = clients(seed=seed)
    target, (mean_a, mean_b) = whole(factors), means(factors)

    def gap(flat: Array) -> float:
        p, q = flat[:3], flat[3:]
        a, b = (np.tensordot(w, np.stack([pair[i].numpy() for pair in factors]), 1) for i, w in ((0, q), (1, p)))
        return float(((target - b @ a) ** 2).sum())

    share = np.array(WEIGHTS) / sum(WEIGHTS)
    best = minimize(gap, np.concatenate([share, share]), method="BFGS", options={"gtol": 1e-10})
    a, b = fitted(factors, WEIGHTS)
    ours = float(((target - (b @ a).numpy()) ** 2).sum())
    assert ours == pytest.approx(best.fun, rel=1e-6)
    assert ours < 0.99 * float(((target - mean_b @ mean_a) ** 2).sum())
    for matrix, part in ((a, 0), (b, 1)):  # each is a combination of the clients'
        basis = np.stack([pair[part].numpy().ravel() for pair in factors], axis=1)
        rest = matrix.numpy().ravel() - basis @ np.linalg.lstsq(basis, matrix.numpy().ravel(), rcond=None)[0]
        assert np.abs(rest).max() < 1e-9


def test_equal_factors_are_fitted_by_the_mean() -> None:
    factors = clients()
    same_a = [(factors[0][0], b) for _, b in factors]  # A in common: the mean is exact
    for given in ([factors[0]] * 3, same_a):
        mean_a, mean_b = means(given)
        a, b = fitted(given, WEIGHTS)
        np.testing.assert_allclose(a.numpy(), mean_a, atol=1e-9)
        np.testing.assert_allclose(b.numpy(), mean_b, atol=1e-9)
    a, b = fitted([(a, 0 * b) for a, b in factors], WEIGHTS)
    assert not b.any()
    assert torch.isfinite(a).all()


# HetLoRA --------------------------------------------------------------------------------------------------------


def test_means_weighted_by_norms_are_sums_by_hand() -> None:
    factors = clients((1, 3, 2))
    norms = [w * np.linalg.norm((b @ a).numpy()) for (a, b), w in zip(factors, WEIGHTS, strict=True)]
    for (a, b), w, norm in zip(factors, WEIGHTS, norms, strict=True):
        assert w * norm_of_product((a, b)) == pytest.approx(norm, rel=1e-12)
    wanted_a, wanted_b = np.zeros((3, 5)), np.zeros((6, 3))
    for (a, b), norm in zip(factors, norms, strict=True):
        wanted_a[: len(a)] += norm / sum(norms) * a.numpy()
        wanted_b[:, : len(a)] += norm / sum(norms) * b.numpy()
    a, b = mean_by_norm(factors, WEIGHTS, 3)
    np.testing.assert_allclose(a.numpy(), wanted_a, atol=1e-12)
    np.testing.assert_allclose(b.numpy(), wanted_b, atol=1e-12)


def test_updates_of_zero_count_nothing_beside_others() -> None:
    factors = clients()
    still = [(a, 0 * b) for a, b in factors]
    np.testing.assert_allclose(mean_by_norm(still, WEIGHTS, 2)[0].numpy(), means(still)[0], atol=1e-12)
    a, b = mean_by_norm([still[0], factors[1], still[2]], WEIGHTS, 2)
    assert torch.equal(a, factors[1][0])
    assert torch.equal(b, factors[1][1])


def test_the_stack_is_the_target() -> None:
    factors = clients()
    a, b = stack(factors, WEIGHTS)
    np.testing.assert_allclose((b @ a).numpy(), whole(factors), atol=1e-12)
