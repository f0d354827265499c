"""The page on the architecture: its table is that of the tests, and its picture is drawn from today's imports."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_{path.stem}_read", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def expanded(cell: str, layers: tuple[tuple[str, ...], ...]) -> set[str]:
    """The packages of "layers 1–3 but losses; runs, tasks" (layers count from 1)."""
    found: set[str] = set()
    for part in cell.split(";"):
        if among := re.fullmatch(r"layers 1–(\d)(?: but ([\w, ]+))?", part.strip()):
            found |= {name for names in layers[: int(among[1])] for name in names} - set(
                re.findall(r"\w+", among[2] or "")
            )
        else:
            found |= set(re.findall(r"\w+", part))
    return found


def test_table_is_the_one_of_the_tests() -> None:
    (path,) = sorted((ROOT / "tests").rglob("test_package.py"))
    package = module(path)
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert {name: int(layer) for layer, name, _ in rows} == {n: layer + 1 for n, layer in package.LAYER.items()}
    assert {name: expanded(cell, package.LAYERS) for _, name, cell in rows} == package.MAY_IMPORT


def test_picture_is_current() -> None:
    assert module(ROOT / "docs" / "draw_architecture.py").check(), "run python docs/draw_architecture.py"
