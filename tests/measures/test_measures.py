"""A measure is one declaration: columns, a figure, a frame and paired tests follow, of means and of others."""

import csv
import io
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import confed
from confed.federation.protocols import Output
from confed.inference.evaluate import evaluate
from confed.measures.macro_f1 import MacroF1
from confed.measures.top5 import Top5
from confed.recipes.recipe import load_recipe
from confed.report.comparison import compare
from confed.report.report import render, save_figures
from confed.report.tables.columns import Context, MethodRow, _caption_column, _recall_column, columns_of
from confed.report.tables.methods import paper_table
from confed.report.tables.models import model_studies, model_table, model_tables
from confed.results.records import record_of
from confed.results.runs import RunResults, load
from confed.results.summary import Summary
from confed.results.views import View
from confed.runs.run import run
from confed.tracking.records import tracked_runs
from own_measures import Rank, Unsure
from refusals import refuses

DRAWS = ("bars",)

SMALL = [
    "data.train=8", "data.validation=4", "data.test=16", "model.name=vilt_tiny", "run.rounds=1", "run.workers=1",
    "local.epochs=1", "run.gallery=0",
]  # fmt: skip
MEASURES = ["top-5", "macro-F1", "own_measures:Unsure", "own_measures:Rank"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods and two seeds with four measures, two of them from outside of the package."""
    folder = tmp_path_factory.mktemp("measures") / "study"
    settings = {"data.train": 8, "data.validation": 4, "data.test": 16, "model.name": "vilt_tiny", "local.epochs": 1}
    settings |= {"run.measures": MEASURES, "run.gallery": 0}
    confed.study(
        "fedvqa_scenes", settings, methods=["local", "fedavg"], seeds=2, rounds=1, workers=1, folder=folder,
        progress=False,
    )  # fmt: skip
    return folder


def f1(given: list[int], right: list[int]) -> float:
    """Mean over the answers that are right for some example, each from its precision and recall."""
    scores: list[float] = []
    for answer in set(right):
        hits = sum(g == r == answer for g, r in zip(given, right, strict=True))
        precision, recall = hits / max(given.count(answer), 1), hits / right.count(answer)
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    return sum(scores) / len(scores)


def test_values_are_those_of_a_plain_computation() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(200, 9))).float()
    labels = torch.from_numpy(rng.integers(9, size=200))
    output, batch = Output(logits, logits), {"label": labels}
    top5 = Top5().per_example(output, batch)
    above = [(row > row[label]).sum() < 5 for row, label in zip(logits, labels, strict=True)]
    assert Top5().combine(top5.double()) == pytest.approx(np.mean(above))
    kept = MacroF1().per_example(output, batch).double()
    assert MacroF1().combine(kept) == pytest.approx(f1(logits.argmax(1).tolist(), labels.tolist()))
    few = kept[kept[:, 1] < 3]  # an answer that is given and never right does not count
    assert MacroF1().combine(few) == pytest.approx(f1(few[:, 0].tolist(), few[:, 1].tolist()))


def test_a_run_has_the_values_of_every_place(study: Path) -> None:
    folder = study / "fedavg" / "seed-0"
    summary = json.loads((folder / "summary.json").read_text())
    assert {name: of["mean"] for name, of in summary["measures"].items()} == {
        "top-5": True, "macro-F1": False, "never given": False, "rank": True,
    }  # fmt: skip
    kept = load_file(folder / "predictions.safetensors")
    places = {"personal": summary["personal"], "global": summary["global_seen"], "unseen": summary["global_unseen"]}
    keys = {"personal": "personal", "global": "global_seen", "unseen": "global_unseen"}
    for view, measure in product(places, (Top5(), MacroF1(), Unsure(), Rank())):
        assert places[view]
        for place in places[view]:
            rows = kept[f"{view}/{place}/measure/{measure.name}"].astype(np.float64)
            assert view == "unseen" or len(rows) == 16
            assert summary["test_metrics"][keys[view]][place][measure.name] == pytest.approx(
                measure.combine(torch.from_numpy(rows))
            )


def test_each_has_columns_a_figure_and_a_frame(study: Path, tmp_path: Path) -> None:
    table = paper_table(load(study))
    titles = [column.full_title for column in table.columns]
    wanted = [
        f"{name} {view}"
        for name in ("top-5 accuracy", "macro-F1", "never given", "rank (places)")
        for view in ("personal", "global on seen", "global on unseen")
    ]
    assert titles[-12:] == wanted
    local = table.rows[0]
    assert [local[titles.index(f"macro-F1 global on {where}")].text for where in ("seen", "unseen")] == ["–", "–"]
    summaries = [json.loads((study / f"fedavg/seed-{seed}/summary.json").read_text()) for seed in (0, 1)]
    means = [np.mean([place["macro-F1"] for place in s["test_metrics"]["personal"].values()]) for s in summaries]
    assert table.rows[1][titles.index("macro-F1 personal")].value == pytest.approx(100 * np.mean(means))
    names = {path.name for path in save_figures(study, tmp_path)}
    assert {"measure-top-5.png", "measure-macro-F1.svg", "measure-never given.png"} <= names
    assert "<h3>top-5 accuracy</h3>" in render(load(study))
    frame = confed.load_run(study / "fedavg" / "seed-0").results
    place = next(iter(summaries[0]["personal"]))
    assert frame.loc[place, "never given personal"] == summaries[0]["test_metrics"]["personal"][place]["never given"]


def test_each_has_paired_tests(study: Path) -> None:
    comparison = compare([study], "fedavg")
    by_measure = {d.measure: d for d in comparison.differences}
    mean, other = (by_measure[f"{name}, personal on own data"] for name in ("top-5 accuracy", "macro-F1"))
    assert mean.signs is not None
    assert mean.signs.difference == pytest.approx(mean.points)
    assert mean.examples_p is not None
    assert other.signs is None
    assert other.over_examples is not None
    assert other.over_examples.difference == pytest.approx(other.points)
    assert 1 / 500 <= other.examples_p_uncorrected <= 1
    assert any("No mean over examples (macro-F1, personal on own data;" in remark for remark in comparison.remarks)
    rows = [row["measure"] for row in csv.DictReader(io.StringIO(comparison.csv()))]
    assert "never given, personal on own data" in rows
    assert "macro-F1, personal on own data" in comparison.frame().index.get_level_values(0)


def ranks(study: Path, method: str = "fedavg") -> list[float]:
    """The mean rank of each seed's personal models."""
    summaries = [json.loads((study / f"{method}/seed-{seed}/summary.json").read_text()) for seed in (0, 1)]
    return [np.mean([place["rank"] for place in s["test_metrics"]["personal"].values()]) for s in summaries]


def test_values_in_another_unit_are_shown_and_tested_in_it(study: Path) -> None:
    table = paper_table(load(study))
    at = [column.full_title for column in table.columns].index("rank (places) personal")
    assert table.columns[at].unit == "places"
    assert table.rows[1][at].value == pytest.approx(np.mean(ranks(study)))
    found = {d.measure: d for d in compare([study], "local").differences}["rank (places), personal on own data"]
    apart = np.mean(ranks(study)) - np.mean(ranks(study, "local"))
    assert (found.signs.difference, found.points) == pytest.approx((apart / 100, apart / 100))
    assert found.over_seeds is not None
    assert found.equivalence is None  # a margin in points says nothing of places


def test_tracking_sweeps_and_tables_over_models_have_them(study: Path) -> None:
    folder, rank = study / "fedavg" / "seed-0", ranks(study)[0]
    found = evaluate(folder, models=["all"])
    means = {(mean["model"], mean.get("metric")): mean["mean"] for mean in found.means()}
    stated = json.loads((folder / "summary.json").read_text())["test_metrics"]
    client = next(iter(stated["personal"]))
    assert means[f"personal:{client}", "rank"] == pytest.approx(stated["personal"][client]["rank"])
    rows = {tuple(cell.text for cell in row[1:3]): row for row in found.table().rows if row[4].text == "macro-F1"}
    assert rows["global", client][5].value == pytest.approx(100 * stated["global_seen"][client]["macro-F1"])
    assert {"top-5", "rank (places)"} < {row[4].text for row in found.table().rows}
    (tracked,) = tracked_runs(folder, files=False)
    assert tracked.rounds[1]["test/rank/personal"] == pytest.approx(rank)
    columns = columns_of("sweep", Context([MethodRow("m", load(study).of("fedavg"))]))
    assert "rank (places) personal" in [column.heading.full_title for column in columns]
    models = model_studies({"one": load(study), "other": load(study)})
    name = "rank (places), personal on own data"
    over_models = model_table(models, name)
    assert "test values in places after the last round, rank (places), personal on own data" in over_models.title
    assert over_models.rows[0][2].value == pytest.approx(np.mean(ranks(study)))
    tables = model_tables(models)
    assert name in tables["models"]
    assert name in tables["pairs"]


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("test_metrics", lambda run: record_of(run).value("top-5 accuracy, personal on own data")),
        ("test_metrics", _recall_column("top-5", View.PERSONAL, "").value),
        ("bleu4", _caption_column("bleu4", View.PERSONAL).value),
        ("personal", lambda run: run.summary.headline("personal_mean")),
    ],
    ids=["measure", "recall", "BLEU", "headline"],
)
def test_clients_that_left_are_in_no_mean(key: str, read: Callable[[RunResults], float]) -> None:
    places = {"here": 0.5, "gone": 0.9}
    by_metric = {place: {"top-5": value} for place, value in places.items()}
    content = {"measures": {"top-5": Top5().stated()}, "left": ["gone"]}
    content[key] = {"test_metrics": {"personal": by_metric}, "bleu4": {"personal": places}, "personal": places}[key]
    assert read(RunResults(Path("run"), "m", "M", 0, Summary(content), {})) == 0.5


def test_small_values_are_best_where_the_measure_says_so(study: Path) -> None:
    rows = [MethodRow("m", load(study).of("fedavg"))]
    columns = {c.heading.full_title: c for c in columns_of("paper", Context(rows)) if c.title == "personal"}
    assert columns["never given personal"].lower_is_better
    assert not columns["macro-F1 personal"].lower_is_better


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ('["top-3"]', "measure.*top-3"),
        ('["own_measures:Wrong"]', r"run.measures: 'own_measures:Wrong' cannot be computed of the task 'vqa': "
         r"ValueError: the measure 'wrong' must keep finite numbers of each example, of shape \(2,\) or \(2, K\)"),
        ('["own_measures:TooLarge"]', "'too large' declares values between 0 and 1, and gave 2"),
        ('["top-5", "top-5"]', "run.measures must have different names, got top-5, top-5"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_early(chosen: str, message: str, tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", [*SMALL, f"run.measures={chosen}"])
    refuses(message, run, recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_workers_compute_the_same(study: Path, tmp_path: Path) -> None:
    chosen = f"run.measures={json.dumps(MEASURES)}"
    recipe = load_recipe("fedvqa_scenes", [*SMALL, chosen, "run.workers=2", "algorithm.name=fedavg"])
    found = run(recipe, tmp_path / "run")
    alone = json.loads((study / "fedavg/seed-0/summary.json").read_text())
    assert found["test_metrics"] == alone["test_metrics"]
