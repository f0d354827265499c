"""Verbs that choose settings: tune."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    INTERRUPTED,
    Json,
    app,
    complain,
    console,
    default_workers,
    interruptible,
    is_quiet,
    plain,
    print_json,
    print_table,
    say,
)
from confed.cli.completion import complete_key
from confed.cli.study import Methods, RecipeName, Seeds, Tuned, Workers, tuned_values

if TYPE_CHECKING:
    from rich.table import Table

    from confed.studies.tuned import Tuned as TunedRow


@app.command(rich_help_panel="Compare")
def tune(
    recipe: RecipeName = "fedvqa_scenes",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value with a TOML value, e.g. run.rounds=3", autocompletion=complete_key),
    ] = None,
    budget: Annotated[int, typer.Option(help="Configurations per method, the recipe's included.")] = 6,
    methods: Methods = None,
    seed: Annotated[int, typer.Option(help="Seed of the tuning runs, never used for reported results.")] = 100,
    seeds: Annotated[int, typer.Option(help="Seeds of each configuration, counted from --seed; scores are means.")] = 1,
    workers: Annotated[
        int | None, typer.Option(help="Methods in parallel, one process each. [default: one per core; one on a GPU]")
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            help="Stop configurations early that lie two standard errors below the median, two rounds in a row."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the scores. [default: runs/NAME-tune]")] = None,
    as_json: Json = False,
) -> None:
    """Choose each method's settings on the clients' validation data, with the same budget for all.

    Writes scores.csv and tuned.toml (for `confed compare --tuned`). The same command goes on after an interruption.
    """
    from dataclasses import asdict

    from confed.api.progress import Display
    from confed.studies import tune as tuning
    from confed.studies.study import load_rows

    loaded, _ = load_rows(recipe, overrides or [], methods)
    folder = out or Path("runs") / f"{loaded.name}-tune"
    count = workers if workers is not None else default_workers(loaded)
    try:
        with Display(console, quiet=as_json or is_quiet()) as display:
            tuning_result = tuning.tune(
                loaded, folder, budget=budget, seed=seed, seeds=seeds, workers=count, progress=display, prune=prune
            )
    except KeyboardInterrupt:
        say("[yellow]stopped;[/] every finished configuration is saved. Go on with the same command")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        rows = [{**asdict(tuned), "lead": tuned.lead} for tuned in tuning_result]
        print_json(plain({"folder": str(folder), "methods": rows}))
    else:
        print_table(_table(tuning_result))
        shown = Console()
        for tuned in tuning_result:
            if tuned.lead:
                shown.print(escape(f"{tuned.label}: {tuned.lead}"), soft_wrap=True, highlight=False)
        for tuned in tuning_result:
            if tuned.error:
                shown.print(f"[red]without[/] {escape(tuned.label)}: {escape(tuned.error)}", highlight=False)
        shown.print(escape(f"written: {folder}/tuned.toml, scores.csv"), soft_wrap=True, highlight=False)
    if any(tuned.failed or (tuned.trials and tuned.best is None) for tuned in tuning_result):
        raise typer.Exit(FAILED)


def _table(found: "list[TunedRow]") -> "Table":
    from rich.table import Table

    from confed.studies.tuned import in_words

    table = Table("method", "chosen", title="Chosen on validation data", title_justify="left", box=None, pad_edge=False)
    for name in ("recipe's own", "chosen's", "tried", "pruned"):
        table.add_column(name, justify="right")
    for tuned in found:
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


if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from confed.recipes.recipe import Recipe
    from confed.results.gates import Gate


@app.command(rich_help_panel="Compare")
def gates(
    source: Annotated[
        str, typer.Argument(help="A recipe file, the name of a packaged one, or the folder of a finished study.")
    ] = "modalities",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value with a TOML value, e.g. data.train=100")
    ] = None,
    methods: Methods = None,
    seeds: Seeds = 1,
    workers: Workers = None,
    tuned: Tuned = None,
    longer: Annotated[
        Path | None, typer.Option(help="Of a finished study: the same rows with at least 1.5 times the rounds.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs and gates.json. [default: runs/NAME-gates]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge whether a benchmark can show what methods claim: head-room, convergence, order, ceiling, floors.

    Of a recipe all rows are run with its rounds and with 1.5 times as many, a local and a centralised row included;
    finished runs are reused. Of a study's folder nothing is run. The exit status is 0 whether gates are passed or not.
    """
    from confed.results.folder import kind_of
    from confed.studies.gates import judged
    from confed.studies.study import read_study

    root = Path(source)
    if kind_of(root) == "study":
        if overrides or methods or tuned or seeds != 1:
            raise ValueError(
                "of a finished study nothing is run: overrides, --methods, --seeds and --tuned need a recipe"
            )
        recipe, folder = read_study(root).recipe, root
    else:
        if longer is not None:
            raise ValueError("--longer is for a finished study; of a recipe the longer runs are made")
        out = out or Path("runs") / f"{_name(source)}-gates"
        recipe, folder, longer = _run(source, overrides or [], methods, seeds, workers, tuned, out, as_json)
    judgement = judged(recipe, folder, longer)
    content = plain({"recipe": recipe.name, "rounds": recipe.run.rounds, "gates": [vars(gate) for gate in judgement]})
    if out is not None:
        from confed.federation.checkpoint import write_atomically

        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "gates.json", (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    if as_json:
        print_json(content)
        return
    print_table(_gates_table(recipe, judgement))
    if out is not None:
        console.print(escape(f"written: {out}/gates.json"), soft_wrap=True, highlight=False)


def _name(source: str) -> str:
    return Path(source).name.removesuffix(".toml")


def _run(
    source: str,
    overrides: list[str],
    methods: str | None,
    seeds: int,
    workers: int | None,
    tuned: Path | None,
    out: Path,
    as_json: bool,
) -> "tuple[Recipe, Path, Path]":
    """Missing runs of a recipe with its rounds and with more; the recipe, and the folders of both studies."""
    from confed.api.progress import Display
    from confed.studies.gates import with_references, with_rounds
    from confed.studies.runner import run_study
    from confed.studies.study import load_rows, open_study

    loaded, used = load_rows(source, overrides, methods, "", tuned_values(tuned, source, overrides, seeds))
    recipe = with_references(loaded)
    folders: list[Path] = []
    for each in (recipe, with_rounds(recipe)):
        folder = out / f"rounds-{each.run.rounds}"
        open_study(each, folder, range(each.run.seed, each.run.seed + seeds), used)
        with interruptible(folder, "the same command"), Display(console, quiet=as_json) as display:
            outcome = run_study(folder, display, workers if workers is not None else default_workers(each))
        for cell, error in outcome.errors.items():
            complain(f"without {cell}: {error}", "note")
        folders.append(folder)
    return recipe, folders[0], folders[1]


def _gates_table(recipe: "Recipe", found: "Sequence[Gate]") -> "RichTable":
    from rich.table import Table

    verdicts = {True: "[green]passed[/]", False: "[red]failed[/]", None: "not judged"}
    title = f"{recipe.name}: whether differences between methods could show, {recipe.run.rounds} rounds"
    table = Table("gate", "asked", "found", "", title=escape(title), title_justify="left", box=None, pad_edge=False)
    for gate in found:
        text = gate.found.removeprefix("not judged: ")
        table.add_row(gate.key, escape(gate.asked), escape(text), verdicts[gate.passed])
    return table
