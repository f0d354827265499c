"""Common parts of the verbs that run studies: options, how methods are judged, execution and results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    Judged,
    complain,
    console,
    default_workers,
    interruptible,
    is_quiet,
    plain,
    print_json,
    print_table,
    say,
    show,
)
from confed.cli.completion import complete_method, complete_recipe
from confed.federation.file_names import name_of_file, path_of

if TYPE_CHECKING:
    from confed.report.tables.table import Table
    from confed.results.sweep import Sweep
    from confed.studies.runner import Outcome
    from confed.studies.study import Job, StudyFolder


RecipeName = Annotated[
    str,
    typer.Argument(
        help="A recipe file, or the name of a packaged one (`confed list recipes`).", autocompletion=complete_recipe
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="all (the recipe's table, else every method), or names a,b,c. [default: the recipe's table]",
        autocompletion=complete_method,
    ),
]
Seeds = Annotated[int, typer.Option(help="Number of seeds, counted from the recipe's.")]
Workers = Annotated[
    int | None, typer.Option(help="Parallel runs, one process each. [default: one per core; one on a GPU]")
]
Tuned = Annotated[Path | None, typer.Option(help="Use the values of this tuned.toml of `confed tune`.")]
Margin = Annotated[float, typer.Option(help="Points within which methods count as equal (equivalence test).")]


def judged_by(references: list[str] | None, margin: float, headline: str, relative: str = "") -> Judged:
    """How methods are judged, as options say it."""
    from confed.results.summary import check_headline

    if not 0 < margin < 100:
        raise ValueError(f"--margin must lie between 0 and 100 points, got {margin:g}")
    check_headline(headline, "--headline")
    return Judged(tuple(references or ()), margin / 100, relative)


def tuned_values(
    tuned: Path | None, recipe: str, overrides: list[str], seeds: int
) -> Mapping[str, Mapping[str, Any]] | None:
    """Values of ``--tuned`` for each row."""
    from confed.recipes.recipe import load_recipe
    from confed.studies.tuned import read_tuned

    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if tuned is None:
        return None
    values, chosen = read_tuned(tuned)
    first = load_recipe(recipe, overrides).run.seed
    for seed in chosen:
        if first <= seed < first + seeds:
            raise ValueError(f"seed {seed} chose the values of {tuned}, so nothing may be reported with it")
    return values


def finish(folder: Path, workers: int | None, as_json: bool) -> None:
    """Execution of what is missing in a run, study or sweep folder; its tables and report are written and shown."""
    from confed.api.progress import Display
    from confed.results.folder import kind_of
    from confed.studies.runner import resume
    from confed.studies.study import growing
    from confed.system.folder_lock import exclusive

    kind = kind_of(folder)
    if kind == "federation":  # see confed.deployment.server
        raise ValueError(f"{folder} is a federation across machines: go on with the same `confed server` as before")

    def execute(study: "StudyFolder") -> "Outcome":
        return _run(study, folder, workers, as_json)

    if kind == "sweep":
        with exclusive(folder):
            _finish_sweep(folder, execute, as_json)
    elif kind == "study" and (study := growing(folder)) is not None:
        _finish_study(study, execute, as_json)
    else:
        with interruptible(folder), Display(console, quiet=as_json or is_quiet(), rounds=True) as display:
            summaries = resume(folder, display)
        show(folder, summaries, as_json)


def show_gathered(folder: Path, as_json: bool, more: Mapping[str, Any]) -> None:
    """Tables and report of a study or sweep whose runs other processes make, written and shown; nothing is run."""
    from confed.results.folder import kind_of
    from confed.studies.runner import gather
    from confed.studies.study import growing
    from confed.system.folder_lock import exclusive

    def execute(study: "StudyFolder") -> "Outcome":
        return gather(study.root)

    if kind_of(folder) == "sweep":
        with exclusive(folder):
            _finish_sweep(folder, execute, as_json, more)
    elif (study := growing(folder)) is not None:
        _finish_study(study, execute, as_json, more)
    else:
        raise ValueError(f"{folder} must be a study of `confed compare --recipe`, or a sweep")


def _run(study: "StudyFolder", root: Path, workers: int | None, as_json: bool) -> "Outcome":
    """Execution of the missing runs of a study that grows, which a command on ``root`` goes on with."""
    from confed.api.progress import Display
    from confed.studies.runner import run_study

    count = workers if workers is not None else default_workers(study.recipe)
    with interruptible(root), Display(console, quiet=as_json or is_quiet()) as display:
        return run_study(study.root, display, count)


def _finish_study(
    study: "StudyFolder",
    execute: "Callable[[StudyFolder], Outcome]",
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Tables of a study after its missing runs were executed or gathered, judged as its index says."""
    judged_before = study.index.get("judged", {})
    judged = Judged(
        tuple(judged_before.get("references", ())),
        judged_before.get("margin", Judged.margin),
        judged_before.get("relative", ""),
    )
    outcome = execute(study)
    if not outcome.summaries:
        if outcome.failed:
            first = min(outcome.failed)
            place = _cell(study.root, first)
            raise RuntimeError(f"no run could be made: {outcome.errors[first]}; see {place}/error.txt")
        raise ValueError("no run could be made: " + next(iter(outcome.errors.values())))
    _show_study(outcome, judged, as_json, more or {})
    if outcome.failed:
        raise typer.Exit(FAILED)


def _finish_sweep(
    root: Path, execute: "Callable[[StudyFolder], Outcome]", as_json: bool, more: Mapping[str, Any] | None = None
) -> None:
    """Tables of a sweep after its missing runs were executed or gathered, value by value or model by model."""
    from confed.report.report import write_report
    from confed.report.tables.write import write_tables
    from confed.results.sweep import read_sweep
    from confed.studies.runner import borrow
    from confed.studies.study import growing

    sweep = read_sweep(root)
    outcomes: dict[str, Outcome] = {}
    for number, point in enumerate(sweep.points, 1):
        study = growing(root / point.folder)
        if study is None:
            continue
        if not as_json:
            say(rf"\[{number}/{len(sweep.points)}] {escape(point.title)}")
        before = [job for job in study.jobs if study.finished(job)]
        if not sweep.models:  # runs with other models are other runs
            borrow(study.root, [root / other.folder for other in sweep.points if other is not point])
        outcomes[point.folder] = execute(study)
        after = [job for job in study.jobs if study.finished(job)]
        if after and (after != before or _outdated(study, after)):
            write_tables(study.root, _present(sweep, {job.method for job in after}), sweep.margin)
            write_report(study.root)
    errors: dict[str, str] = {}
    for place, outcome in outcomes.items():
        errors |= {f"{place}/{cell}": text for cell, text in outcome.errors.items()}
    if not any(outcome.summaries for outcome in outcomes.values()):
        raise ValueError("no run could be made: " + next(iter(errors.values()), "the folder holds no study"))
    show_sweep(root, as_json, errors, more)
    for text, cells in _grouped(errors).items():
        complain(f"{', '.join(cells)}: {text}", "without")
    if any(outcome.failed for outcome in outcomes.values()):
        raise typer.Exit(FAILED)


def _outdated(study: "StudyFolder", finished: Sequence["Job"]) -> bool:
    """Whether a run was finished after the study's report was written, such as a cell on another machine."""
    report = study.root / "report.html"
    if not report.is_file():
        return True
    written = report.stat().st_mtime
    return any((study.root / job.folder / "summary.json").stat().st_mtime >= written for job in finished)


def _present(sweep: "Sweep", methods: set[str]) -> tuple[str, ...] | None:
    """The references that have runs; None, for the usual ones, if none has."""
    return tuple(name for name in sweep.references if name in methods) or None


def _show_study(outcome: "Outcome", judged: Judged, as_json: bool, more: Mapping[str, Any]) -> None:
    """Tables of a study that grows, written and printed, and its report."""
    from confed.api.study import write_study_files
    from confed.report.tables.paper import main_tables
    from confed.report.tables.table import to_rich
    from confed.results.runs import load
    from confed.studies.tuned import in_words

    written = write_study_files(outcome.folder, judged.references, judged.margin, judged.relative)
    for absent in written.absent["reference"]:
        complain(f"reference {absent!r} has no finished run", "note")
    for absent in written.absent["relative"]:
        complain(f"{absent!r}, asked for with --relative, has no finished run", "note")
    comparison, tables, page = written.comparison, written.tables, written.page
    if as_json:
        result = {"folder": str(outcome.folder), "report": str(page), "runs": outcome.summaries}
        result |= {"errors": outcome.errors, "tuned": outcome.tuned, "comparison": comparison.content()}
        print_json(plain(result | dict(more)))
        return
    for table in main_tables(load(outcome.folder)):
        print_table(to_rich(table))
    print_table(comparison.rich())
    if written.relative:
        print_table(to_rich(comparison.relative(written.relative)))
    shown = Console()
    if outcome.tuned:
        words = "; ".join(f"{row} {in_words(values)}" for row, values in outcome.tuned.items())
        shown.print(escape(f"Tuned values: {words}"), highlight=False)
    for text, cells in _grouped(outcome.errors).items():
        shown.print(f"[red]without[/] {escape(', '.join(cells))}: {escape(text)}", highlight=False)
    for cell in sorted(outcome.failed):
        shown.print(escape(f"what went wrong in {cell}: {_cell(outcome.folder, cell)}/error.txt"), soft_wrap=True)
    each = ", each" if len(tables) > 1 else ""
    text = f"tables: {outcome.folder}/{' and '.join(tables)}{each} as .md, .csv and .tex"
    shown.print(escape(text), soft_wrap=True, highlight=False)
    if written.figures:
        shown.print(escape(f"figures: {written.figures[0].parent}, as .png and .svg"), soft_wrap=True, highlight=False)
    shown.print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)


def show_sweep(
    root: Path, as_json: bool, errors: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> None:
    """Tables and figures of a sweep's finished runs, written and printed."""
    from confed.report.tables.sweep import write_sweep
    from confed.report.tables.table import to_rich
    from confed.results.sweep import read_sweep

    sweep = read_sweep(root)
    if sweep.models:
        result, tables, paths = _of_models(root, sweep)
    else:
        table, paths = write_sweep(root)
        result, tables = json.loads((root / "results.json").read_text(encoding="utf-8")), [table]
    if as_json:
        print_json(plain({"folder": str(root), **result, "errors": dict(errors or {}), **(more or {})}))
        return
    for table in tables:
        print_table(to_rich(table))
    files = ", ".join(str(path.relative_to(root)) for path in paths)
    Console().print(f"written to {escape(str(root))}: {escape(files)}", soft_wrap=True, highlight=False)


def _of_models(root: Path, sweep: "Sweep") -> "tuple[dict[str, Any], list[Table], list[Path]]":
    """Results of a sweep over models for machines, its first tables, and the files."""
    from confed.report.tables.models import model_tables, pairs_of, pairs_over_models, shown_first, write_models

    finished = list(chain.from_iterable((root / row).glob("*/seed-*/summary.json") for row in sweep.models))
    finished_methods = {name_of_file(path.parent.parent.name) for path in finished}
    for absent in [name for name in sweep.references if name not in finished_methods]:
        complain(f"reference {absent!r} has no finished run", "note")
    references = _present(sweep, finished_methods)
    studies, paths = write_models(root, sweep.models, references)
    pairs, tables = pairs_of(studies, references), model_tables(studies, references)
    tests: dict[str, list[dict[str, Any]]] = {}
    for measure, cells in studies.measures.items():
        tests[measure] = [asdict(pair) for pair in pairs_over_models(cells, pairs)]
    result = {"kind": studies.view, "values": studies.measures, "pairs": tests}
    return result, [tables[name] for name in shown_first(tables)], paths


def _cell(folder: Path, name: str) -> Path:
    """The folder of a cell "row/seed-n"."""
    row, _, seed = name.rpartition("/")
    return path_of(folder, row) / seed


def _grouped(errors: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> its cells; all seeds of a refused method give one line."""
    groups: dict[str, list[str]] = {}
    for cell, text in errors.items():
        groups.setdefault(text, []).append(cell)
    return groups
