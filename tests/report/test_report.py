"""The HTML report: complete in itself, escaped, the same bytes twice, and written for broken folders too."""

import json
import re
import shutil
from pathlib import Path

import pytest

from confed.report import sections as sections_package
from confed.report.html.media import ImageStore
from confed.report.report import render, write_report
from confed.report.section import sections
from confed.results.runs import load
from html_page import Page
from synthetic_study import CLIENTS, METHODS, changed, make_run, make_study, picture


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
    with pytest.raises(ValueError, match="must be a run folder"):
        write_report(tmp_path)


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
