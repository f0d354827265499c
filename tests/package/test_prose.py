"""Rules of prose that ruff does not know: what docstrings may not say, and which words stand for which things."""

import ast
import re
from pathlib import Path

import pytest

from repository import ROOT
from source_trees import nodes_of

FILES = sorted((ROOT / "src" / "confed").rglob("*.py"))
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "results").glob("*.md"))

EMPTY = re.compile(r"^\s+\w+: (it|they|as well|see there|them)\.$", re.MULTILINE)
"""An argument's description that says nothing."""

METAPHORS = re.compile(
    r"\b(houses?|rooms|(a|this|each|every|one|another|own) room(?! for)|walls?(?![ -](time|clock))|doors?|books?"
    r"|(top|own|same|lower|upper) floors?|on the line)\b",
    re.IGNORECASE,
)
"""Buildings and the like in place of packages, layers, modules, interfaces, records and connections."""

SCENERY = {"datasets/scenes", "datasets/gqa_scenes", "datasets/scene_labels.py", "datasets/tagged_texts.py"}
SCENERY |= {"data/ml_files", "inference/export.py"}
"""Where houses, rooms and books are things in pictures or answers."""


def prose(path: Path) -> str:
    """Docstrings, texts and comments of a module."""
    source = path.read_text(encoding="utf-8")
    texts = [n.value for n in nodes_of(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join([*texts, *re.findall(r"(?<!\S)# .*$", source, re.MULTILINE)])


def module(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "confed").as_posix()


def faulty(path: Path, allowed: set[str], found: list[str]) -> list[str]:
    """What is found in a file whose part of the package is not excepted."""
    return [] if any(module(path).startswith(part) for part in allowed) else found


def test_arguments_are_described() -> None:
    found = {module(path): EMPTY.findall(path.read_text()) for path in FILES}
    assert not {name: words for name, words in found.items() if words}


def test_packages_are_not_called_rooms() -> None:
    found = {module(p): faulty(p, SCENERY, [m[0] for m in METAPHORS.finditer(prose(p))]) for p in FILES}
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_speak_of_packages(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [match[0] for match in METAPHORS.finditer(text)] == []
