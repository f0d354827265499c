"""What is kept of examples between runs can be seen, removed and switched off."""

import json
from pathlib import Path

import pytest

from command_line import Capture, Patch, confed, refused
from confed.recipes.run_section import KeptFeatures, RunSection
from confed.runs.build import _features  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "confed" / "features" / "abc").mkdir(parents=True)
    (tmp_path / "confed" / "features" / "abc" / "x.safetensors").write_bytes(b"12345")
    (tmp_path / "other").mkdir()
    return tmp_path


def test_kept_features_are_listed_and_removed(cache: Path, capfd: Capture) -> None:
    assert confed("data", "cache") == 0
    assert f"1 files, 5 bytes in {cache / 'confed' / 'features'}" in capfd.readouterr().out
    assert confed("data", "cache", "--json") == 0
    assert json.loads(capfd.readouterr().out)["features"]["bytes"] == 5
    assert confed("data", "cache", "--clear") == 0
    assert [path.name for path in (cache / "confed").iterdir()] == []
    assert (cache / "other").is_dir()
    assert confed("data", "cache", "--clear") == 0
    assert confed("data", "cache") == 0


@pytest.mark.parametrize(
    ("machine", "recipe", "kept", "files"),
    [
        ("auto", "auto", True, True), ("off", "auto", False, False), ("memory", "auto", True, False),
        ("auto", "off", False, False), ("auto", "memory", True, False), ("off", "memory", False, False),
    ],
)  # fmt: skip
def test_a_machine_may_switch_keeping_off(
    machine: str, recipe: str, kept: bool, files: bool, cache: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CONFED_FEATURES", machine)
    settings = _features(RunSection(features=KeptFeatures(recipe)))  # pyright: ignore[reportArgumentType]
    assert (settings is not None) == kept
    assert (settings is not None and settings.folder == cache / "confed" / "features") == files
    monkeypatch.setenv("CONFED_FEATURES", "none")
    with refused("CONFED_FEATURES must be auto, memory or off"):
        _features(RunSection())
