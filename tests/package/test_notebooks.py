"""The notebooks run from top to bottom, and hold outputs that name no machine."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT, script_module

nbformat: Any = pytest.importorskip("nbformat", reason="the extra dev brings nbclient and ipykernel")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
FIRST = ROOT / "docs" / "notebooks" / "first_federation.ipynb"


FEWER = (
    (re.compile(r'("data\.(?:train|validation|test)": )\d+'), r"\g<1>16"),
    (re.compile(r"""(\brounds["']?[=:] ?|\bseeds=)\d+"""), r"\g<1>2"),
)
"""What costs time and not code: numbers of examples, rounds and seeds."""


def with_fewer(notebook: Path, folder: Path) -> Path:
    """A copy of a notebook whose runs have fewer examples, rounds and seeds."""
    content = nbformat.read(notebook, as_version=4)
    replaced = 0
    for cell in content.cells:
        for pattern, fewer in FEWER:
            cell.source, count = pattern.subn(fewer, cell.source)
            replaced += count if cell.cell_type == "code" else 0
    assert replaced
    copy = folder / notebook.name
    nbformat.write(content, copy)
    return copy


def executed(notebook: Path, folder: Path) -> Any:
    return script_module("docs/run_notebooks.py").executed(notebook, str(folder))


def errors(content: Any) -> list[str]:
    """Errors and warnings among the outputs."""
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    return [str(o)[:400] for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@every_notebook
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, in a kernel of its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("CONFED_ALLOW_CODE")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert errors(executed(with_fewer(notebook, tmp_path), tmp_path)) == []


def test_the_first_notebook_runs_without_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, whose last value is shown, with warnings as errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("CONFED_ALLOW_CODE")
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in nbformat.read(with_fewer(FIRST, tmp_path), as_version=4).cells:
        if cell.cell_type == "code":
            *body, last = ast.parse(cell.source).body
            exec(compile(ast.Module(body, []), FIRST.name, "exec"), names)
            if isinstance(last, ast.Expr):
                shown = eval(compile(ast.Expression(last.value), FIRST.name, "eval"), names)
                assert getattr(shown, "_repr_html_", shown.__repr__)()
            else:
                exec(compile(ast.Module([last], []), FIRST.name, "exec"), names)


@every_notebook
def test_stored_outputs_are_there_and_name_no_machine(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert errors(content) == []
    assert any(cell.outputs for cell in cells)
    assert re.findall(r"(?:/home|/root|/tmp|/work|/Users)/\S*", notebook.read_text(encoding="utf-8")) == []
    assert notebook.stat().st_size < 300_000
