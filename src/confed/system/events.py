"""Progress events of long operations, and the type of the callbacks that receive them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Note:
    """Message about what is being done."""

    text: str


@dataclass(frozen=True)
class Caution:
    """Message about a problem that does not stop the operation."""

    text: str


@dataclass(frozen=True)
class StepProgress:
    """Progress within one step of a preparation.

    Attributes:
        step: what is done, such as "reading questions".
        done: number of items that are done.
        total: number of items; 0 if unknown.
    """

    step: str
    done: int
    total: int


Stage = Literal["starting", "answering", "training", "fine-tuning", "evaluating", "evaluated", "done"]


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run, reported after every step.

    Attributes:
        round: the last finished round; 0 before the first.
        rounds: number of rounds of the run.
        stage: "starting" before the first round, "answering" after a client's reply within a round, "training" and
            "fine-tuning" after a round, "evaluating" before the final models are tried on test data, "evaluated" after
            each such trial, "done" at the end.
        text: the same in words, with the loss where there is one.
        share: of the round under way that is done, in [0, 1).
    """

    round: int
    rounds: int
    stage: Stage
    text: str
    share: float = 0.0


@dataclass
class SiteStatus:
    """What a server knows of a site.

    Attributes:
        state: "away", "idle", or the action it was asked for.
        note: what went wrong last; empty if nothing did.
        up: bytes received from the site.
        down: bytes sent to the site.
    """

    state: str = "away"
    note: str = ""
    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class SiteStates:
    """Status of all sites of a federation, by name, reported after every change."""

    sites: Mapping[str, SiteStatus] = field(default_factory=dict[str, SiteStatus])


@dataclass(frozen=True)
class JobsPlanned:
    """Start of a series of jobs, such as the runs of a study.

    Attributes:
        titles: of the jobs that are to be done, in order.
        finished: number of jobs that were finished before.
    """

    titles: Sequence[str]
    finished: int = 0


@dataclass(frozen=True)
class JobStarted:
    """Start of one job.

    Attributes:
        job: position among the titles of :class:`JobsPlanned`.
        worker: number of the process that works on it.
    """

    job: int
    worker: int = 0


@dataclass(frozen=True)
class JobProgress:
    """Progress event of one job."""

    job: int
    worker: int
    event: "Event"


@dataclass(frozen=True)
class JobEnded:
    """End of one job.

    Attributes:
        job: position among the titles of :class:`JobsPlanned`.
        worker: number of the process that worked on it.
        outcome: "refused" if the job cannot be done as it stands: a ``ValueError`` before its first progress event.
        text: the result in one line, or what went wrong.
    """

    job: int
    worker: int
    outcome: Literal["done", "refused", "failed"]
    text: str = ""


Event = Note | Caution | StepProgress | RunProgress | SiteStates | JobsPlanned | JobStarted | JobProgress | JobEnded
Progress = Callable[[Event], None]
"""Callback that is called with every progress event of an operation."""


def ignore(event: Event) -> None:
    """Progress callback that does nothing."""
    del event


def of_job(progress: Progress, job: int, worker: int = 0) -> Progress:
    """Progress callback of one job of a series."""

    def report(event: Event) -> None:
        progress(JobProgress(job, worker, event))

    return report


_PORTABLE: dict[str, type[Note] | type[Caution] | type[RunProgress]] = {
    kind.__name__: kind for kind in (Note, Caution, RunProgress)
}


def to_json(event: Event) -> dict[str, Any]:
    """A note, a caution or a run's progress as a JSON object that :func:`from_json` reads, for another process."""
    return {"event": type(event).__name__, **asdict(event)}


def from_json(content: Mapping[str, Any]) -> Note | Caution | RunProgress:
    """The event that :func:`to_json` wrote."""
    fields = dict(content)
    kind = _PORTABLE.get(str(fields.pop("event", "")))
    if kind is None:
        raise ValueError(f"expected a progress event of {', '.join(_PORTABLE)}, got {content!r}")
    return kind(**fields)
