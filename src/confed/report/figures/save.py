"""Export of a study's figures as PNG and SVG files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from confed.federation.file_names import file_name
from confed.report.figures.bars import further_bars
from confed.report.figures.style import Drawing
from confed.report.section import sections
from confed.results.runs import StudyResults, load


def figures() -> dict[str, Callable[[StudyResults], Drawing | None]]:
    """Name of a file -> what draws it, of all sections of the report."""
    drawings: dict[str, Callable[[StudyResults], Drawing | None]] = {}
    for section in sections():
        drawings |= section.figures
    return drawings


def save_figures(folder: Path, out: Path | None = None, methods: Sequence[str] = ()) -> list[Path]:
    """Export of a report's figures as ``NAME.png`` and ``NAME.svg``, without those that have no data."""
    study = load(Path(folder))
    for method in methods:
        if method not in study.methods:
            raise ValueError(f"methods must be among {', '.join(study.methods)}, got {method!r}")
    if methods:
        study = replace(study, runs=tuple(run for run in study.runs if run.method in methods))
    out = Path(out) if out else study.folder / "figures"
    drawings = {name: make(study) for name, make in figures().items()}
    for measure, drawing in further_bars(study):
        drawings[f"measure-{file_name(measure.name)}"] = drawing
    paths: list[Path] = []
    for name, drawing in drawings.items():
        paths += [] if drawing is None else drawing.save(out, name)
    return paths
