"""Distance correlation against loops over its definition, and its limiting cases."""

import math

import numpy as np
import pytest
import torch

from confed.losses.distance_correlation import distance_correlation


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
