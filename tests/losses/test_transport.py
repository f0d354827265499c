"""Transport plans against linear programmes of scipy at small sizes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.losses.transport import _by_scaling, transport_plan


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
    with pytest.raises(ValueError, match=message):
        transport_plan(costs(1, 3, 2), **options)  # type: ignore[arg-type]
