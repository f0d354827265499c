"""Tables, figures and report of a study, written into its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confed.report.statistics.comparison import Comparison

__all__ = ["StudyFiles", "write_files", "write_study_files"]


@dataclass(frozen=True)
class StudyFiles:
    """What :func:`write_study_files` has written.

    Attributes:
        comparison: of the study's methods.
        tables: names of tables, each as .md, .csv and .tex.
        figures: files of figures.
        page: the report.
        relative: the method whose relative improvement is among the tables; empty for none.
        absent: methods that were asked for as references, or as ``relative``, and have no finished run.
    """

    comparison: "Comparison"
    tables: Sequence[str]
    figures: Sequence[Path]
    page: Path
    relative: str
    absent: Mapping[str, Sequence[str]]


def write_study_files(
    folder: Path, references: Sequence[str] = (), margin: float = 0.01, relative: str = ""
) -> StudyFiles:
    """Tables, figures and report of a study's finished runs.

    A folder without any is a ValueError.

    Args:
        folder: the study's.
        references: the methods that the others are compared with; none for the usual ones.
        margin: of equality, a fraction.
        relative: a method whose relative improvement over each of the others is shown, client by client; "" for none.
    """
    from confed.report.figures.save import save_figures
    from confed.report.report import write_report
    from confed.report.statistics.comparison import compare
    from confed.report.tables.write import write_tables
    from confed.results.runs import load

    there = {run.method for run in load(folder).runs if run.complete}
    present = [name for name in references if name in there] or None
    comparison = compare([folder], present, margin)
    tables = [path.stem for path in write_tables(folder, present, margin) if path.suffix == ".md"]
    figures = save_figures(folder)
    own = relative if relative in comparison.clients_of else ""
    if own:
        write_files(comparison.relative_files(own), folder)
        tables.append("relative")
    absent = {
        "reference": [name for name in references if name not in there],
        "relative": [relative] if relative and not own else [],
    }
    return StudyFiles(comparison, tables, figures, write_report(folder), own, absent)


def write_files(files: Mapping[str, str] | Mapping[str, bytes], folder: Path) -> None:
    """Write files, by name, into a folder that is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
