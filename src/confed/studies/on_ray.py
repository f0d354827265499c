"""Cells of a study or sweep as jobs on a Ray cluster, whose nodes share a file system with this process."""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.studies.cells import CELLS, Cells, CellStatus, find_cell, number_cells, statuses, studies_of
from confed.studies.pool import attempt, headline
from confed.studies.runner import complete, error_of, leave_error
from confed.system.events import Event, JobEnded, JobsPlanned, Progress, to_json
from confed.system.folder_lock import Occupied

if TYPE_CHECKING:
    from confed.engines.ray.placement import Wanted


SEEN = 30.0
"""Seconds after which every node of a network file system sees a file as it is."""


def compute_on_ray(
    root: Path, address: str, workers: int, progress: Progress, refused: Callable[[str, str], None]
) -> Cells:
    """Execution of the cells of a study or sweep that are missing, each in an actor on a Ray cluster.

    A cell whose actor or node is lost goes on elsewhere from its checkpoint. A KeyboardInterrupt is passed on after
    cells were stopped.
    """
    try:
        from confed.engines.ray.actor import JobSource
        from confed.engines.ray.jobs import carry_out
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ValueError(
            "--on ray needs Ray, which is not installed: pip install '.[ray]' -c constraints.txt"
        ) from None
    from confed.engines.workers import free_cores

    cells = number_cells(root)
    for cell, why in cells.refused.items():
        refused(cell, why)
    missing = [status for status in statuses(root) if status.state != "done"]
    titles = [status.title for status in missing]
    progress(JobsPlanned(titles, len(cells.cells) - len(missing)))
    place = root.resolve()
    source = JobSource(
        "confed.studies.on_ray:shares_folder",
        "confed.studies.on_ray:run_cell_on_ray",
        {"root": str(place), "digest": _digest(root)},
    )
    wanted = _wanted(root, workers, len(missing))
    carry_out(
        source,
        [{"root": str(place), "number": status.cell.number} for status in missing],
        titles,
        wanted,
        address,
        workers * wanted.threads or free_cores(),
        _noting(root, missing, progress),
    )
    return cells


def shares_folder(root: str, digest: str) -> str:
    """Why a process cannot work on cells: it does not see their folder as the process that wrote it; or ""."""
    until = time.monotonic() + SEEN
    while (Path(root) / CELLS).is_file():
        if _digest(Path(root)) == digest:
            return ""
        if time.monotonic() > until:
            break
        time.sleep(1.0)
    return f"it does not see {root}/{CELLS} as it was written: the folder must be on a file system that all nodes share"


def run_cell_on_ray(job: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> dict[str, str]:
    """Execution or continuation of a cell; returns its outcome as :class:`confed.system.events.JobEnded` has it."""
    outcome, text = attempt(_complete, job, lambda event: tell(to_json(event)))
    return {"outcome": outcome, "text": text}


def _complete(job: Mapping[str, Any], progress: Progress) -> str:
    """One cell, after an earlier attempt on a node that was lost if there was one."""
    study, run, _ = find_cell(Path(job["root"]), job["number"])
    try:
        return headline(complete(study, run, progress, outlast=True))
    except Occupied as error:  # no fault of the recipe
        raise RuntimeError(str(error)) from error


def _wanted(root: Path, workers: int, cells: int) -> "Wanted":
    """What an actor needs: the threads and the device of the recipe, and as much memory as this process has.

    This process has read the data and made every method's model once.
    """
    import psutil

    from confed.engines.ray.placement import Wanted

    recipes = [study.recipe.run for study in studies_of(root).values()]
    return Wanted(
        min(workers, cells) or cells,
        max(run.threads for run in recipes),
        {"cpu": False, "cuda": True, "auto": None}[recipes[0].device],
        psutil.Process().memory_info().rss,
    )


def _noting(root: Path, missing: list[CellStatus], progress: Progress) -> Progress:
    """Progress callback that leaves why a cell failed in its folder, where its process did not come to that."""
    studies = studies_of(root)

    def note(event: Event) -> None:
        if isinstance(event, JobEnded) and event.outcome != "done":
            cell = missing[event.job].cell
            study = studies[cell.study]
            run = next(job for job in study.jobs if (job.method, job.seed) == (cell.method, cell.seed))
            if not error_of(study.root / run.folder):
                (study.root / run.folder).mkdir(parents=True, exist_ok=True)
                leave_error(study.root / run.folder, f"{event.text}\n")
        progress(event)

    return note


def _digest(root: Path) -> str:
    return hashlib.sha256((root / CELLS).read_bytes()).hexdigest()
