"""The tests that SECURITY.md names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_security_page_names_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    for name in re.findall(r"`tests/(test_\w+\.py)`", text):
        assert name in sources, name
    for name in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name
