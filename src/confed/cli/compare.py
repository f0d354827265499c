"""Verbs that compare methods: compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, Judged, app, complain, console, default_workers, plain, print_json, print_table, say
from confed.cli.app import tell_asks as tell
from confed.cli.cluster import Before, On, Slurm, Submit, carry_out, check_cluster, show_cells, with_address
from confed.cli.plan import Plan, rows_of_study, show_plan
from confed.cli.study import Margin, Methods, Seeds, Tuned, Workers, judged_by, tuned_values

if TYPE_CHECKING:
    from confed.recipes.recipe import Recipe
    from confed.report.tables.models import ModelStudies
    from confed.report.tables.table import Table
    from confed.results.runs import StudyResults


@app.command(rich_help_panel="Compare")
def compare(
    folders: Annotated[
        list[str] | None, typer.Argument(help="Run or study folders; with --recipe, section.key=value overrides.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Run this recipe's methods first; finished runs are reused.")
    ] = None,
    methods: Methods = None,
    models: Annotated[
        str | None,
        typer.Option(help="With --recipe: the same with each of these models: all (of the recipe), or names a,b,c."),
    ] = None,
    seeds: Seeds = 1,
    workers: Workers = None,
    tuned: Tuned = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            help="A method that the others are compared with; may be repeated. [default: fedavg, fedavg_ft, adapter]"
        ),
    ] = None,
    headline: Annotated[
        str,
        typer.Option(
            help="The model in the column 'deployed': personal, or global_seen (what is global, with "
            "each client's own head; local rows their own models). [default: as the recipe and the methods say]"
        ),
    ] = "",
    margin: Margin = 1.0,
    relative: Annotated[
        str,
        typer.Option(help="Also show this method's relative improvement over every other method, client by client."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for compare.md, .csv and .tex; with --recipe also for the runs.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for results files: JSON per method, predictions beside it; see `confed reproduce`."),
    ] = None,
    on: On = "",
    slurm: Slurm = None,
    submit: Submit = False,
    before: Before = None,
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds and over examples, with paired tests.

    Of folders that are there, or of a whole grid of methods and seeds: `confed compare --recipe fedvqa_scenes --methods
    all --seeds 5`. The same command goes on after an interruption, and adds methods and seeds. With --models it makes a
    grid for each model, and a table of models and methods with tests over models.

    With --on slurm it writes a job array for a cluster, a task per run; `confed compare STUDY` shows what is there.
    With --on ray the runs are computed on the nodes of a Ray cluster.
    """
    from confed.studies.cells import CELLS
    from confed.studies.cluster import parse_options

    judged = judged_by(reference, margin, headline, relative)
    check_cluster(on, slurm, submit, before)
    address, overrides = ("", []) if recipe is None else with_address(on, recipe, folders or [])
    if recipe is not None and results is not None:
        raise ValueError("--results is of runs that are there: `confed compare STUDY --results DIR`, without --recipe")
    if recipe is not None and plan:
        rows = _planned(recipe, overrides, methods, models, seeds, tuned, headline)
        count = workers or default_workers(next(iter(rows.values())))
        show_plan(rows, seeds, count, True, parse_options(slurm or []), as_json)
        return
    if recipe is not None:
        folder = _opened(recipe, overrides, methods, models, seeds, tuned, headline, judged, out)
        carry_out(folder, on, address, workers, slurm, submit, before, as_json)
        return
    if (
        methods is not None
        or models is not None
        or workers is not None
        or tuned is not None
        or seeds != 1
        or on
        or plan
    ):
        raise ValueError("--methods, --models, --seeds, --workers, --tuned, --plan and --on need --recipe")
    places = list(map(Path, folders or ()))
    if len(places) == 1 and (places[0] / CELLS).is_file() and out is None:
        show_cells(places[0], as_json)
        return
    if results is not None:
        _write_rows(places, results)
    _compare_folders(places, reference, judged, headline, out, as_json)


def _write_rows(folders: Sequence[Path], results: Path) -> None:
    from confed.results.runs import load
    from confed.studies.published import write_rows

    studies: list[tuple[str, StudyResults]] = []
    for folder in folders:
        models = {folder / row: row for row in _models(folder)}
        studies += [(models.get(place, ""), load(place)) for place in _places([folder])]
    names = ", ".join(path.name for path in write_rows(studies, results))
    say(escape(f"written into {results}: {names}, and what each predicted as .safetensors"))


def _compare_folders(
    folders: list[Path], references: list[str] | None, judged: Judged, headline: str, out: Path | None, as_json: bool
) -> None:
    """Tables of folders that are there, written into a folder if one is given, and printed."""
    from confed.api.study import write_files
    from confed.report.comparison import compare as compare_folders
    from confed.report.tables import models as model_tables
    from confed.report.tables.table import in_files, to_rich
    from confed.results.runs import load

    places = _places(folders)
    comparison = compare_folders(places, references or None, judged.margin, headline)
    studies = [load(place) for place in places]
    backbones, several = _by_backbone(studies, headline), _by_model(folders, studies, headline)
    relative_rows = comparison.relative(judged.relative) if judged.relative else None
    if out is not None:
        texts = comparison.files() | ({} if backbones is None else in_files("backbones", backbones))
        texts |= {} if several is None else model_tables.files(several, references or None)
        write_files(texts, out)
        if relative_rows is not None:
            write_files(comparison.relative_files(judged.relative), out)
        more = "" if backbones is None else ", backbones.md, .csv and .tex"
        more += "" if several is None else ", models.md, .csv and .tex"
        more += "" if relative_rows is None else ", relative.md, .csv, .tex, .png and .svg"
        text = f"written: {out}/compare.md, compare.csv, compare.tex{more}"
        console.print(escape(text), soft_wrap=True, highlight=False)
    if as_json:
        print_json(plain(comparison.content()))
        return
    if backbones is not None:
        print_table(to_rich(backbones))
    print_table(comparison.rich())
    if relative_rows is not None:
        print_table(to_rich(relative_rows))
    shown = {} if several is None else model_tables.model_tables(several, references or None)
    for name in model_tables.shown_first(shown):
        print_table(to_rich(shown[name]))


def _places(folders: Sequence[Path]) -> list[Path]:
    """Folders of studies; a folder of several models gives the studies in it."""
    from confed.results.folder import kind_of

    places: list[Path] = []
    for folder in folders:
        models = [folder / row for row in _models(folder)]
        places += [place for place in models if kind_of(place) == "study"] if models else [folder]
    return places


def _models(folder: Path) -> dict[str, str]:
    """Folder of each model's study -> label of the model; empty where a folder is no sweep over models."""
    from confed.results.folder import kind_of
    from confed.results.sweep import read_sweep

    return read_sweep(folder).models if kind_of(folder) == "sweep" else {}


def _by_backbone(studies: "Sequence[StudyResults]", headline: str) -> "Table | None":
    """Tables of several studies as one: one backbone for each study, and the same clients for all."""
    from dataclasses import replace

    from confed.report.tables.cost import backbone, by_backbone
    from confed.report.tables.paper import paper_table
    from confed.results.runs import with_deployed_of

    studies = [replace(study, runs=tuple(with_deployed_of(study.runs, headline))) for study in studies]
    tables = {backbone(study.runs): paper_table(study) for study in studies}
    same = len({table.columns for table in tables.values()}) == 1 and not _other_data(studies)
    return by_backbone(tables) if len(tables) == len(studies) > 1 and same else None


def _by_model(folders: Sequence[Path], studies: "Sequence[StudyResults]", headline: str) -> "ModelStudies | None":
    """A folder of several models, or several studies with one model each."""
    from confed.report.tables.cost import backbone
    from confed.report.tables.models import load_models, model_studies

    if len(folders) == 1 and (models := _models(folders[0])):
        return load_models(folders[0], models, headline)
    by_name = {backbone(study.runs): study for study in studies}
    if len(by_name) > 1 and (reason := _other_data(studies)):
        complain(f"no table over models: {reason}", "note")
        return None
    return model_studies(by_name, headline) if len(by_name) == len(studies) > 1 else None


def _other_data(studies: "Sequence[StudyResults]") -> str:
    """Reason why the studies cannot be of the same data; "" if they may be."""
    from confed.comparison.refusals import other_data
    from confed.results.records import record_of

    firsts = [record_of(study.runs[0]) for study in studies]
    return next(filter(None, (other_data(firsts[0], other) for other in firsts[1:])), "")


def _planned(
    name: str,
    overrides: list[str],
    methods: str | None,
    models: str | None,
    seeds: int,
    tuned: Path | None,
    headline: str,
) -> "dict[str, Recipe]":
    """Title -> single-run recipe of each row of the study, or of the sweep over models, that the options ask for."""
    from confed.studies.study import load_rows
    from confed.studies.sweep import models_of, points_of_models, recipes_of

    values = tuned_values(tuned, name, overrides, seeds)
    loaded, _ = load_rows(name, overrides, methods, headline, values)
    if models is None:
        return rows_of_study(loaded)
    points = points_of_models(loaded, models_of(loaded, models))
    recipes = recipes_of(name, overrides, points, methods, headline, values)
    result: dict[str, Recipe] = {}
    for p in points:
        for t, r in rows_of_study(recipes[p.folder][0], p.title).items():
            result[t] = r
    return result


def _opened(
    name: str,
    overrides: list[str],
    methods: str | None,
    models: str | None,
    seeds: int,
    tuned: Path | None,
    headline: str,
    judged: Judged,
    out: Path | None,
) -> Path:
    """Folder of the study, or of the sweep over models, that the options of ``--recipe`` ask for; nothing is run."""
    from dataclasses import asdict

    from confed.results.sweep import MODELS, Sweep
    from confed.studies.study import growing, load_rows, open_study
    from confed.studies.sweep import models_of, open_sweep, points_of_models, recipes_of

    values = tuned_values(tuned, name, overrides, seeds)
    loaded, used = load_rows(name, overrides, methods, headline, values)
    tell(loaded, name)
    folder = out or Path("runs") / f"{loaded.name}-{'compare' if models is None else 'models'}"
    before = growing(folder)
    method_names = {*loaded.methods, *(() if before is None else before.recipe.methods)}
    named = [*(("--reference", name) for name in judged.references), ("--relative", judged.relative or None)]
    for option, wanted in named:
        if wanted is not None and wanted not in method_names:
            raise ValueError(f"{option} {wanted} is none of the methods compared: {', '.join(sorted(method_names))}")
    if models is not None and judged.relative:
        raise ValueError("--relative is for one model; leave out --models")
    if values is not None and (without := [row for row in loaded.methods if row not in values]):
        complain(f"{tuned} has no values for {', '.join(without)}; the recipe's own are used", "note")
    if models is None:
        open_study(loaded, folder, range(loaded.run.seed, loaded.run.seed + seeds), used, asdict(judged))
        return folder
    points = points_of_models(loaded, models_of(loaded, models))
    sweep = Sweep(loaded.name, MODELS, points, judged.references, judged.margin)
    recipes = recipes_of(name, overrides, points, methods, headline, values)
    open_sweep(folder, sweep, recipes, seeds=seeds, judged=asdict(judged), models_from=loaded)
    return folder
