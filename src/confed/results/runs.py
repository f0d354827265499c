"""Reading run and study folders back, complete or not.

A run that was interrupted leaves some of its files; everything here takes what there is and remembers what is
missing. Values that are absent or not finite are None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from confed.comparison.records import distinct_labels
from confed.federation.file_names import name_of_file
from confed.federation.reading import check_header
from confed.results.run_files import EXPECTED, lines_of, read_json, read_toml
from confed.results.stored import TRAINING, Records, read_examples, read_records
from confed.results.summary import Summary, average, check_headline, mapping, with_deployed, words
from confed.results.views import View


@dataclass(frozen=True)
class RunResults:
    """One run folder."""

    folder: Path
    method: str  # the method's key within a study; the algorithm's name for a run on its own
    label: str  # the method's name as people write it
    seed: int
    summary: Summary  # its results; of an interrupted run what its other files tell
    recipe: Mapping[str, Any]
    records: Records = field(default_factory=Records)  # what was measured round by round
    timings: tuple[Mapping[str, Any], ...] = ()
    # Files that are not there or cannot be read -> what is lacking without them.
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    # Setting -> the value that tuning chose for the method, from the study's index.
    tuned: Mapping[str, Any] = field(default_factory=dict[str, Any])
    deploys: str = ""  # what the study says that the method deploys, as in results.summary.deploys

    @property
    def complete(self) -> bool:
        """Whether the run reached its end and left its results."""
        return "summary.json" not in self.missing

    @property
    def place(self) -> str:
        """Where a study's index has it."""
        return f"{self.method}/seed-{self.seed}"

    def predictions(self) -> dict[str, np.ndarray]:
        """Content of ``predictions.safetensors``, empty if it is missing or cannot be read."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.folder / "predictions.safetensors"
        try:
            if path.is_file():
                check_header(path)
            return load_file(path) if path.is_file() else {}
        except (OSError, SafetensorError):
            return {}

    def examples(self, view: View) -> dict[str, dict[str, np.ndarray]]:
        """Place -> column (:data:`confed.results.stored.EXAMPLE_COLUMNS`) -> a row per test example."""
        return read_examples(self.folder, view.evaluated)

    def gallery(self) -> list[Mapping[str, Any]]:
        """Content of ``gallery.json``, empty if it is missing or cannot be read."""
        content = read_json(self.folder / "gallery.json")
        return [item for item in content if isinstance(item, Mapping)] if isinstance(content, list) else []


@dataclass(frozen=True)
class StudyResults:
    """Several methods with one or more seeds each; a run on its own is a study of one."""

    folder: Path
    recipe: str  # name of the recipe
    runs: tuple[RunResults, ...]  # the runs, methods in order and seeds in order within a method
    single: bool = False  # whether the folder is a run on its own
    remarks: tuple[str, ...] = ()  # what was odd about the folder
    # Method -> its name as people write it, in the order of the index, also where no run was found.
    rows: Mapping[str, str] = field(default_factory=dict[str, str])
    # "method/seed-n" -> why that run is not there, from the index.
    failures: Mapping[str, str] = field(default_factory=dict[str, str])
    # Those of failures that were refused beforehand, instead of breaking on the way.
    refused: frozenset[str] = frozenset()

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that have runs, in order."""
        return tuple(dict.fromkeys(run.method for run in self.runs))

    @property
    def labels(self) -> dict[str, str]:
        """Method -> its name as people write it."""
        return {method: self.of(method)[0].label for method in self.methods}

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, ascending."""
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, in order."""
        return tuple(dict.fromkeys(chain.from_iterable(run.summary.clients for run in self.runs)))

    @property
    def scenes(self) -> tuple[str, ...]:
        """All unseen places, in order."""
        return tuple(dict.fromkeys(chain.from_iterable(run.summary.scenes for run in self.runs)))

    @property
    def failed(self) -> tuple[str, ...]:
        """The runs that were refused or that an error ended, one sentence per method and reason."""
        ended = {run.place for run in self.runs if run.complete}
        seeds: dict[tuple[str, str, str], list[str]] = {}
        for place, text in self.failures.items():
            method, _, seed = place.partition("/seed-")
            what = "cannot run here" if place in self.refused else "failed"
            if place not in ended:
                seeds.setdefault((self.rows.get(method, method), what, text), []).append(seed)
        return tuple(
            f"{label}, seed{'s' if len(failed_seeds) > 1 else ''} {', '.join(failed_seeds)}, {what}: {text}"
            for (label, what, text), failed_seeds in seeds.items()
        )

    @property
    def tuned(self) -> dict[str, Mapping[str, Any]]:
        """Method -> setting -> the value that tuning chose; methods that were not tuned are left out."""
        return {method: tuned for method in self.methods if (tuned := self.of(method)[0].tuned)}

    def of(self, method: str) -> tuple[RunResults, ...]:
        """A method's runs, one per seed."""
        return tuple(run for run in self.runs if run.method == method)

    def mean(self, method: str, value: Callable[[RunResults], float | None]) -> float | None:
        """Mean over a method's seeds of a value of its runs."""
        return average([value(run) for run in self.of(method)])


def load(folder: Path) -> StudyResults:
    """Reads a run or a study folder."""
    folder = Path(folder)
    try:
        return _load(folder)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        # What an index or a history of another form leads to, wherever it is used.
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{folder} has a damaged summary.json, metrics.jsonl or recipe.toml: {what}") from error


def _load(folder: Path) -> StudyResults:
    index = read_json(folder / "summary.json")
    if isinstance(index, Mapping) and isinstance(index.get("runs"), list):
        return _study(folder, index)
    if _is_run(folder):
        (run,) = with_deployed_of([_run(folder)])
        return StudyResults(folder, run.summary.recipe, (run,), single=True)
    run_folders = [path for path in sorted(folder.glob("*/seed-*")) if _is_run(path)]
    if run_folders:
        runs = [_run(path, name_of_file(path.parent.name)) for path in run_folders]
        order = list(dict.fromkeys(run.method for run in runs))
        runs = with_deployed_of(_labelled(sorted(runs, key=lambda run: (order.index(run.method), run.seed)), {}))
        remark = "The study has no index (summary.json), so it was interrupted; methods are in alphabetical order."
        return StudyResults(folder, runs[0].summary.recipe, tuple(runs), remarks=(remark,))
    what = "an empty or foreign folder" if folder.is_dir() else "nothing"
    raise ValueError(
        f"{folder} must be a run folder (recipe.toml, metrics.jsonl, summary.json) or a study folder "
        f"(<method>/seed-<n>/ and summary.json), found {what}"
    )


def _study(folder: Path, index: Mapping[str, Any]) -> StudyResults:
    labels, deploys = words(index.get("labels")), words(index.get("deploys"))
    failures = {name_of_file(place): text for place, text in words(index.get("errors")).items()}
    order = [str(method) for method in index.get("methods", ())]
    runs: list[RunResults] = []
    remarks: list[str] = []
    read: set[str] = set()
    for entry in index["runs"]:
        method, seed = str(entry["method"]), int(entry["seed"])
        place = str(entry.get("folder", f"{method}/seed-{seed}"))
        if place in read:  # a method named twice, in an older study: one run is no second seed
            continue
        read.add(place)
        path = folder / place
        if _is_run(path):
            tuned = mapping(mapping(index.get("tuned")).get(method))
            runs.append(replace(_run(path, method, labels.get(method)), tuned=tuned, deploys=deploys.get(method, "")))
        elif name_of_file(place) not in failures:
            remarks.append(f"{labels.get(method, method)}, seed {seed}: the index names it, but its folder has no run.")
    if not runs:
        why = f"; the first that failed: {next(iter(failures.values()))}" if failures else ""
        raise ValueError(f"{folder} must hold the runs that its summary.json names, found none of them{why}")
    order += [run.method for run in runs if run.method not in order]
    # What an error ended is told in a sentence; it is no method of the comparison, unless there is nothing else.
    runs = [run for run in runs if run.complete or run.place not in failures] or runs
    rows = distinct_labels({method: labels.get(method, method) for method in order})
    runs.sort(key=lambda run: (order.index(run.method), run.seed))
    runs = with_deployed_of(_labelled(runs, {method: label for method, label in rows.items() if method in labels}))
    refused = _refused(folder, index, failures)
    return StudyResults(
        folder, str(index.get("recipe", "")), tuple(runs), False, tuple(remarks), rows, failures, refused
    )


def _refused(folder: Path, index: Mapping[str, Any], failures: Mapping[str, str]) -> frozenset[str]:
    """The cells that were refused: those that the index names, or in an older one those that left nothing behind."""
    named = index.get("refused")
    if isinstance(named, list):
        return frozenset(name_of_file(str(place)) for place in named).intersection(failures)
    return frozenset(place for place in failures if not any((folder / place).glob("*")))


def _labelled(runs: Sequence[RunResults], labels: Mapping[str, str]) -> list[RunResults]:
    """The same runs with labels that tell their methods apart: those given, else those that the runs know."""
    distinct = distinct_labels({**{run.method: run.label for run in reversed(runs)}, **labels})
    return [replace(run, label=distinct[run.method]) for run in runs]


def _is_run(folder: Path) -> bool:
    if (folder / "metrics.jsonl").is_file() and (folder / "recipe.toml").is_file():
        return True
    summary = read_json(folder / "summary.json")
    return isinstance(summary, Mapping) and "algorithm" in summary


def _run(folder: Path, method: str | None = None, label: str | None = None) -> RunResults:
    missing = {name: why for name, why in EXPECTED.items() if not (folder / name).is_file()}
    recipe = read_toml(folder / "recipe.toml")
    if mapping(recipe.get("run")).get("gallery") == 0:
        missing.pop("gallery.json", None)  # none was asked for
    records = read_records(folder)
    content = read_json(folder / "summary.json")
    if not isinstance(content, Mapping):
        missing["summary.json"] = EXPECTED["summary.json"]
        content = _provisional(recipe, records, folder)
    algorithm = str(content.get("algorithm", folder.name))
    summary = Summary(content)
    return RunResults(
        folder=folder,
        method=method or algorithm,
        label=str(label or content.get("label") or method or algorithm),
        seed=summary.seed,
        summary=summary,
        recipe=recipe,
        records=records,
        timings=tuple(lines_of(folder / "timings.jsonl")),
        missing=missing,
    )


def _provisional(recipe: Mapping[str, Any], records: Records, folder: Path) -> dict[str, Any]:
    """What is known of a run that did not write its summary; its test results are not."""
    section, tail = recipe.get("run", {}), folder.name.removeprefix("seed-")
    names = {view: list(values.names) for view, values in records.values.items()}
    errors: list[dict[str, Any]] = []
    for facts in records.rounds:
        for client, error in (facts.get("errors") or {}).items():
            errors.append({"round": facts["round"], "client": client, "error": error})
    failed = dict.fromkeys(error["client"] for error in errors)
    sent: dict[str, dict[str, Any]] = {}
    for key in ("bytes_up", "bytes_down"):
        sent[key] = {str(facts["round"]): {} for facts in records.rounds}
        sent[key] |= {str(number): of_round for number, of_round in records.by_round(TRAINING, key).items()}
    return {
        "algorithm": recipe.get("algorithm", {}).get("name", folder.name),
        "recipe": recipe.get("name", ""),
        "seed": section.get("seed", int(tail) if tail.isdigit() else 0),
        "rounds": records.reached,
        "planned_rounds": section.get("rounds"),
        "clients": names.get("personal") or list(dict.fromkeys([*names.get(TRAINING, ()), *failed])),
        "scenes": names.get("unseen", []),
        **sent,
        "errors": errors,
    }


def with_deployed_of(runs: "Sequence[RunResults]", headline: str = "") -> "list[RunResults]":
    """The same runs with what each deploys; see :func:`confed.results.summary.with_deployed`."""
    check_headline(headline, "headline")
    summaries = with_deployed([run.summary for run in runs], [headline or run.deploys for run in runs])
    return [replace(run, summary=summary) for run, summary in zip(runs, summaries, strict=True)]
