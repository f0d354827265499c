"""Export of a study's figures as PNG and SVG files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from confed.federation.file_names import file_name
from confed.report.figures import bars as plots
from confed.report.figures import convergence
from confed.report.figures import curves as lines
from confed.report.figures import labels as label_figures
from confed.report.figures.style import Drawing
from confed.report.sections import fedp3_filter as filter_size
from confed.report.sections import privacy_curve, similarity
from confed.report.sections import split_steps as steps
from confed.report.tables import modalities as modality_matrix
from confed.results.runs import StudyResults, load

FIGURES: Mapping[str, Callable[[StudyResults], Drawing | None]] = {
    "accuracy-by-round": lines.curves,
    "convergence": convergence.drawing,
    "personal-against-unseen": plots.trade_off,
    "accuracy-by-traffic-and-time": lines.spending,
    "clients": plots.bars,
    "modalities": modality_matrix.drawing,
    "average-precision-by-label": label_figures.precision_by_label,
    "labels-together": label_figures.co_occurrence_of,
    "filter-size": filter_size.drawing,
    "similarity": similarity.figure,
    "steps": steps.drawing,
    "accuracy-by-epsilon": privacy_curve.accuracy_against_epsilon,
}
"""Name of a file -> what draws it."""


def save_figures(folder: Path, out: Path | None = None, methods: Sequence[str] = ()) -> list[Path]:
    """Export of a report's figures as ``NAME.png`` and ``NAME.svg``, without those that have no data."""
    study = load(Path(folder))
    for method in methods:
        if method not in study.methods:
            raise ValueError(f"methods must be among {', '.join(study.methods)}, got {method!r}")
    if methods:
        study = replace(study, runs=tuple(run for run in study.runs if run.method in methods))
    out = Path(out) if out else study.folder / "figures"
    paths: list[Path] = []
    drawings = {name: make(study) for name, make in FIGURES.items()}
    for measure, drawing in plots.further_bars(study):
        drawings[f"measure-{file_name(measure.name)}"] = drawing
    for name, drawing in drawings.items():
        if drawing is None:
            continue
        out.mkdir(parents=True, exist_ok=True)
        for ending, content in (("png", drawing.png()), ("svg", drawing.svg())):
            path = out / f"{name}.{ending}"
            path.write_bytes(content)
            paths.append(path)
    return paths
