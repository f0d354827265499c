"""The HTML report: complete in itself, escaped, the same bytes twice, and written for broken folders too."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from confed.metrics.statistics import unpaired_t
from confed.report import sections as sections_package
from confed.report.html.media import ImageStore
from confed.report.report import figures, render, write_report
from confed.report.section import sections
from confed.report.sections import privacy_curve
from confed.report.sections.privacy_curve import accuracy_against_epsilon, curves, section
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
from confed.results.runs import RunResults, StudyResults, load
from confed.results.summary import Summary
from html_page import Page
from refusals import refuses
from synthetic_study import CLIENTS, METHODS, changed, make_run, make_study, picture

DRAWS = True


@pytest.fixture(scope="module")
def study(finished_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_study, tmp_path_factory.mktemp("report") / "study"))


@pytest.fixture(scope="module")
def html(study: Path) -> str:
    path = write_report(study)
    assert path == study / "report.html"
    assert not path.with_name("report.html.part").exists()
    return path.read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize(("unfinished", "mention"), [("fedavg", ""), ("local", " (seed 0)")])
def test_clients_are_compared_with_local_training(tmp_path: Path, unfinished: str, mention: str) -> None:
    # Seed 1 was easy: a method that has not run it yet would look worse everywhere.
    study = make_study(tmp_path / "study")
    levels = {("local", 0): 0.5, ("local", 1): 0.9, ("fedavg", 0): 0.6, ("fedavg", 1): 0.95}
    for (method, seed), level in levels.items():
        own = dict.fromkeys(CLIENTS, level) | ({"school": 0.25} if method == "fedavg" else {})
        changed(study / method / f"seed-{seed}", personal=own)
    (study / unfinished / "seed-1" / "summary.json").unlink()
    assert f"<td>1 of 4: school, up to 25.0 points{mention}</td>" in render(load(study)).replace(" class=left", "")


def test_page_is_complete_in_itself(html: str) -> None:
    page = Page(html)
    assert not page.open
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert all(link[1:] in page.ids for link in page.links)
    loaded = re.findall(r"url\(([^)]{0,40})", html)
    assert all(target.startswith(("data:image/png;base64,", "#")) for target in loaded)
    assert "@import" not in html


def test_sections_and_figures_of_a_study(html: str) -> None:
    sections = re.findall(r'<section id="(\w+)">', html)
    assert sections == [
        "results",
        "significance",
        "learning",
        "clients",
        "matrix",
        "types",
        "calibration",
        "cost",
        "gallery",
        "notes",
        "data",
        "glossary",
    ]
    text = "".join(Page(html).words)
    for name in [*METHODS.values(), *CLIENTS, "home", "shop"]:
        assert name in text
    assert "With 2 seeds no significance is claimed" in text
    assert "FedProx, seed 0, round 2, school: TimeoutError: no reply within 60 s" in text
    assert "FedP³: teacher cached per round" in text
    assert html.count("<svg") == 5


def test_headline_value_is_the_mean_of_the_summaries(study: Path, html: str) -> None:
    values = [json.loads((study / "fedp3" / f"seed-{s}/summary.json").read_text())["personal_mean"] for s in (0, 1)]
    assert f">{50 * sum(values):.1f}<small>" in html.split('id="significance"', maxsplit=1)[0]


def test_same_results_give_the_same_bytes(study: Path, html: str) -> None:
    assert render(load(study)) == html


def test_pictures_are_stored_once_and_answers_judged(html: str) -> None:
    assert html.count(f"base64,{picture(0)}") == 1
    assert "<span class=right>✓ red</span>" in html
    assert "<span class=wrong>✗ blue</span>" in html


def test_what_an_error_ended_is_told_once(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", seeds=1)
    (folder / "fedprox/seed-0/summary.json").unlink()
    shutil.rmtree(folder / "local")
    errors = {"fedprox/seed-0": "RuntimeError: broke", "local/seed-0": "no single answers"}
    changed(folder, errors=errors, tuned={"fedp3": {"lam": 0.1}})
    html = render(load(folder))
    text = "".join(Page(html).words)
    assert "FedProx, seed 0, failed: RuntimeError: broke" in text
    assert "Local, seed 0, cannot run here: no single answers" in text
    assert "was interrupted" not in text
    assert "3 methods compared" in text
    assert "Three methods (FedAvg, FedP³ and Central)" in text
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert "FedP³" in drawn
    assert "FedProx" not in drawn
    settings = html.split('id="data"', maxsplit=1)[1]
    assert "Tuned on validation data: FedP³ lam=0.1. Not tuned: FedAvg, Central." in settings
    for path in folder.glob("*/seed-0/summary.json"):
        path.unlink()
    errors |= dict.fromkeys(("fedavg/seed-0", "fedp3/seed-0", "central/seed-0"), "RuntimeError: broke")
    changed(folder, errors=errors)
    assert "was interrupted" not in render(load(folder))  # nothing but failures: they are said, and that is all


def test_report_of_a_single_run_has_no_significance(study: Path) -> None:
    text = write_report(study / "fedp3" / "seed-0").read_text(encoding="utf-8")
    assert "<h1>FedP³ on fedvqa_scenes</h1>" in text
    assert "class=tile" in text
    assert 'id="significance"' not in text
    assert not Page(text).open


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    bad = "<script>alert('x')</script>$a_1$ &"
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).write_text((folder / name).read_text().replace('"transport"', json.dumps(bad)))
    changed(folder, label=bad, recipe=bad, notes=[bad], errors=[{"round": 1, "client": bad, "error": bad}])
    gallery = json.loads((folder / "gallery.json").read_text())
    gallery[0] |= {"question": bad, "answer": bad, "place": bad, "type": bad, "image": f"x);}}</style>{bad}"}
    gallery[1]["global"] |= {"answer": bad, "attention": [[bad]], "probability": "1;x"}
    (folder / "gallery.json").write_text(json.dumps(gallery))
    text = write_report(folder).read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 1  # the page's own
    assert not page.open
    assert text.count("</style>") == text.count("<style")
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "gone",
    [
        "gallery.json",
        "predictions.safetensors",
        "timings.jsonl",
        "metrics.jsonl",
        "recipe.toml",
        "summary.json",
    ],
)
def test_report_of_an_incomplete_run_names_what_is_missing(tmp_path: Path, gone: str) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / gone).unlink()
    text = write_report(folder).read_text(encoding="utf-8")
    expected = "was interrupted after round 6 of 6" if gone == "summary.json" else f"({gone})"
    assert expected in text
    assert not Page(text).open


def test_run_killed_before_its_first_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    for path in folder.iterdir():
        if path.name != "recipe.toml":
            path.write_bytes(b"") if path.name == "metrics.jsonl" else path.unlink()
    assert "interrupted after round 0 of 6" in write_report(folder).read_text(encoding="utf-8")


def test_many_clients_stay_readable(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    clients = [f"client-{i:03d}" for i in range(100)]
    matrix = {client: dict.fromkeys(clients, 0.5) for client in clients}
    changed(folder, clients=clients, personal={c: 0.3 + 0.004 * i for i, c in enumerate(clients)}, matrix=matrix)
    text = write_report(folder).read_text(encoding="utf-8")
    assert "clients, from the worst to the best" in text
    assert 'id="matrix"' not in text


@pytest.mark.usefixtures("undrawn_figures")
def test_only_clients_with_a_site_count_as_trained(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    changed(folder, federation={name: {} for name in CLIENTS[1:]})
    words = " ".join(Page(write_report(folder).read_text(encoding="utf-8")).words)
    assert f"{len(CLIENTS) - 1} clients" in words
    assert f"clients ({CLIENTS[1]}" in words
    assert f"clients ({CLIENTS[0]}" not in words


def test_folder_that_is_neither(tmp_path: Path) -> None:
    refuses("must be a run folder", write_report, tmp_path)


def test_album_takes_only_pictures() -> None:
    store = ImageStore()
    assert store.add("no base64!") == store.add(None) == store.add("aGVsbG8=") == ""
    assert store.add(picture(1)) == store.add(picture(1)) != ""
    assert store.css.count("background-image") == 1


def test_verdict_comes_first_and_says_whether_a_lead_is_noise(html: str) -> None:
    head = html.split("<h1>")[1]
    assert head.index("class=verdict") < head.index("class=lead")
    said = re.search(r"<p class=verdict>(.*?)</p>", html)
    assert said is not None
    assert said.group(1).startswith("Personal models on their own clients")
    assert "The global model in unseen places: " in said.group(1)
    assert said.group(1).count(". ") == 3  # two sentences for each of two measures


def test_tables_have_captions_and_scopes_and_drawings_titles(html: str) -> None:
    assert not re.search(r"<th(?!ead| scope)", html)
    tables = html.count("<table>")
    assert tables
    assert html.count("<table><caption>") == tables
    drawings = re.findall(r"<figure><svg[^>]*>", html)
    assert drawings
    assert all('role="img" aria-label="' in drawing for drawing in drawings)


def test_panels_are_named_on_paper_and_pictures_are_printed(html: str) -> None:
    assert re.search(r'<div class=panel data-title="[^"]+">', html)
    printed = html[html.index("@media print") :]
    assert "attr(data-title)" in printed
    assert re.search(r"\.picture,[^{]*\{\s*print-color-adjust: exact", printed)


def test_columns_without_a_value_are_left_out() -> None:
    from confed.report.tables.table import Cell, Column, Table

    columns = (Column("method", words=True), Column("p"), Column("value"))
    table = Table("t", columns, (((Cell("A"), Cell("–"), Cell("1", 1.0)), (Cell("B"), Cell(""), Cell("–"))),))
    assert [column.title for column in table.without_empty().columns] == ["method", "value"]


@pytest.mark.usefixtures("undrawn_figures")
def test_names_of_one_paper_stay_with_its_recipes(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study")
    assert "In the FedVQA chapter" in render(load(folder))
    changed(folder, recipe="modalities")
    assert "In the FedVQA chapter" not in render(load(folder))


def test_sections_are_found_in_their_modules() -> None:
    modules = {path.stem for path in Path(sections_package.__path__[0]).glob("[!_]*.py")}
    declaring = {section.html.__module__.rpartition(".")[2] for section in sections()}
    assert declaring == modules
    places = [section.place for section in sections()]
    assert places == sorted(places)


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
    tables = model_tables(published)["models"]
    assert list(tables) == [OVERALL, *TYPES]
    for column, table in enumerate(tables.values()):
        for row, (model, (central, split)) in zip(table.rows, PUBLISHED.items(), strict=False):
            assert row[0].text == model
            assert [cell.value for cell in row[1:]] == pytest.approx([split[column], central[column]][::-1])
            assert row[1].sd == pytest.approx(2**0.5)
    mean = tables[OVERALL].rows[-1]
    assert mean[0].text == "mean"
    assert mean[1].value == pytest.approx(np.mean([c[0] for c, _ in PUBLISHED.values()]))
    assert "yes/no" in tables["yes/no"].title


def test_a_bound_is_not_ranked_and_is_said_to_be_one(published: ModelStudies) -> None:
    table = model_tables(published)["models"][OVERALL]
    assert {cell.mark for row in table.rows for cell in row} == {""}
    assert any("a bound, not ranked" in note for note in table.notes)


def test_files_have_every_measure(published: ModelStudies) -> None:
    texts = files(model_tables(published))
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
    assert any("all pairs of the row" in note for note in table.notes)
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
    lines = list(csv.DictReader(io.StringIO(files(model_tables(models))["models-pairs.csv"])))
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


def finished(row: str, seed: int, accuracy: float, privacy: dict[str, Any], method: str = "bicsl") -> RunResults:
    recipe = {"algorithm": {"name": method, "privacy": privacy}, "run": {"rounds": 5}, "local": {"epochs": 2}}
    summary = {"algorithm": method, "global_seen_mean": accuracy, "metric": "accuracy"}
    return RunResults(Path(row), row, method, seed, Summary(summary), recipe)


def study_of(runs: Sequence[RunResults]) -> StudyResults:
    return StudyResults(Path(), "mine", tuple(runs))


def test_points_have_the_epsilon_of_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int, float]] = []

    def stand_in(noise: float, releases: int, delta: float) -> float:
        asked.append((noise, releases, delta))
        return math.inf if noise == 0 else 10 / noise

    monkeypatch.setattr(privacy_curve, "epsilon", stand_in)
    runs = [
        finished("off", 0, 0.6, {}), finished("low", 0, 0.55, {"clip": 1.0, "noise": 2.0}),
        finished("low", 1, 0.45, {"clip": 1.0, "noise": 2.0}), finished("high", 0, 0.3, {"clip": 1.0, "noise": 10.0}),
        finished("half", 0, 0.3, {"clip": 1.0, "noise": 2.0}, "split_learning"),
        finished("other", 0, 0.9, {}, "fedavg"),
    ]  # fmt: skip
    found = curves(study_of(runs), 1e-6)
    # Five rounds of two epochs with two rows each.
    assert asked[:3] == [(0.0, 20, 1e-6), (2.0, 20, 1e-6), (10.0, 20, 1e-6)]
    assert [(p.epsilon, round(float(np.mean(p.accuracies)), 3)) for p in found["bicsl"]] == [
        (1.0, 0.3),
        (5.0, 0.5),
        (math.inf, 0.6),
    ]
    assert np.std(found["bicsl"][1].accuracies, ddof=1) == pytest.approx(0.1 / math.sqrt(2))
    assert [p.epsilon for p in found["split_learning"]] == [math.inf]  # its gradients are not noised
    assert "fedavg" not in found
    drawing = accuracy_against_epsilon(study_of(runs))
    assert drawing is not None
    assert b"no guarantee" in drawing.svg()


def test_a_curve_is_of_rows_that_differ_in_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy_curve, "epsilon", lambda noise, releases, delta: math.inf if noise == 0 else 10 / noise)
    noised = {"clip": 1.0, "noise": 2.0}
    other = finished("butd", 0, 0.2, noised)
    other = replace(other, recipe={**other.recipe, "model": {"name": "butd_mini"}})
    found = curves(study_of([finished("off", 0, 0.6, {}), finished("low", 0, 0.5, noised), other,
                          finished("distinct", 0, 0.4, {**noised, "distinct": True})]))  # fmt: skip
    rows = {name: [point.row for point in points] for name, points in found.items()}
    assert rows == {"bicsl (off)": ["low", "off"], "bicsl (butd)": ["butd"], "bicsl (distinct)": ["distinct"]}


@pytest.mark.usefixtures("undrawn_figures")
def test_report_and_figures_of_a_noised_study_have_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"fedavg": "", "fedprox": "clip = 1.0\nnoise = 4.0\n", "fedp3": "clip = 1.0\nnoise = 9.0\n"}
    for row, noise in rows.items():
        place = make_run(tmp_path / row / "seed-0", row, 0)
        recipe = place / "recipe.toml"
        split = f'name = "bicsl"\n[algorithm.privacy]\n{noise}'
        recipe.write_text(recipe.read_text().replace(f'name = "{row}"\n', split))
        summary = place / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"algorithm": "bicsl"}))
    monkeypatch.setattr(privacy_curve, "available", lambda: True)
    monkeypatch.setattr(privacy_curve, "epsilon", lambda noise, releases, delta: math.inf if noise == 0 else 10 / noise)
    html = render(load(tmp_path))
    part = html[html.index('id="privacy"') : html.index("</section>", html.index('id="privacy"'))]
    assert "<svg" in part
    assert [part.count(f">{text}</td>") for text in ("2.5", "1.11", "∞")] == [1, 1, 1]
    assert figures()["accuracy-by-epsilon"](load(tmp_path)) is not None
    monkeypatch.setattr(privacy_curve, "available", lambda: False)
    assert "pip install '.[privacy]' -c constraints.txt" in render(load(tmp_path)).replace("&#x27;", "'").replace(
        "&#39;", "'"
    )
    assert figures()["accuracy-by-epsilon"](load(tmp_path)) is None


def test_without_noise_there_is_no_drawing() -> None:
    off = study_of([finished("off", 0, 0.6, {}), finished("b", 0, 0.5, {})])
    assert accuracy_against_epsilon(off) is None
    assert section(off) == ""
