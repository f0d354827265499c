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
    """Progress within one step of a preparation."""

    step: str  # what is done, such as "reading questions"
    done: int  # number of items that are done
    total: int  # number of items; 0 if unknown


Stage = Literal["starting", "answering", "training", "fine-tuning", "evaluating", "evaluated", "done"]


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run, reported after every step."""

    round: int  # the last finished round; 0 before the first
    rounds: int  # number of rounds of the run
    # "starting" before the first round, "answering" after a client's reply within a round, "training" and "fine-
    # tuning" after a round, "evaluating" before the final models are tried on test data, "evaluated" after each such
    # trial, "done" at the end
    stage: Stage
    text: str  # the same in words, with the loss where there is one
    share: float = 0.0  # of the round under way that is done, in [0, 1)
    loss: float | None = None  # mean training loss over the round's clients, after a round
    epsilon: float | None = None  # largest privacy cost of any client so far, where updates are noised


@dataclass
class SiteStatus:
    """What a server knows of a site."""

    state: str = "away"  # "away", "idle", or the action it was asked for
    note: str = ""  # what went wrong last; empty if nothing did
    up: int = 0  # bytes received from the site
    down: int = 0  # bytes sent to the site


@dataclass(frozen=True)
class SiteStates:
    """Status of all sites of a federation, by name, reported after every change."""

    sites: Mapping[str, SiteStatus] = field(default_factory=dict[str, SiteStatus])


@dataclass(frozen=True)
class JobsPlanned:
    """Start of a series of jobs, such as the runs of a study."""

    titles: Sequence[str]  # of the jobs that are to be done, in order
    finished: int = 0  # number of jobs that were finished before


@dataclass(frozen=True)
class JobStarted:
    job: int  # position among the titles of JobsPlanned
    worker: int = 0  # number of the process that works on it


@dataclass(frozen=True)
class JobProgress:
    """Progress event of one job."""

    job: int
    worker: int
    event: "Event"


@dataclass(frozen=True)
class JobEnded:
    job: int  # position among the titles of JobsPlanned
    worker: int  # number of the process that worked on it
    # "refused" if the job cannot be done as it stands: a ValueError before its first progress event
    outcome: Literal["done", "refused", "failed"]
    text: str = ""  # the result in one line, or what went wrong


Event = Note | Caution | StepProgress | RunProgress | SiteStates | JobsPlanned | JobStarted | JobProgress | JobEnded
Progress = Callable[[Event], None]  # callback that is called with every progress event of an operation


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
