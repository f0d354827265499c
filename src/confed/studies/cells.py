"""Cells of a study or sweep: its runs, numbered from 1, for processes that share nothing but a file system.

``cells.json`` in the folder lists the cells with the versions of confed and of libraries, and a digest of each recipe.
Cells keep their numbers: what a study gains later is added at the end. A run that the swept setting does not concern is
the same at every value of a sweep; it is one cell, and copied when results are gathered
(:func:`confed.studies.runner.borrow`). Actors on a Ray cluster whose nodes share a file system with this process
compute them (:func:`compute_on_ray`), or tasks of an array. Its script has ``#SBATCH`` lines and starts ``confed resume
STUDY --cell array``; which cell that is, the task learns from the variable of its scheduler (:func:`array_index`).
Slurm sends SIGUSR1 to the script's process, which by then is that command, some time before the time limit
(``--signal=B:USR1@SECONDS``), and a task that has stopped for it asks to be queued again (``scontrol requeue``).
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import Name
from confed.federation.reading import faults_of
from confed.recipes.recipe import Recipe
from confed.results.folder import kind_of
from confed.results.settings import flat
from confed.results.stored import read_records
from confed.results.sweep import read_sweep
from confed.results.watching import error_of
from confed.runs.run import needing_ray
from confed.runs.summary import versions
from confed.studies.pool import attempt
from confed.studies.runner import in_one_line, leave_error, note_refusals
from confed.studies.study import INDIFFERENT, Job, StudyFolder, begun, study_in
from confed.system.events import Event, JobEnded, JobsPlanned, Progress, to_json
from confed.system.folder_lock import exclusive, holder_of

if TYPE_CHECKING:
    from confed.engines.ray.placement import Wanted

CELLS = "cells.json"  # the list of cells, in the folder of a study or sweep

State = Literal["done", "running", "stopped", "failed", "waiting"]


@dataclass(frozen=True)
class Cell:
    """One run of a study or sweep."""

    number: int
    study: str  # folder of its study within the sweep's; empty in a study
    method: str  # row of the study
    seed: int
    recipe: str  # digest of its recipe when it was listed


@dataclass(frozen=True)
class Cells:
    """Content of ``cells.json``."""

    root: Path  # folder of the study or sweep
    cells: tuple[Cell, ...]  # in the order of their numbers
    versions: Mapping[str, str]  # of confed and of libraries, when the list was written
    refused: Mapping[str, str]  # "row/seed-n", after the point of a sweep -> why it is no cell; for who listed them


@dataclass(frozen=True)
class CellStatus:
    """What is known of a cell from its folder."""

    cell: Cell
    title: str  # its run in words
    # "running": a process holds the lease of its folder; "stopped": it was begun, and no process does; "failed": it
    # went wrong; "waiting": nothing is there
    state: State
    round: int  # number of finished rounds
    rounds: int
    text: str = ""  # where it runs, or what went wrong


def studies_of(root: Path) -> dict[str, StudyFolder]:
    """Folder within the root -> study: those of a sweep, or the one in the root itself, called ""."""
    if kind_of(root) == "sweep":
        studies = {point.folder: study_in(root / point.folder) for point in read_sweep(root).points}
        return {folder: study for folder, study in studies.items() if study is not None}
    study = study_in(root)
    if study is None:
        raise ValueError(f"{root} must be a study or a sweep")
    return {"": study}


def number_cells(root: Path) -> Cells:
    """Numbers for all runs of a study or sweep that have none yet and can be run; written into ``cells.json``."""
    refused: dict[str, str] = {}
    for folder, study in studies_of(root).items():
        refused |= {"/".join(filter(None, (folder, cell))): why for cell, why in note_refusals(study.root).items()}
    # Numbers stay; recipes of cells that were not begun may have changed.
    with exclusive(root):
        numbered = {
            (c.study, c.method, c.seed): c for c in (read_cells(root).cells if (root / CELLS).is_file() else ())
        }
        shared = kind_of(root) == "sweep" and not read_sweep(root).models
        seen: dict[str, tuple[str, str, int]] = {}
        listed: dict[int, Cell] = {}
        following = len(numbered)
        for folder, study, job in _runs(root):
            key, digest = (folder, job.method, job.seed), _digest(study.recipe_of(job))
            if "/".join(filter(None, (folder, job.cell))) in refused and key not in numbered:
                continue
            if key not in numbered and shared and digest in seen:
                continue
            seen.setdefault(digest, key)
            number = numbered[key].number if key in numbered else (following := following + 1)
            listed[number] = Cell(number, folder, job.method, job.seed, digest)
        cells = Cells(root, tuple(listed[number] for number in sorted(listed)), versions(), refused)
        content = {"versions": dict(cells.versions), "cells": [asdict(cell) for cell in cells.cells]}
        write_atomically(root / CELLS, json.dumps(content, indent=1, ensure_ascii=False).encode())
    return cells


def read_cells(root: Path) -> Cells:
    """The cells of a study or sweep."""
    file = root / CELLS
    if not file.is_file():
        raise ValueError(f"{root} has no {CELLS}; write it with `confed compare RECIPE --on script` and the same --out")
    with faults_of(file, "a list of cells"):
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        cells = tuple(Cell(**entry) for entry in content["cells"])
        for number, cell in enumerate(cells, 1):
            texts = (cell.study, cell.method, cell.recipe)
            if cell.number != number or type(cell.seed) is not int or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{file} must be a list of cells numbered from 1, got {asdict(cell)}")
        return Cells(root, cells, {str(name): str(value) for name, value in content["versions"].items()}, {})


def find_cell(root: Path, number: int) -> tuple[StudyFolder, Job, str]:
    """The study and run of a cell, and a note on versions of libraries that differ, if any do."""
    cells = read_cells(root)
    if not 1 <= number <= len(cells.cells):
        raise ValueError(f"{root} has cells 1 to {len(cells.cells)}, got {number}")
    here, before = versions(), cells.versions
    if before.get("confed") != here["confed"]:
        raise ValueError(
            f"{root}/{CELLS} was written by confed {before.get('confed')}, and this is confed {here['confed']}; tasks "
            "must have the version that wrote it (see --before), or write it again"
        )
    cell = cells.cells[number - 1]
    study = studies_of(root).get(cell.study)
    job = None if study is None else study.job(cell.method, cell.seed)
    if study is None or job is None:
        raise ValueError(f"{root} has no run {cell.study}/{cell.method}/seed-{cell.seed}, which is cell {number}")
    if _digest(study.recipe_of(job)) != cell.recipe:
        raise ValueError(
            f"cell {number} of {root} has another recipe than when {CELLS} was written; write it again with the "
            "command that changed the recipe and `--on script`"
        )
    other = [
        f"{name} {before[name]}, here {version}"
        for name, version in here.items()
        if before.get(name, version) != version
    ]
    note = f"{CELLS} was written with {', '.join(other)}: numbers need not agree to the last digit" if other else ""
    return study, job, note


def statuses(root: Path) -> list[CellStatus]:
    """Status of every cell, in the order of their numbers, from what is in their folders."""
    studies = studies_of(root)
    cell_statuses: list[CellStatus] = []
    for cell in read_cells(root).cells:
        study = studies.get(cell.study)
        if study is not None and (job := study.job(cell.method, cell.seed)) is not None:
            cell_statuses.append(_status(cell, study, job))
    return cell_statuses


def _status(cell: Cell, study: StudyFolder, job: Job) -> CellStatus:
    folder = study.root / job.folder
    titles = [cell.study, study.labels[job.method], f"seed {job.seed}"]
    title, rounds = ", ".join(filter(None, titles)), study.recipe_of(job).run.rounds
    if study.finished(job):
        return CellStatus(cell, title, "done", rounds, rounds)
    round = read_records(folder).reached
    holder = holder_of(folder) if folder.is_dir() else None
    if holder is not None and holder.alive:
        text = f"{holder.who}, last sign of life {holder.silent:.0f} s ago"
        return CellStatus(cell, title, "running", round, rounds, text)
    if error := error_of(folder):
        return CellStatus(cell, title, "failed", round, rounds, error)
    if begun(folder) or round:
        return CellStatus(cell, title, "stopped", round, rounds, "goes on when its task runs again")
    return CellStatus(cell, title, "waiting", 0, rounds)


def _runs(root: Path) -> Iterator[tuple[str, StudyFolder, Job]]:
    for folder, study in studies_of(root).items():
        for job in study.jobs:
            yield folder, study, job


def _digest(recipe: Recipe) -> str:
    """Digest of the settings of a single-run recipe, those apart that change no figure."""
    settings = {key: value for key, value in flat(tomllib.loads(recipe.to_toml())).items() if key not in INDIFFERENT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


# Cells as jobs on a Ray cluster -----------------------------------------------------------------------------------

SEEN = 30.0  # seconds after which every node of a network file system sees a file as it is


def compute_on_ray(
    root: Path, address: str, workers: int, progress: Progress, refused: Callable[[str, str], None]
) -> Cells:
    """Execution of the cells that are missing, each in an actor on a Ray cluster; lost ones go on elsewhere."""
    with needing_ray("--on ray"):
        from confed.engines.ray.actor import JobSource
        from confed.engines.ray.jobs import carry_out
    from confed.engines.workers import free_cores

    cells = number_cells(root)
    for cell, why in cells.refused.items():
        refused(cell, why)
    missing = [status for status in statuses(root) if status.state != "done"]
    titles = [status.title for status in missing]
    progress(JobsPlanned(titles, len(cells.cells) - len(missing)))
    place = root.resolve()
    terms = {"root": str(place), "digest": _digest_of_list(root)}
    source = JobSource("confed.studies.cells:shares_folder", "confed.studies.cells:run_cell_on_ray", terms)
    wanted, jobs = (
        _wanted(root, workers, len(missing)),
        [{"root": str(place), "number": s.cell.number} for s in missing],
    )
    cores = workers * wanted.threads or free_cores()
    carry_out(source, jobs, titles, wanted, address, cores, _noting(root, missing, progress))
    return cells


def shares_folder(root: str, digest: str) -> str:
    """Why a process cannot work on cells: it does not see their folder as the process that wrote it; or ""."""
    until = time.monotonic() + SEEN
    while (Path(root) / CELLS).is_file():
        if _digest_of_list(Path(root)) == digest:
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
    return in_one_line(study, run, progress, outlast=True)


def _wanted(root: Path, workers: int, cells: int) -> "Wanted":
    """What an actor needs; memory is that of this process, which has read the data and made every method's model."""
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
            run = studies[cell.study].job(cell.method, cell.seed)
            folder = studies[cell.study].root / (run.folder if run else "")
            if run and not error_of(folder):
                folder.mkdir(parents=True, exist_ok=True)
                leave_error(folder, f"{event.text}\n")
        progress(event)

    return note


def _digest_of_list(root: Path) -> str:
    return hashlib.sha256((root / CELLS).read_bytes()).hexdigest()


# Job scripts for clusters: one array task per cell, for Slurm, PBS, LSF, Grid Engine and Kubernetes -----------------

SCRIPT = "cells.sh"  # the job script, in the folder of the study or sweep
LEAD = 120  # seconds before the time limit at which Slurm sends SIGUSR1, if the options do not say it

GRACE = 90.0
"""Seconds after SIGUSR1 within which the round under way may end, if the lead is :data:`LEAD`."""

_VARIABLES = {
    "SLURM_ARRAY_TASK_ID": 0, "PBS_ARRAY_INDEX": 0, "PBS_ARRAYID": 0, "LSB_JOBINDEX": 0, "SGE_TASK_ID": 0,
    "JOB_COMPLETION_INDEX": 1,
}  # fmt: skip
"""Variable of a scheduler -> what is added to its value, so that cells count from 1; Kubernetes counts from 0."""


_PATTERNS = {
    "array": (r"%[1-9]\d*", "%N (N tasks at a time), as cells are counted here"),
    "signal": (r"B:(?:SIG)?USR1@(\d+)", "B:USR1@SECONDS, which cells understand"),
}
"""Option of sbatch that is read here -> pattern of its value, and what it must be."""


@dataclass(frozen=True)
class BatchOptions:
    """Options of ``sbatch``."""

    lines: tuple[str, ...] = ()  # long options with their values, such as "--partition=gpu"
    throttle: str = ""  # tasks at a time, as Slurm writes it after the indexes ("%20"); empty for no limit
    lead: int = LEAD  # seconds between SIGUSR1 and the time limit
    seconds: float | None = None  # the time limit; None if none was given

    @property
    def grace(self) -> float:
        """Seconds after SIGUSR1 within which the round under way may end; the rest is for a checkpoint."""
        return self.lead * GRACE / LEAD


def parse_options(texts: Sequence[str]) -> BatchOptions:
    """``partition=gpu,gres=gpu:1,exclusive`` as options of ``sbatch``; a value with commas stands in quotes."""
    lines, throttle, lead, seconds = dict[str, str](), "", LEAD, None
    for text in texts:
        for option_text in _parts(text):
            key, equals, value = option_text.partition("=")
            printable = value.isprintable() and '"' not in value
            if not re.fullmatch(r"[A-Za-z][A-Za-z-]*", key) or (equals and not value) or not printable:
                raise ValueError(
                    f"--slurm takes options of sbatch, as in partition=gpu,time=4:00:00, got {option_text!r}"
                )
            if key in _PATTERNS:
                pattern, wanted = _PATTERNS[key]
                match = re.fullmatch(pattern, value)
                if match is None:
                    raise ValueError(f"--slurm {key} must be {wanted}, got {value!r}")
                throttle, lead = (match[0], lead) if key == "array" else (throttle, int(match[1]))
            elif key in ("wrap", "parsable", "test-only"):
                raise ValueError(f"--slurm {key} does not go with a job script")
            else:
                seconds = parse_time(value) if key in ("time", "t") else seconds
                dashes, between = ("-", " ") if len(key) == 1 else ("--", "=")
                lines[key] = f"{dashes}{key}" + (f"{between}{_quoted(value)}" if equals else "")
    if seconds is not None and seconds <= lead:
        raise ValueError(
            f"--slurm time must be longer than the {lead} s before its end at which cells stop, got {seconds:.0f} s"
        )
    return BatchOptions(tuple(lines.values()), throttle, lead, seconds)


def _parts(text: str) -> list[str]:
    splitter = shlex.shlex(text, posix=True, punctuation_chars=False)
    splitter.whitespace, splitter.whitespace_split, splitter.commenters = ",", True, ""
    try:
        return [option_text.strip() for option_text in splitter if option_text.strip()]
    except ValueError as error:
        raise ValueError(f"--slurm has a quote without its end: {text!r}") from error


def parse_time(text: str) -> float | None:
    """A time limit of Slurm in seconds; None if it has none.

    ``MINUTES``, ``MINUTES:SECONDS``, ``HOURS:MINUTES:SECONDS``, ``DAYS-HOURS``, ``DAYS-HOURS:MINUTES`` or
    ``DAYS-HOURS:MINUTES:SECONDS``.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(field.isdecimal() for field in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise ValueError(f"--slurm time must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, got {text!r}")
    numbers = [int(field) for field in parts]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return int(days or 0) * 86400.0 + hours * 3600 + minutes * 60 + seconds


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as schedulers write them: ``1-4,7,9-10``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def script_of(
    root: Path, numbers: Sequence[int], options: BatchOptions, before: Sequence[str] = (), allowed: Sequence[str] = ()
) -> str:
    """The job script; a fault is a ValueError."""
    place, log = root.resolve(), root.resolve() / "cells-%A_%a.log"
    for path in (place, Path.cwd()):
        if not str(path).isprintable() or '"' in str(path):
            raise ValueError(f"a job script needs folders without control characters and quotes, got {str(path)!a}")
    command = " ".join(map(shlex.quote, (sys.executable, "-m", "confed.cli")))
    more = "".join(f" --allow-code {shlex.quote(module)}" for module in allowed)
    given = {re.split(r"[ =]", line.lstrip("-"))[0] for line in options.lines}
    lines = {
        "job-name": Name(re.sub(r"[^\w .+-]", "_", f"confed-{place.name}")[:80].strip()),
        "output": str(log),
        "open-mode": "append",
    }
    directives = [f"--{key}={_quoted(value)}" for key, value in lines.items() if key not in given]
    directives += [f"--array={ranges(numbers)}{options.throttle}", "--requeue", f"--signal=B:USR1@{options.lead}"]
    head = "\n".join(f"#SBATCH {line}" for line in [*directives, *options.lines])
    return f"""#!/bin/bash
# One cell of {place} per array task; written by confed.
# CONFED and CONFED_STUDY in the environment replace the command and the folder.
{head}
cd {shlex.quote(str(Path.cwd()))} || exit 1
{"".join(line + chr(10) for line in before)}study={shlex.quote(str(place))}
study=${{CONFED_STUDY:-$study}}
set -- resume "$study" --cell "${{1:-array}}" --grace {options.grace:g}{more}
[ -z "$CONFED" ] || exec $CONFED "$@"
exec {command} "$@"
"""


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value


def write_script(root: Path, text: str) -> Path:
    """Writes the job script into the folder of the study or sweep; returns its path."""
    path = root / SCRIPT
    write_atomically(path, text.encode())
    path.chmod(0o755)
    return path


def submit(script: Path) -> str:
    """Submits a job script to Slurm and returns the job's number; faults are a ValueError or RuntimeError."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ValueError(
            f"--submit needs sbatch, which is not on this machine's PATH; on a login node give: sbatch {script}"
        )
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"sbatch {script} ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""


def array_index(environment: Mapping[str, str]) -> int | None:
    """Number of the cell that an array task's environment asks for; None outside arrays; a fault is a ValueError."""
    for name, offset in _VARIABLES.items():
        text = environment.get(name, "")
        # LSF and Grid Engine set theirs for ordinary jobs too.
        if text in ("", "undefined") or (name == "LSB_JOBINDEX" and text == "0"):
            continue
        if not text.isdecimal():
            raise ValueError(f"{name} must be the number of an array task, got {text!r}")
        return int(text) + offset
    return None


def requeue(environment: Mapping[str, str] = os.environ) -> bool:
    """Asks Slurm to queue this array task again; returns whether it will."""
    job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    name = f"{job}_{task}" if job and task else environment.get("SLURM_JOB_ID")
    scontrol = shutil.which("scontrol", path=environment.get("PATH"))
    if not name or scontrol is None:
        return False
    return subprocess.run([scontrol, "requeue", name], check=False).returncode == 0
