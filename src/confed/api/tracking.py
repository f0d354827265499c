"""Tracking of runs and studies from Python, as ``confed track`` does it."""

import webbrowser
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from confed.results.runs import StudyResults

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from confed.tracking.follow import Tracked

# A report page that shows itself in a notebook ----------------------------------------------------------------


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


def learning_curves(study: StudyResults) -> "Figure":
    """The curves of a report's page by round; a ValueError where fewer than two rounds are there to be drawn."""
    from confed.report.figures.curves import curves

    drawing = curves(study)
    if drawing is None:
        raise ValueError(f"{study.folder}: curves need at least two evaluated rounds, found fewer")
    return drawing.figure()


# Tracking of runs and studies from Python, as confed track does it --------------------------------------------


class Trackable:
    """A folder with runs that a tracking tool can be sent.

    Attributes:
        folder: the folder.
    """

    folder: Path

    def track(
        self,
        to: str = "trackio",
        *,
        at: str = "",
        project: str = "",
        group: str = "",
        name: str = "",
        files: bool = True,
        follow: bool = False,
        every: float = 2.0,
    ) -> "list[Tracked]":
        """Parameters, metrics by round and files sent to a tracking tool; what it has already is not sent again.

        Args:
            to: "trackio", "tensorboard", "mlflow" or "wandb".
            at: where the tool keeps runs; its own choice by default.
            project: name of the project; the recipe's by default.
            group: name of the group; the study's folder by default.
            name: of a run on its own; its folder's by default.
            files: whether recipe, summary and report go along. Reports hold sample pictures.
            follow: whether to go on until no process is at work in the folder.
            every: seconds between looks at the files.

        Returns:
            What was sent of each run, with ``state``, ``round``, ``values`` (that were new) and ``where``.

        An unknown or missing tool is a ValueError.

        Example:
            >>> sent = confed.load_run("runs/first").track("tensorboard", at="log")
            >>> [(one.state, one.round, one.where) for one in sent]
            [('finished', 2, 'log')]
        """
        from confed.tracking.follow import track
        from confed.tracking.records import Names

        names = Names(project, group, name)
        return [*track(self.folder, to, at=at, names=names, files=files, follow=follow, every=every)]
