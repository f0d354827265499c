"""Tests over examples are of the tables' means over clients, and pair examples by their names."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confed.comparison import Examples
from confed.comparison.paired import LEVEL, MOST_SIGNS, Difference, by_place_test
from confed.comparison.pairing import aligned, over_seeds
from confed.metrics.stratified import sign_flip
from confed.report.comparison import Comparison, compare
from confed.results.records import record_of
from confed.results.run_files import name_hashes
from confed.results.runs import load
from synthetic_study import CLIENTS, changed, make_run

TEST_MISSING = 'missing = { image = 0.3, when = "test" }\n'


def personal(comparison: Comparison) -> Difference:
    return next(d for d in comparison.differences if d.measure == "personal_mean")


def rewritten(folder: Path, scores: dict[str, np.ndarray], names: bool | Callable[[str], Sequence[str]] = True) -> Path:
    """A run whose personal models have these scores, in the summary too; with names of examples or without."""
    kept: dict[str, np.ndarray] = {}
    for place, values in scores.items():
        kept[f"personal/{place}/correct"] = values.astype(np.float32)
        kept[f"personal/{place}/prediction"] = np.zeros(len(values), np.int64)
        if names:
            of = names(place) if callable(names) else [f"{place}/{i}" for i in range(len(values))]
            kept[f"names/{place}"] = name_hashes(of)
    save_file(kept, folder / "predictions.safetensors")
    values = {place: float(v.mean()) for place, v in scores.items()}
    mean = float(np.mean([*values.values()]))
    changed(folder, personal=values, personal_mean=mean, clients=list(scores), global_seen={}, global_seen_mean=None)
    return folder


def shares(right: int, of: int, start: int = 0) -> np.ndarray:
    values = np.zeros(of)
    values[(start + np.arange(right)) % of] = 1
    return values


def test_differences_lie_in_intervals_with_unequal_clients(tmp_path: Path) -> None:
    # 1000 questions of which the method wins a few, and 100 of which it loses many: means over clients say it loses.
    rewritten(make_run(tmp_path / "a", "fedavg"), {"large": shares(500, 1000), "small": shares(70, 100)})
    rewritten(make_run(tmp_path / "b", "fedp3"), {"large": shares(530, 1000), "small": shares(50, 100)})
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    d = personal(comparison)
    assert d.points == pytest.approx(-0.085)
    assert d.over_examples is not None
    assert d.signs is not None
    assert d.over_examples.difference == pytest.approx(d.points)
    assert d.over_examples.low < d.points < d.over_examples.high < 0
    assert d.signs.p < 0.001  # although more questions are won than lost
    assert (d.signs.won, d.signs.lost) == (30, 20)
    (row,) = (
        r
        for r in csv.DictReader(io.StringIO(comparison.csv()))
        if (r["method"], r["measure"][:8]) == ("FedP³", "personal")
    )
    low, value, high = (
        float(row[key]) for key in ("over examples low (points)", "difference (points)", "over examples high (points)")
    )
    assert low < value < high
    assert not any("McNemar" in key or "won:lost" in key for key in row)


def reordered_runs(root: Path, seeds: int, names: bool, missing: bool = True) -> list[Path]:
    """Two methods that do not differ, whose rows stand in another order for every seed."""
    folders: list[Path] = []
    rng = np.random.default_rng(8)
    hard = {client: rng.random(60) for client in CLIENTS[:2]}
    for seed in range(seeds):
        order = np.random.default_rng([9, seed]).permutation(60)
        for method in ("fedavg", "fedp3"):
            folder = make_run(root / f"{method}-{seed}", method, seed)
            own = np.random.default_rng([seed, len(method)])
            scores = {c: (0.9 * h + 0.1 * own.random(60) < 0.55).astype(float)[order] for c, h in hard.items()}
            rewritten(folder, scores, (lambda place, o=order: [f"{place}/{i}" for i in o]) if names else False)
            if missing:
                recipe = folder / "recipe.toml"
                recipe.write_text(recipe.read_text().replace('setting = "C"\n', f'setting = "C"\n{TEST_MISSING}'))
            folders.append(folder)
    return folders


def test_rows_in_another_order_for_each_seed_are_paired_by_name(tmp_path: Path) -> None:
    folders = reordered_runs(tmp_path / "x", 3, names=True)
    comparison = compare(folders)
    d = personal(comparison)
    total = np.zeros((2, 60))
    for seed in range(3):
        order = np.random.default_rng([9, seed]).permutation(60)
        a, b = (load_file(tmp_path / f"x/{m}-{seed}/predictions.safetensors") for m in ("fedp3", "fedavg"))
        for i, client in enumerate(CLIENTS[:2]):
            total[i, order] += a[f"personal/{client}/correct"] - b[f"personal/{client}/correct"]
    assert d.signs is not None
    assert (d.signs.won, d.signs.lost) == ((total > 0).sum(), (total < 0).sum())
    assert not any("by position" in remark for remark in comparison.remarks)


def test_older_folders_are_paired_by_position(tmp_path: Path) -> None:
    safe = compare(reordered_runs(tmp_path / "safe", 2, names=False, missing=False))
    assert personal(safe).signs is not None
    assert any("paired by position" in remark for remark in safe.remarks)
    refused = compare(reordered_runs(tmp_path / "lost", 2, names=False))
    assert personal(refused).signs is None
    assert personal(refused).over_seeds is not None
    assert "reorders them by seed" in personal(refused).unpaired
    said = "No tests over examples: FedP³ against FedAvg (personal on own data): sports: predictions carry no names"
    assert any(remark.startswith(said) for remark in refused.remarks)
    one = compare(reordered_runs(tmp_path / "one", 1, names=False))
    assert personal(one).signs is not None  # one seed has one order


def test_other_examples_of_the_same_number_are_refused(tmp_path: Path) -> None:
    rewritten(make_run(tmp_path / "a", "fedavg"), {"home": shares(5, 10)})
    rewritten(make_run(tmp_path / "b", "fedp3"), {"home": shares(6, 10)}, lambda _: [f"other/{i}" for i in range(10)])
    d = personal(compare([tmp_path / "a", tmp_path / "b"]))
    assert d.over_examples is None
    assert d.by_place == {}
    assert (d.refused, d.unpaired) == ("home: other test examples (seed 0)", "")


def test_means_of_other_examples_are_not_tested_over_seeds(tmp_path: Path) -> None:
    for seed in range(5):
        for method, right in (("fedavg", 5), ("fedp3", 6 + seed % 2)):
            folder = make_run(tmp_path / f"{method}-{seed}", method, seed)
            rewritten(folder, {"home": shares(right, 10)}, lambda _, m=method: [f"{m}/{i}" for i in range(10)])
    d = personal(compare([*tmp_path.iterdir()]))
    assert d.refused == "home: other test examples (seed 0)"
    assert (d.over_seeds, d.seeds_p, d.equivalence) == (None,) * 3
    assert not d.significant


def test_means_over_other_places_are_not_tested(tmp_path: Path) -> None:
    # On the two clients that both have nothing differs; the third one is easy.
    for seed in range(5):
        own = {"x": shares(30 + seed, 60), "y": shares(20, 60)}
        rewritten(make_run(tmp_path / f"a{seed}", "fedavg", seed), own)
        rewritten(make_run(tmp_path / f"b{seed}", "fedp3", seed), {**own, "z": shares(59, 60)})
    comparison = compare([*tmp_path.iterdir()])
    d = personal(comparison)
    assert d.points > 0.1
    assert d.refused == "the means are of other places (only one has z, seed 0)"
    assert (d.over_seeds, d.equivalence, d.over_examples, d.signs) == (None,) * 4
    assert not d.significant
    assert comparison.refused["fedp3"]["fedavg"].startswith("the means are of other places (only one has z")


def test_seeds_without_names_are_stacked_where_names_agree(tmp_path: Path) -> None:
    runs = [record_of(load(make_run(tmp_path / str(seed), "fedavg", seed)).runs[0]) for seed in range(3)]
    scores, names = np.arange(4.0), name_hashes("abcd")
    same = [Examples(scores, names), Examples(scores, None), Examples(scores, names)]
    assert not isinstance(over_seeds(same, runs), str)
    reason = over_seeds([*same[:2], Examples(scores, names[::-1])], runs)
    assert reason == "some predictions carry no names of examples, and the others have other examples or another order"


def test_tests_by_place_can_pass_the_correction(tmp_path: Path) -> None:
    # Seeds of other sizes of differences: too many outcomes to count, and 10,001 draws times 560 tests is above 5 %.
    rng = np.random.default_rng(3)
    differences = rng.uniform(0.2, 1.0, (2, 40))
    assert sign_flip([differences], 0).p * 560 > LEVEL
    found = by_place_test(differences, 0, 560)
    assert not found.exact
    assert found.p * 560 <= LEVEL
    # What is not small is not asked again, and few tests need no more draws.
    assert by_place_test(differences, 0, 5) == sign_flip([differences], 0)
    even = rng.normal(size=(2, 40))
    assert by_place_test(even, 0, 560) == sign_flip([even], 0)
    assert by_place_test(differences, 0, 10**6).smallest_p == pytest.approx(1 / (MOST_SIGNS + 1))


def test_seeds_may_have_other_examples(tmp_path: Path) -> None:
    folders: list[Path] = []
    for seed in range(2):
        for method, right in (("fedavg", 30), ("fedp3", 36)):
            folder = make_run(tmp_path / f"{method}-{seed}", method, seed)
            scores = {"home": shares(right, 60, 7 * seed)}
            folders.append(rewritten(folder, scores, lambda _, s=seed: [f"{i + 20 * s}" for i in range(60)]))
    d = personal(compare(folders))
    assert d.over_examples is not None
    assert d.over_examples.n == 80
    assert d.over_examples.difference == pytest.approx(d.points) == pytest.approx(0.1)
    assert d.over_examples.low < d.points < d.over_examples.high


def test_orders_of_names() -> None:
    scores, names = np.arange(4.0), name_hashes("abcd")
    base, moved = Examples(scores, names, np.arange(4)), Examples(scores[::-1], names[::-1], np.arange(4)[::-1])
    order = aligned(base, moved)
    assert not isinstance(order, str)
    assert moved.scores[order].tolist() == [0, 1, 2, 3]
    assert aligned(base, Examples(scores, names, np.zeros(4))) == "examples of the same names with other right answers"
    # Positions in pools of other training data say nothing; hashes of the answers' texts do.
    pool = Examples(scores, names, np.arange(4) + 1)
    assert isinstance(aligned(base, pool), str)
    assert not isinstance(aligned(base, pool, same_pool=False), str)
    hashed = [Examples(scores, names, pool, name_hashes(texts)) for pool, texts in ((names, "wxyz"), (scores, "wxyz"))]
    assert not isinstance(aligned(hashed[0], hashed[1]), str)
    other = Examples(scores, names, names, name_hashes("wxyy"))
    assert aligned(hashed[0], other, same_pool=False) == "examples of the same names with other right answers"
    twice = name_hashes("aabb")
    assert aligned(Examples(scores, twice), Examples(scores, twice[::-1])) == (
        "examples in another order, whose names are not unique"
    )
    assert not isinstance(aligned(Examples(scores, twice), Examples(scores, twice)), str)
    assert aligned(base, Examples(scores, None), lambda: "why") == "why"


def test_reordered_seeds_reject_no_more_than_they_should(tmp_path: Path) -> None:
    # Nothing differs; what is hard stays hard for all seeds, whose rows stand in orders of their own.
    rng, repeats = np.random.default_rng(10), 200
    by_name = by_position = 0
    run = record_of(load(make_run(tmp_path / "run", "fedavg")).runs[0])
    for _ in range(repeats):
        lean = rng.choice([-0.5, 0.0, 0.5], 80)
        orders = [rng.permutation(80) for _ in range(3)]
        scores = [np.sign(np.round(lean + rng.uniform(-0.6, 0.6, 80)))[order] for order in orders]
        rows = [Examples(values, order) for values, order in zip(scores, orders, strict=True)]
        joined = over_seeds(rows, [run] * 3)
        assert not isinstance(joined, str)
        by_name += int(sign_flip([joined], resamples=300).p <= 0.05)
        by_position += int(sign_flip([np.stack(scores)], resamples=300).p <= 0.05)
    assert by_name / repeats < 0.1  # 5 % and three standard errors
    assert by_position / repeats > 0.12


def failing(folder: Path, rounds: Sequence[int]) -> Path:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["event"] == "round" and line["round"] in rounds:
            line["errors"] = {"school": "ValueError: no such word"}
            del line["loss"]["school"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_clients_that_failed_are_said_for_each_method(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg")
    for seed in (0, 1):
        failing(make_run(tmp_path / f"b{seed}", "fedp3", seed), (2, 3))
    comparison = compare([tmp_path / "a", tmp_path / "b0", tmp_path / "b1"])
    said = (
        "fedp3: clients failed in 4 of 48 (client, round) pairs and were left out there; the first, 'school' in round "
        "2 of seed 0: ValueError: no such word"
    )
    assert comparison.warnings == (said,)
    assert f"Warning: {said}" in comparison.markdown().replace("\\", "")


def test_the_values_of_every_seed_are_in_a_file(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", "fedavg", seed)
        make_run(tmp_path / f"b{seed}", "fedp3", seed)
    comparison = compare([*tmp_path.iterdir()])
    rows = list(csv.DictReader(io.StringIO(comparison.files()["compare-seeds.csv"])))
    mine = [r for r in rows if (r["measure"], r["row"], r["seed"]) == ("personal on own data", "fedp3", "1")]
    summary = json.loads((tmp_path / "b1/summary.json").read_text())
    assert [r["place"] for r in mine] == ["", *CLIENTS]
    assert [float(r["value (%)"]) for r in mine] == pytest.approx(
        [100 * summary["personal_mean"], *(100 * summary["personal"][client] for client in CLIENTS)]
    )
