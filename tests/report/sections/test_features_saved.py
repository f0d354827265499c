"""What kept features saved is said in the section of costs."""

from pathlib import Path

import pytest

from confed.report.sections.general import cost, features_saved
from confed.results.runs import load
from synthetic_study import changed, make_run

USED = {"used": True, "stage": "block 2", "computed": 2656, "reused": 28064, "held": 21_000_000, "exact": True}


def with_features(folder: Path, said: dict[str, object]) -> Path:
    run = make_run(folder / "fedavg" / "seed-0", "fedavg", 0)
    changed(run, **said)
    return run


def test_served_and_computed_examples_are_in_the_costs(tmp_path: Path) -> None:
    study = load(with_features(tmp_path, {"features": USED}))
    said = features_saved(study)
    assert "(up to block 2)" in said
    assert "28.1 k examples served" in said
    assert "2.66 k computed" in said
    assert "21.0 MB kept in memory; the same bits as without" in said
    assert said in cost(study)


def test_difference_is_said_where_bits_were_not_the_same(tmp_path: Path) -> None:
    study = load(with_features(tmp_path, {"features": USED | {"exact": False, "difference": 2e-6}}))
    assert "relative difference at most 2.0e-06" in features_saved(study)


@pytest.mark.parametrize(
    "said",
    [{}, {"features": {"used": False, "reason": "run.features.keep is 'off'"}}, {"features": USED | {"used": False}}],
)
def test_nothing_is_said_where_no_features_were_used(tmp_path: Path, said: dict[str, object]) -> None:
    study = load(with_features(tmp_path, said))
    assert features_saved(study) == ""
    assert "Features of frozen layers" not in cost(study)
