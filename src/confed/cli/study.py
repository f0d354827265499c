"""Common parts of the verbs that run grids of methods, seeds and points: options, execution, tunings, results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    answer,
    argument,
    complain,
    default_workers,
    for_people,
    is_quiet,
    option,
    plain,
    print_line,
    print_table,
    print_tables,
    remark,
    show,
    showing,
    table_of,
)
from confed.cli.completion import complete_key, complete_method, complete_recipe
from confed.federation.file_names import name_of_file, path_of

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from confed.recipes.recipe import Recipe
    from confed.report.tables.table import Table
    from confed.results.sweep import Sweep
    from confed.studies.runner import Outcome
    from confed.studies.study import Job, StudyFolder
    from confed.studies.tuned import Tuned as TunedRow

    Execute = Callable[[StudyFolder], Outcome]


RecipeName = Annotated[
    str, argument("A file, or a packaged recipe's name (confed list recipes).", autocompletion=complete_recipe)
]
Overrides = Annotated[
    list[str] | None,
    argument(
        "section.key=TOML, such as algorithm.lam=0.5; ~section.key takes a key away.",
        metavar="[KEY=VALUE]...",
        autocompletion=complete_key,
    ),
]
Methods = Annotated[str | None, option("Rows: a,b,c, or all. [default: the recipe's]", autocompletion=complete_method)]
Workers = Annotated[int | None, option("Runs at a time. [default: one per core; one on a GPU]")]
Plan = Annotated[bool, option("Measure a few steps and print what it will take.", "--plan")]

_VERDICTS = {True: "[green]passed[/]", False: "[red]failed[/]", None: "not judged"}


@dataclass(frozen=True)
class Judged:
    references: tuple[str, ...] = ()  # what they are compared with; none for the usual ones
    margin: float = 0.01  # of equality, a fraction
    # the method whose relative improvement over each of the others is shown, client by client; "" for none
    relative: str = ""
    gates: bool = False  # as a benchmark, whose gates are judged in place of methods


def judged_by(references: list[str] | None, margin: float, headline: str, relative: str, gates: bool = False) -> Judged:
    """How methods are judged, as options say it."""
    from confed.results.summary import check_headline

    if not 0 < margin < 100:
        raise ValueError(f"--margin must lie between 0 and 100 points, got {margin:g}")
    check_headline(headline, "--headline")
    return Judged(tuple(references or ()), margin / 100, relative, gates)


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


def finish(folder: Path, workers: int | None) -> None:
    """Execution of what is missing in a run, study, sweep or tuning; its tables and report are written and shown."""
    from confed.results.folder import kind_of
    from confed.studies.runner import resume, run_study
    from confed.studies.tune import is_tuning, tuned_before

    if kind_of(folder) == "federation":  # see confed.deployment.server
        raise ValueError(f"{folder} is a federation across machines: go on with the same `confed server` as before")
    if is_tuning(folder):
        recipe, terms = tuned_before(folder)
        tune_rows(recipe, folder, workers, **terms)
        return

    def execute(study: "StudyFolder") -> "Outcome":
        count = workers if workers is not None else default_workers(study.recipe)
        with showing(folder, rounds=not study.side_by_side) as display:
            return run_study(study.root, display, count)

    if not _finish_grid(folder, execute):
        with showing(folder, rounds=True) as display:
            summaries = resume(folder, display)
        show(folder, summaries)


def show_gathered(folder: Path, **more: Any) -> None:
    """Tables and report of a study or sweep whose runs other processes make, written and shown; nothing is run."""
    from confed.studies.runner import gather

    if not _finish_grid(folder, lambda study: gather(study.root), **more):
        raise ValueError(f"{folder} must be a study or a sweep")


def _finish_grid(folder: Path, execute: "Execute", **more: Any) -> bool:
    """Whether a folder is a sweep or a study, which is executed or gathered, and shown with ``more``."""
    from confed.results.folder import kind_of
    from confed.studies.study import study_in
    from confed.system.folder_lock import exclusive

    if kind_of(folder) == "sweep":
        with exclusive(folder):
            _finish_sweep(folder, execute, more)
    elif (study := study_in(folder)) is not None:
        _finish_study(study, execute, more)
    else:
        return False
    return True


def _finish_study(study: "StudyFolder", execute: "Execute", more: Mapping[str, Any]) -> None:
    """Tables of a study after its missing runs were executed or gathered, judged as its index says."""
    outcome = execute(study)
    if not outcome.summaries:
        if outcome.failed:
            first = min(outcome.failed)
            place = _cell(study.root, first)
            raise RuntimeError(f"no run could be made: {outcome.errors[first]}; see {place}/error.txt")
        raise ValueError("no run could be made: " + next(iter(outcome.errors.values())))
    if study.side_by_side:
        _show_study(outcome, _judged(study), more)
    else:
        tell_account(outcome.summaries[0])
        show(outcome.folder, outcome.summaries, errors=outcome.errors, **more)
        _tell_errors(outcome)
    if outcome.failed:
        raise typer.Exit(FAILED)


def tell_account(summary: Mapping[str, Any]) -> None:
    """What was read and left out of the data of a run, on standard error."""
    for key in ("account", "read"):
        if (told := summary.get("facts", {}).get(key)) and not is_quiet():
            remark(f"data: {escape(told)}")


def _tell_errors(outcome: "Outcome") -> None:
    """Why runs are not there, and where more of it is written."""
    shown = for_people()
    for text, cells in _grouped(outcome.errors).items():
        shown.print(f"[red]without[/] {escape(', '.join(cells))}: {escape(text)}")
    for cell in sorted(outcome.failed):
        shown.print(escape(f"what went wrong in {cell}: {_cell(outcome.folder, cell)}/error.txt"), soft_wrap=True)


def _judged(study: "StudyFolder") -> Judged:
    """How the methods of a study are judged, as its index says."""
    terms = study.index.get("judged") or {}
    references, relative = tuple(terms.get("references", ())), terms.get("relative", "")
    return Judged(references, terms.get("margin", 0.01), relative, bool(terms.get("gates")))


def _finish_sweep(root: Path, execute: "Execute", more: Mapping[str, Any]) -> None:
    """Tables of a sweep after its missing runs were executed or gathered, value by value or model by model."""
    from confed.report.report import write_report
    from confed.report.tables.write import write_tables
    from confed.results.sweep import read_sweep
    from confed.studies.runner import borrow
    from confed.studies.study import study_in

    sweep = read_sweep(root)
    outcomes: dict[str, Outcome] = {}
    for number, point in enumerate(sweep.points, 1):
        study = study_in(root / point.folder)
        if study is None:
            continue
        remark(rf"\[{number}/{len(sweep.points)}] {escape(point.title)}")
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
    studies = [study_in(root / point.folder) for point in sweep.points]
    if all(study is not None and _judged(study).gates for study in studies):
        first, *longer = [root / point.folder for point in sweep.points]
        show_gates(first, longer[0] if longer else None, root)
    else:
        show_sweep(root, errors, **more)
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


def _show_study(outcome: "Outcome", judged: Judged, more: Mapping[str, Any]) -> None:
    """Tables of a study that grows, written and printed, and its report."""
    from confed.api.study import write_study_files
    from confed.report.tables.methods import main_tables
    from confed.results.runs import load
    from confed.studies.tuned import in_words

    written = write_study_files(outcome.folder, judged.references, judged.margin, judged.relative)
    for absent in written.absent["reference"]:
        complain(f"reference {absent!r} has no finished run", "note")
    for absent in written.absent["relative"]:
        complain(f"{absent!r}, asked for with --relative, has no finished run", "note")
    comparison, tables, page = written.comparison, written.tables, written.page
    result = {"folder": str(outcome.folder), "report": str(page), "runs": outcome.summaries}
    result |= {"errors": outcome.errors, "tuned": outcome.tuned, "comparison": comparison.content()}
    answer({**result, **more})
    print_tables(main_tables(load(outcome.folder)))
    print_table(comparison.rich())
    if written.relative:
        print_tables([comparison.relative(written.relative)])
    if outcome.tuned:
        words = "; ".join(f"{row} {in_words(values)}" for row, values in outcome.tuned.items())
        for_people().print(escape(f"Tuned values: {words}"))
    _tell_errors(outcome)
    each = ", each" if len(tables) > 1 else ""
    print_line(escape(f"tables: {outcome.folder}/{' and '.join(tables)}{each} as .md, .csv and .tex"))
    if written.figures:
        print_line(escape(f"figures: {written.figures[0].parent}, as .png and .svg"))
    print_line(f"report: {escape(str(page))}")


def show_sweep(root: Path, errors: Mapping[str, str] | None = None, **more: Any) -> None:
    """Tables and figures of a sweep's finished runs, written and printed."""
    from confed.report.tables.sweep import write_sweep
    from confed.results.sweep import read_sweep

    sweep = read_sweep(root)
    if sweep.models:
        result, tables, paths = _of_models(root, sweep)
    else:
        table, paths = write_sweep(root)
        result, tables = json.loads((root / "results.json").read_text(encoding="utf-8")), [table]
    answer({"folder": str(root), **result, "errors": errors or {}, **more})
    print_tables(tables)
    files = ", ".join(str(path.relative_to(root)) for path in paths)
    print_line(f"written to {escape(str(root))}: {escape(files)}")


def show_gates(study: Path, longer: Path | None, out: Path | None) -> None:
    """Gates of a benchmark, judged by its study and by one with more rounds, written into ``out`` and printed."""
    from confed.federation.checkpoint import write_atomically
    from confed.studies.gates import GATES, judged
    from confed.studies.study import read_study

    recipe = read_study(study).recipe
    gates = judged(recipe, study, longer)
    content = plain({"recipe": recipe.name, "rounds": recipe.run.rounds, "gates": [vars(gate) for gate in gates]})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / GATES, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    answer(content)
    title = f"{recipe.name}: whether differences between methods could show, {recipe.run.rounds} rounds"
    table = table_of("gate", "asked", "found", "", title=escape(title), title_justify="left")
    for gate in gates:
        found = escape(gate.found.removeprefix("not judged: "))
        table.add_row(gate.key, escape(gate.asked), found, _VERDICTS[gate.passed])
    print_table(table)
    if out is not None:
        remark(escape(f"written: {out / GATES}"))


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


# Tuning: the results of a folder's configurations ------------------------------------------------------------------


def tune_rows(recipe: "Recipe", folder: Path, workers: int | None, **terms: Any) -> None:
    """Tuning of a recipe's rows on these terms; what was chosen is shown."""
    from confed.studies.tune import tune

    count = workers if workers is not None else default_workers(recipe)
    with showing(folder) as display:
        rows = tune(recipe, folder, workers=count, progress=display, **terms)
    show_tuning(folder, rows)
    if any(tuned.failed or (tuned.trials and tuned.best is None) for tuned in rows):
        raise typer.Exit(FAILED)


def show_tuning(folder: Path, rows: "Sequence[TunedRow]") -> None:
    """What was chosen for each row, printed."""
    answer({"folder": str(folder), "methods": [{**asdict(tuned), "lead": tuned.lead} for tuned in rows]})
    print_table(_tuning_table(rows))
    for tuned in rows:
        if tuned.lead:
            print_line(escape(f"{tuned.label}: {tuned.lead}"))
    for tuned in rows:
        if tuned.error:
            print_line(f"[red]without[/] {escape(tuned.label)}: {escape(tuned.error)}")
    print_line(escape(f"written: {folder}/tuned.toml, scores.csv"))


def _tuning_table(rows: "Sequence[TunedRow]") -> "RichTable":
    from confed.studies.tuned import in_words

    numbers = ("recipe's own", "chosen's", "tried", "pruned")
    title = "Chosen on validation data"
    table = table_of("method", "chosen", *numbers, right=numbers, title=title, title_justify="left")
    for tuned in rows:
        default_score, best = tuned.trials[0].score if tuned.trials else None, tuned.best
        table.add_row(
            escape(tuned.label),
            escape(in_words(best.values)) if best else "–",
            "–" if default_score is None else f"{default_score:.1%}",
            "–" if best is None else f"{best.score:.1%}",
            str(len(tuned.trials)),
            str(sum(trial.state == "pruned" for trial in tuned.trials)),
        )
    return table
