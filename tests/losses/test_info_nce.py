"""InfoNCE against the golden values and against loops in NumPy."""

import math

import numpy as np
import pytest
import torch

from confed.losses.info_nce import Contrast, info_nce, same_answers, similarities
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
