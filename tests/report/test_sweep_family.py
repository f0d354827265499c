"""Family of tests of a sweep's table: all pairs of methods at all values."""

import json
from pathlib import Path

import pytest

from confed.metrics.statistics import holm
from confed.report.tables.sweep import finished_stages
from confed.results.sweep import Point, Sweep
from synthetic_study import make_run, make_study


def test_a_sweep_s_table_is_one_family_of_all_pairs(tmp_path: Path) -> None:
    points = []
    for value in ("1", "2"):
        make_study(tmp_path / value, seeds=3)
        points.append(Point({"data.shards": value}, value))
    found = finished_stages(tmp_path, Sweep("fedvqa_scenes", "data.shards", tuple(points), ("fedavg",)))
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


def test_pairs_without_a_common_seed_count_in_the_family(tmp_path: Path) -> None:
    study = make_study(tmp_path / "1", seeds=2)
    index = json.loads((study / "summary.json").read_text())
    index["runs"] = [run for run in index["runs"] if run["method"] != "local"]
    make_run(study / "local/seed-7", "local", 7)
    index["runs"].append({"method": "local", "seed": 7, "folder": "local/seed-7"})
    (study / "summary.json").write_text(json.dumps(index))
    sweep = Sweep("fedvqa_scenes", "data.shards", (Point({"data.shards": "1"}, "1"),), ("fedavg",))
    (stage,) = finished_stages(tmp_path, sweep)
    tested = {method: d.over_seeds.p for method, d in stage.differences.items() if d.over_seeds and d.over_seeds.p}
    assert set(tested) == {"fedprox", "fedp3", "central"}
    pairs = [d for d in stage.comparison.pairs if d.measure == stage.measure and d.over_seeds and d.over_seeds.p]
    smallest = min(pairs, key=lambda d: d.over_seeds.p if d.over_seeds and d.over_seeds.p else 1.0)
    assert smallest.seeds_p == pytest.approx(min(1.0, 10 * smallest.over_seeds.p))  # ten pairs, six of them tested
    measured = [d for d in stage.comparison.pairs if d.measure == stage.measure]
    for method, d in stage.differences.items():
        own = next(pair for pair in measured if {pair.method, pair.reference} == {method, "fedavg"})
        assert d.seeds_p == own.seeds_p
        assert d.examples_p == own.examples_p
