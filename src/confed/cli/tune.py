"""Verbs that choose settings: tune."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import FAILED, INTERRUPTED, Json, app, console, default_workers, plain, print_json, print_table, say
from confed.cli.completion import complete_key
from confed.cli.global_options import is_quiet
from confed.cli.study import Methods, RecipeName

if TYPE_CHECKING:
    from rich.table import Table

    from confed.studies.tuned import Tuned


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


def _table(found: "list[Tuned]") -> "Table":
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
