"""Studies: several methods and seeds on the same data, one run folder each, and an index."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import remove_unfinished, write_atomically
from confed.federation.file_names import file_name
from confed.federation.reading import faults_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, is_run, is_study
from confed.results.runs import distinct_labels
from confed.runs.build import check_device
from confed.runs.run import prepare, run
from confed.runs.same_recipe import check_same_recipe
from confed.studies.progress import headline
from confed.system.events import JobEnded, JobsPlanned, JobStarted, Progress, ignore, of_job
from confed.system.folder_lock import alone, exclusive, without_lock

__all__ = [
    "Job",
    "cell_folder",
    "create_study",
    "free_folder",
    "is_free",
    "read_study",
    "resume",
    "run_job",
    "run_study",
    "write_study",
]


def cell_folder(row: str, seed: int) -> str:
    """Folder of the run of a row and a seed in a study."""
    return f"{file_name(row)}/seed-{seed}"


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    method: str
    seed: int
    folder: str

    @property
    def cell(self) -> str:
        """Its name, which is also its folder where the row's name is a file name."""
        return f"{self.method}/seed-{self.seed}"

    @property
    def title(self) -> str:
        """Its name in progress displays."""
        return f"{self.method}, seed {self.seed}"


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """``runs/NAME``, or ``runs/NAME-2`` and so on if that is taken."""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        number += 1


def is_free(root: Path) -> bool:
    """Whether a study can be made in a folder: nothing is there, or only what :func:`write_study` began with."""
    if not root.is_dir():
        return not root.exists()
    there = {path.name for path in without_lock(root)}
    return not there or (there == {"summary.json"} and is_study(root))


@alone
def create_study(recipe: Recipe, root: Path, seeds: int = 1) -> list[Job]:
    """A new study's index and recipe; no run is started.

    Args:
        recipe: with ``[study]`` methods, or of a single method that is to run with several seeds.
        root: the study folder.
        seeds: number of seeds, counted from the recipe's.

    Raises:
        ValueError: the folder exists, fewer than one seed, or a row that cannot be run with this recipe.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if not is_free(root):
        raise ValueError(
            f"{root} exists already; continue it with `confed resume {root}` or give another folder with --out"
        )
    methods = recipe.methods or (recipe.sections["algorithm"]["name"],)
    numbers = list(range(recipe.run.seed, recipe.run.seed + seeds))
    # Neither faulty data nor a method that cannot work with them may leave a folder behind, or train the others first.
    check_device(recipe)
    for method in methods:
        setup, _ = prepare(recipe.method(method).with_run(seed=numbers[0]))
        if method == methods[0]:
            setup.model()  # weights that are none
    jobs = [Job(method, seed, cell_folder(method, seed)) for seed in numbers for method in methods]
    write_study(recipe, methods, root, jobs)
    return jobs


def write_study(recipe: Recipe, methods: Sequence[str], root: Path, jobs: Sequence[Job], **more: Any) -> None:
    """Write a study's recipe and index.

    Args:
        recipe: whose rows are the methods.
        methods: the rows in the order of tables.
        root: the study folder.
        jobs: its runs.
        more: further entries of the index.
    """
    root.mkdir(parents=True, exist_ok=True)
    index = {
        "recipe": recipe.name,
        "methods": list(methods),
        "labels": distinct_labels({method: recipe.label(method) for method in methods}),
        "seeds": sorted({job.seed for job in jobs}),
        "deploys": {method: key for method in methods if (key := recipe.deploys(method))},
        "runs": [vars(job) for job in jobs],
        **more,
    }
    files = {"recipe.toml": recipe.to_toml(), "summary.json": json.dumps(index, indent=1, ensure_ascii=False)}
    # Stopped in between, a new folder must not look like a run's (a recipe and no index), and a folder that grows
    # must have a recipe with all rows of its index.
    for name in files if (root / "recipe.toml").exists() else reversed(files):
        write_atomically(root / name, files[name].encode())


def read_study(root: Path) -> tuple[Recipe, dict[str, Any]]:
    """A study folder's recipe and index.

    Raises:
        ValueError: there is no recipe, or the index has runs that are not the recipe's or lie elsewhere.
    """  # noqa: DOC501 (the TypeError is caught here)
    with faults_of(root / "summary.json", "a study's index"):
        index = json.loads((root / "summary.json").read_text(encoding="utf-8"))
        jobs = [Job(**entry) for entry in index["runs"]]
        _ = index["recipe"], dict(index.get("labels", {}))
        for job in jobs:
            if not isinstance(job.method, str) or not isinstance(job.folder, str):
                raise TypeError("a run's method and folder must be texts")
    if not (root / "recipe.toml").is_file():
        raise ValueError(f"{root} has no recipe.toml: making it was interrupted; give that command again")
    recipe = replace(load_recipe(root / "recipe.toml"), name=index["recipe"])
    rows = recipe.methods or (recipe.sections["algorithm"]["name"],)
    for entry in index["runs"]:
        method, seed, folder = entry["method"], entry["seed"], entry["folder"]
        # Runs are written, and failed attempts deleted, where the index says: it must not point anywhere else.
        if method not in rows or type(seed) is not int or folder not in (
            cell_folder(method, seed), f"{method}/seed-{seed}",
        ):  # fmt: skip
            raise ValueError(
                f"{root}/summary.json: a run must lie in ROW/seed-N with a row of {', '.join(rows)}, got {folder!r} "
                f"for method {method!r} and seed {seed!r}"
            )
    return recipe, index


def run_study(root: Path, progress: Progress = ignore) -> list[dict[str, Any]]:
    """Execution of all missing runs of a study folder; returns every run's summary.

    A faulty index and another process in the folder are a ValueError.

    Args:
        root: a study folder made by :func:`create_study`.
        progress: called with the planned runs, and with every event of each.
    """
    with exclusive(root):
        return _run_missing(root, progress)


def _run_missing(root: Path, progress: Progress) -> list[dict[str, Any]]:
    remove_unfinished(root, ".*.tmp")  # of the study's own files; every run sees to its own
    recipe, index = read_study(root)
    jobs, labels = [Job(**entry) for entry in index["runs"]], distinct_labels(index["labels"])
    for job in jobs:  # none of its runs may be joined by others with another recipe
        check_same_recipe(RunFolder(root / job.folder), recipe.method(job.method).with_run(seed=job.seed))
    missing = [job for job in jobs if not (root / job.folder / "summary.json").exists()]
    progress(JobsPlanned([job.title for job in missing], len(jobs) - len(missing)))
    for number, job in enumerate(missing):
        own = recipe.method(job.method).with_run(seed=job.seed)
        run_job(own, root / job.folder, progress, number)
    # Rows of one method are told apart by the study's labels, which a run does not know.
    return [{**_summary(root / job.folder), "label": labels[job.method]} for job in jobs]


def run_job(recipe: Recipe, folder: Path, progress: Progress, number: int = 0) -> dict[str, Any]:
    """Execution or continuation of a single-run recipe as one job of a series.

    Args:
        recipe: what to run.
        folder: the run folder.
        progress: callback of the series.
        number: position of the job.

    Returns:
        The run's summary.
    """
    progress(JobStarted(number))
    summary = run(recipe, folder, resume=is_run(folder), progress=of_job(progress, number))
    progress(JobEnded(number, 0, "done", headline(summary)))
    return summary


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def resume(root: Path, progress: Progress = ignore) -> Sequence[Mapping[str, Any]]:
    """Continuation of a run or study folder; returns the summaries of its runs.

    Raises:
        ValueError: the folder is neither.
    """
    if is_study(root):
        return run_study(root, progress)
    if is_run(root):
        if (root / "summary.json").exists():
            return [_summary(root)]
        recipe = load_recipe(root / "recipe.toml")
        progress(JobsPlanned([Job(recipe.sections["algorithm"]["name"], recipe.run.seed, root.name).title]))
        return [run_job(recipe, root, progress)]
    raise ValueError(f"{root} is neither a run folder (recipe.toml) nor a study folder (summary.json with runs)")
