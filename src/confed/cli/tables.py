"""Results of runs and studies as commands print them, made from their folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from confed.api.study import write_study_files
from confed.cli.app import (
    answer,
    complain,
    console,
    for_people,
    plain,
    print_line,
    print_table,
    print_tables,
    remark,
    say,
    table_of,
    tell_errors,
)
from confed.cli.options import Judged
from confed.comparison.refusals import other_data
from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import name_of_file
from confed.report.comparison import compare as compare_folders
from confed.report.tables.methods import backbone, by_backbone, main_tables, paper_table
from confed.report.tables.models import (
    ModelStudies,
    load_models,
    model_studies,
    model_tables,
    pairs_of,
    pairs_over_models,
    shown_first,
    write_models,
)
from confed.report.tables.models import files as model_files
from confed.report.tables.sweep import write_sweep
from confed.report.tables.table import Table, in_files, write_files
from confed.results.folder import kind_of
from confed.results.records import record_of
from confed.results.runs import StudyResults, load, with_deployed_of
from confed.results.sweep import Sweep, read_sweep
from confed.studies.gates import GATES
from confed.studies.gates import judged as judged_gates
from confed.studies.published import write_rows
from confed.studies.reproduce import Verdict
from confed.studies.runner import Outcome
from confed.studies.study import read_study
from confed.studies.tuned import Tuned as TunedRow
from confed.studies.tuned import in_words
from confed.system.plain_text import visible


def write_rows_of(folders: Sequence[Path], results: Path) -> None:
    studies: list[tuple[str, StudyResults]] = []
    for folder in folders:
        models = {folder / row: row for row in _models(folder)}
        studies += [(models.get(place, ""), load(place)) for place in _places([folder])]
    names = ", ".join(path.name for path in write_rows(studies, results))
    say(escape(f"written into {results}: {names}, and what each predicted as .safetensors"))


def show_comparison(
    folders: list[Path], references: list[str] | None, judged: Judged, headline: str, out: Path | None
) -> None:
    """Tables of folders that are there, written into a folder if one is given, and printed."""
    places = _places(folders)
    comparison = compare_folders(places, references or None, judged.margin, headline)
    studies = [load(place) for place in places]
    backbones, several = _by_backbone(studies, headline), _by_model(folders, studies, headline)
    shown = None if several is None else model_tables(several, references or None)
    relative_rows = comparison.relative(judged.relative) if judged.relative else None
    if out is not None:
        texts = comparison.files() | ({} if backbones is None else in_files("backbones", backbones))
        texts |= {} if shown is None else model_files(shown)
        write_files(out, texts)
        if relative_rows is not None:
            write_files(out, comparison.relative_files(judged.relative))
        more = "" if backbones is None else ", backbones.md, .csv and .tex"
        more += "" if several is None else ", models.md, .csv and .tex"
        more += "" if relative_rows is None else ", relative.md, .csv, .tex, .png and .svg"
        text = f"written: {out}/compare.md, compare.csv, compare.tex{more}"
        console.print(escape(text), soft_wrap=True, highlight=False)
    answer(comparison.content())
    print_tables([] if backbones is None else [backbones])
    print_table(comparison.rich())
    print_tables([] if relative_rows is None else [relative_rows])
    print_tables([] if shown is None else shown_first(shown))


def _places(folders: Sequence[Path]) -> list[Path]:
    """Folders of studies; a folder of several models gives the studies in it."""
    places: list[Path] = []
    for folder in folders:
        models = [folder / row for row in _models(folder)]
        places += [place for place in models if kind_of(place) == "study"] if models else [folder]
    return places


def _models(folder: Path) -> dict[str, str]:
    """Folder of each model's study -> label of the model; empty where a folder is no sweep over models."""
    return read_sweep(folder).models if kind_of(folder) == "sweep" else {}


def _by_backbone(studies: Sequence[StudyResults], headline: str) -> Table | None:
    """Tables of several studies as one: one backbone for each study, and the same clients for all."""
    studies = [replace(study, runs=tuple(with_deployed_of(study.runs, headline))) for study in studies]
    tables = {backbone(study.runs): paper_table(study) for study in studies}
    same = len({table.columns for table in tables.values()}) == 1 and not _other_data(studies)
    return by_backbone(tables) if len(tables) == len(studies) > 1 and same else None


def _by_model(folders: Sequence[Path], studies: Sequence[StudyResults], headline: str) -> ModelStudies | None:
    """A folder of several models, or several studies with one model each."""
    if len(folders) == 1 and (models := _models(folders[0])):
        return load_models(folders[0], models, headline)
    by_name = {backbone(study.runs): study for study in studies}
    if len(by_name) > 1 and (reason := _other_data(studies)):
        complain(f"no table over models: {reason}", "note")
        return None
    return model_studies(by_name, headline) if len(by_name) == len(studies) > 1 else None


def _other_data(studies: Sequence[StudyResults]) -> str:
    """Reason why the studies cannot be of the same data; "" if they may be."""
    firsts = [record_of(study.runs[0]) for study in studies]
    return next(filter(None, (other_data(firsts[0], other) for other in firsts[1:])), "")


# What was executed: studies, sweeps, gates, tunings --------------------------------------------------------------

_VERDICTS = {True: "[green]passed[/]", False: "[red]failed[/]", None: "not judged"}


def show_study(outcome: Outcome, judged: Judged, more: Mapping[str, Any]) -> None:
    """Tables of a study that grows, written and printed, and its report."""
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
    tell_errors(outcome)
    each = ", each" if len(tables) > 1 else ""
    print_line(escape(f"tables: {outcome.folder}/{' and '.join(tables)}{each} as .md, .csv and .tex"))
    if written.figures:
        print_line(escape(f"figures: {written.figures[0].parent}, as .png and .svg"))
    print_line(f"report: {escape(str(page))}")


def show_sweep(root: Path, errors: Mapping[str, str] | None = None, **more: Any) -> None:
    """Tables and figures of a sweep's finished runs, written and printed."""
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
    recipe = read_study(study).recipe
    gates = judged_gates(recipe, study, longer)
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


def _of_models(root: Path, sweep: Sweep) -> tuple[dict[str, Any], list[Table], list[Path]]:
    """Results of a sweep over models for machines, its first tables, and the files."""
    finished = list(chain.from_iterable((root / row).glob("*/seed-*/summary.json") for row in sweep.models))
    finished_methods = {name_of_file(path.parent.parent.name) for path in finished}
    for absent in [name for name in sweep.references if name not in finished_methods]:
        complain(f"reference {absent!r} has no finished run", "note")
    references = sweep.present(finished_methods)
    studies = load_models(root, sweep.models)
    pairs, tables = pairs_of(studies, references), model_tables(studies, references)
    paths = write_models(root, studies, tables, sweep.models)
    tests: dict[str, list[dict[str, Any]]] = {}
    for measure, cells in studies.measures.items():
        tests[measure] = [asdict(pair) for pair in pairs_over_models(cells, pairs)]
    result = {"kind": studies.view, "values": studies.measures, "pairs": tests}
    return result, shown_first(tables), paths


def show_tuning(folder: Path, rows: Sequence[TunedRow]) -> None:
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


def _tuning_table(rows: Sequence[TunedRow]) -> RichTable:
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


# Published results, run again ------------------------------------------------------------------------------------

_COLOURS = {"equal bits": "green", "equal figures": "green", "within the interval": "green", "different": "red"}


def _escape(text: str) -> str:
    """A text of the published file on one line of the terminal, which it cannot control."""
    return escape(visible(" ".join(text.split())))


def show_verdict(verdict: Verdict) -> None:
    """The verdict in a line, the means, and below what differs."""
    bits = f" ({', '.join(verdict.compared)})" if verdict.word == "equal bits" else ""
    if verdict.word == "equal figures":
        digits = "" if verdict.digits is None else f"to {verdict.digits} digits; "
        bits = f" ({digits}the published result has no digests of its history, predictions and models)"
    colour = _COLOURS[verdict.word]
    shown = for_people()
    text = f"[{colour}]{verdict.word}[/]{bits}: {_escape(verdict.label)}, seed {verdict.seed}"
    shown.print(text, soft_wrap=True)
    print_table(_figures_table(verdict))
    for heading, lines in (("differences", verdict.where), ("what else differs", verdict.causes)):
        if lines:
            shown.print(f"{heading}:")
        for line in lines:
            shown.print(f"  {_escape(line)}", soft_wrap=True)
    shown.print(f"run: {escape(visible(str(verdict.folder)))}", soft_wrap=True)


def _figures_table(verdict: Verdict) -> RichTable:
    table = RichTable("figure", "published", "here", "expected of one run", box=box.SIMPLE)
    for name, figure in verdict.figures.items():
        here = "none" if figure.found is None else f"{figure.found:.4f}"
        ends = "–" if figure.interval is None else f"{figure.interval[0]:.4f} to {figure.interval[1]:.4f}"
        mean = "" if figure.mean_of == 1 else f" (mean of {figure.mean_of})"
        judged = {True: "", False: " (outside)", None: " (not judged)"}[figure.inside]
        table.add_row(_escape(name), f"{figure.published:.4f}{mean}", here, f"{ends}{judged}")
    return table
