"""A study's drawings as files, for documents: PNG and SVG."""

from collections.abc import Callable, Mapping
from pathlib import Path

from confed.results import convergence, filter_size, lines, plots
from confed.results.drawing import Drawing
from confed.results.runs import Study, load

__all__ = ["FIGURES", "save_figures"]

FIGURES: Mapping[str, Callable[[Study], Drawing | None]] = {
    "accuracy-by-round": lines.curves,
    "convergence": convergence.drawing,
    "personal-against-unseen": plots.trade_off,
    "accuracy-by-traffic-and-time": lines.spending,
    "clients": plots.bars,
    "filter-size": filter_size.drawing,
}
"""Name of a file -> what draws it."""


def save_figures(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes the drawings of a report as ``NAME.png`` and ``NAME.svg``; those that have no data are left out.

    Args:
        folder: a run or study folder.
        out: where the files go; by default ``figures/`` in the folder.

    Returns:
        The files.

    Raises:
        ValueError: the folder is neither a run nor a study.
    """
    study = load(Path(folder))
    out = Path(out) if out else study.folder / "figures"
    paths: list[Path] = []
    for name, make in FIGURES.items():
        drawing = make(study)
        if drawing is None:
            continue
        out.mkdir(parents=True, exist_ok=True)
        for ending, content in (("png", drawing.png()), ("svg", drawing.svg())):
            path = out / f"{name}.{ending}"
            path.write_bytes(content)
            paths.append(path)
    return paths
