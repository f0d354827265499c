"""Table of tracking tools: a new one is a module ``to_<package>`` with a function ``send``, and an entry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confed.tracking.records import TrackedRun


@dataclass(frozen=True)
class Sent:
    """What a tool was given of a run."""

    values: int  # number of values that it did not have
    where: str  # where it keeps the run


Send = Callable[["TrackedRun", str], Sent]
"""Adds what a tool lacks of a run, at a place (empty for the tool's own choice), and says what that was."""


@dataclass(frozen=True)
class Backend:
    """A tracking tool."""

    package: str  # which must be installed; its function of type :data:`Send` is in the module ``to_<package>``
    place: str  # what ``--at`` means, and the default
    show: str = ""  # command that shows the results; ``{where}``, ``{project}`` are filled in
    whole_rounds: bool = False  # whether a round can be given only once, so that an unfinished one has to wait

    def load(self) -> Send:
        """The function, imported; the tool must be there."""
        return import_module(f"confed.tracking.to_{self.package}").send


BACKENDS: Mapping[str, Backend] = {
    "trackio": Backend(
        "trackio", "folder of its databases [TRACKIO_DIR, or its own]", show="trackio show --project {project}"
    ),
    "tensorboard": Backend("tensorboard", "log folder [tensorboard]", show="tensorboard --logdir {where}"),
    "mlflow": Backend("mlflow", "tracking URI [MLFLOW_TRACKING_URI, or its own]"),
    "wandb": Backend("wandb", "folder of its files [WANDB_DIR, or the current one]", whole_rounds=True),
}


def backend_of(name: str) -> Backend:
    """A tracking tool by name, if it is installed."""
    if name not in BACKENDS:
        raise ValueError(f"the tracking tool must be one of {', '.join(BACKENDS)}, got {name!r}")
    backend = BACKENDS[name]
    if find_spec(backend.package) is None:
        extra = "'.[track]' -c constraints.txt" if name == "trackio" else backend.package
        raise ValueError(f"tracking with {name} needs the package {backend.package}: pip install {extra}")
    return backend
