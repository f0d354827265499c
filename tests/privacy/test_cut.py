"""Privacy on the cut: what is sent, and what it costs against closed forms."""

import importlib
import math
import sys
from typing import Any

import mpmath
import pytest
import torch
from scipy import stats
from torch import nn

from confed.privacy import accountant
from confed.privacy.accountant import epsilon, releases_of
from confed.privacy.cut import CutPrivacy, first_of_each, refuse_mixing
from refusals import refuses
from repository import ROOT


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# What is sent ---------------------------------------------------------------------------------------------


def test_by_default_nothing_happens() -> None:
    v, generator = torch.randn(4, 3, generator=rng()), rng(1)
    before = generator.get_state()
    off = CutPrivacy()
    assert off.off
    assert off.activations(v, generator) is v
    assert off.gradients(v, generator) is v
    assert off.rows(torch.tensor([1, 1, 2])) is None
    CutPrivacy(clip=1.0).activations(v, generator)
    assert torch.equal(generator.get_state(), before)  # without noise nothing is drawn


def test_rows_are_clipped_one_by_one() -> None:
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-6.0, 8.0]])
    sent = CutPrivacy(clip=2.0).activations(v, rng())
    torch.testing.assert_close(sent, torch.tensor([[1.2, 1.6], [0.3, 0.4], [0.0, 0.0], [-1.2, 1.6]]))
    # Further dimensions belong to the row.
    deep = CutPrivacy(clip=2.0).activations(v.reshape(2, 2, 2), rng())
    torch.testing.assert_close(deep.flatten(1).norm(dim=1), torch.tensor([2.0, 2.0]))


def test_gradients_have_a_clip_and_a_noise_of_their_own() -> None:
    v = 5 * torch.randn(3, 4, generator=rng())
    privacy = CutPrivacy(gradient_clip=0.5)
    assert privacy.activations(v, rng()) is v
    torch.testing.assert_close(privacy.gradients(v, rng()).norm(dim=1), torch.full((3,), 0.5))


def test_noise_has_the_stated_spread() -> None:
    privacy = CutPrivacy(clip=0.5, noise=3.0)
    zeros = torch.zeros(300, 40)
    noise = privacy.activations(zeros, rng(7))
    assert torch.equal(noise, privacy.activations(zeros, rng(7)))
    assert not torch.equal(noise, privacy.activations(zeros, rng(8)))
    assert float(noise.std()) == pytest.approx(1.5, rel=0.02)
    assert stats.kstest(noise.flatten().numpy(), "norm", args=(0, 1.5)).pvalue > 0.01


def test_the_backward_pass_goes_through_the_clipping() -> None:
    v = torch.randn(4, 3, generator=rng(), dtype=torch.float64) + torch.tensor([[2.0], [0.0], [0.0], [2.0]])
    v.requires_grad_()
    privacy = CutPrivacy(clip=1.0, noise=0.3)
    assert torch.autograd.gradcheck(lambda v: privacy.activations(v, rng(1)), (v,))
    zero = torch.zeros(2, 3, requires_grad=True)
    privacy.activations(zero, rng()).sum().backward()
    assert zero.grad is not None
    assert torch.equal(zero.grad, torch.ones(2, 3))


def test_half_precision_rows_neither_overflow_nor_change_dtype() -> None:
    v = torch.full((2, 600), 60000.0, dtype=torch.float16)
    sent = CutPrivacy(clip=1.0).activations(v, rng())
    assert sent.dtype == torch.float16
    torch.testing.assert_close(sent.float().norm(dim=1), torch.ones(2), atol=1e-2, rtol=0)


def test_a_row_changes_with_its_own_example_alone() -> None:
    v = torch.randn(5, 4, generator=rng())
    privacy = CutPrivacy(clip=0.7, noise=0.2)
    other = v.clone()
    other[2] = 100.0
    a, b = privacy.activations(v, rng(3)), privacy.activations(other, rng(3))
    same = [0, 1, 3, 4]
    assert torch.equal(a[same], b[same])
    assert float((a[2] - b[2]).norm()) <= 2 * 0.7 + 1e-6  # the sensitivity


def test_each_answer_once() -> None:
    labels = torch.tensor([4, 1, 4, 0, 1, 9, 4])
    expected = [i for i, label in enumerate(labels.tolist()) if label not in labels.tolist()[:i]]
    assert first_of_each(labels).tolist() == expected == [0, 1, 3, 5]
    rows = CutPrivacy(distinct=True).rows(labels)
    assert rows is not None
    assert rows.tolist() == expected
    assert first_of_each(labels[:0]).tolist() == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip": 0.0}, r"privacy\.clip must be positive and finite, got 0\.0"),
        ({"clip": math.inf}, r"privacy\.clip must be positive and finite, got inf"),
        ({"clip": 1.0, "noise": -1.0}, r"privacy\.noise must be finite and not negative, got -1\.0"),
        ({"noise": 1.0}, r"privacy\.noise is in units of privacy\.clip, which must be given"),
        ({"gradient_noise": 1.0, "clip": 1.0}, r"privacy\.gradient_noise is in units of privacy\.gradient_clip"),
        ({"gradient_clip": math.nan}, r"privacy\.gradient_clip must be positive and finite, got nan"),
    ],
)
def test_faulty_settings_are_refused(values: dict[str, Any], message: str) -> None:
    refuses(message, CutPrivacy, **values)


# What it costs --------------------------------------------------------------------------------------------


def analytic(multiplier: float, delta: float) -> float:
    """Balle and Wang, "Improving the Gaussian mechanism for differential privacy" (2018), theorem 8, solved here."""
    with mpmath.workdps(60):
        s = mpmath.mpf(multiplier)

        def spent(e: Any) -> Any:
            return mpmath.ncdf(1 / (2 * s) - e * s) - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * s) - e * s)

        low, high = mpmath.mpf(0), mpmath.mpf(1)
        while spent(high) > delta:
            high *= 2
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if spent(middle) > delta else (low, middle)
        return float(high)


def renyi(multiplier: float, releases: int, delta: float) -> float:
    """Mironov, "Rényi differential privacy" (2017), propositions 1, 3 and 7, at the best alpha."""
    rate = releases / (2 * multiplier**2)
    # The minimum over alpha > 1 of alpha rate + log(1 / delta) / (alpha - 1).
    return rate + 2 * math.sqrt(rate * math.log(1 / delta))


@pytest.fixture
def library() -> None:
    pytest.importorskip("dp_accounting")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("noise", [0.2, 0.7, 1.0, 4.0, 30.0])
def test_one_release_costs_as_the_gaussian_mechanism(noise: float) -> None:
    spent = epsilon(noise, 1, 1e-5, "zero-out")
    exact = analytic(noise, 1e-5)
    assert exact <= spent <= exact * 1.0001 + 1e-4  # never understated
    # Replacing an example moves a row twice as far.
    assert epsilon(2 * noise, 1, 1e-5) == pytest.approx(spent, rel=1e-9)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("noise", "releases"), [(1.0, 2), (5.0, 40), (20.0, 100)])
def test_releases_add_up_within_published_bounds(noise: float, releases: int) -> None:
    spent = epsilon(noise, releases, 1e-6, "zero-out")
    # k Gaussian mechanisms are one with a multiplier sqrt(k) times smaller (Dong, Roth and Su, 2022, corollary 3.3).
    assert spent == pytest.approx(analytic(noise / math.sqrt(releases), 1e-6), rel=1e-3)
    assert spent < renyi(noise, releases, 1e-6)
    # The classical bound (Dwork and Roth, 2014, theorem A.1), where it holds: epsilon below 1.
    classical = math.sqrt(2 * math.log(1.25 / 1e-6) * releases) / noise
    assert classical >= 1 or spent < classical


def test_limiting_cases_need_no_arithmetic() -> None:
    assert epsilon(0.0, 3, 1e-5) == math.inf
    assert epsilon(2.0, 0, 1e-5) == 0
    assert epsilon(math.inf, 3, 1e-5) == 0
    assert releases_of(20) == 40
    assert releases_of(20, kinds=3) == 60


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    refuses(r"dp-accounting, which is not installed; .*pip install '\.\[privacy\]'", epsilon, 1.0, 1, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1, 1e-5), "noise must not be negative, got -1"),
        ((math.nan, 1, 1e-5), "noise must not be negative, got nan"),
        ((1.0, -1, 1e-5), "releases must not be negative, got -1"),
        ((1.0, 1, 0.0), r"delta must lie in \(0, 1\), got 0"),
        ((1.0, 1, 1e-5, "add"), "adjacency must be 'replace' or 'zero-out', got 'add'"),
    ],
)
def test_faulty_arguments_are_refused(arguments: Any, message: str) -> None:
    refuses(message, epsilon, *arguments)


def test_the_extra_that_the_message_names_exists() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(item.startswith("dp-accounting") for item in project["optional-dependencies"]["privacy"])
    assert importlib.import_module(accountant.__name__).epsilon is epsilon


def test_noise_behind_batch_normalisation_is_refused() -> None:
    mixing = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for privacy in (CutPrivacy(clip=1.0, noise=1.0), CutPrivacy(gradient_clip=1.0, gradient_noise=1.0)):
        refuses(r"1 \(BatchNorm1d\) normalises over the batch", refuse_mixing, privacy, mixing)
        refuse_mixing(privacy, nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    refuse_mixing(CutPrivacy(clip=1.0), mixing)  # nothing is guaranteed, so nothing is refused
