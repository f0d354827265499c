"""Application with all verbs, its entry point, and output to the terminal."""

import json
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
import typer.main
from rich.console import Console
from rich.markup import escape
from typer.core import TyperOption

from confed.data.preparation import shown
from confed.federation.file_names import path_of
from confed.registry import allow_code, allowing_code, grant
from confed.system.events import Caution, Event, Note, Progress, ignore
from confed.system.packages import for_this_installation
from confed.system.plain_text import visible

_QUIET: list[bool] = []  # whether the command was given --quiet
_JSON: list[bool] = []  # whether it was given --json
_ALLOWED: list[str] = []  # what the command was given with --allow-code


def shared_options() -> list[Any]:
    """The options ``--allow-code``, ``--grant`` and ``--quiet`` of every verb, and ``--json`` of most."""

    def allow(context: Any, option: Any, modules: Sequence[str]) -> None:
        _ALLOWED[:] = modules
        allow_code(*modules)

    def permit(context: Any, option: Any, kinds: Sequence[str]) -> None:
        grant(*kinds)

    def silence(context: Any, option: Any, wanted: bool) -> None:
        _QUIET[:] = [wanted]

    def for_machines(context: Any, option: Any, wanted: bool) -> None:
        _JSON[:] = [wanted]

    common: dict[str, Any] = {"expose_value": False, "hidden": True}
    several: dict[str, Any] = {**common, "multiple": True, "is_eager": True}
    return [
        TyperOption(param_decls=["--allow-code"], metavar="MODULE", callback=allow, **several),
        TyperOption(param_decls=["--grant"], metavar="network|disk", callback=permit, **several),
        TyperOption(param_decls=["--quiet", "-q"], is_flag=True, callback=silence, **common),
        TyperOption(
            param_decls=["--json"], is_flag=True, callback=for_machines, expose_value=False,
            help="Print JSON, and nothing else, to standard output.",
        ),
    ]  # fmt: skip


def is_quiet() -> bool:
    """Whether the command prints no progress."""
    return any(_QUIET)


def is_json() -> bool:
    """Whether the command prints its result as JSON (:func:`answer`) and not for people."""
    return any(_JSON)


def allowed_modules() -> tuple[str, ...]:
    """Modules that the command was given with ``--allow-code``, for a command that goes on with its work."""
    return tuple(_ALLOWED)


if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from confed.api.progress import Display
    from confed.recipes.recipe import Recipe
    from confed.report.tables.table import Table as ReportTable
    from confed.studies.runner import Outcome


FAULTY, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
"""Exit codes: bad input; something went wrong on the way; stopped by Ctrl-C; asked to end (SIGTERM)."""

_EXAMPLES = """Every command takes -q or --quiet (no progress), --allow-code MODULE (whose code recipes may run) and
--grant network|disk (to recipes from elsewhere).

Exit codes: 0 done, 1 failed on the way, 2 bad input, 130 Ctrl-C, 143 SIGTERM."""

RENAMED = {
    "sweep": "confed compare RECIPE --over KEY=VALUES",
    "compare --recipe": "confed compare RECIPE [KEY=VALUE]...",
    "gates": "confed compare RECIPE --gates, or of finished studies: confed compare STUDY LONGER --gates",
    "cell": "confed resume STUDY --cell NUMBER",
    "tell": "confed evaluate RUN --known SHARES",
    "pretrain": "confed weights pretrain",
    "convert": "confed weights convert",
    "cache": "confed data cache",
}
"""Earlier command -> what does the same now."""

KIND_OF = {"algorithm": "method", "model": "model", "data": "dataset", "task": "task"}
"""Section of a recipe -> kind of what it names."""

MOST_COLUMNS = 250  # width up to which a table of figures is printed in full
app = typer.Typer(
    name="confed",
    help="Federated vision-language learning: a global model, and personal ones.",
    epilog=_EXAMPLES,
    rich_markup_mode=None,  # plain help takes half the lines
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

console = Console(stderr=True)


def option(help: str, *names: str, **more: Any) -> Any:
    """An option of a command, with its help."""
    return typer.Option(*names, help=help, **more)


def argument(help: str, **more: Any) -> Any:
    """An argument of a command, with its help."""
    return typer.Argument(help=help, **more)


WITHOUT_JSON = (
    "client", "sign", "key", "ca", "add", "revoke", "quarantine", "renew", "erase", "retain", "pass", "consent",
)  # fmt: skip
"""Commands without ``--json``: they print no result but sentences."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line on standard error, warnings a line each; ends with a SystemExit."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    with _terminable() as signals:
        code = _code(given)
    sys.exit(TERMINATED if code == INTERRUPTED and signals else code)


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Ctrl-C acknowledged at once, and termination signals of batch systems and service managers handled like it."""
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def acknowledge(number: int, frame: FrameType | None) -> None:
        # Written at once and past any display: what is under way may take a while to end.
        os.write(2, b"\nstopping at the end of what is under way; Ctrl-C again stops at once\n")
        signal.default_int_handler(number, frame)

    handlers: dict[int, Callable[[int, FrameType | None], None]]
    handlers = {signal.SIGTERM: interrupt, signal.SIGINT: acknowledge}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a command in the background
        del handlers[signal.SIGINT]
    with handling(handlers):
        yield signals


@contextmanager
def handling(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Signals as these functions handle them within the ``with`` block."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code(given: Sequence[str]) -> int:
    words = {word.partition("=")[0] for word in given}
    for earlier, now in RENAMED.items():
        verb, *options = earlier.split()
        if given[:1] == [verb] and words.issuperset(options):
            complain(f"confed {earlier} is now: {now}")
            return FAULTY
    try:
        with _spoken_warnings(), shown(_step), allowing_code():
            return command_line()(args=given or ["--help"], prog_name="confed", standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):
        say("[yellow]stopped[/]")
        return INTERRUPTED
    except Exception as error:
        return _failure(error)
    finally:
        _JSON.clear()


@contextmanager
def _spoken_warnings() -> Iterator[None]:
    """Warnings as single lines without the place in the program, each text once, within the ``with`` block."""
    spoken: set[str] = set()

    def speak(message: Warning | str, *place: object) -> None:
        del place  # category, file, line
        text = " ".join(str(message).split())
        if text not in spoken:
            spoken.add(text)
            say(f"[yellow]warning:[/] {escape(text)}")

    with warnings.catch_warnings():
        warnings.showwarning = speak
        yield


@contextmanager
def _step(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A step of a dataset's preparation: a bar on a terminal, otherwise a line."""
    from rich.errors import LiveError
    from rich.progress import Progress as Bars

    if is_quiet():
        yield lambda done: None
        return
    bars = Bars(console=console, transient=True)
    task = bars.add_task(escape(what), total=total)
    live = console.is_terminal
    if live:
        try:
            bars.start()
        except LiveError:  # rich 14.0 shows one live thing at a time, and a server's page is one
            live = False
    if not live:
        say(f"{escape(what)}: {total}")
    try:
        yield lambda done: bars.update(task, completed=done)
    finally:
        if live:
            bars.stop()


def command_line() -> Any:
    """The command line, whose help is as short as it can be: options of every command stand in that of the root."""
    root: Any = typer.main.get_command(app)
    shared = shared_options()
    for parameter in root.params:
        parameter.hidden = parameter.name == "show_completion"
    pending = [root]
    while pending:
        command = pending.pop()
        groups = getattr(command, "commands", {}).values()
        pending += groups
        hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
        for parameter in command.params:  # typer 0.20 loses the help of arguments with click 8.5
            for info in getattr(hints.get(parameter.name), "__metadata__", ()):
                parameter.help = parameter.help or info.help
        if not groups:
            command.params += shared[: 3 if command.name in WITHOUT_JSON else 4]
            command.format_arguments = lambda context, formatter: None
            command.format_options = partial(_write_parameters, command)
    return root


def _write_parameters(command: Any, context: Any, formatter: Any) -> None:
    """Arguments and options of a command, those of every command apart."""
    rows: list[tuple[str, str]] = []
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            name, text = record
            rows.append((name, text.replace(r"\[", "[").replace("  [", " [").removesuffix(" [required]")))
    rows.append(("-q --grant --allow-code", "Of every command; see confed --help."))
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_dl(rows, col_max=24)


def _failure(error: Exception) -> int:
    """One-line message about an error; returns the exit code. A fault of the program is raised again."""
    usage: Any = error  # typer's errors about arguments are those of whichever click it brings
    if hasattr(usage, "format_message"):
        context = getattr(usage, "ctx", None)
        complain(_once(usage.format_message()) + (f" (see `{context.command_path} --help`)" if context else ""))
        return FAULTY
    if isinstance(error, ValueError):
        complain(str(error))
        return FAULTY
    if isinstance(error, RuntimeError | OSError):
        complain(str(error), "failed")
        return FAILED
    raise error


def _once(message: str) -> str:
    """A message without a hint that stands in it twice: both typer and its click add one."""
    sentences = re.split(r"(?<=[.?!]) ", message)
    return " ".join(dict.fromkeys(sentences))


def complain(text: str, kind: str = "error") -> None:
    """One line on standard error, headed by what kind of trouble it is."""
    say(f"[red]{kind}:[/] {escape(' '.join(for_this_installation(text).split()))}")


def say(markup: str) -> None:
    """One message on standard error, lines as they are."""
    console.print(visible(markup), soft_wrap=True, highlight=False)


def notes(of: str = "") -> Progress:
    """Progress callback that prints notes as lines on standard error."""

    def show(event: Event) -> None:
        if isinstance(event, Caution) or (isinstance(event, Note) and not is_quiet()):
            say(escape(f"{of}: {event.text}" if of else event.text))

    return show


def progress_notes() -> Progress:
    """The same; nothing with ``--json``."""
    return ignore if is_json() else notes()


def tell_asks(recipe: "Recipe", source: str) -> None:
    """One line on what a recipe of the user's own asks for beyond its folder."""
    from confed.runs.grants import asks_of

    if asks := asks_of(recipe, Path(source).parent):
        complain(f"the recipe asks for more than its folder: {'; '.join(map(str, asks))}", "note")


def print_json(value: Any) -> None:
    print(visible(json.dumps(plain(value), indent=1, ensure_ascii=False)))


def answer(content: Any) -> None:
    """The result of a command for machines; what is printed for people beside it is not heard with ``--json``."""
    if is_json():
        print_json(content)


def for_people(**options: Any) -> Console:
    """Standard output, which is not heard with ``--json``."""
    return Console(quiet=is_json(), highlight=False, **options)


def remark(markup: str) -> None:
    """One message on standard error; none with ``--json``."""
    if not is_json():
        say(markup)


def tell(content: Any, text: str) -> None:
    """A result on standard output: as JSON, or in words."""
    answer(content)
    print_line(visible(escape(text)))


def _version(wanted: bool) -> None:
    if wanted:
        from confed.system.release import VERSION

        print(f"confed {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, option("Print the version and stop.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated vision-language learning: a global model, and personal ones."""
    del version


@contextmanager
def interruptible(folder: Path, again: str = "") -> Iterator[None]:
    """Advice after Ctrl-C and after a full disk: to go on with ``confed resume``, or as ``again`` says."""
    from confed.api.progress import interruptible as stopping

    resume = " ".join([f"confed resume {folder}", *(f"--allow-code {module}" for module in allowed_modules())])
    try:
        with stopping(folder, again or resume):
            yield
    except KeyboardInterrupt as stop:
        say(f"[yellow]{escape(str(stop))}[/]")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def showing(folder: Path, rounds: bool = False) -> "Iterator[Display]":
    """Display of the progress of work in a folder, with advice after an interruption."""
    from confed.api.progress import Display

    with interruptible(folder), Display(console, quiet=is_json() or is_quiet(), rounds=rounds) as display:
        yield display


def plain(value: Any) -> Any:
    """A value that strict JSON can hold: keys are texts, what is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table_of(*columns: str, right: Collection[str] = (), **style: Any) -> "Table":
    """An empty table without lines; ``right`` are its columns of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, **style)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def print_table(table: "RenderableType") -> None:
    """Prints figures in full: a terminal that is too narrow breaks lines rather than losing digits."""
    from rich.measure import Measurement

    shown = Console()
    needed = Measurement.get(shown, shown.options.update(max_width=MOST_COLUMNS), table).maximum
    for_people(width=max(shown.width, needed)).print(table)


def print_tables(tables: "Iterable[ReportTable]") -> None:
    """Prints tables of a report."""
    from confed.report.tables.table import to_rich

    for table in tables:
        print_table(to_rich(table))


def print_line(markup: str) -> None:
    """One line of a result on standard output, however long."""
    for_people().print(markup, soft_wrap=True)


def show(folder: Path, summaries: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Writes a folder's report and prints its results: as a table, or as JSON, with ``more``."""
    from confed.api.run import write_folder_report
    from confed.report.tables.methods import study_table

    page = write_folder_report(folder)
    answer({"folder": str(folder), "report": str(page), "runs": summaries, **more})
    if summaries:
        print_table(study_table(summaries))
    print_line(f"report: {escape(str(page))}")


def default_workers(recipe: "Recipe") -> int:
    """Processes for cells: one per core, or one where they would share a GPU."""
    from confed.engines.workers import free_cores

    return free_cores() if recipe.run.device == "cpu" else 1


def grouped(errors: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> its cells; all seeds of a refused method give one line."""
    groups: dict[str, list[str]] = {}
    for cell, text in errors.items():
        groups.setdefault(text, []).append(cell)
    return groups


def tell_errors(outcome: "Outcome") -> None:
    """Why runs are not there, and where more of it is written."""
    shown = for_people()
    for text, cells in grouped(outcome.errors).items():
        shown.print(f"[red]without[/] {escape(', '.join(cells))}: {escape(text)}")
    for cell in sorted(outcome.failed):
        shown.print(escape(f"what went wrong in {cell}: {cell_place(outcome.folder, cell)}/error.txt"), soft_wrap=True)


def cell_place(folder: Path, name: str) -> Path:
    """The folder of a cell "row/seed-n"."""
    row, _, seed = name.rpartition("/")
    return path_of(folder, row) / seed
