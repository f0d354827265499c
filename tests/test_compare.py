"""Comparing methods over seeds and examples."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import stats

from confed.results.compare import Comparison, compare
from confed.results.paired import Difference
from test_results_runs import CLIENTS, make_run, make_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("compare") / "study", seeds=3)


def found(comparison: Comparison, measure: str, method: str) -> Difference:
    return next(d for d in comparison.differences if (d.measure, d.method) == (measure, method))


def test_seeds_agree_with_scipy(study: Path) -> None:
    comparison = compare([study])
    personal = {
        method: [json.loads((study / method / f"seed-{s}/summary.json").read_text())["personal_mean"] for s in range(3)]
        for method in ("fedavg", "fedp3", "local", "fedprox", "central")
    }
    expected = stats.ttest_rel(personal["fedp3"], personal["fedavg"])
    difference = found(comparison, "personal_mean", "fedp3")
    assert difference.over_seeds is not None
    assert difference.over_seeds.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert (difference.over_seeds.low, difference.over_seeds.high) == pytest.approx((low, high))
    p = {m: stats.ttest_rel(personal[m], personal["fedavg"]).pvalue for m in personal if m != "fedavg"}
    holm = max(min(1.0, (4 - i) * q) for i, q in enumerate(sorted(p.values())) if q <= p["fedp3"])
    assert difference.seeds_p == pytest.approx(holm)


def test_examples_are_paired_within_seeds(study: Path) -> None:
    won = lost = 0
    for seed in range(3):
        a, b = (load_file(study / m / f"seed-{seed}/predictions.safetensors") for m in ("fedp3", "fedavg"))
        for client in CLIENTS:
            x, y = a[f"personal/{client}/correct"], b[f"personal/{client}/correct"]
            won, lost = won + int((x > y).sum()), lost + int((x < y).sum())
    difference = found(compare([study]), "personal_mean", "fedp3")
    assert difference.discordant is not None
    assert (difference.discordant.only_a, difference.discordant.only_b) == (won, lost)
    assert difference.discordant.p == pytest.approx(stats.binomtest(won, won + lost).pvalue)
    assert difference.over_examples is not None
    assert difference.over_examples.n == 800  # four clients of 200; seeds are averaged, not added
    assert difference.over_examples.difference == pytest.approx((won - lost) / 2400)


def test_method_without_global_model_is_compared_where_it_can_be(study: Path) -> None:
    comparison = compare([study])
    assert "local" in comparison.values["personal_mean"]
    assert "local" not in comparison.values["global_unseen_mean"]
    assert [d.measure for d in comparison.differences if d.method == "local"] == ["personal_mean"]


def test_three_seeds_claim_nothing(study: Path) -> None:
    few = compare([study])
    assert not any(d.significant for d in few.differences)
    assert any("With 3 seeds no significance is claimed" in remark for remark in few.remarks)
    assert any("cannot give a p-value below 0.25" in remark for remark in few.remarks)


def test_five_seeds_with_a_clear_difference(tmp_path: Path) -> None:
    for seed in range(5):
        make_run(tmp_path / "fedavg" / f"seed-{seed}", "fedavg", seed)
        make_run(tmp_path / "fedp3" / f"seed-{seed}", "fedp3", seed, shift=0.2)
    comparison = compare([tmp_path])
    assert found(comparison, "personal_mean", "fedp3").significant
    assert next(row[4].text for row in comparison.table().rows if row[1].text == "FedP³").endswith("*")
    assert not any("no significance" in remark for remark in comparison.remarks)
    assert comparison.warnings == ()


def test_other_settings_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "x", "fedavg")
    make_run(tmp_path / "y", "fedp3", train=800)
    comparison = compare([tmp_path / "x", tmp_path / "y"])
    assert comparison.warnings == ("fedp3 and fedavg differ in more than the algorithm: data.train (800, not 400)",)
    assert any("One seed in common" in remark for remark in comparison.remarks)


def test_variants_of_one_algorithm_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "x", "fedavg")
    make_run(tmp_path / "y", "fedprox", extra="mu = 0.1")
    make_run(tmp_path / "z", "fedprox", extra="mu = 1.0")
    comparison = compare([tmp_path / name for name in "xyz"])
    assert list(comparison.labels) == ["fedavg", "fedprox (mu=0.1)", "fedprox (mu=1.0)"]
    clash = compare([tmp_path / "x", make_run(tmp_path / "again", "fedavg")], reference="fedavg (x)")
    assert list(clash.labels) == ["fedavg (x)", "fedavg (again)"]


def test_soft_scores_and_missing_predictions(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    make_run(tmp_path / "x", "fedavg")
    path = make_run(tmp_path / "y", "fedp3") / "predictions.safetensors"
    save_file({key: value * np.float32(0.5) for key, value in load_file(path).items() if "correct" in key}, path)
    soft = found(compare([tmp_path / "x", tmp_path / "y"]), "personal_mean", "fedp3")
    assert soft.discordant is None
    assert soft.over_examples is not None
    path.unlink()
    comparison = compare([tmp_path / "x", tmp_path / "y"])
    assert found(comparison, "personal_mean", "fedp3").over_examples is None
    assert any("No tests over examples" in remark for remark in comparison.remarks)


def test_writers_agree(study: Path) -> None:
    comparison = compare([study])
    rows = list(csv.DictReader(io.StringIO(comparison.csv())))
    assert len(rows) == 13
    fedp3 = next(row for row in rows if row["method"] == "FedP³")
    difference = found(comparison, "personal_mean", "fedp3")
    assert float(fedp3["difference (points)"]) == pytest.approx(100 * difference.points)
    assert float(fedp3["over seeds p"]) == pytest.approx(difference.seeds_p)
    assert comparison.markdown().count("reference |") == 3
    assert r"\begin{tabular}" in comparison.latex()
    assert comparison.rich().row_count == 13


def test_unknown_reference_and_nothing_to_compare(study: Path) -> None:
    with pytest.raises(ValueError, match=r"one of local, fedavg.* got 'fedsgd'"):
        compare([study], reference="fedsgd")
    with pytest.raises(ValueError, match="at least one run or study"):
        compare([])
