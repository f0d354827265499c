"""Documentation: links, claims, pages of the site, and the security page."""

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from confed.recipes.recipe import load_recipe, packaged_recipes
from confed.registry import ALLOWED, algorithms
from confed.testing import check_algorithm
from repository import ROOT, script_module

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "results").glob("*.md"))
EXAMPLES = {"feature_anchor.py", "bag_of_words.py", "colours.py", "focal.py", "lg_fedavg.py"}

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def spans(page: Path) -> list[str]:
    """What stands in backticks on one line, outside code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def commands(page: Path) -> list[str]:
    """Command lines: of shell blocks, and in backticks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines + spans(page) if line]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page_by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        # docs/reference is made when the site is built, which checks links to it.
        if not target.startswith(("https://", "mailto:", "reference/")):
            path, _, anchor = target.partition("#")
            assert (page.parent / path).exists(), target
            assert not anchor or anchor in anchors(page.parent / path if path else page), target


@page_by_page
def test_named_files_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src", ROOT / "src" / "confed", ROOT / "src" / "confed" / "federation")
    places += tuple(path for path in (ROOT / "src" / "confed").iterdir() if path.is_dir())
    places += (ROOT / "benchmarks",)
    for span in spans(page):
        if re.fullmatch(r"[\w./-]+\.(py|toml|md|txt|svg)", span) and Path(span).name not in EXAMPLES:
            own = {"recipe.toml", "begun.toml", "mine.toml", "policy.toml"}  # of a run folder, a site, and the reader's
            assert span in own or any((place / span).exists() for place in places), span
        if re.fullmatch(r"(src|tests|docs|scripts|benchmarks)/[\w./-]*", span):
            assert (ROOT / span).exists(), span


@pytest.fixture(scope="module")
def verbs() -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer imports names that click is about to drop
        from typer.main import get_command

        from confed.cli import app

        return set(get_command(app).commands)  # type: ignore[attr-defined]


@page_by_page
def test_named_commands_exist(page: Path, verbs: set[str]) -> None:
    for line in commands(page):
        for script in re.findall(r"(?:^|\s)(scripts/\w+|\.ci/run)", line):
            assert os.access(ROOT / script, os.X_OK), line
        verb = re.search(r"(?:^|\s)confed ([a-z]+)", line)
        assert verb is None or verb.group(1) in verbs, line


@page_by_page
def test_named_recipes_are_packaged(page: Path) -> None:
    assert {span for span in spans(page) if re.fullmatch(r"fedvqa_\w+", span)} <= set(packaged_recipes())


@page_by_page
def test_named_overrides_are_keys_of_their_recipe(page: Path) -> None:
    for line in commands(page):
        if line.startswith("confed run"):
            named = re.match(r"confed run (\w+)(?= |$)", line)
            load_recipe(named[1] if named else "fedvqa_scenes", re.findall(r"\s([a-z]+\.\w+=\S+)", line))


def test_the_index_of_papers_has_every_method_and_recipe() -> None:
    text = (ROOT / "docs" / "papers.md").read_text()
    rows = re.findall(r"^\|[^|]+\| `(\w+)` \|[^|]+\| `([\w/.]+)` \| ([^|]+) \|", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(algorithms.names())
    for name, file, recipe in rows:
        assert (ROOT / "src" / "confed" / file).stem == name
        assert (ROOT / "src" / "confed" / file).is_file()
        known = recipe.strip().strip("`")
        if known != "–":
            study = load_recipe(known)
            assert name in {study.method(row).sections["algorithm"]["name"] for row in (*study.methods, *study.table)}


def test_usage_names_every_method() -> None:
    page = (ROOT / "docs" / "usage.md").read_text()
    assert {f"`{name}`" for name in algorithms.names()} <= set(re.findall(r"`\w+`", page))


def test_readme_fits_on_a_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 50


def test_method_of_the_usage_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "usage.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 20
    (tmp_path / "lg_fedavg.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = re.findall(r"^PYTHONPATH=\. confed run .*$", (ROOT / "docs" / "usage.md").read_text(), re.MULTILINE)
    monkeypatch.setenv(ALLOWED, command.partition("--allow-code ")[2].split()[0])
    try:
        method = importlib.import_module("lg_fedavg").LGFedAvg
        verdicts = dict(check_algorithm(method(head="head.*")))
        assert verdicts["sends only what is shared"] == "passed"
        recipe = load_recipe("fedvqa_scenes", ['study.methods=["fedavg", "lg_fedavg:LGFedAvg"]'])
        assert recipe.method("lg_fedavg:LGFedAvg").construct("algorithm") == method()
    finally:
        sys.modules.pop("lg_fedavg", None)


def test_the_page_on_federations_names_every_method() -> None:
    text = (ROOT / "docs" / "federation.md").read_text()
    told = text.partition("The methods that pass it")[2].partition(".\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", told)) == sorted(algorithms.names())


def test_the_page_on_ways_of_execution_is_current() -> None:
    assert script_module("docs/make_equivalence.py").check(), "run python docs/make_equivalence.py"


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


SHORT, LONG = ROOT / "SECURITY.md", ROOT / "docs" / "security_long.md"
TEST = re.compile(r"`(test_\w+|tests/[\w/]+\.py)`")


FEDERATION = [ROOT / "docs" / f"{name}.md" for name in ("federation", "federation_setup", "operating")]


@pytest.mark.parametrize("page", [SHORT, LONG, *FEDERATION], ids=lambda page: page.stem)
def test_every_test_that_a_security_page_names_exists(page) -> None:
    text = page.read_text(encoding="utf-8")
    files = (ROOT / "tests").rglob("test_*.py")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert TEST.search(text)
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert name in sources, name
    for name in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name


PROTECTS = re.compile(
    r"\b(refuse[sd]?|cannot|can change nothing|never|does not start|left out|noticed|nothing is shown|loses nothing|"
    r"asked nothing|no pickle|by its owner alone|opens with)\b"
)


@pytest.mark.parametrize("page", FEDERATION, ids=lambda page: page.stem)
def test_every_sentence_of_protection_names_its_test(page) -> None:
    """What a page promises is refused, kept or noticed is tried by a test that the same sentence names."""
    text = re.sub(r"^(```.*?^```$|\|.*?)$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.;:])\s+(?=[A-Z`\n])", text)]
    promises = [sentence for sentence in sentences if PROTECTS.search(sentence)]
    assert promises
    assert [sentence for sentence in promises if not TEST.search(sentence)] == []


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
