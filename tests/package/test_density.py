"""Code is spread out, and names say what a value is (the rules of AGENTS.md), counted by ``scripts/count``."""

import ast
import json
import re
from collections import Counter
from types import ModuleType

import pytest

from repository import ROOT, script_module
from source_trees import nodes_of

SOURCES = sorted((ROOT / "src").rglob("*.py"))
NONE = ("nested comprehensions", "comprehensions over two loops", "chained conditionals")
"""What there were 310, 325 and 38 of at the start."""


@pytest.fixture(scope="module")
def count() -> ModuleType:
    """The command's module."""
    return script_module("scripts/count")


@pytest.fixture(scope="module")
def counts(count: ModuleType) -> Counter[str]:
    """Counts of the package."""
    total = Counter[str]()
    for path in SOURCES:
        total.update(count.density(nodes_of(path)))
    return total


@pytest.mark.parametrize("what", NONE)
def test_nothing_is_dense(counts: Counter[str], what: str) -> None:
    assert counts[what] == 0


def test_other_comprehensions_and_conditionals_do_not_grow(counts: Counter[str], count: ModuleType) -> None:
    start = json.loads(count.START.read_text(encoding="utf-8"))["counts"]["src"]
    statements = sum(isinstance(node, ast.stmt) for path in SOURCES for node in nodes_of(path))
    for what in ("comprehensions", "conditional expressions"):
        assert counts[what] / statements <= start[what] / start["statements"] * 1.01


def test_comprehensions_with_two_conditions_become_fewer(counts: Counter[str]) -> None:
    assert counts["comprehensions with two conditions"] <= 171


def test_few_names_say_nothing(counts: Counter[str]) -> None:
    assert 0 < counts["vague names"] < 0.02 * counts["assigned names"]


def test_the_count_sees_what_it_counts(count: ModuleType) -> None:
    source = (
        "a = [[x for x in row] for row in rows]\n"
        "b = [x for row in rows for x in row if x and x > 1]\n"
        "c = 1 if x else 2 if y else 3\n"
        "found = 1\n"
    )
    counts = count.count_module(source)
    assert [counts[what] for what in (*NONE, "comprehensions with two conditions")] == [1, 1, 1, 1]
    assert counts["vague names"] == 1


def test_names_of_tests_are_short() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        names = re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not [name for name in names if len(name) > 60], path
