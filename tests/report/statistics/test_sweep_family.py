"""Family of tests of a sweep's table: all pairs of methods at all values."""

from pathlib import Path

import pytest

from confed.metrics.statistics import holm
from confed.report.statistics.sweep import stages
from confed.results.sweep import Point, Sweep
from synthetic_study import make_study


def test_a_sweep_s_table_is_one_family_of_all_pairs(tmp_path: Path) -> None:
    points = []
    for value in ("1", "2"):
        make_study(tmp_path / value, seeds=3)
        points.append(Point({"data.shards": value}, value))
    found = stages(tmp_path, Sweep("fedvqa_scenes", "data.shards", tuple(points), ("fedavg",)))
    assert [stage.measure for stage in found] == ["personal_mean"] * 2
    pairs = [(i, d) for i, stage in enumerate(found) for d in stage.comparison.pairs if d.measure == stage.measure]
    assert len(pairs) == 2 * 10  # five methods at two values
    p = {
        f"{i} {d.reference} {d.method}": d.over_seeds.p for i, d in pairs if d.over_seeds and d.over_seeds.p is not None
    }
    expected = holm(p, tests=20).adjusted
    for i, stage in enumerate(found):
        assert set(stage.differences) == {"local", "fedprox", "fedp3", "central"}
        for method, d in stage.differences.items():
            assert d.reference == "fedavg"
            key = next(key for key in expected if set(key.split()) == {str(i), "fedavg", method})
            assert d.seeds_p == pytest.approx(expected[key])
