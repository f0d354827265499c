"""Table of tracking tools: a new one is a module with a function like those named here, and an entry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confed.tracking.records import TrackedRun


@dataclass(frozen=True)
class Sent:
    """What a tool was given of a run.

    Attributes:
        values: number of values that it did not have.
        where: where it keeps the run.
    """

    values: int
    where: str


Send = Callable[["TrackedRun", str], Sent]
"""Adds what a tool lacks of a run, at a place (empty for the tool's own choice), and says what that was."""


@dataclass(frozen=True)
class Backend:
    """A tracking tool.

    Attributes:
        send: module and function, of type :data:`Send`, imported when used.
        needs: module that must be installed.
        place: what ``--at`` means, and the default.
        show: command that shows the results; ``{where}``, ``{project}`` are filled in.
        whole_rounds: whether a round can be given only once, so that an unfinished one has to wait.
    """

    send: str
    needs: str
    package: str
    place: str
    show: str = ""
    whole_rounds: bool = False

    def load(self) -> Send:
        """The function, imported; the tool must be there."""
        module, _, name = self.send.partition(":")
        return getattr(import_module(module), name)


BACKENDS: Mapping[str, Backend] = {
    "trackio": Backend(
        "confed.tracking.to_trackio:send",
        "trackio",
        "trackio",
        "folder of its databases [TRACKIO_DIR, or its own]",
        show="trackio show --project {project}",
    ),
    "tensorboard": Backend(
        "confed.tracking.to_tensorboard:send",
        "tensorboard",
        "tensorboard",
        "log folder [tensorboard]",
        show="tensorboard --logdir {where}",
    ),
    "mlflow": Backend(
        "confed.tracking.to_mlflow:send",
        "mlflow",
        "mlflow",
        "tracking URI [MLFLOW_TRACKING_URI, or its own]",
    ),
    "wandb": Backend(
        "confed.tracking.to_wandb:send",
        "wandb",
        "wandb",
        "folder of its files [WANDB_DIR, or the current one]",
        whole_rounds=True,
    ),
}


def backend_of(name: str) -> Backend:
    """A tracking tool by name, if it is installed."""
    if name not in BACKENDS:
        raise ValueError(f"the tracking tool must be one of {', '.join(BACKENDS)}, got {name!r}")
    backend = BACKENDS[name]
    if find_spec(backend.needs) is None:
        extra = "'.[track]' -c constraints.txt" if name == "trackio" else backend.package
        raise ValueError(f"tracking with {name} needs the package {backend.package}: pip install {extra}")
    return backend
