"""Transport plans against linear programmes of scipy at small sizes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.losses.transport import transport_plan


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
def test_cost_of_a_plan_with_little_entropy_is_that_of_the_linear_programme(
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


@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_plans_meet_their_margins(mass: float) -> None:
    plan = transport_plan(costs(5, 9, 2), mass=mass, strength=0.05, steps=2000, tolerance=1e-10)
    torch.testing.assert_close(plan.sum(1), torch.full((5, 2), mass / 2, dtype=torch.float64))
    assert (plan.sum(2) <= 1 / 9 + 1e-6).all()
    if mass == 1:
        torch.testing.assert_close(plan.sum(2), torch.full((5, 9), 1 / 9, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_entropic_plan_satisfies_its_optimality_condition() -> None:
    """With equality on both sides, log T + C / strength is a sum of a function of rows and one of columns."""
    cost = costs(1, 6, 3)
    plan = transport_plan(cost, strength=0.3, steps=2000, tolerance=1e-12)[0]
    potential = plan.log() + cost[0] / 0.3
    centred = potential - potential.mean(0, keepdim=True) - potential.mean(1, keepdim=True) + potential.mean()
    assert centred.abs().max() < 1e-9


def test_a_small_strength_does_not_overflow() -> None:
    plan = transport_plan(100 * costs(2, 8, 2).float(), strength=1e-2, steps=200)
    assert torch.isfinite(plan).all()


@pytest.mark.parametrize(("options", "message"), [({"mass": 0.0}, "mass must lie"), ({"strength": 0.0}, "positive")])
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transport_plan(costs(1, 3, 2), **options)  # type: ignore[arg-type]
