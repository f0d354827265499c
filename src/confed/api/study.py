"""A study as an object, and the function that makes one of a recipe: methods and seeds on the same data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.api.progress import Shown, in_this_session, showing
from confed.api.run import Report, Run, Trackable, check_reached, learning_curves, recipe_of, write_folder_report
from confed.engines.workers import free_cores
from confed.federation.algorithm import Algorithm
from confed.recipes.objects import section_of
from confed.recipes.recipe import Recipe
from confed.results.folder import kind_of
from confed.results.runs import StudyResults as Record
from confed.results.runs import load
from confed.results.summary import check_headline
from confed.studies.runner import Outcome, run_study
from confed.studies.study import free_folder, open_study, read_study, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from confed.report.comparison import Comparison

# Tables, figures and report of a study, written into its folder -----------------------------------------------


@dataclass(frozen=True)
class StudyFiles:
    """What :func:`write_study_files` has written."""

    comparison: "Comparison"
    tables: Sequence[str]  # names, each as .md, .csv and .tex
    figures: Sequence[Path]
    page: Path  # the report
    relative: str  # the method whose relative improvement is among the tables; empty for none
    absent: Mapping[str, Sequence[str]]  # asked for as "reference" or "relative", and without a finished run


def write_study_files(
    folder: Path, references: Sequence[str] = (), margin: float = 0.01, relative: str = ""
) -> StudyFiles:
    """Tables, figures and report of a study's finished runs; without any a ValueError.

    The methods are judged against ``references`` (none for the usual ones), with a ``margin`` of equality as a
    fraction, and with the improvement of ``relative`` over each of them, client by client ("" for none).
    """
    from confed.report.comparison import compare
    from confed.report.report import save_figures, write_report, write_tables
    from confed.report.tables.table import write_files
    from confed.results.runs import load

    complete_methods = {run.method for run in load(folder).runs if run.complete}
    present = [name for name in references if name in complete_methods] or None
    comparison = compare([folder], present, margin)
    tables = [path.stem for path in write_tables(folder, present, margin) if path.suffix == ".md"]
    figures = save_figures(folder)
    baseline = relative if relative in comparison.clients_of else ""
    if baseline:
        write_files(folder, comparison.relative_files(baseline))
        tables.append("relative")
    absent = {
        "reference": [name for name in references if name not in complete_methods],
        "relative": [relative] if relative and not baseline else [],
    }
    return StudyFiles(comparison, tables, figures, write_report(folder), baseline, absent)


# A study as an object, and the function that makes one of a recipe --------------------------------------------

Method = str | Algorithm | type[Algorithm]
Methods = str | Sequence[Method] | Mapping[str, Method]
"""Names ("all" or "a,b,c"), or names and objects; a mapping names the rows."""


_METHODS = "confed.study takes methods, by name or as objects, such as methods=['fedavg', FedProx(mu=0.1)]"
_OF_A_RUN: Mapping[str, str] = dict.fromkeys(("method", "algorithm", "algorithm.name"), _METHODS)
"""Arguments of :func:`confed.run` that :func:`study` lacks -> what to give instead."""


class Study(Trackable):
    """A study folder, finished or not; made by :func:`study` and :func:`load_study`.

    Args:
        folder: the study folder.

    Attributes:
        folder: the study folder.

    Raises:
        ValueError: the folder is not a study's.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        kind = kind_of(self.folder)
        if kind != "study":
            what = f"that of a {kind}: use confed.load_run" if kind == "run" else "no study folder"
            raise ValueError(f"{self.folder} is {what}")

    def __repr__(self) -> str:
        record = self._record
        done = sum(run.complete for run in record.runs)
        methods = ", ".join(record.rows.values())
        return f"Study of {methods}, {done} finished runs: {self.folder}"

    def __iter__(self) -> Iterator[Run]:
        """The runs, methods in the order of tables and seeds in order within a method."""
        return (Run(run.folder, run.method, run.label) for run in self._record.runs)

    def __len__(self) -> int:
        return len(self._record.runs)

    def __getitem__(self, key: tuple[str, int]) -> Run:
        """The run of a method and a seed.

        Raises:
            ValueError: there is none.

        Example:
            >>> confed.load_study("runs/study")["fedavg", 0].method
            'fedavg'
        """
        runs = {(run.method, run.seed): run for run in self}
        if key not in runs:
            raise ValueError(f"{self.folder} has no run {key!r}; there are {', '.join(map(str, runs))}")
        return runs[key]

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that have runs, in the order of tables."""
        return self._record.methods

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, ascending."""
        return self._record.seeds

    @property
    def errors(self) -> Mapping[str, str]:
        """Run, as "method/seed-n" -> why it is not there."""
        return self._record.failures

    @property
    def table(self) -> "DataFrame":
        """A row per method, a column per result: means over seeds on test data, in percent, and costs.

        Example:
            >>> list(confed.load_study("runs/study").table.index)
            ['Local only', 'FedAvg']
        """
        from confed.report.tables.methods import table_of

        return table_of(self._record).frame()

    def compare(
        self, reference: str | Sequence[str] | None = None, margin: float = 1.0, *, headline: str = ""
    ) -> "Comparison":
        """Paired differences to reference methods with tests over seeds and over examples.

        A notebook shows its tables; ``.frame()`` has the first as a data frame, ``.differences`` every number.

        Args:
            reference: the method or methods that the others are compared with; by default FedAvg and FedAvg + FT as far
                as they are there.
            margin: points within which methods count as equal.
            headline: the model in ``deployed``: "personal" or "global_seen"; by default as each method's kind asks.

        Raises:
            ValueError: there is no such method or headline, or the margin is not between 0 and 100 points.

        Example:
            >>> comparison = confed.load_study("runs/study").compare(reference="local")
            >>> comparison.references, sorted({d.method for d in comparison.differences})
            (('local',), ['fedavg'])
        """
        from confed.report.comparison import compare

        check_headline(headline, "headline")
        if not 0 < margin < 100:
            raise ValueError(f"margin must lie between 0 and 100 points, got {margin:g}")
        return compare([self.folder], reference, margin / 100, headline)

    def plot(self) -> "Figure":
        """Learning curves by round as a matplotlib figure, a line per method: the mean over seeds on validation data.

        Bands reach from the lowest to the highest seed, with up to six methods. Fewer than two evaluated rounds are a
        ValueError.

        Example:
            >>> figure = confed.load_study("runs/study").plot()
            >>> figure.axes[0].get_lines()[0].get_label()
            'FedAvg'
        """
        return learning_curves(self._record)

    def report(self) -> Report:
        """The study's page, written again; a notebook shows it.

        Example:
            >>> confed.load_study("runs/study").report().path.name
            'report.html'
        """
        return Report(write_folder_report(self.folder))

    def resume(self, *, workers: int | None = None, progress: Shown = True) -> "Study":
        """The same study with its missing runs.

        Args:
            workers: runs at a time, one process each; by default one per core, or one on a GPU.
            progress: show it, or a callback that is called with every event.

        Example:
            >>> len(confed.load_study("runs/study").resume(progress=False))
            4
        """
        _carry_out(self.folder, workers, progress)
        return self

    @property
    def _record(self) -> Record:
        """What the folder's files say now."""
        return load(self.folder)


def study(
    recipe: str | Path | Recipe = "fedvqa_scenes",
    overrides: Mapping[str, Any] | None = None,
    *,
    methods: Methods | None = None,
    seeds: int | Sequence[int] = 1,
    folder: Path | str | None = None,
    workers: int | None = None,
    progress: Shown = True,
    **settings: Any,
) -> Study:
    """Execution of methods and seeds of a recipe on the same data.

    A run that goes wrong does not end the others; :attr:`Study.errors` says why it is not there. Ctrl-C, or the button
    of a notebook, stops with a KeyboardInterrupt once the runs under way are saved; the same call with the study's
    folder goes on, as :meth:`Study.resume` does.

    Args:
        recipe: as for :func:`confed.run`.
        overrides: as for :func:`confed.run`.
        methods: names of methods or rows of the recipe, or "all" for its whole table; objects; or a mapping of rows'
            names to either. By default the recipe's methods.
        seeds: how many, counted from the recipe's; or which.
        folder: of the study. One that holds runs of this recipe gets those that are missing; by default a new one under
            ``runs/``.
        workers: runs at a time, one process each; by default one per core, or one on a GPU.
        progress: show it, or a callback that is called with every event.
        settings: as for :func:`confed.run`, but for ``algorithm``, which ``methods`` names.

    An unknown recipe, key or method, a setting that no row has, faulty data, a folder that holds something else, and no
    run that could be made are a ValueError.

    Example:
        >>> small = {"data.train": 8, "data.validation": 4, "data.test": 4, "model.name": "vilt_tiny"}
        >>> confed.study("fedvqa_scenes", small, methods=["local", "fedavg"], seeds=2, rounds=1, folder="runs/study",
        ...              workers=1, progress=False)
        Study of Local only, FedAvg, 4 finished runs: runs/study
    """
    chosen = _with_rows(recipe_of(recipe, overrides, settings, _OF_A_RUN), methods)
    instead = "give the row as an object with its own keywords, such as methods={'weak': FedProx(mu=0.1)}"
    check_reached(overrides, settings, {row: chosen.method(row) for row in chosen.methods}, instead)
    numbers = _seeds(seeds, chosen.run.seed)
    place = free_folder(chosen.name) if folder is None else Path(folder)
    open_study(chosen, place, numbers)
    _carry_out(place, workers, progress)
    return Study(place)


def load_study(folder: Path | str) -> Study:
    """A study that is there, finished or not, of this version or an earlier one, or of the command line.

    Args:
        folder: the study folder; any other is a ValueError.

    Example:
        >>> confed.load_study("runs/study").seeds
        (0, 1)
    """
    return Study(folder)


def _seeds(given: int | Sequence[int], first: int) -> list[int]:
    """Seeds that a call asks for, by their number or one by one."""
    try:
        numbers = (
            [index(seed) for seed in given] if isinstance(given, Iterable) else [*range(first, first + index(given))]
        )
    except TypeError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers) or isinstance(given, bool):
        raise ValueError(f"seeds must be a whole number of at least 1, or different whole numbers, got {given!r:.60}")
    return numbers


def _with_rows(recipe: Recipe, methods: Methods | None) -> Recipe:
    """The recipe with the methods that a call names as its rows."""
    if methods is None:
        return recipe.with_rows(recipe.methods or (recipe.sections["algorithm"]["name"],))
    if isinstance(methods, str):
        return recipe.with_rows(rows_of(recipe, methods))
    if not isinstance(methods, Iterable):
        raise ValueError(
            f"methods must be names, a list of names or objects, or a mapping of rows, got {methods!r:.60}"
        )
    named = list(methods.items()) if isinstance(methods, Mapping) else [(_row(method), method) for method in methods]
    rows = [row for row, _ in named]
    if twice := next((row for row in rows if rows.count(row) > 1), None):
        raise ValueError(f"two methods would be called {twice!r}: give a mapping of names to methods")
    row_overrides: dict[str, dict[str, Any]] = {}
    for row, method in named:
        given = section_of("algorithm", method)
        is_row = isinstance(method, str) and row == method
        row_overrides[row] = dict(recipe.overrides.get(row, {})) if is_row else given
    return recipe.with_rows(rows, {row: values for row, values in row_overrides.items() if values})


def _row(method: Method) -> str:
    """The name of a method's row in tables."""
    if isinstance(method, str):
        return method
    name = str(section_of("algorithm", method)["name"])
    return name.rpartition(":")[2]


def _carry_out(folder: Path, workers: int | None, progress: Shown) -> Outcome:
    """Execution of a study's missing runs, its tables, figures and report."""
    study = read_study(folder)
    with showing(folder, progress, "study") as shown:
        in_this_session(study.recipe, shown)
        if study.recipe.session_only:
            workers = 1  # other processes have not made its objects
        elif workers is None:  # each run of a study computes in one process, this one where alone
            workers = free_cores() if study.recipe.run.device == "cpu" else 1
        outcome = run_study(folder, shown, workers)
    if not outcome.summaries:
        raise ValueError(f"no run could be made: {next(iter(outcome.errors.values()), 'the study has none')}")
    write_study_files(folder)
    return outcome
