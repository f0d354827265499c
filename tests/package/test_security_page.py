"""The tests that SECURITY.md names are there."""

import re

from repository import ROOT


def test_every_test_that_the_security_page_names_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    files = (ROOT / "tests").rglob("test_*.py")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    named = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert named
    for name in named:
        assert name in sources, name
    for name in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name
