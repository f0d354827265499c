"""Verdicts on claims: the four words by gates, seeds and tests, and cells that sentences quote."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from refusals import refuses
from repository import script_module

HEAD = "reference,measure,method,seeds,value (%),difference (points),over seeds low (points),over seeds high (points)"
COMPARE = f"""{HEAD},over seeds p
B,own,A,5,72,2,1.5,2.5,0.001
B,own,B,5,70,,,,
B,own,C,5,70.1,0.1,-0.4,0.6,0.7
B,own,Local,5,66,-4,-5,-3,0.001
B,own,Central,5,75,5,4,6,0.001
B,unseen,A,3,72,2,1.5,2.5,0.001
B,unseen,B,3,70,,,,
"""
EVIDENCE: Mapping[str, Any] = {
    "table": "t", "measure": "own", "row": "A", "reference": "B", "room": ["Central", "Local"], "converged": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("docs/make_claims.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t_compare.csv").write_text(COMPARE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("claim", "changes", "word"),
    [
        ({"effect": 2.0}, {}, "shown"),
        ({}, {"row": "B", "reference": "A"}, "against"),
        ({"effect": 2.0}, {"row": "C"}, "not seen"),
        (
            {"effect": 0.1},
            {"row": "C"},
            "cannot be judged: power (the seeds show 0.7 points, the paper's effect is 0.1)",
        ),
        ({"effect": 2.0, "equal": True}, {"row": "C"}, "shown"),
        ({"equal": True}, {}, "against"),
        ({}, {"room": ["Central", "A"]}, "cannot be judged: head-room of the view (+3.0)"),
        ({}, {"converged": None}, "cannot be judged: convergence not measured"),
        ({}, {"converged": 0.8}, "cannot be judged: convergence (rows move by 0.8)"),
        ({"effect": 2.0}, {"changed": 0.1}, "cannot be judged: mechanism (it changes 0.1 %, the paper's effect is 2)"),
        ({}, {"measure": "unseen", "room": []}, "cannot be judged: power (3 seeds)"),
        ({}, {"faults": ["equal work"]}, "cannot be judged: equal work"),
    ],
)  # fmt: skip
def test_the_word_follows_from_gates_seeds_and_tests(
    script: ModuleType, folder: Path, claim: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    evidence = {key: value for key, value in {**EVIDENCE, **changes}.items() if value not in (None, [])}
    assert script.verdict(claim, evidence, script.measured(folder, evidence)) == word


def test_values_by_seed_give_the_difference_that_seeds_can_show(script: ModuleType, folder: Path) -> None:
    lines = ["measure,method,row,seed,place,value (%)"]
    for seed, (first, second) in enumerate([(72, 70), (73, 70), (71, 70), (72, 70), (72, 70)]):
        lines += [f"own,A,a,{seed},,{first}", f"own,B,b,{seed},,{second}"]
    (folder / "t_seeds.csv").write_text("\n".join(lines), encoding="utf-8")
    # differences 2, 3, 1, 2, 2: deviation 0.7071, error 0.3162; t of 4: 2.7764 and 0.9410
    assert script.measured(folder, EVIDENCE).visible == pytest.approx(0.31623 * (2.77645 + 0.94096), rel=1e-4)


def test_a_row_that_is_not_there_is_named(script: ModuleType, folder: Path) -> None:
    refuses("t, own: no row 'X'; there are A, B", script.measured, folder, {**EVIDENCE, "row": "X"})


def test_sentences_follow_the_files_that_they_quote(script: ModuleType, folder: Path) -> None:
    page = folder / "page.md"
    title = '"difference: method=C; reference=B; measure=own"'
    assert script.quoted(f"ahead by [9.9](t_compare.csv {title}) points", page) == (
        f"ahead by [+0.1](t_compare.csv {title}) points"
    )
    (folder / "t_compare.csv").write_text(COMPARE.replace("70.1,0.1,", "70.1,-0.3,"), encoding="utf-8")
    assert "[−0.3](" in script.quoted(f"[+0.1](t_compare.csv {title})", page)
    refuses("0 rows with 'method=Z'", script.quoted, '[1](t_compare.csv "difference: method=Z")', page)


def test_claims_and_quotes_are_those_of_registry_and_files(script: ModuleType) -> None:
    assert [path.name for path, _, _ in script.remade()] == [], "run python docs/make_results.py"
