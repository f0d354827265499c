"""Comparisons of methods: differences and tests, verdicts, and families of tests of sweeps."""

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import stats

from confed.comparison.paired import LEVEL, Difference
from confed.metrics.statistics import holm
from confed.report.comparison import Comparison, compare, compare_runs, verdict
from confed.report.tables.sweep import finished_stages
from confed.results.runs import StudyResults, load
from confed.results.sweep import Point, Sweep
from refusals import refuses
from synthetic_study import CLIENTS, changed, make_run, make_study


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
    p = sorted(stats.ttest_rel(personal[a], personal[b]).pvalue for a, b in itertools.combinations(personal, 2))
    assert len(p) == 10  # all pairs of five methods, whichever a table shows
    holm = max(min(1.0, (10 - i) * q) for i, q in enumerate(p) if q <= expected.pvalue * (1 + 1e-9))
    assert difference.seeds_p == pytest.approx(holm)


def test_a_pair_has_one_p_value_in_every_table(study: Path) -> None:
    methods = ("local", "fedavg", "fedp3", "fedprox", "central")
    alone = {name: compare([study], name) for name in methods}
    together = compare([study], methods)
    for a, b in itertools.permutations(methods, 2):
        own, mirrored, both = (
            next(d for d in one.against(reference) if (d.measure, d.method) == ("personal_mean", method))
            for one, reference, method in ((alone[a], a, b), (alone[b], b, a), (together, a, b))
        )
        assert own == both
        assert (own.seeds_p, own.examples_p, own.equivalence_p) == (
            mirrored.seeds_p, mirrored.examples_p, mirrored.equivalence_p,
        )  # fmt: skip
        assert own.no_worse_p == mirrored.no_better_p
        assert own.by_place_p == pytest.approx(mirrored.by_place_p)
        assert own.points == -mirrored.points
        assert own.over_examples is not None
        assert mirrored.over_examples is not None
        assert own.over_examples.low == -mirrored.over_examples.high
        assert own.signs is not None
        assert mirrored.signs is not None
        assert (own.signs.won, own.signs.lost) == (mirrored.signs.lost, mirrored.signs.won)
        assert own == mirrored.mirrored


def mean_differences(study: Path, clients: list[str], method: str = "fedp3", reference: str = "fedavg") -> np.ndarray:
    """Each question's difference, its mean over the three seeds; clients behind one another."""
    files = [
        [load_file(study / m / f"seed-{s}/predictions.safetensors") for s in range(3)] for m in (method, reference)
    ]
    a, b = (
        [np.concatenate([file[f"personal/{client}/correct"] for client in clients]) for file in side] for side in files
    )
    return np.mean(np.subtract(a, b), axis=0).round(9)


def test_examples_are_paired_and_have_one_vote(study: Path) -> None:
    d = mean_differences(study, CLIENTS)
    difference = found(compare([study]), "personal_mean", "fedp3")
    assert difference.signs is not None
    assert (difference.signs.won, difference.signs.lost, difference.signs.n) == ((d > 0).sum(), (d < 0).sum(), 800)
    assert difference.signs.difference == pytest.approx(difference.points)
    assert difference.over_examples is not None
    assert difference.over_examples.n == 800  # four clients of 200; seeds are averaged, not added
    assert difference.over_examples.difference == pytest.approx(d.mean())


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
    recipe = make_run(tmp_path / "z", "local") / "recipe.toml"  # of a version with a key more, which is empty
    recipe.write_text(recipe.read_text() + '[task]\nheadline = ""\n')
    assert compare([tmp_path / "x", tmp_path / "z"]).warnings == ()


def test_seeds_with_other_settings_are_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{method}-{seed}", method, seed) for seed in (0, 1) for method in ("fedavg", "fedp3")]
    assert compare(runs).warnings == ()
    for folder in runs[2:]:  # both methods of seed 1: within each seed, the methods still agree
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe.read_text().replace("lr = 0.003", "lr = 0.3"))
    comparison = compare(runs)
    assert list(comparison.labels) == ["fedavg", "fedp3"]
    change = "differ in more than the seed: local.lr (0.3, not 0.003)"
    assert comparison.warnings == (f"the seeds of fedavg {change}", f"the seeds of fedp3 {change}")


def test_tuned_settings_are_named_once_and_no_warning(tmp_path: Path) -> None:
    study = make_rows(tmp_path / "study", {"fedavg": "fedavg", "fedp3": "fedp3"})
    for seed in (0, 1):
        recipe = study / f"fedp3/seed-{seed}/recipe.toml"
        recipe.write_text(recipe.read_text().replace("lr = 0.003", "lr = 0.3"))
    assert compare([study]).warnings == (
        "fedp3 and fedavg differ in more than the algorithm: local.lr (0.3, not 0.003)",
    )
    changed(study, tuned={"fedp3": {"lam": 0.1, "local.lr": 0.3}})
    comparison = compare([study])
    assert comparison.warnings == ()
    said = [remark for remark in comparison.remarks if "local.lr" in remark]
    assert len(said) == 1
    assert said[0].startswith("Tuned on validation data: FedP³ lam=0.1, local.lr=0.3. Not tuned: FedAvg. A difference")
    assert "Tuned on validation data" in comparison.markdown()


def test_equal_results_are_no_evidence_of_equality(tmp_path: Path) -> None:
    comparison = compare([make_rows(tmp_path / "study", {"fedavg": "fedavg", "twin": "fedavg"})])
    difference = found(comparison, "personal_mean", "twin")
    assert difference.points == 0
    assert difference.equivalence is not None
    assert difference.equivalence.p is None
    assert any("there is no spread" in remark for remark in comparison.remarks)


def test_the_same_difference_in_all_seeds_is_no_claim(tmp_path: Path) -> None:
    rows = {"fedavg": "fedavg", "twin": "fedavg", "shifted": "fedavg", "fedp3": "fedp3", "fedprox": "fedprox"}
    study = make_rows(tmp_path / "study", rows, seeds=5)
    for path in (study / "shifted").glob("seed-*/summary.json"):  # the same four points in every seed
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"personal_mean": content["personal_mean"] + 0.04}))
    comparison = compare([study])
    for row, points in (("twin", 0.0), ("shifted", 0.04)):
        d = found(comparison, "personal_mean", row)
        assert d.points == pytest.approx(points)
        assert (d.seeds_p, d.no_worse_p, d.equivalence_p) == (None, None, None)
        assert (d.significant, d.no_worse, d.equivalent) == (False, False, False)
    others = [found(comparison, "personal_mean", row) for row in ("fedp3", "fedprox")]
    values = comparison.values["personal_mean"]
    p = {d.method: stats.ttest_rel([*values[d.method].values()], [*values["fedavg"].values()]).pvalue for d in others}
    rows = {row: [*values[row].values()] for row in values}
    steady = [{"twin", "fedavg"}, {"shifted", "fedavg"}, {"twin", "shifted"}]  # no spread, hence no p-value
    pairs = [set(pair) for pair in itertools.combinations(rows, 2)]
    tested = {frozenset(p): stats.ttest_rel(*(rows[r] for r in p)).pvalue for p in pairs if p not in steady}
    assert len(tested) == 7  # the others count as tests that could have been made
    for method in p:
        q = tested[frozenset({method, "fedavg"})]
        ranked = [
            min(1.0, (10 - i) * other) for i, other in enumerate(sorted(tested.values())) if other <= q * (1 + 1e-9)
        ]
        assert found(comparison, "personal_mean", method).seeds_p == pytest.approx(max(ranked))
    lines = csv.DictReader(io.StringIO(comparison.csv()))
    line = next(one for one in lines if one["method"].endswith("(shifted)") and one["measure"].startswith("personal"))
    assert {line[key] for key in line if "over seeds p" in key or "margin" in key} == {""}


def test_clients_that_left_are_in_no_test(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / method, method) for method in ("fedavg", "fedp3")]
    means: list[float] = []
    for folder in folders:
        content = json.loads((folder / "summary.json").read_text())
        changed(folder, ("personal_mean",), left=["school"])
        means.append(float(np.mean([content["personal"][client] for client in CLIENTS if client != "school"])))
    difference = found(compare(folders), "personal_mean", "fedp3")
    assert difference.points == pytest.approx(means[1] - means[0])
    assert difference.over_examples is not None
    assert difference.over_examples.n == 3 * 200
    assert difference.over_examples.difference == pytest.approx(means[1] - means[0])
    assert list(difference.by_place) == [client for client in CLIENTS if client != "school"]


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
    assert soft.signs is not None
    assert soft.over_examples is not None
    path.unlink()
    comparison = compare([tmp_path / "x", tmp_path / "y"])
    assert found(comparison, "personal_mean", "fedp3").over_examples is None
    assert any("No tests over examples" in remark for remark in comparison.remarks)


def test_all_writers_agree_on_the_differences(study: Path) -> None:
    comparison = compare([study])
    rows = list(csv.DictReader(io.StringIO(comparison.csv())))
    assert len(rows) == 13
    fedp3 = next(row for row in rows if row["method"] == "FedP³")
    difference = found(comparison, "personal_mean", "fedp3")
    assert float(fedp3["difference (points)"]) == pytest.approx(100 * difference.points)
    assert float(fedp3["over seeds p"]) == pytest.approx(difference.seeds_p)
    assert comparison.markdown().count("reference |") == 3
    assert r"\begin{tabular}" in comparison.latex()
    assert sum(line.startswith("|") for line in comparison.markdown().splitlines()) > 13


def make_rows(folder: Path, rows: dict[str, str], seeds: int = 2) -> Path:
    """A study whose rows have names of their own: row -> which synthetic method it is."""
    runs = [{"method": row, "seed": s, "folder": f"{row}/seed-{s}"} for row in rows for s in range(seeds)]
    for run in runs:
        make_run(folder / str(run["folder"]), rows[str(run["method"])], int(str(run["seed"])))
    (folder / "summary.json").write_text(json.dumps({"methods": list(rows), "labels": {}, "runs": runs}))
    return folder


def test_default_references_are_fedavg_and_fedavg_ft(tmp_path: Path) -> None:
    rows = {"fedadam": "fedavg", "fedavg": "fedavg", "fedavg_ft": "fedp3", "local": "local"}
    study = make_rows(tmp_path / "study", rows)
    for run in (study / "fedavg_ft").iterdir():
        changed(run, algorithm="fedavg_ft")
    comparison = compare([study])
    assert comparison.references == ("fedavg", "fedavg_ft")  # not fedadam, although its algorithm is fedavg
    one = {(d.measure, d.method): d.points for d in comparison.against("fedavg")}
    other = {(d.measure, d.method): d.points for d in comparison.against("fedavg_ft")}
    assert one["personal_mean", "fedavg_ft"] == pytest.approx(-other["personal_mean", "fedavg"])
    names = ["FedAvg (fedavg)", "FedP³"]  # two rows share the label FedAvg
    assert [table.title.split(" to ")[1] for table in comparison.tables()] == [f"{name} in points" for name in names]
    lines = list(csv.DictReader(io.StringIO(comparison.csv())))
    assert [line["reference"] for line in lines] == [name for name in names for _ in range(10)]
    assert comparison.latex().count(r"\begin{table}") == 2 * 2  # differences, places
    files = comparison.files()
    lines = list(csv.DictReader(io.StringIO(files["compare-clients.csv"])))
    each = 3 + 2 + 2  # local training has no global model
    assert [line["reference"] for line in lines] == [label for label in names for _ in range(each)]
    assert any(key.endswith("school p uncorrected") for key in lines[0])


def test_reference_without_fedavg_is_the_first_federated_method(tmp_path: Path) -> None:
    study = make_rows(tmp_path / "study", {"central": "central", "mine": "fedp3", "other": "fedprox"})
    assert compare([study]).references == ("mine",)
    assert compare([study], ["other", "mine", "other"]).references == ("other", "mine")


def test_equivalence_within_a_margin(study: Path) -> None:
    values = compare([study]).values["personal_mean"]
    d = np.subtract(list(values["fedprox"].values()), list(values["fedavg"].values()))
    comparison = compare([study], margin=0.03)
    difference = found(comparison, "personal_mean", "fedprox")
    assert difference.equivalence is not None
    low = stats.ttest_1samp(d, -0.03, alternative="greater").pvalue
    high = stats.ttest_1samp(d, 0.03, alternative="less").pvalue
    assert difference.equivalence.no_worse_p == pytest.approx(low)
    assert difference.equivalence.p == pytest.approx(max(low, high))
    assert difference.no_worse_p is not None
    assert difference.no_worse_p >= low  # corrected over methods
    assert not difference.no_worse  # three seeds
    assert "p, margin 3 no worse" in comparison.csv()
    assert any("less than 3 points" in remark for remark in comparison.table_remarks)


def test_five_seeds_claim_that_a_better_method_is_no_worse(tmp_path: Path) -> None:
    for seed in range(5):
        make_run(tmp_path / "fedavg" / f"seed-{seed}", "fedavg", seed)
        make_run(tmp_path / "fedp3" / f"seed-{seed}", "fedp3", seed, shift=0.2)
    difference = found(compare([tmp_path]), "personal_mean", "fedp3")
    assert difference.no_worse
    assert not difference.equivalent


def test_sign_flips_place_by_place(study: Path) -> None:
    comparison = compare([study])
    difference = found(comparison, "personal_mean", "fedp3")
    assert list(difference.by_place) == CLIENTS  # in the federation's order
    d = mean_differences(study, ["school"])
    won, lost = int((d > 0).sum()), int((d < 0).sum())
    test = difference.by_place["school"]
    assert (test.won, test.lost) == (won, lost)
    assert test.exact
    signs = np.random.default_rng(0).choice([-1, 1], (4000, len(d)))
    assert test.p == pytest.approx((np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean(), abs=0.03)
    assert difference.by_place_p["school"] == pytest.approx(min(1.0, 10 * 4 * test.p))  # ten pairs, four clients
    table = comparison.clients()
    assert table is not None
    row = next(row for row in table.rows if row[1].text == "FedP³")
    assert row[2 + 3 * CLIENTS.index("school")].text == f"{won}:{lost}"


def test_unknown_reference_and_nothing_to_compare(study: Path) -> None:
    refuses(r"one of local, fedavg.* got 'fedsgd'", compare, [study], reference="fedsgd")
    refuses("at least one run or study", compare, [])
    refuses("at least one of local, fedavg", compare, [study], reference=[])
    refuses(r"margin must lie between 0 and 1 .* got 1", compare, [study], margin=1)


SPREAD = [0.000, 0.004, -0.003, 0.002, -0.001]
NOISE = [0.003, -0.004, 0.002, -0.003, 0.004]


def with_values(folder: Path, values: Mapping[str, Sequence[float]], key: str = "personal_mean") -> None:
    """Other means of the methods' seeds."""
    for method, own in values.items():
        for seed, value in enumerate(own):
            changed(folder / method / f"seed-{seed}", **{key: value})


def compared(folder: Path) -> tuple[StudyResults, Comparison]:
    judged = load(folder)
    return judged, compare_runs(judged.runs)


def personal(folder: Path) -> str:
    text = verdict(*compared(folder))
    return text[: text.index(" The global model")]


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """Five seeds: FedP³ is best, FedProx close to it, the others far behind; central is ten points ahead of local."""
    folder = make_study(tmp_path / "study", seeds=5)
    values = {
        "fedp3": [0.80 + s for s in SPREAD], "fedprox": [0.798 + s + n for s, n in zip(SPREAD, NOISE, strict=True)],
        "fedavg": [0.7 + s + n for s, n in zip(SPREAD, NOISE, strict=True)],
        "local": [0.6 + 2 * s for s in SPREAD], "central": [0.9 - s for s in SPREAD],
    }  # fmt: skip
    with_values(folder, values)
    return folder


def test_two_plain_sentences(judged: Path) -> None:
    assert personal(judged) == (
        "Personal models on their own clients' data: FedP³ has the highest mean (80.0 %), 0.2 points ahead of FedProx. "
        "Over 5 seeds FedP³ is ahead of Local and FedAvg (p below 0.001); the difference of FedP³ to FedProx may be "
        "noise (p at least 0.764; a true difference of 0.6 points would show in 4 of 5 cases)."
    )
    single = load(judged / "fedavg" / "seed-0")
    assert verdict(single, compare_runs(single.runs)) == ""


def test_verdict_and_tables_cannot_disagree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = make_study(tmp_path / "study", seeds=5)
    methods = ("local", "fedavg", "fedprox", "fedp3")
    outcomes: set[str] = set()
    for _ in range(6):
        means = rng.uniform(0.55, 0.62, len(methods))
        values = {m: (mean + rng.normal(0, 0.008, 5)).tolist() for m, mean in zip(methods, means, strict=True)}
        with_values(folder, values | {"central": [0.9] * 5})
        text, best = personal(folder), max(values, key=lambda m: float(np.mean(values[m])))
        comparison = compare_runs(load(folder).runs, best)
        table = comparison.table()
        ahead, _, level = text.partition("the difference of")
        for row in table.rows:
            others = [comparison.labels[m] for m in methods if m != best]
            if row[0].text != "personal on own data" or row[1].text not in others:
                continue
            claimed = f" {row[1].text}" in ahead.partition("is ahead of")[2] or "every other method" in ahead
            p = row[[c.full_title for c in table.columns].index("over seeds p")].value
            assert p is not None
            assert claimed == (p <= LEVEL) == row[4].text.endswith("*")
            assert claimed != (f" {row[1].text}" in level or "any other method" in level)
            outcomes.add(f"{claimed}")
    assert outcomes == {"True", "False"}


def test_few_seeds_are_judged_on_examples(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", seeds=1)
    with_values(folder, {"central": [0.99]})
    _, comparison = compared(folder)
    text = personal(folder)
    best = text.partition("clients' data: ")[2].split(" ")[0]
    assert f"On these test examples (1 seed, others may differ) {best}" in text
    tested = [d for d in comparison.pairs if d.measure == "personal_mean" and "central" not in (d.method, d.reference)]
    assert len(tested) == 6
    assert all(d.examples_p is not None and d.seeds_p is None for d in tested)


def test_a_measure_without_headroom_cannot_be_judged(judged: Path) -> None:
    with_values(judged, {"central": [0.64] * 5})
    text = personal(judged)
    said = "gate a fails, Central is 3.9 points ahead of Local and at least 5 ahead are needed"
    assert text.endswith(f"Nothing can be judged here: {said}.")
    assert "noise" not in text
    with_values(judged, {"central": [0.651] * 5})
    assert "Nothing can be judged" not in personal(judged)


def test_unseen_places_have_a_gate_of_their_own(judged: Path) -> None:
    key = "global_unseen_mean"
    with_values(judged, {"fedavg": [0.6] * 5, "central": [0.567] * 5, "fedp3": [0.61] * 5, "fedprox": [0.5] * 5}, key)
    text = verdict(*compared(judged))
    assert "Nothing can be judged" not in text[: text.index("The global model")]
    assert text.endswith("gate a fails, Central is 3.3 points behind FedAvg and at least 5 ahead are needed.")
    with_values(judged, {"central": [0.65] * 5}, key)
    assert "Nothing can be judged" not in verdict(*compared(judged))


def test_equal_seeds_are_level_and_shifts_untested(judged: Path) -> None:
    best = [0.80 + s for s in SPREAD]
    with_values(judged, {"fedprox": best, "fedavg": [v - 0.1 for v in best]})
    text = personal(judged)
    assert "FedAvg is not tested" in text
    assert "may be noise (p at least 1.000" in text
    assert "share the highest mean (80.0 %)" in text


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
