"""What reports say of methods that make no models of the clients' own, or none for everybody."""

from html import escape
from pathlib import Path

import pytest

from confed.report.comparison import compare
from confed.report.html.page import Tabs
from confed.report.report import render
from confed.report.sections.general import learning, matrices, question_types
from confed.report.tables.headline import table_of
from confed.report.tables.paper import paper_table
from confed.results.runs import load
from confed.results.summary import Summary, deployed_note, global_note, personal_note, with_deployed
from confed.studies.pool import headline
from confed.system import format as formats
from synthetic_study import changed, make_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FedAvg, and a method that says of itself that it makes no personal models."""
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    split = make_run(tmp_path / "fedp3" / "seed-0", "fedp3", 0)
    changed(split, has_personal=False, matrix={}, label="Split", scenes=[])
    return tmp_path


NOTE = "Split: no models of the clients' own"


def test_it_is_known_of_runs_that_do_not_say_so_by_their_method() -> None:
    assert Summary({"algorithm": "bicsl"}).without_personal
    assert not Summary({"algorithm": "fedavg"}).without_personal
    assert not Summary({"algorithm": "of somebody else"}).without_personal
    assert not Summary({"algorithm": "bicsl", "has_personal": True}).without_personal
    assert personal_note({"FedAvg": Summary({"algorithm": "fedavg"})}) == ""


def test_tables_say_that_personal_values_are_global_ones(folder: Path) -> None:
    study = load(folder)
    for table in (table_of(study), paper_table(study)):
        assert any(note.startswith(NOTE) for note in table.notes)
    assert any(remark.startswith(NOTE) for remark in compare([folder]).remarks)
    assert escape(NOTE).replace("&#x27;", "&#39;") in render(study)


def test_a_run_on_its_own_has_no_figure_of_personal_models(folder: Path) -> None:
    html = render(load(folder / "fedp3" / "seed-0"))
    assert "personal models, mean over clients" not in html
    assert "the worst client (%)" in html
    line = headline({"personal_mean": 0.4, "personal_worst": 0.3, "global_seen_mean": 0.4, "has_personal": False,
                     "seconds": 1.0})  # fmt: skip
    assert line == "worst client 30.0%, global on seen 40.0%, 1 s"


def test_methods_without_a_global_model_are_named() -> None:
    assert Summary({"algorithm": "local"}).without_global
    assert Summary({"algorithm": "fedper"}).without_global
    assert not Summary({"algorithm": "fedavg"}).without_global
    assert not Summary({"algorithm": "of somebody else"}).without_global
    assert Summary({"algorithm": "of somebody else", "has_global": False}).without_global
    note = global_note({"Alone": Summary({"algorithm": "local"}), "FedAvg": Summary({"algorithm": "fedavg"})})
    assert note == "Alone trains no shared model, so its global columns are empty."
    assert Summary({}).public_place({"algorithm": {"public": "new"}}) == "new"
    assert Summary({"public_place": "shop"}).public_place({}) == "shop"
    assert Summary({}).public_place({"algorithm": {"public": 3}}) == ""


def test_a_run_without_a_global_model_is_not_said_to_have_one(tmp_path: Path) -> None:
    study = load(make_run(tmp_path / "seed-0", "local", 0))
    html = render(study)
    lead = html.split("<p class=lead>", maxsplit=1)[1].split("</p>", maxsplit=1)[0]
    assert "One thing is measured" in lead
    assert "There is no model for everybody." in lead
    assert "shared model" not in lead
    assert "every client trains alone" in lead
    assert "global model on the clients' data (%)" not in html
    assert "than the global model" not in html
    assert "and the global one" not in html
    assert any(note.startswith("Local trains no shared model") for note in table_of(study).notes)


def test_among_others_it_is_named(folder: Path) -> None:
    make_run(folder / "local" / "seed-0", "local", 0)
    html = render(load(folder))
    assert "Two things are measured" in html
    assert "(Local: nothing)" in html
    assert "Local trains no shared model, so its global columns are empty." in html


def test_private_heads_are_named_where_there_are_some() -> None:
    plain = {"algorithm": "fedavg", "own_heads": False, "global_seen": {"a": 0.5}, "personal": {"a": 0.4}}
    both = with_deployed([Summary(plain), Summary({**plain, "own_heads": True})], ["global_seen", "global_seen"])
    assert deployed_note({"A": both[0], "B, b": both[0]}) == (
        "Deployed, on each client's test data: the global model (A; B, b)."
    )
    assert "with each client's own head where it has one (A, B)" in deployed_note(dict(zip("AB", both, strict=True)))


def test_names_with_commas_are_told_apart() -> None:
    assert formats.names(["a", "b"]) == "a, b"
    assert formats.names(["a, in one place", "b"]) == "a, in one place; b"


def test_a_matrix_on_its_own_says_whose_it_is(folder: Path) -> None:
    assert "FedAvg" in matrices(load(folder), Tabs())


def test_losses_of_several_tasks_have_no_common_scale(folder: Path) -> None:
    assert "no common scale" not in learning(load(folder))
    path = folder / "fedp3" / "seed-0" / "recipe.toml"
    path.write_text(path.read_text() + '\n[task]\nname = "contrastive"\n')
    assert "no common scale" in learning(load(folder))


def test_the_judged_models_come_first_among_the_types(folder: Path) -> None:
    for row in ("fedavg", "fedp3"):
        types = {view: {"school": {"count": value}} for view, value in (("personal", 0.2), ("global_seen", 0.3))}
        changed(folder / row / "seed-0", own_heads=True, types=types)
    html = question_types(load(folder), Tabs())
    assert html.index("deployed") < html.index("personal")
    assert html.index("30.0") < html.index("20.0")


@pytest.mark.usefixtures("undrawn_figures")
def test_the_lead_claims_no_more_than_the_rows_have_in_common(folder: Path) -> None:
    html = render(load(folder))
    assert "Pictures and questions never leave a client;" in html
    assert "started from the same model" in html
    make_run(folder / "central" / "seed-0", "central", 0)
    path = folder / "fedp3" / "seed-0" / "recipe.toml"
    path.write_text(path.read_text() + '\n[task]\nname = "contrastive"\n')
    html = render(load(folder))
    assert "Central pools all data in one place, as an upper bound" in html
    assert "started from the same model" not in html
    assert "trained on the same data" in html
