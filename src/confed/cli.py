"""The ``confed`` command."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["app", "main"]

FAULTY, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: bad input; something went wrong on the way; stopped by Ctrl-C."""

_EXAMPLES = """Examples: `confed run` (the built-in benchmark), `confed run fedvqa_scenes study.methods=[] algorithm.name=fedp3
algorithm.lam=0.5 --seeds 3`, `confed compare runs/fedvqa_scenes`, `confed list runs`.

Exit codes: 0 done, 1 failed on the way, 2 bad input, 130 stopped by Ctrl-C."""

app = typer.Typer(
    name="confed",
    help="Federated vision-language learning: a global model for everyone, a personal one for each.",
    epilog=_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

console = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON, and nothing else, to standard output.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line on standard error and an exit code.

    Args:
        arguments: of the command; those of the process by default.

    Raises:
        SystemExit: always, with the exit code.
    """
    code = FAILED
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="confed", standalone_mode=False) or 0
    except click.UsageError as error:
        where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        _complain(f"{error.format_message()}{where}")
        code = FAULTY
    except click.ClickException as error:
        _complain(error.format_message())
        code = FAULTY
    except (click.Abort, KeyboardInterrupt):
        console.print("[yellow]stopped[/]")
        code = INTERRUPTED
    except ValueError as error:
        _complain(str(error))
        code = FAULTY
    except (RuntimeError, OSError) as error:
        _complain(str(error), "failed")
    sys.exit(code)


def _complain(text: str, kind: str = "error") -> None:
    console.print(f"[red]{kind}:[/] {escape(' '.join(text.split()))}", soft_wrap=True, highlight=False)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"confed {version('confed')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated vision-language learning: a global model for everyone, a personal one for each."""
    del version


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a packaged one.")] = "fedvqa_scenes",
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. algorithm.lam=0.5")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; must not exist.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (the recipe's by default).")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds to run, counted from the first.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; 0 = one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Run a recipe; without arguments, the built-in benchmark."""
    from confed import study
    from confed.experiment import run as run_one
    from confed.recipe import load_recipe

    overrides = list(overrides or [])
    if "=" in recipe:  # `confed run algorithm.lam=0.5` means the default recipe
        overrides.insert(0, recipe)
        recipe = "fedvqa_scenes"
    overrides += [f"run.{key}={value}" for key, value in (("seed", seed), ("workers", workers)) if value is not None]
    loaded = load_recipe(recipe, overrides)
    folder = out or study.free_folder(loaded.name)
    with _interruptible(folder), _watching(as_json) as watch:
        if loaded.methods or seeds > 1:
            study.create_study(loaded, folder, seeds)
            summaries = study.run_study(folder, watch)
        else:
            job = study.Job(loaded.sections["algorithm"]["name"], loaded.run.seed, folder.name)
            summaries = [run_one(loaded, folder, watch=watch(0, 1, job))]
    _show(folder, summaries, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run or study folder.")], as_json: Json = False
) -> None:
    """Continue an interrupted run or study exactly where it stopped."""
    from confed import study

    with _interruptible(folder), _watching(as_json) as watch:
        summaries = list(study.resume(folder, watch))
    _show(folder, summaries, as_json)


@app.command(name="list")
def list_things(
    kind: Annotated[str, typer.Argument(help="algorithms, models, tasks, datasets, recipes or runs")] = "algorithms",
    contract: Annotated[bool, typer.Option(help="Algorithms: which checks of the contract apply.")] = False,
    as_json: Json = False,
) -> None:
    """List what there is."""
    from confed.catalogue import listing

    rows = listing(kind, contract=contract)
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=bool(rows))
    for column in rows[0] if rows else ():
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    Console().print(table if rows else f"no {kind} found")


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run or study folder.")], as_json: Json = False) -> None:
    """Write report.html again and show the table."""
    from confed.results.folder import run_folders

    found = [f / "summary.json" for f in run_folders(folder)]
    summaries = [json.loads(f.read_text()) for f in found if f.exists()]
    _show(folder, summaries, as_json)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run or study folders.")],
    reference: Annotated[str, typer.Option(help="The method others are compared with.")] = "fedavg",
    out: Annotated[Path | None, typer.Option(help="Folder for compare.md, compare.csv and compare.tex.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds and over examples, with paired tests."""
    from confed.results.compare import compare as compare_folders

    comparison = compare_folders(folders, reference)
    if out is not None:
        comparison.write(out)
        console.print(f"written: {out}/compare.md, compare.csv, compare.tex")
    if as_json:
        print(json.dumps(comparison.to_json(), indent=1, ensure_ascii=False))
    else:
        Console().print(comparison.to_rich())


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    image: Annotated[Path, typer.Option(help="A picture.")],
    question: Annotated[str, typer.Option(help="A question about it.")],
    client: Annotated[str | None, typer.Option(help="Use this client's personal model; else the global one.")] = None,
    top: Annotated[int, typer.Option(help="How many answers to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Ask a trained model about a picture."""
    from confed.inference import predict as ask

    answers = ask(folder, image, question, client, top)
    if as_json:
        print(json.dumps(answers, indent=1))
        return
    for answer in answers["answers"]:
        Console().print(f"{answer['probability']:6.1%}  {escape(answer['answer'])}")
    if answers["unknown_words"]:
        console.print(f"[yellow]words the model does not know:[/] {', '.join(answers['unknown_words'])}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    target: Annotated[Path, typer.Argument(help="Where to write; must not exist.")],
    as_json: Json = False,
) -> None:
    """Write the global and every personal model in the Hugging Face layout."""
    from confed.inference import export as write

    written = write(folder, target)
    print(json.dumps(written, indent=1)) if as_json else console.print(
        "\n".join(f"{name}: {path}" for name, path in written.items())
    )


@data_app.command()
def describe(
    name: Annotated[str, typer.Argument(help="A dataset's name.")] = "scenes",
    options: Annotated[list[str] | None, typer.Argument(help="key=value of the dataset")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) of sample pictures here.")] = None,
    as_json: Json = False,
) -> None:
    """Counts, answers, sources and floors of a dataset."""
    from confed.catalogue import describe as describe_data

    description = describe_data(name, options or [], out)
    if as_json:
        print(json.dumps(description, indent=1, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table("place", "role", "questions", "pictures", "answers", "most frequent", box=None, pad_edge=False)
    for row in description["rows"]:
        table.add_row(*(str(value) for value in row.values()))
    shown = Console()
    shown.print(f"[bold]{name}[/]: {description['answers']} answers, {description['words']} words")
    shown.print(table)
    for key, value in description["facts"].items():
        shown.print(f"{escape(key)}: {escape(value)}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, threads, memory, GPUs, and what is missing and how to get it."""
    from confed.catalogue import diagnose

    findings = diagnose()
    if as_json:
        print(json.dumps(findings, indent=1))
        return
    for section, entries in findings.items():
        Console().print(f"[bold]{section}[/]")
        for key, value in entries.items():
            Console().print(f"  {key}: {escape(str(value))}")


@app.command()
def pretrain(
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    questions: Annotated[int | None, typer.Option(help="Public questions.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over them.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.")] = None,
) -> None:
    """Make the mini backbone's weights again, from nothing."""
    from confed.pretrain import pretrain as make

    options = {"questions": questions, "epochs": epochs, "seed": seed}
    make(out, **{key: value for key, value in options.items() if value is not None})


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Says how to go on after Ctrl-C and after a full disk."""
    import errno

    try:
        yield
    except KeyboardInterrupt:
        console.print(f"\n[yellow]stopped;[/] everything up to the last finished round is saved. Go on with:\n"
                      f"  confed resume {escape(str(folder))}")  # fmt: skip
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            console.print(
                f"[red]failed:[/] no space left on the device while writing to {escape(str(folder))}. The last "
                f"checkpoint is whole; make room and go on with:\n  confed resume {escape(str(folder))}"
            )
            sys.exit(FAILED)
        raise


@contextmanager
def _watching(quiet: bool) -> "Iterator[Callable[[int, int, Job], Callable[[Progress], None]]]":
    """A progress display of runs and rounds."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )  # fmt: skip
    with Bars(*columns, console=console, disable=quiet) as bars:

        def watch(number: int, jobs: int, job: "Job") -> "Callable[[Progress], None]":
            title = f"[{number + 1}/{jobs}] {job.method}, seed {job.seed}"
            task = bars.add_task(title, total=None, text="preparing data")

            def update(progress: "Progress") -> None:
                if "left out" in progress.text or "damaged" in progress.text:
                    bars.console.print(f"[yellow]warning:[/] {escape(progress.text)}")
                bars.update(task, completed=progress.round, total=progress.rounds, text=escape(progress.text))
                if progress.text == "done":
                    bars.stop_task(task)

            return update

        yield watch


def _show(folder: Path, summaries: list[dict[str, Any]], as_json: bool) -> None:
    from confed.results.report import write_report
    from confed.results.tables import study_table

    page = write_report(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "report": str(page), "runs": summaries}, ensure_ascii=False))
        return
    if summaries:
        Console().print(study_table(summaries))
    Console().print(f"report: {escape(str(page))}", soft_wrap=True)


if __name__ == "__main__":
    main()
