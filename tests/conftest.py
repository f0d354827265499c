"""One thread per process: the tests are small, and they run beside each other."""

import os
from pathlib import Path

import pytest
import torch

from confed.recipes.run_section import Run

torch.set_num_threads(1)
# Control conditions triple what the examination of a small run costs: tests about them ask with run.controls=all.
Run.controls = "none"
Run.__init__.__defaults__ = tuple("none" if value == "all" else value for value in Run.__init__.__defaults__ or ())
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Recipes of the tests name things of the tests' own modules. No other is allowed, and nobody's own settings count.
OWN = [*sorted(path.stem for path in Path(__file__).parent.rglob("*.py")), "breaking"]
os.environ["CONFED_ALLOW_CODE"] = ",".join(OWN)
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "no settings")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of small real datasets; tests that need it skip where it is missing."""
    folder = Path(os.environ.get("CONFED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real data here; set CONFED_DATA to its folder")
    return folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts on pictures are kept in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))
