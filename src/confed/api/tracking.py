"""Tracking of runs and studies from Python, as ``confed track`` does it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confed.tracking.follow import Tracked

__all__ = ["Trackable"]


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
