"""Report over several models: tables, figures, and links to the report of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from confed.comparison.records import distinct_labels
from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.over_models import OVERALL, ModelStudies, model_studies
from confed.report.tables import models as model_tables
from confed.report.tables.table import Table, to_html
from confed.report.tables.write import write_files
from confed.results.runs import StudyResults, load


def load_models(root: Path, models: Mapping[str, str], headline: str = "") -> ModelStudies:
    """The studies of several models that have runs."""
    studies: dict[str, StudyResults] = {}
    absent: dict[str, str] = {}
    labels = distinct_labels(models)
    for row, label in labels.items():
        try:
            studies[label] = load(root / row)
        except ValueError as error:  # not one run is there; an index may tell why
            absent[label] = str(error) if (root / row / "summary.json").is_file() else "nothing has been run yet"
    if not any(run.complete for run in chain.from_iterable(study.runs for study in studies.values())):
        raise ValueError(f"{root} must hold a finished run of at least one of {', '.join(models)}, found none")
    return replace(model_studies(studies, headline), absent=absent)


def write_models(
    root: Path, models: Mapping[str, str], references: Sequence[str] | None = None
) -> tuple[ModelStudies, list[Path]]:
    """Export of ``models.md``, ``.csv``, ``.tex``, the CSV files of the tests and ``report.html`` to a folder.

    Raises ``ValueError``: no finished run, or an unknown reference.
    """
    studies = load_models(root, models)
    links = {
        label: f"{row}/report.html"
        for row, label in distinct_labels(models).items()
        if (root / row / "report.html").is_file()
    }
    texts = {**model_tables.files(studies, references), "report.html": render(studies, references, links)}
    return studies, write_files(root, texts)


def render(
    studies: ModelStudies, references: Sequence[str] | None = None, links: Mapping[str, str] | None = None
) -> str:
    """The page as HTML."""
    tables, tabs = model_tables.model_tables(studies, references), Tabs()
    recipe = next((study.recipe for study in studies.studies.values() if study.recipe), "")
    title = f"{recipe + ': ' if recipe else ''}{len(studies.studies)} models, {len(studies.labels)} methods"
    panels: dict[str, list[tuple[str, str]]] = {"models": [], "pairs": [], "differences": []}
    for measure in studies.measures:
        for kind, panel in panels.items():
            name = kind if measure == OVERALL else f"{kind} {measure}"
            if name in tables:
                panel.append((measure, _html(tables[name])))
    inner = "".join(
        f'<li><a href="{page.escape(where)}">{page.escape(label)}</a></li>' for label, where in (links or {}).items()
    )
    lead = (
        "The same methods with each of several models, on the same data. A cell is the mean over clients, and over "
        "seeds with their standard deviation where there are several."
    )
    entries = [
        ("results", "Results", tabs(panels["models"]) if panels["models"] else ""),
        ("pairs", "Methods compared over models", tabs(panels["pairs"]) if panels["pairs"] else ""),
        ("differences", "Differences model by model", tabs(panels["differences"]) if panels["differences"] else ""),
        ("reports", "The report of each model", f"<ul>{inner}</ul>" if inner else ""),
    ]
    head = f"<h1>{page.escape(title)}</h1>{page.paragraph(lead, 'lead')}"
    return page.document(title, head, entries)


def _html(table: Table) -> str:
    return f'{page.paragraph(table.title, "muted")}<div class="wide dense">{to_html(table)}</div>'
