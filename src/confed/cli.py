"""The ``confed`` command."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
import typer.main
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["app", "main"]

FAULTY, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: bad input; something went wrong on the way; stopped by Ctrl-C."""

_EXAMPLES = """Examples: `confed run` (the built-in benchmark), `confed run study.methods=[] algorithm.lam=0.5
--seeds 3`, `confed compare runs/fedvqa_scenes`, `confed list runs`.

Exit codes: 0 done, 1 failed on the way, 2 bad input, 130 stopped by Ctrl-C."""

MOST_COLUMNS = 250
"""Width up to which a table of figures is printed in full."""

app = typer.Typer(
    name="confed",
    help="Federated vision-language learning: a global model for everyone, a personal one for each.",
    epilog=_EXAMPLES,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at datasets.")
app.add_typer(data_app, name="data")

console = Console(stderr=True)

Json = Annotated[
    bool, typer.Option("--json", help="Print machine-readable JSON, and nothing else, to standard output.")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line on standard error and an exit code.

    Args:
        arguments: of the command; those of the process by default.

    Raises:
        SystemExit: always, with the exit code.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _command()(args=given or ["--help"], prog_name="confed", standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):
        _say("[yellow]stopped[/]")
        code = INTERRUPTED
    except Exception as error:
        code = _failure(error)
    sys.exit(code)


def _command() -> Any:
    """The command line; arguments get back the help that typer 0.20 loses with click 8.5."""
    root: Any = typer.main.get_command(app)
    pending = [root]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
        for parameter in command.params:
            for info in getattr(hints.get(parameter.name), "__metadata__", ()):
                parameter.help = parameter.help or info.help
    return root


def _failure(error: Exception) -> int:
    """Says in one line what went wrong, and returns the exit code; a fault of the program is raised again."""
    usage: Any = error  # typer's errors about arguments are those of whichever click it brings
    if hasattr(usage, "format_message"):
        context = getattr(usage, "ctx", None)
        _complain(usage.format_message() + (f" (see `{context.command_path} --help`)" if context else ""))
        return FAULTY
    if isinstance(error, ValueError):
        _complain(str(error))
        return FAULTY
    if isinstance(error, RuntimeError | OSError):
        _complain(str(error), "failed")
        return FAILED
    raise error


def _complain(text: str, kind: str = "error") -> None:
    _say(f"[red]{kind}:[/] {escape(' '.join(text.split()))}")


def _say(markup: str) -> None:
    """One message on standard error, lines as they are."""
    console.print(markup, soft_wrap=True, highlight=False)


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
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or the name of a packaged one (`confed list recipes`).")
    ] = "fedvqa_scenes",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value with a TOML value, e.g. algorithm.lam=0.5")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; must not exist. By default under runs/.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (the recipe's by default).")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds to run, counted from the first.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; 0 = one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Run a recipe; without arguments, the built-in benchmark.

    Several methods or seeds make a study folder with one run folder each.

    Ctrl-C stops; `confed resume FOLDER` goes on exactly there.
    """
    from confed import study
    from confed.experiment import run as run_one
    from confed.progress import Display
    from confed.recipe import load_recipe

    overrides = list(overrides or [])
    if "=" in recipe:  # `confed run algorithm.lam=0.5` means the default recipe
        overrides.insert(0, recipe)
        recipe = "fedvqa_scenes"
    overrides += [f"run.{key}={value}" for key, value in (("seed", seed), ("workers", workers)) if value is not None]
    loaded = load_recipe(recipe, overrides)
    folder = out or study.free_folder(loaded.name)
    with _interruptible(folder), Display(console, folder, quiet=as_json) as watch:
        if loaded.methods or seeds != 1:
            study.create_study(loaded, folder, seeds)
            summaries = study.run_study(folder, watch)
        else:
            job = study.Job(loaded.sections["algorithm"]["name"], loaded.run.seed, ".")
            summaries = [run_one(loaded, folder, watch=watch(0, 1, job))]
    _show(folder, summaries, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run or study folder.")],
    as_json: Json = False,
) -> None:
    """Continue an interrupted run or study exactly where it stopped."""
    from confed import study
    from confed.progress import Display

    with _interruptible(folder), Display(console, folder, quiet=as_json) as watch:
        summaries = study.resume(folder, watch)
    _show(folder, summaries, as_json)


@app.command(name="list")
def list_things(
    kind: Annotated[str, typer.Argument(help="algorithms, models, tasks, datasets, recipes or runs")] = "algorithms",
    contract: Annotated[bool, typer.Option("--contract", help="Algorithms: which checks apply, and why not.")] = False,
    as_json: Json = False,
) -> None:
    """List the methods, models, tasks, datasets and recipes there are, and the runs under ./runs."""
    from confed.catalogue import listing

    rows = listing(kind, contract=contract)
    if as_json:
        _print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    Console().print(table if rows else f"no {kind} found")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run or study folder, finished or not.")],
    as_json: Json = False,
) -> None:
    """Write report.html again and show the table."""
    from confed.results.folder import run_folders

    found = [f / "summary.json" for f in run_folders(folder)]
    _show(folder, [json.loads(f.read_text(encoding="utf-8")) for f in found if f.is_file()], as_json)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run or study folders.")],
    reference: Annotated[str, typer.Option(help="The method that the others are compared with.")] = "fedavg",
    out: Annotated[Path | None, typer.Option(help="Folder for compare.md, .csv and .tex.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds and over examples, with paired tests."""
    from dataclasses import asdict

    from confed.results.compare import compare as compare_folders

    comparison = compare_folders(folders, reference)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        texts = {"md": comparison.markdown(), "csv": comparison.csv(), "tex": comparison.latex()}
        for ending, text in texts.items():
            (out / f"compare.{ending}").write_text(text, encoding="utf-8")
        console.print(escape(f"written: {out}/compare.md, compare.csv, compare.tex"), soft_wrap=True, highlight=False)
    if as_json:
        _print_json(_plain(asdict(comparison)))
    else:
        _print_table(comparison.rich())


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(help="A finished run, or a study: its main method's first seed.")],
    image: Annotated[Path, typer.Option(help="A picture, of any size and format.")],
    question: Annotated[str, typer.Option(help="A question about it.")],
    client: Annotated[str | None, typer.Option(help="Use this client's own model; else the global one.")] = None,
    top: Annotated[int, typer.Option(help="How many answers to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Ask a trained model about a picture."""
    from confed.inference import predict as ask

    folder = _run_of(folder)
    answers = ask(folder, image, question, client, top)
    if as_json:
        _print_json(answers)
        return
    for answer in answers["answers"]:
        print(f"{answer['probability']:6.1%}  {answer['answer']}")
    if answers["unknown_words"]:
        words = escape(", ".join(answers["unknown_words"]))
        _say(f"[yellow]words the model does not know:[/] {words}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A finished run, or a study: its main method's first seed.")],
    target: Annotated[Path, typer.Argument(help="Where to write; must not exist.")],
    as_json: Json = False,
) -> None:
    """Write the global and every personal model in the Hugging Face layout."""
    from confed.inference import export as write

    folder = _run_of(folder)
    written = write(folder, target)
    if as_json:
        _print_json(written)
        return
    for name, path in written.items():
        print(f"{name}: {path}")


def _run_of(folder: Path) -> Path:
    from confed.inference import run_of

    run = run_of(folder)
    if run != folder:
        _say(f"this is a study; asking {escape(str(run))}")
    return run


@data_app.command()
def describe(
    name: Annotated[str, typer.Argument(help="A dataset's name (`confed list datasets`).")] = "scenes",
    options: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. setting=A")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a PNG with sample pictures here.")] = None,
    as_json: Json = False,
) -> None:
    """Counts, answers, sources and floors of a dataset."""
    from confed.catalogue import describe as describe_data

    description = describe_data(name, options or [], out)
    if as_json:
        _print_json(description)
        return
    from rich.table import Table

    table = Table("place", "role", "questions", "pictures", "answers", "most frequent", box=None, pad_edge=False)
    for row in description["rows"]:
        table.add_row(*(escape(str(value)) for value in row.values()))
    shown = Console(highlight=False)
    shown.print(f"[bold]{escape(name)}[/]: {description['answers']} answers, {description['words']} words")
    shown.print(table)
    for key, value in description["facts"].items():
        shown.print(f"{escape(key)}: {escape(value)}")
    if out is not None:
        shown.print(f"written: {escape(str(out))}", soft_wrap=True)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, threads, memory, GPUs, and what is missing and how to get it."""
    from confed.catalogue import diagnose

    findings = diagnose()
    if as_json:
        _print_json(findings)
        return
    shown = Console(highlight=False)
    for section, entries in findings.items():
        shown.print(f"[bold]{section}[/]")
        for key, value in entries.items():
            shown.print(f"  {escape(key)}: {escape(value)}", soft_wrap=True)


@app.command()
def pretrain(
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    questions: Annotated[int | None, typer.Option(help="Public questions.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over them.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.")] = None,
    as_json: Json = False,
) -> None:
    """Make the mini backbone's weights again, from nothing; the same call continues after an interruption."""
    from confed.pretrain import pretrain as make

    given = {"questions": questions, "epochs": epochs, "seed": seed}
    accuracy = make(out, progress=not as_json, **{key: value for key, value in given.items() if value is not None})
    if as_json:
        _print_json({"file": str(out), "accuracy": accuracy})


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Says how to go on after Ctrl-C and after a full disk."""
    import errno

    from confed.federation.checkpoint import CorruptCheckpoint
    from confed.results.folder import is_run, is_study

    try:
        yield
    except KeyboardInterrupt:
        if is_run(folder) or is_study(folder):
            _say(
                "[yellow]stopped;[/] everything up to the last finished round is saved. Go on with:\n"
                f"  confed resume {escape(str(folder))}"
            )
        else:
            _say("[yellow]stopped[/] before anything was saved")
        raise typer.Exit(INTERRUPTED) from None
    except CorruptCheckpoint as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RuntimeError(
            f"no space left on the device while writing to {folder}. The last checkpoint is whole; make room "
            f"and go on with: confed resume {folder}"
        ) from error


def _plain(value: Any) -> Any:
    """A value that strict JSON can hold: keys are texts, what is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_table(table: "Table") -> None:
    """Prints figures in full: a terminal that is too narrow breaks lines rather than losing digits."""
    from rich.measure import Measurement

    shown = Console()
    needed = Measurement.get(shown, shown.options.update(max_width=MOST_COLUMNS), table).maximum
    Console(width=max(shown.width, needed)).print(table)


def _show(folder: Path, summaries: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    from confed.results.report import write_report
    from confed.results.tables import study_table

    page = write_report(folder)
    if as_json:
        _print_json({"folder": str(folder), "report": str(page), "runs": summaries})
        return
    if summaries:
        _print_table(study_table(summaries))
    Console().print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
