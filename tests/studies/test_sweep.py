"""Sweeps: a grid per value, reused and resumed, and one table and figure over all."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from scipy import stats

from command_line import Capture, confed, refusal, refused
from confed.data.examples import FederatedDataset
from confed.report.tables.sweep import write_sweep
from confed.results.runs import load
from confed.results.sweep import Sweep
from confed.studies.study import Axis, open_sweep, parse_axis, points_of
from modal_examples import gaps, recipe_file
from refusals import refuses

DRAWS = True
TINY = [
    "feddat_function", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=16",
    "data.validation=4", "data.test=10", "local.epochs=1", "run.gallery=0", "run.evaluate_every=0", "run.controls=none",
    "--methods", "clf_local,full", "methods.clf_local.model.trainable=all", "--reference", "full",
]  # fmt: skip

OVER = ["--over", "data.shards=1,2", "--with", "run.rounds=1,2", "--seeds", "2", "--workers", "1"]


def values(root: Path, grid: str, row: str, key: str) -> list[float]:
    """The mean over clients of each seed, from the runs' own files."""
    found: list[float] = []
    for seed in (0, 1):
        summary = json.loads((root / grid / row / f"seed-{seed}" / "summary.json").read_text())
        found.append(float(np.mean([summary[key][client] for client in summary["clients"]])))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two numbers of clients, two methods, two seeds."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    assert confed("compare", *TINY, *OVER, "--out", folder) == 0
    return folder


def test_one_table_over_all_values(root: Path) -> None:
    results = json.loads((root / "results.json").read_text())
    assert [(p["settings"], p["clients"], p["rounds"], p["measure"], p["reference"]) for p in results["points"]] == [
        ({"data.shards": "1", "run.rounds": "1"}, 5, "1", "deployed_mean", "full"),
        ({"data.shards": "2", "run.rounds": "2"}, 10, "2", "deployed_mean", "full"),
    ]
    rows = list(csv.DictReader((root / "table.csv").read_text().splitlines()))
    assert [(row["data.shards"], row["clients"], row["rounds"], row["method"]) for row in rows] == [
        ("1", "5", "1", "clf-L"), ("1", "5", "1", "full*"), ("2", "10", "2", "clf-L"), ("2", "10", "2", "full*"),
    ]  # fmt: skip
    for point, grid in zip(results["points"], ("shards-1", "shards-2"), strict=True):
        local, full = values(root, grid, "clf_local", "personal"), values(root, grid, "full", "global_seen")
        found = point["methods"]
        assert (found["clf_local"]["mean"], found["full"]["mean"]) == pytest.approx((np.mean(local), np.mean(full)))
        assert found["clf_local"]["sd"] == pytest.approx(np.std(local, ddof=1))
        assert found["clf_local"]["difference"]["mean"] == pytest.approx(np.mean(local) - np.mean(full))
        if np.ptp(np.subtract(local, full)) > 0:
            expected = stats.ttest_rel(local, full).pvalue
            assert found["clf_local"]["difference"]["seeds_p_uncorrected"] == pytest.approx(expected)
    for kind in ("seeds_p", "examples_p"):
        tests = [point["methods"]["clf_local"]["difference"] for point in results["points"]]
        alone = [test[f"{kind}_uncorrected"] for test in tests]
        small, large = sorted(alone)  # of two tests Holm doubles the smaller, and the larger is no smaller than that
        expected = [min(1.0, 2 * p) if p == small else max(min(1.0, 2 * small), large) for p in alone]
        assert [test[kind] for test in tests] == pytest.approx(expected)
    text = (root / "table.md").read_text()
    assert "Holm's correction over all pairs of methods at all values" in text
    assert "data.shards=1, run.rounds=1 (5 clients): 1; data.shards=2, run.rounds=2 (10 clients): 2." in text


def test_the_figure_has_a_point_per_number_of_clients(root: Path) -> None:
    svg = (root / "figures/sweep.svg").read_text()
    for text in (">5<", ">10<", ">1 round<", ">2 rounds<", ">clf-L<", ">full*<", ">clients<"):
        assert text in svg, text
    assert (root / "figures/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_reused_and_what_was_stopped_goes_on(root: Path) -> None:
    done = root / "shards-1/full/seed-0/summary.json"
    before = done.stat().st_mtime_ns
    lost = root / "shards-2/full/seed-1/summary.json"
    content = json.loads(lost.read_text())
    lost.unlink()  # as if it had been stopped before its end
    assert confed("compare", *TINY, *OVER, "--out", root) == 0
    assert done.stat().st_mtime_ns == before
    again = json.loads(lost.read_text())
    assert again["global_seen"] == content["global_seen"]
    for verb in ("resume", "report"):
        (root / "results.json").unlink()
        assert confed(verb, root) == 0
        assert (root / "results.json").is_file()
    assert confed("report", root, "--figures") == 2


def test_another_budget_is_not_passed_off_as_the_first(root: Path, capsys: Capture) -> None:
    kept = (root / "sweep.json").read_text()
    arguments = ["--over", "data.shards=2,3", "--with", "run.rounds=5,5", "--seeds", "2", "--out", root]
    error = refusal(capsys, "compare", *TINY, *arguments)
    assert "was begun with data.shards=2, run.rounds=2, not data.shards=2, run.rounds=5" in " ".join(error.split())
    assert (root / "sweep.json").read_text() == kept


def test_a_faulty_value_is_refused_before_anything_runs(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out"
    assert "run.rounds" in refusal(capsys, "compare", *TINY, "--over", "run.rounds=1,0", "--out", folder)
    assert not folder.exists()
    assert "section.key=VALUE,VALUE" in refusal(capsys, "compare", *TINY, "--over", "rounds", "--out", folder)
    assert "a recipe comes before its settings" in refusal(
        capsys, "compare", "algorithm.lam=0.1,0.3", "--split", "iid,dirichlet"
    )


def test_a_setting_that_every_row_has_for_itself_is_refused(tmp_path: Path, capsys: Capture) -> None:
    over = ["feddat_scene_equal", "--methods", "feddat", "--out", tmp_path / "out", "--over"]
    error = refusal(capsys, "compare", *over, "algorithm.alpha=0.0,1.0")
    assert "algorithm.alpha changes nothing" in error
    assert "methods.feddat.alpha" in error
    assert not (tmp_path / "out").exists()


def test_values_may_be_any_toml() -> None:
    assert parse_axis("data.shards=1,2") == Axis("data.shards", ("1", "2"))
    assert parse_axis("local.betas=[0.9, 0.99],[0.8,0.9]") == Axis("local.betas", ("[0.9, 0.99]", "[0.8,0.9]"))
    assert parse_axis("a.b={x=1,y=2},{x=3}").values == ("{x=1,y=2}", "{x=3}")
    points = points_of(parse_axis("data.preset=domain,function"), [parse_axis("run.rounds=3,4")])
    assert [point.overrides for point in points] == [
        ["data.preset=domain", "run.rounds=3"],
        ["data.preset=function", "run.rounds=4"],
    ]
    assert [point.folder for point in points] == ["preset-domain", "preset-function"]
    assert [p.folder for p in points_of(parse_axis("a.b=[1],1"))] == ["b-1", "b-1-1"]
    for wrong in ("a.b", "a=1", "a.b="):
        refuses(r"section\.key=VALUE", parse_axis, wrong)
    refuses(r"the values of a\.b must differ, got 1, 1", points_of, parse_axis("a.b=1,1"))
    refuses(r"a value for each of the 2 of a\.b, got 1", points_of, parse_axis("a.b=1,2"), [parse_axis("c.d=1")])


def test_a_line_for_each_value_of_another_setting() -> None:
    points = points_of(
        parse_axis("a.lam=0.1,0.3"), [parse_axis("run.rounds=2,3")], parse_axis("data.split=iid,dirichlet")
    )
    assert [(p.folder, dict(p.settings)) for p in points] == [
        (f"lam-{lam}-split-{split}", {"a.lam": lam, "run.rounds": rounds, "data.split": split})
        for split in ("iid", "dirichlet")
        for lam, rounds in (("0.1", "2"), ("0.3", "3"))
    ]
    for by, message in (("data.split=iid,iid", "must differ"), ("a.lam=1", "every setting must be given once")):
        with refused(message):
            points_of(parse_axis("a.lam=0.1,0.3"), (), Axis(by.split("=")[0], tuple(by.split("=")[1].split(","))))


def divided(split: Literal["even", "odd"] = "even", *, seed: int = 0) -> FederatedDataset:
    """Data that can be split in two ways."""
    del seed
    dataset = gaps(8)
    return dataset if split == "even" else replace(dataset, clients=dict(list(dataset.clients.items())[::-1]))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rates, two ways of splitting the data, a method that has rates and one that has none."""
    folder = tmp_path_factory.mktemp("lines")
    recipe = recipe_file(folder, "sums", "gaps")
    recipe.write_text(recipe.read_text().replace("modal_examples:gaps", "test_sweep:divided"))
    settings = ["algorithm.name=modality_dropout", "algorithm.rate=0.1,0.5", "run.gallery=0", "run.evaluate_every=0"]
    more = ["--split", "even,odd", "--methods", "local,modality_dropout", "--reference", "local", "--workers", "1"]
    assert confed("compare", recipe, *settings, *more, "--out", folder / "out") == 0
    return folder / "out"


def test_what_the_setting_does_not_concern_is_run_once(lines: Path) -> None:
    for split in ("even", "odd"):
        one, other = (lines / f"rate-{rate}-split-{split}" for rate in ("0.1", "0.5"))
        timings = [(grid / "local/seed-0/timings.jsonl").read_bytes() for grid in (one, other)]
        assert timings[0] == timings[1]
        settings = [(grid / "modality_dropout/seed-0/recipe.toml").read_text() for grid in (one, other)]
        assert "rate = 0.1" in settings[0]
        assert "rate = 0.5" in settings[1]
        assert not list(lines.rglob("*.part"))
    splits = [(lines / f"rate-0.1-split-{s}/local/seed-0/recipe.toml").read_text() for s in ("even", "odd")]
    assert "even" in splits[0]
    assert "odd" in splits[1]


def test_the_figure_has_a_line_per_split(lines: Path) -> None:
    results = json.loads((lines / "results.json").read_text())
    assert results["by"] == "data.split"
    svg = (lines / "figures/sweep.svg").read_text()
    for text in (">Modality dropout, even<", ">Modality dropout, odd<", ">improvement relative to Local only, %<"):
        assert text in svg, text
    rows = list(csv.DictReader((lines / "table.csv").read_text().splitlines()))
    assert [(r["algorithm.rate"], r["data.split"]) for r in rows[::2]] == [
        ("0.1", "even"), ("0.5", "even"), ("0.1", "odd"), ("0.5", "odd"),
    ]  # fmt: skip
    for point in results["points"]:
        own, base = (
            json.loads((lines / point["folder"] / m / "seed-0/summary.json").read_text())["personal"]
            for m in ("modality_dropout", "local")
        )
        if all(base.values()):
            wanted = np.mean([(own[client] - base[client]) / base[client] for client in base])
            assert point["methods"]["modality_dropout"]["relative"]["0"] == pytest.approx(wanted)
    message = r"for each data\.split, not of mine over algorithm\.rate; give another folder"
    with refused(message):
        open_sweep(lines, Sweep("mine", "algorithm.rate", points_of(Axis("algorithm.rate", ("0.1",)))), {})


def test_no_mean_improvement_where_the_reference_is_at_0(lines: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(lines, copy)
    for file in copy.glob("*/*/seed-0/summary.json"):
        summary = json.loads(file.read_text())
        zero = file.parts[-4] == "rate-0.5-split-even" and file.parts[-3] == "local"
        summary["personal"] = dict.fromkeys(summary["personal"], 0.5) | ({"ears": 0.0} if zero else {})
        file.write_text(json.dumps(summary))
    table, _ = write_sweep(copy)
    place = [column.full_title for column in table.columns].index("relative")
    shown = {(row[0].text, row[1].text): row[place].text for row in table.rows if row[4].text != "Local only"}
    assert shown == {("0.1", "even"): "0.0", ("0.5", "even"): "–", ("0.1", "odd"): "0.0", ("0.5", "odd"): "0.0"}
    (note,) = (text for text in table.notes if "no mean over clients" in text)
    assert note.startswith("algorithm.rate=0.5, data.split=even (3 clients): Relative to Local only, no mean")
    assert "ears is at 0 with it" in note
    assert ">(no point where it is 0 at a client)<" in (copy / "figures/sweep.svg").read_text()


def test_its_grids_are_studies_as_any_other(root: Path) -> None:
    study = load(root / "shards-2")
    assert (len(study.clients), study.seeds, study.methods) == (10, (0, 1), ("clf_local", "full"))
    assert (root / "shards-2/report.html").is_file()
