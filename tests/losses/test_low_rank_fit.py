"""Factors fitted at the server, against scipy's minimisers and sums by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from confed.losses.low_rank import corrected, fitted, mean_by_norm, norm_of_product, stack

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
