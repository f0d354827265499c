"""Sections of the report that every study has."""

from pathlib import Path

from confed.datasets.scenes.questions import FAMILIES, TYPE_NAMES
from confed.report.html.page import Tabs
from confed.report.sections.general import question_types
from confed.results.runs import load
from synthetic_study import TYPES, changed, make_run


def test_question_types_are_named_in_words_where_a_run_has_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    plain = question_types(load(folder), Tabs())
    assert all(f">{kind}<" in plain for kind in TYPES)
    changed(folder, type_names={"qcolor": "which color", "count": "how <many>"})
    named = question_types(load(folder), Tabs())
    assert ">which color<" in named
    assert ">how &lt;many&gt;<" in named
    assert "qcolor" not in named
    assert ">exist<" in named


def test_every_question_family_has_a_name() -> None:
    assert set(TYPE_NAMES) == set(FAMILIES)
    assert len(set(TYPE_NAMES.values())) == len(FAMILIES)
