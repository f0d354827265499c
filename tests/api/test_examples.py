"""The examples of the interface's docstrings and of its page run as they stand."""

import doctest
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import confed
import confed.api.run
import confed.api.study
import confed.comparison.verdict
import confed.federation.measure
import confed.recipes.recipe
import confed.testing
from command_line import Patch
from repository import ROOT

PAGE = ROOT / "docs" / "python.md"
MODULES = (
    confed.recipes.recipe, confed.api.run, confed.api.study, confed.comparison.verdict, confed.federation.measure,
    confed.testing,
)  # fmt: skip
PUBLIC = ("Recipe", "run", "study", "load_run", "load_study")


def examples() -> list[doctest.DocTest]:
    """Those that make a folder first."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for module in MODULES for test in finder.find(module, globs={"confed": confed}) if test.examples]
    return sorted(found, key=lambda test: test.name.rpartition(".")[2] not in ("run", "study"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder."""
    before, place = Path.cwd(), tmp_path_factory.mktemp("examples")
    os.chdir(place)
    yield place
    os.chdir(before)


def test_examples_in_docstrings_print_what_they_say(folder: Path) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in examples():
        runner.run(test, out=said.append)
    assert not said, "".join(said)


def test_every_public_function_and_method_has_an_example() -> None:
    there = {test.name for test in examples()}
    wanted = {f"{getattr(confed, name).__module__}.{name}" for name in PUBLIC}
    for cls in (confed.Run, confed.Study):
        missing = {"clients", "errors", "finished", "method", "methods", "recipe", "rounds", "seed", "seeds", "summary"}
        named = {name for name in vars(cls) if not name.startswith("_")} - missing
        wanted |= {f"{cls.__module__}.{cls.__name__}.{name}" for name in named}
    assert wanted <= there


@pytest.mark.slow
def test_blocks_of_the_page(folder: Path, monkeypatch: Patch) -> None:
    (folder / "page").mkdir()
    monkeypatch.chdir(folder / "page")
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save("picture.png")
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("a browser"))
    namespace: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert {path.name for path in Path("runs").iterdir()} >= {"first", "study", "recipe"}
