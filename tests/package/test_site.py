"""The documentation site builds offline without a warning."""

import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT


@pytest.mark.slow  # 20 s of processor time; needs the extra "docs"
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees"), "docs"]
    done = subprocess.run([*command, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for page in ("index", "tutorial", "reference/methods", "reference/commands", "reference/api"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    outside = [
        path.name
        for path in (tmp_path / "site").rglob("*.html")
        if 'src="http' in (text := path.read_text(encoding="utf-8")) or 'rel="stylesheet" href="http' in text
    ]
    assert not outside, "pages load something from elsewhere"
