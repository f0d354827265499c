"""Finished folders lead to the same pages, files and frames, and the interface says what it said.

Where a change is meant, ``python tests/golden/golden.py pages`` writes the texts anew, and the change names each.
"""

import difflib
from pathlib import Path

import pytest

from golden import FOLDERS, INTERFACE, PAGES, interface, pages_of, stored

DRAWS = True

DRAWN = ("sweep", "vqa")
"""Folders whose figures are drawn: of the others only texts are compared."""


def _compare(now: dict[str, str], before: dict[str, str]) -> None:
    assert sorted(now) == sorted(before)
    for name, text in now.items():
        lines = difflib.unified_diff(before[name].splitlines(), text.splitlines(), "before", "now", n=0, lineterm="")
        difference = list(lines)[:12]
        assert not difference, "\n".join([name, *difference])


@pytest.mark.parametrize("archive", sorted(FOLDERS.glob("*.zip")), ids=lambda path: path.stem)
def test_a_finished_folder_leads_to_the_same_pages(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    if archive.stem not in DRAWN:
        request.getfixturevalue("undrawn_figures")
    _compare(pages_of(archive, tmp_path), stored(PAGES / archive.stem))


def test_the_interface_says_what_it_said() -> None:
    _compare(interface(), stored(INTERFACE))
