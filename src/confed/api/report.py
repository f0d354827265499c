"""A report page that shows itself in a notebook."""

import webbrowser
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from confed.results.runs import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "learning_curves", "write_folder_report"]


class Report:
    """A report page; a notebook shows it, and other functions take it as the path of its file.

    Args:
        path: of the page.
        height: pixels of the frame in a notebook.

    Attributes:
        path: of the page, one file that needs no network.
    """

    def __init__(self, path: Path, height: int = 600) -> None:
        self.path, self.height = path, height

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """A frame with the whole page in it: a notebook's browser need not reach the file."""
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:{self.height}px;border:1px solid #8884"></iframe>'

    def open(self) -> None:
        """The page in a browser."""
        webbrowser.open(self.path.resolve().as_uri())


def write_folder_report(folder: Path) -> Path:
    """The report of a run's or study's folder, written again; returns its file.

    A folder that is neither is a ValueError.
    """
    from confed.report.report import write_report
    from confed.report.tables import modalities

    modalities.write(folder)
    return write_report(folder)


def learning_curves(study: Study) -> "Figure":
    """The curves of a report's page by round; a ValueError where fewer than two rounds are there to be drawn."""
    from confed.report.figures.curves import curves

    drawing = curves(study)
    if drawing is None:
        raise ValueError(f"{study.folder}: curves need at least two evaluated rounds, found fewer")
    return drawing.figure()
