"""The tests that the pages on security name are there, and every protection names one."""

import re

import pytest

from repository import ROOT

SHORT, LONG = ROOT / "SECURITY.md", ROOT / "docs" / "security_long.md"
TEST = re.compile(r"`(test_\w+|tests/[\w/]+\.py)`")


@pytest.mark.parametrize("page", [SHORT, LONG], ids=lambda page: page.stem)
def test_every_test_that_a_security_page_names_exists(page) -> None:
    text = page.read_text(encoding="utf-8")
    files = (ROOT / "tests").rglob("test_*.py")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    named = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert named
    for name in named:
        assert name in sources, name
    for name in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name


def test_every_threat_has_a_protection_a_test_and_a_remainder() -> None:
    text = SHORT.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "threat"]
    assert len(rows) > 20
    assert [row for row in rows if len(row) != 4 or not all(row) or not TEST.search(row[2])] == []
    assert len(text.split()) < 1300, "two pages"


def test_every_protection_names_its_test() -> None:
    """Each entry of the lists of protections, and each cell of what somebody cannot do."""
    text = LONG.read_text(encoding="utf-8")
    today, across = (re.split(rf"^## {title}.*$", text, flags=re.MULTILINE)[1] for title in ("What is p", "Across"))
    entries = [entry for part in (today, across) for entry in re.split(r"^- ", part.split("\n## ")[0], flags=re.M)[1:]]
    table = across.split("| who | can | cannot |")[1].split("\n\n")[0]
    entries += [line.rsplit(" | ", 1)[1] for line in table.splitlines()[2:]]
    assert len(entries) > 20
    assert [entry for entry in entries if not TEST.search(entry)] == []
