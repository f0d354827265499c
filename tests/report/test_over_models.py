"""Several models: values, tables, and the paired statistics of BiCSL's table 2."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from confed.metrics.statistics import unpaired_t
from confed.report.tables.models import (
    OVERALL,
    ModelStudies,
    files,
    model_studies,
    model_table,
    model_tables,
    pairs_of,
    pairs_over_models,
)
from confed.results.runs import load
from refusals import refuses
from synthetic_study import CLIENTS, changed, make_run

# Overall and per type of question, in %, of table 2 of the paper: centralised contrastive learning, and BiCSL.
PUBLISHED = {
    "BAN": ((36.23, 66.90, 12.71, 19.11), (35.11, 63.84, 11.06, 19.61)),
    "BUTD": ((45.08, 75.82, 29.27, 25.86), (40.96, 66.98, 13.34, 28.74)),
    "MFB": ((46.98, 73.95, 32.81, 30.20), (42.43, 68.65, 23.33, 27.52)),
    "MCAN-s": ((53.18, 81.06, 41.95, 34.93), (48.42, 74.93, 30.88, 32.89)),
    "MCAN-l": ((53.32, 81.21, 42.66, 34.90), (48.44, 77.44, 30.72, 32.01)),
    "MMNas-s": ((51.54, 78.06, 39.76, 34.46), (45.14, 70.55, 28.04, 30.33)),
    "MMNas-l": ((53.82, 80.06, 42.86, 36.75), (49.89, 74.85, 36.88, 34.33)),
}
TYPES = ("yes/no", "number", "other")


def written(folder: Path, method: str, seed: int, overall: float, types: tuple[float, ...]) -> None:
    """A run's folder whose personal results are these."""
    run = make_run(folder / method / f"seed-{seed}", method, seed)
    by_type = {client: dict(zip(TYPES, types, strict=True)) for client in CLIENTS}
    changed(run, personal=dict.fromkeys(CLIENTS, overall), personal_mean=overall, types={"personal": by_type})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> ModelStudies:
    """The paper's table as studies of two seeds, which lie a point to both sides of the published mean."""
    root = tmp_path_factory.mktemp("models")
    for model, (central, split) in PUBLISHED.items():
        for seed, shift in ((0, 0.01), (1, -0.01)):
            for method, values in (("central", central), ("fedavg", split)):
                overall, *types = (value / 100 + shift for value in values)
                written(root / model, method, seed, overall, tuple(types))
    return model_studies({model: load(root / model) for model in PUBLISHED})


def test_the_published_table_gives_both_statistics(published: ModelStudies) -> None:
    (pair,) = pairs_over_models(published.measures[OVERALL], [("central", "fedavg")])
    assert pair.paired.statistic == pytest.approx(7.05, abs=0.005)
    assert pair.paired.n - 1 == 6
    assert pair.unpaired.statistic == pytest.approx(1.357, abs=0.0005)
    a, b = np.array([(c[0], s[0]) for c, s in PUBLISHED.values()]).T
    assert pair.paired.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    independent: Any = stats.ttest_ind(a, b)
    assert pair.unpaired.p == pytest.approx(independent.pvalue)
    assert pair.signed_ranks.p == pair.signed_ranks.smallest_p == 2 / 2**7
    assert pair.differences["BAN"] == pytest.approx(0.0112)


def test_tables_overall_and_per_type_hold_the_published_values(published: ModelStudies) -> None:
    tables = model_tables(published)
    assert [name for name in tables if name.startswith("models")] == [
        "models", "models yes/no", "models number", "models other",
    ]  # fmt: skip
    for column, name in enumerate(["models", *(f"models {t}" for t in TYPES)]):
        table = tables[name]
        for row, (model, (central, split)) in zip(table.rows, PUBLISHED.items(), strict=False):
            assert row[0].text == model
            assert [cell.value for cell in row[1:]] == pytest.approx([split[column], central[column]][::-1])
            assert row[1].sd == pytest.approx(2**0.5)
    mean = tables["models"].rows[-1]
    assert mean[0].text == "mean"
    assert mean[1].value == pytest.approx(np.mean([c[0] for c, _ in PUBLISHED.values()]))
    assert "yes/no" in tables["models yes/no"].title


def test_a_bound_is_not_ranked_and_is_said_to_be_one(published: ModelStudies) -> None:
    table = model_tables(published)["models"]
    assert {cell.mark for row in table.rows for cell in row} == {""}
    assert any("a bound, not ranked" in note for note in table.notes)


def test_files_have_every_measure(published: ModelStudies) -> None:
    texts = files(published)
    assert set(texts) == {"models.md", "models.tex", "models.csv", "models-pairs.csv", "models-differences.csv"}
    rows = list(csv.DictReader(io.StringIO(texts["models-pairs.csv"])))
    assert [row["questions"] for row in rows] == [OVERALL, *TYPES]
    assert float(rows[0]["paired t-test over models t"]) == pytest.approx(7.05, abs=0.005)
    assert "| 7.05 | 6 |" in texts["models.md"]
    assert "| 1.36 |" in texts["models.md"]
    values = list(csv.DictReader(io.StringIO(texts["models-differences.csv"])))
    (number,) = [row for row in values if row["questions"] == "number"]
    assert (number["first"], number["second"]) == ("Central", "FedAvg")
    assert float(number["BUTD (points)"]) == pytest.approx(29.27 - 13.34)


def test_pairs_are_of_common_models_and_seeds(tmp_path: Path) -> None:
    for model, seeds in (("a", (0, 1)), ("b", (0,)), ("c", (0, 1))):
        for seed in seeds:
            written(tmp_path / model, "fedavg", seed, 0.5 + 0.1 * seed, (0.1, 0.2, 0.3))
    for model, seeds in (("a", (1,)), ("b", (0,)), ("c", (2,))):
        for seed in seeds:
            written(tmp_path / model, "fedp3", seed, 0.7, (0.1, 0.2, 0.3))
    models = model_studies({model: load(tmp_path / model) for model in "abc"})
    (pair,) = pairs_over_models(models.measures[OVERALL], [("fedavg", "fedp3")])
    assert pair.differences == pytest.approx({"a": -0.1, "b": -0.2})  # c shares no seed
    table = model_table(models)
    assert [row[0].text for row in table.rows] == ["a", "b", "c", "mean"]
    assert not any(cell.mark for row in table.rows for cell in row)  # too few seeds


def test_bold_in_a_row_is_what_tests_do_not_tell_from_the_best(tmp_path: Path) -> None:
    for seed in range(5):
        written(tmp_path / "a", "fedavg", seed, 0.5 + 0.01 * (seed % 2), (0.1, 0.2, 0.3))
        written(tmp_path / "a", "fedp3", seed, 0.7 + 0.01 * (seed % 3), (0.1, 0.2, 0.3))
    models = model_studies({"a": load(tmp_path / "a")})
    table = model_table(models)
    assert [cell.mark for cell in table.rows[0]] == ["", "", "best"]
    assert "all pairs of the row" in table.notes[0]
    refused = replace(models, refused={"fedavg": {"fedp3": "other data"}, "fedp3": {"fedavg": "other data"}})
    assert not any(cell.mark for cell in model_table(refused).rows[0])


def test_the_same_difference_in_all_models_has_no_p_value(tmp_path: Path) -> None:
    for number, model in enumerate("abc"):
        for method, value in (("fedavg", 0.5), ("fedprox", 0.6), ("fedp3", 0.6 + 0.05 * number)):
            written(tmp_path / model, method, 0, value, (0.1, 0.2, 0.3))
    models = model_studies({model: load(tmp_path / model) for model in "abc"})
    shifted, other = pairs_over_models(models.measures[OVERALL], [("fedprox", "fedavg"), ("fedp3", "fedavg")])
    assert (shifted.paired.p, shifted.paired_p) == (None, None)
    assert other.paired_p == pytest.approx(stats.ttest_1samp([0.1, 0.15, 0.2], 0).pvalue)  # a family of one
    lines = list(csv.DictReader(io.StringIO(files(models)["models-pairs.csv"])))
    names = {models.labels["fedavg"], models.labels["fedprox"]}
    (line,) = [one for one in lines if one["questions"] == OVERALL and {one["first"], one["second"]} == names]
    assert [line[f"paired t-test over models {key}"] for key in ("t", "p", "p uncorrected")] == [""] * 3


def test_many_methods_are_compared_with_the_reference_only(tmp_path: Path) -> None:
    for method in ("local", "fedavg", "fedprox", "fedp3", "central", "a", "b"):
        make_run(tmp_path / method / "seed-0", "fedavg" if method in "ab" else method, 0)
    models = model_studies({"x": load(tmp_path)})
    assert len(models.labels) == 7
    assert {second for _, second in pairs_of(models)} == {"fedavg"}
    pairs = pairs_of(models, ["local", "fedp3"])
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 11
    refuses("reference must be one of", pairs_of, models, ["nobody"])


def test_two_samples_agree_with_scipy_and_know_their_limits() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=5), rng.normal(1, 2, size=9)
    found = unpaired_t(a, b)
    expected: Any = stats.ttest_ind(a, b)
    assert (found.statistic, found.df, found.p) == pytest.approx((expected.statistic, 12, expected.pvalue))
    assert unpaired_t([1, 1], [1, 1]).p == 1
    assert unpaired_t([2, 2], [1, 1]).p == 0
    refuses("at least 2 values", unpaired_t, [1], [1, 2])
