"""Verbs that compare methods, settings and results with published ones: compare, tune, reproduce."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from confed.cli import options
from confed.cli.app import FAILED, answer, app, argument, complain, option, showing, tell_asks
from confed.cli.completion import complete_recipe


@app.command()
def compare(
    sources: Annotated[
        list[str],
        argument(
            "A recipe to run, with overrides; or run and study folders.",
            metavar="RECIPE [KEY=VALUE]... | FOLDER...",
            autocompletion=complete_recipe,
        ),
    ],
    methods: options.Methods = None,
    seeds: Annotated[int, option("Number of seeds, counted from the recipe's.")] = 1,
    over: Annotated[str, option("A setting and its values: data.shards=1,2,3.", metavar="KEY=VALUES")] = "",
    along: Annotated[
        list[str] | None, option("A setting that changes along; repeatable.", "--with", metavar="KEY=VALUES")
    ] = None,
    split: Annotated[str | None, option("With --over: values of data.split, a curve each.")] = None,
    models: Annotated[str | None, option("The same with each of these models: a,b,c, or all.")] = None,
    gates: Annotated[bool, option("Judge the benchmark in place of the methods.", "--gates")] = False,
    tuned: Annotated[Path | None, option("The tuned.toml of `confed tune` to use.")] = None,
    workers: options.Workers = None,
    on: Annotated[str, option("Run on a Ray cluster (ray); write a job array (slurm, script).", "--on")] = "",
    slurm: Annotated[list[str] | None, option("Options of sbatch: partition=gpu,time=4:00:00.", "--slurm")] = None,
    submit: Annotated[bool, option("With --on slurm: submit the job array.", "--submit")] = False,
    before: Annotated[list[str] | None, option("Shell before each task; repeatable.", "--before")] = None,
    plan: options.Plan = False,
    reference: Annotated[
        list[str] | None, option("Compare with this method; repeatable. [default: FedAvg and alike]")
    ] = None,
    relative: Annotated[str, option("Show this method's relative improvement by client.")] = "",
    headline: Annotated[str, option("The model in `deployed`: personal or global_seen.")] = "",
    margin: Annotated[float, option("Points within which methods count as equal.")] = 1.0,
    results: Annotated[Path | None, option("Write results files for `confed reproduce` here.")] = None,
    out: Annotated[Path | None, option("Folder of the runs; of folders: for the tables.")] = None,
) -> None:
    """Compare methods, models or values of a setting.

    Tests are paired, over seeds and over examples. Runs what is missing of the recipe's grid, or reads the folders that
    are given. The same command goes on after an interruption, and adds methods, seeds, values and models. With --gates:
    whether the benchmark can show what methods claim, by a local and a centralised row and 1.5 times the rounds.
    """
    from confed.cli import grids
    from confed.studies.study import grid_of

    judged = grids.judged_by(reference, margin, headline, relative, gates)
    cluster = grids.Cluster(on, slurm, submit, before)
    rows_given = {"--methods": methods, "--models": models, "--workers": workers, "--tuned": tuned, "--over": over,
                  "--with": along, "--split": split, "--plan": plan, "--on": on}  # fmt: skip
    if Path(sources[0]).is_dir():
        given = [name for name, value in rows_given.items() if value]
        if given or seeds != 1:
            raise ValueError(f"{(given or ['--seeds'])[0]} goes with a recipe; {sources[0]} is a folder")
        _of_folders(list(map(Path, sources)), reference, judged, headline, results, out)
        return
    if results is not None:
        raise ValueError("--results is of runs that are there: `confed compare STUDY --results DIR`")
    recipe, *overrides = sources
    if "/" in recipe and not recipe.endswith(".toml"):
        raise ValueError(f"{recipe} is neither a folder of runs nor a recipe (`confed list recipes`, or FILE.toml)")
    if "=" in recipe and not Path(recipe).is_file():
        raise ValueError(f"a recipe comes before its settings, as in `confed compare modalities {recipe}`")
    axes = {"over": over, "along": along or (), "split": split, "models": models, "gates": gates}
    address, overrides = grids.with_address(on, recipe, overrides)
    values = grids.tuned_values(tuned, recipe, overrides, seeds)
    grid = grid_of(recipe, overrides, **axes, methods=methods, headline=headline, tuned=values, seeds=seeds)
    if plan:
        grids.show_grid_plan(grid, workers, cluster.options)
        return
    tell_asks(grid.first, recipe)
    folder = out or Path("runs") / grid.name
    grids.check_rows(grid.first, folder, judged)
    if grid.over and relative:
        raise ValueError("--relative is for one study; leave out --models and --over")
    if values is not None and (without := [row for row in grid.first.methods if row not in values]):
        complain(f"{tuned} has no values for {', '.join(without)}; the recipe's own are used", "note")
    grid.open(folder, asdict(judged))
    grids.carry_out(folder, cluster, address, workers)


def _of_folders(
    places: list[Path], references: list[str] | None, judged: options.Judged, headline: str, results: Path | None,
    out: Path | None,
) -> None:  # fmt: skip
    """What folders that are there show: gates, cells, results files, tables."""
    from confed.cli.grids import show_cells
    from confed.cli.tables import show_comparison, show_gates, write_rows_of
    from confed.studies.cells import CELLS

    if judged.gates:
        if len(places) > 2:
            raise ValueError("--gates is of a study and of the same rows with at least 1.5 times the rounds")
        show_gates(places[0], places[1] if len(places) > 1 else None, out)
        return
    if len(places) == 1 and (places[0] / CELLS).is_file() and out is None:
        show_cells(places[0])
        return
    if results is not None:
        write_rows_of(places, results)
    show_comparison(places, references, judged, headline, out)


# Choice of settings ----------------------------------------------------------------------------------------------


@app.command()
def tune(
    recipe: options.RecipeName = "fedvqa_scenes",
    overrides: options.Overrides = None,
    budget: Annotated[int, option("Configurations per method, the recipe's included.")] = 6,
    methods: options.Methods = None,
    seed: Annotated[int, option("Of the tuning runs; never used for reported results.")] = 100,
    seeds: Annotated[int, option("Seeds of each configuration; scores are means.")] = 1,
    workers: options.Workers = None,
    prune: Annotated[bool, option("Stop those two standard errors below the median early.", "--prune")] = False,
    out: Annotated[Path | None, option("Folder. [default: runs/NAME-tune]")] = None,
) -> None:
    """Choose each method's settings on validation data.

    All are tried equally often. Writes scores.csv and tuned.toml (for `confed compare --tuned`). The same command goes
    on after an interruption.
    """
    from confed.cli.grids import tune_rows
    from confed.studies.study import Grid

    loaded, _ = Grid(recipe, overrides or [], methods).rows()
    folder = out or Path("runs") / f"{loaded.name}-tune"
    tune_rows(loaded, folder, workers, budget=budget, seed=seed, seeds=seeds, prune=prune)


# Published results, run again ------------------------------------------------------------------------------------


@app.command()
def reproduce(
    source: Annotated[
        str, argument("A results file, run folder or summary.json, or the address (https://...) of one.")
    ],
    overrides: options.Overrides = None,
    method: Annotated[str, option("Row of a table, by name or label. [default: the first]")] = "",
    seed: Annotated[int | None, option("Seed to run again. [default: the first]")] = None,
    all_seeds: Annotated[bool, option("Run all seeds of the row again.", "--all-seeds")] = False,
    out: Annotated[Path | None, option("Folder of the new runs; must not exist.")] = None,
) -> None:
    """Run a published result again and say whether it repeats.

    The verdict is one of: equal bits (history, predictions and models are the same to the last bit); equal figures
    (all published figures are the same, and there are no digests to compare); within the interval (other bits, and
    every mean lies where one more run of the published row is expected, at 95%); different. With it comes the first
    round, client and metric that differ, and what else does: data, code, packages, instruction set.

    Exit code 1 if a run is different.
    """
    from confed.cli.tables import show_verdict
    from confed.studies.published import read_published
    from confed.studies.reproduce import Verdict, repeat
    from confed.studies.study import free_folder

    if all_seeds and seed is not None:
        raise ValueError("--seed and --all-seeds exclude each other")
    published = read_published(source, method)
    seeds = published.seeds if all_seeds else [published.seeds[0] if seed is None else seed]
    root = out or free_folder(f"reproduced-{published.name}")
    verdicts: list[Verdict] = []
    for number in seeds:
        folder = root if len(seeds) == 1 else root / f"seed-{number}"
        with showing(folder, rounds=True) as display:
            verdicts.append(repeat(published, number, folder, overrides or [], display))
        show_verdict(verdicts[-1])
    answer({"source": source, "runs": [asdict(v) | {"folder": str(v.folder)} for v in verdicts]})
    if any(verdict.word == "different" for verdict in verdicts):
        raise typer.Exit(FAILED)
