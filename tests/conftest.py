"""One thread per process: the tests are small, and they run beside each other."""

import gc
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch
from PIL import Image

import shape_checks  # before the packages whose shapes are checked # isort: skip # noqa: F401
from confed import registry
from confed.recipes.run_section import RunSection
from confed.report.figures.style import Drawing

torch.set_num_threads(1)
gc.disable()  # until all modules of tests are imported
os.fsync = lambda _: None  # what tests write survives their processes, and need not survive a power failure
# Control conditions triple what the examination of a small run costs: tests about them ask with run.controls=all.
RunSection.controls = "none"
RunSection.__init__.__defaults__ = tuple(
    "none" if value == "all" else value for value in RunSection.__init__.__defaults__ or ()
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Recipes of the tests name things of the tests' own modules. No other is allowed, and nobody's own settings count.
OWN = [*sorted(path.stem for path in Path(__file__).parent.rglob("*.py")), "breaking"]
os.environ["CONFED_ALLOW_CODE"] = ",".join(OWN)
# What runs keep for later ones is nobody's but this process's.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"confed-tests-{os.getpid()}")
os.environ["XDG_CONFIG_HOME"] = str(Path(os.environ["XDG_CACHE_HOME"]) / "no settings")


def pytest_collection_finish() -> None:
    """From here on the collector of cycles looks at what tests make, and not at a million objects of libraries."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(autouse=True)
def registries_as_before() -> Iterator[None]:
    """What a test registers is gone after it: others list everything that there is."""
    registries = (registry.algorithms, registry.models, registry.datasets, registry.tasks, registry.measures)
    before = [set(entries._entries) for entries in registries]
    yield
    for entries, names in zip(registries, before, strict=True):
        for name in [*entries._entries]:
            if name not in names and not str(entries._entries[name].__module__).startswith("confed."):
                del entries._entries[name]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of small real datasets; tests that need it skip where it is missing."""
    folder = Path(os.environ.get("CONFED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real data here; set CONFED_DATA to its folder")
    return folder


@pytest.fixture
def faulty_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and types are not checked: the test gives faulty ones, for the errors that a run would show."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts on pictures are kept in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))


@pytest.fixture
def undrawn_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have empty figures, which take most of a report's time: for tests of what its text says."""
    monkeypatch.setattr("confed.report.figures.style.Drawing._save", empty_figure)


def empty_figure(drawing: object, palette: object, kind: str, dpi: int = 72) -> tuple[bytes, object]:
    """A drawing of nothing."""
    content = io.BytesIO(b'<svg width="1" height="1"></svg>')
    if kind == "png":
        Image.new("RGB", (1, 1)).save(content, "PNG")
    return content.getvalue(), SimpleNamespace(bbox=SimpleNamespace(height=1), axes=[])


@pytest.fixture(autouse=True, scope="module")
def figures_where_they_are_tested(request: pytest.FixtureRequest) -> Iterator[None]:
    """Figures are empty, but for those whose first word a module's ``DRAWS`` holds, or for all where it is True."""
    drawn = getattr(request.module, "DRAWS", ())
    with pytest.MonkeyPatch.context() as patch:
        if drawn is not True:
            whole = Drawing._save

            def save(drawing: Drawing, palette: Any, kind: str, dpi: int = 72) -> tuple[bytes, Any]:
                if drawing.name.split()[0] in drawn:
                    return whole(drawing, palette, kind, dpi)
                return empty_figure(drawing, palette, kind)

            patch.setattr(Drawing, "_save", save)
        yield


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of five methods and two seeds that was written, not trained. Tests copy what they change."""
    from synthetic_study import make_study

    return make_study(tmp_path_factory.mktemp("finished") / "study")


@pytest.fixture(scope="session")
def finished_label_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run whose model gives labels and hears of known ones. Tests copy what they change."""
    from coloured_labels import RECIPE
    from confed.recipes.recipe import load_recipe
    from confed.runs.run import run

    root = tmp_path_factory.mktemp("told")
    (root / "told.toml").write_text(RECIPE.replace(':colours"', ':told"'))
    run(load_recipe(root / "told.toml"), root / "run")
    return root / "run"
