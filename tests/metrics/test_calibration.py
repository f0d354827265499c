"""Calibration sums, by hand and against a direct computation."""

import pytest
import torch

from confed.metrics.calibration import (
    calibration_tally,
    expected_calibration_error,
)
from refusals import refuses


def added(tallies):
    total = {}
    for tally in tallies:
        for key, (value, count) in tally.items():
            old = total.get(key, (0.0, 0.0))
            total[key] = (old[0] + value, old[1] + count)
    return total


def test_two_bins_by_hand():
    # (0, .5]: .5 and .25, one right; (.5, 1]: .75 and 1, both right.
    tally = calibration_tally(torch.tensor([0.5, 0.25, 0.75, 1.0]), torch.tensor([1.0, 0, 1, 1]), bins=2)
    assert tally == {
        "calibration/00/confidence": (0.75, 2),
        "calibration/00/correct": (1.0, 2),
        "calibration/01/confidence": (1.75, 2),
        "calibration/01/correct": (2.0, 2),
    }
    assert expected_calibration_error(tally) == pytest.approx((0.25 + 0.25) / 4)


def test_ece_equals_the_direct_computation_and_parts_add_up():
    rng = torch.Generator().manual_seed(0)
    confidence, correct = torch.rand(500, generator=rng), (torch.rand(500, generator=rng) < 0.4).float()
    direct = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            gap = (confidence[inside].mean() - correct[inside].mean()).abs().item()
            direct += gap * inside.float().mean().item()
    parts = [calibration_tally(a, b) for a, b in zip(confidence.split(64), correct.split(64), strict=True)]
    assert expected_calibration_error(added(parts)) == pytest.approx(direct, abs=1e-6)


def test_ends_of_the_range_are_in_the_outer_bins():
    assert set(calibration_tally(torch.tensor([0.0, 1.0]), torch.ones(2))) == {
        f"calibration/{i}/{name}" for i in ("00", "14") for name in ("confidence", "correct")
    }


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibration_tally(torch.tensor([1.5]), torch.ones(1)), r"confidence must lie in \[0, 1\], got 1.5"),
        (lambda: calibration_tally(torch.ones(2), torch.ones(1)), r"one shape \(B,\), got \(2,\) and \(1,\)"),
        (lambda: expected_calibration_error({"loss": (1.0, 1.0)}), r"with examples, got \['loss'\]"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    refuses(message, call)
