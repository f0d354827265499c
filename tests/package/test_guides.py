"""Code of the guides: every block of shell commands and Python is run as it stands, or says why it is not."""

import os
import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from confed.registry import ALLOWED
from repository import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main

GUIDES = (
    "tutorial", "own_data", "own_model", "own_method", "reading_a_report", "tuning", "exporting", "how_it_works", "faq",
    "which_method", "reproducing",
)  # fmt: skip
BLOCK = re.compile(r"^(?:<!-- (?P<why>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> Iterator[tuple[str, str]]:
    """Kind and text of the blocks that are run."""
    for block in BLOCK.finditer((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")):
        why = block["why"] or ""
        assert not why or re.fullmatch(r"not run: .{8,}", why), why
        if not why:
            yield block["kind"], block["text"]


def run(line: str) -> None:
    """A command of a shell block, in this process."""
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        if name == "PYTHONPATH":
            sys.path.insert(0, str(Path(value).resolve()))
    if not words:
        return
    assert words[0] == "confed", line
    with pytest.raises(SystemExit) as stop:
        main([*words[1:], *(["--quiet"] if words[1] == "run" else [])])
    assert stop.value.code == 0, line


@pytest.mark.slow  # half a minute for the tutorial, as long again for all others
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", GUIDES)
def test_all_code_blocks_of_a_guide_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv(ALLOWED, "")
    names: dict[str, object] = {"__name__": "guide"}
    modules = set(sys.modules)
    try:
        for kind, text in blocks(name):
            if kind == "python":
                if saved := re.match(r"# (\w+\.py)\n", text):
                    (tmp_path / saved[1]).write_text(text, encoding="utf-8")
                else:
                    exec(compile(text, name, "exec"), names)
            elif kind == "sh":
                for line in text.splitlines():
                    run(line)
            elif kind == "toml":
                tomllib.loads(text)
            else:
                assert kind in ("text", "json"), kind
    finally:
        for module in set(sys.modules) - modules:
            if (tmp_path / f"{module}.py").is_file():
                sys.modules.pop(module)
        os.chdir(ROOT)


@pytest.mark.parametrize("name", GUIDES)
def test_blocks_are_run_or_say_why_not(name: str) -> None:
    assert {kind for kind, _ in blocks(name)} <= {"python", "sh", "toml", "text", "json"}


def test_every_page_is_a_guide_or_a_reference() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {name for part in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for name in part.split()}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    lost = {name for name in pages - listed if not name.startswith(("results_", "python"))}
    assert not lost, "docs/index.md lists every page"
    assert set(GUIDES) <= listed
