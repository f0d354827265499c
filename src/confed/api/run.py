"""A run as an object, and the function that makes one of a recipe."""

import tomllib
import webbrowser
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.api.progress import Shown, in_this_session, showing, threads_kept
from confed.recipes.objects import overrides_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.recipes.schema import plain
from confed.results.folder import RunFolder, kind_of
from confed.results.history import curve, loss
from confed.results.metric import metric_of
from confed.results.records import further_of, record_of
from confed.results.runs import RunResults as Record
from confed.results.runs import StudyResults, load
from confed.results.settings import flat
from confed.results.stored import TRAINING
from confed.results.summary import number
from confed.results.views import EVALUATED, TESTED, View
from confed.runs.same_recipe import differing_settings
from confed.studies.runner import run_single
from confed.studies.study import free_folder
from confed.system.folder_lock import without_lock
from confed.system.packages import pandas

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import nn

    from confed.data.intake.opening import PictureSource
    from confed.federation.protocols import Batch
    from confed.inference.finished_run import FinishedRun, Role, TrainedModel
    from confed.tracking.follow import Tracked


RECORD_COLUMNS = ("run", "seed", "round", "view", "place", "subset", "example", "measure", "value", "weight")


# A report page that shows itself in a notebook ----------------------------------------------------------------


class Report:
    """A report page; a notebook shows it, and other functions take it as the path of its file.

    Args:
        path: of the page.
        height: pixels of the frame in a notebook.

    Attributes:
        path: of the page, one file that needs no network.
    """

    def __init__(self, path: Path, height: int = 600) -> None:
        self.path, self.height = path, height

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """A frame with the whole page in it: a notebook's browser need not reach the file."""
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:{self.height}px;border:1px solid #8884"></iframe>'

    def open(self) -> None:
        """The page in a browser."""
        webbrowser.open(self.path.resolve().as_uri())


def write_folder_report(folder: Path) -> Path:
    """The report of a run's or study's folder, written again; returns its file.

    A folder that is neither is a ValueError.
    """
    from confed.report.report import write_report
    from confed.report.tables import modalities

    modalities.write(folder)
    return write_report(folder)


def learning_curves(study: StudyResults) -> "Figure":
    """The curves of a report's page by round; a ValueError where fewer than two rounds are there to be drawn."""
    from confed.report.figures.results import curves

    drawing = curves(study)
    if drawing is None:
        raise ValueError(f"{study.folder}: curves need at least two evaluated rounds, found fewer")
    return drawing.figure()


# Tracking of runs and studies from Python, as confed track does it --------------------------------------------


class Trackable:
    """A folder with runs that a tracking tool can be sent.

    Attributes:
        folder: the folder.
    """

    folder: Path

    def track(
        self,
        to: str = "trackio",
        *,
        at: str = "",
        project: str = "",
        group: str = "",
        name: str = "",
        files: bool = True,
        follow: bool = False,
        every: float = 2.0,
    ) -> "list[Tracked]":
        """Parameters, metrics by round and files sent to a tracking tool; what it has already is not sent again.

        Args:
            to: "trackio", "tensorboard", "mlflow" or "wandb".
            at: where the tool keeps runs; its own choice by default.
            project: name of the project; the recipe's by default.
            group: name of the group; the study's folder by default.
            name: of a run on its own; its folder's by default.
            files: whether recipe, summary and report go along. Reports hold sample pictures.
            follow: whether to go on until no process is at work in the folder.
            every: seconds between looks at the files.

        Returns:
            What was sent of each run, with ``state``, ``round``, ``values`` (that were new) and ``where``.

        An unknown or missing tool is a ValueError.

        Example:
            >>> sent = confed.load_run("runs/first").track("tensorboard", at="log")
            >>> [(one.state, one.round, one.where) for one in sent]
            [('finished', 2, 'log')]
        """
        from confed.tracking.follow import track
        from confed.tracking.records import Names

        names = Names(project, group, name)
        return [*track(self.folder, to, at=at, names=names, files=files, follow=follow, every=every)]


# Recipe that a call of the Python interface asks for ----------------------------------------------------------


def recipe_of(
    recipe: str | Path | Recipe,
    overrides: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    elsewhere: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe that a call asks for; ``elsewhere`` is what is no setting of it -> what to give instead."""
    if overrides is not None and not (
        isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides)
    ):
        raise ValueError(
            f"overrides must be a mapping of section.key to values, such as {{'run.rounds': 2}}, got {overrides!r:.60}"
        )
    if name := next((name for name in elsewhere or {} if name in {**settings, **(overrides or {})}), None):
        raise ValueError(f"{name} is no setting here: {(elsewhere or {})[name]}")
    twice = sorted(set(overrides or {}) & set(settings))
    if twice:
        raise ValueError(f"{twice[0]} is given twice, as an override and as a keyword")
    changes = overrides_of({**(overrides or {}), **settings})
    if isinstance(recipe, Recipe):
        return recipe.changed(changes) if changes else recipe
    if not isinstance(recipe, str | Path):
        raise ValueError(f"recipe must be a name, a path or a confed.Recipe, got {type(recipe).__name__}")
    return load_recipe(recipe, changes)


def check_reached(
    overrides: Mapping[str, Any] | None, settings: Mapping[str, Any], rows: Mapping[str, Recipe], instead: str
) -> None:
    """Check that what a call sets of ``[algorithm]`` is what a row is trained with, and was not dropped on the way."""
    given = {key: value for key, value in overrides_of({**(overrides or {}), **settings}).items() if value is not None}
    wanted = {key: value for key, value in flat(_nested(given)).items() if key.startswith("algorithm.")}
    row_settings = [flat({"algorithm": plain(row.sections["algorithm"])}) for row in rows.values()]
    for key, value in wanted.items():
        if not any(key in row and _same(value, row[key]) for row in row_settings):
            raise ValueError(f"{key}={value!r} has no effect on {', '.join(rows)}: {instead}")


def _same(given: Any, of_row: Any) -> bool:
    """Whether a row has a value that was given, which may be a text of TOML."""
    if given == of_row or not isinstance(given, str):
        return bool(given == of_row)
    try:
        return bool(tomllib.loads(f"value = {given}")["value"] == of_row)
    except tomllib.TOMLDecodeError:
        return False


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sections within sections, of keys with dots."""
    nested: dict[str, Any] = {}
    for key, value in given.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = plain(value)
    return nested


# Folder of a run that a call of the Python interface names ----------------------------------------------------


def folder_for(folder: Path, recipe: Recipe) -> Path:
    """A folder that is free, or that holds this run; any other is a ValueError."""
    if kind_of(folder) == "run":
        before = RunFolder(folder).begun if RunFolder(folder).begun.is_file() else RunFolder(folder).recipe
        if changed := differing_settings(load_recipe(before), recipe):
            keys = ", ".join(f"{key}={then}, not {now}" for key, (then, now) in changed.items())
            raise ValueError(f"{folder} holds a run with {keys}; give another folder, or none for a new one")
    elif kind_of(folder) == "study":
        raise ValueError(f"{folder} holds a study, which confed.load_study reads; give another folder")
    elif folder.exists() and (not folder.is_dir() or without_lock(folder)):
        raise ValueError(f"{folder} exists already and is no run folder; give another folder, or none for a new one")
    return folder


# A run as an object, and the function that makes one of a recipe ----------------------------------------------

_OF_A_STUDY: Mapping[str, str] = {
    "methods": "confed.run takes one, method='fedavg', and confed.study takes several, methods=['local', 'fedavg']",
    "seeds": "confed.run takes one, seed=1, and confed.study takes several, seeds=5",
}
"""Arguments of :func:`confed.study` that :func:`run` lacks -> what to give instead."""


class Run(Trackable):
    """A run folder, finished or not; made by :func:`run` and :func:`load_run`.

    Args:
        folder: the run folder.
        row: name of its row in a study; the method's by default.
        label: name of that row in tables.

    Attributes:
        folder: the run folder.

    Raises:
        ValueError: the folder is not a run's.
    """

    def __init__(self, folder: Path | str, row: str = "", label: str = "") -> None:
        self.folder, self._row, self._label = Path(folder), row, label
        kind = kind_of(self.folder)
        if kind not in ("run", "federation"):
            what = f"that of a {kind}: use confed.load_study" if kind == "study" else "no run folder (recipe.toml)"
            raise ValueError(f"{self.folder} is {what}")

    def __repr__(self) -> str:
        record = self._record
        state = "finished" if self.finished else f"unfinished, {self.rounds} rounds done"
        rounds = f"{record.summary.rounds} rounds, " if self.finished else ""
        return f"Run {self._label or record.label}, seed {record.seed}, {rounds}{state}: {self.folder}"

    # What it is -----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the run has its results."""
        return RunFolder(self.folder).summary.is_file()

    @property
    def rounds(self) -> int:
        """Number of rounds that are done."""
        return self._record.records.reached

    @property
    def method(self) -> str:
        """Name of the method as in the recipe, or of its row in a study."""
        return self._row or self._record.method

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self._record.seed

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self._record.summary.clients

    @property
    def recipe(self) -> Recipe:
        """The recipe, as the run's folder has it."""
        return load_recipe(RunFolder(self.folder).recipe)

    @property
    def summary(self) -> Mapping[str, Any]:
        """Content of ``summary.json``: all results and costs; an unfinished run is a ValueError."""
        from confed.inference.finished_run import finished_summary

        return finished_summary(self.folder).content

    # Results --------------------------------------------------------------------------------------------------

    @property
    def history(self) -> "DataFrame":
        """A row per round.

        ``loss`` is the training loss, mean over clients; ``personal``, ``global`` and ``unseen`` are the metric's means
        over clients or places on validation data; ``bytes_up`` and ``bytes_down`` what all clients sent and received;
        ``seconds`` the time of training. Of an unfinished run the rounds that are done.

        Example:
            >>> history = confed.load_run("runs/first").history
            >>> list(history.index), list(history.columns[:3])
            ([0, 1, 2], ['loss', 'personal', 'global'])
        """
        run = self._record
        columns: dict[str, dict[int, float]] = {"loss": dict(loss(run))}
        columns |= {view: dict(curve(run, view)) for view in EVALUATED}
        for key in ("bytes_up", "bytes_down"):
            sent = run.records.by_round(TRAINING, key)
            columns[key] = {int(of["round"]): sum(sent.get(of["round"], {}).values()) for of in run.records.rounds}
        columns["seconds"] = {
            int(line["round"]): value for line in run.timings if (value := number(line.get("seconds"))) is not None
        }
        frame = pandas().DataFrame({name: values for name, values in columns.items() if values})
        frame = frame.sort_index().rename_axis("round")
        return frame.astype({name: "Int64" for name in frame.columns if name.startswith("bytes")})

    @property
    def evaluations(self) -> "DataFrame":
        """A row per evaluated round, view, place and metric, on validation data.

        The columns are ``round``, ``view`` ("personal", "global" or "unseen"), ``place``, ``metric`` and ``value``.

        Example:
            >>> list(confed.load_run("runs/first").evaluations.columns)
            ['round', 'view', 'place', 'metric', 'value']
        """
        run = self._record
        rows: list[tuple[int, str, str, str, float]] = []
        for view in EVALUATED:
            for number_of, places in run.records.measured(view).items():
                for place, metrics in places.items():
                    rows += [(number_of, view, place, metric, value) for metric, value in metrics.items()]
        rows.sort(key=lambda row: row[0])
        return pandas().DataFrame(rows, columns=["round", "view", "place", "metric", "value"])

    @property
    def records(self) -> "DataFrame":
        """Everything that was measured, a row per number: by place on validation data, by example on test data.

        The columns are ``run``, ``seed``, ``round``, ``view`` ("personal", "global" or "unseen"), ``place``,
        ``subset`` ("validation" or "test"), ``example`` (a hash of its name; none for a mean of a place), ``measure``,
        ``value`` and ``weight``. Of an unfinished run the rounds that are done.

        Example:
            >>> records = confed.load_run("runs/first").records
            >>> tests = records[(records.subset == "test") & (records.view == "personal")]
            >>> results = confed.load_run("runs/first").results.personal.dropna()
            >>> bool((tests.groupby("place").value.mean() - results).abs().max() < 1e-6)
            True
        """
        run = self._record
        rows: list[tuple[Any, ...]] = []
        for round_of, view, place, metric, value in self.evaluations.itertuples(index=False):
            subset = "test" if view == "unseen" else "validation"
            rows.append((run.place, run.seed, round_of, view, place, subset, None, metric, value, 1.0))
        last = run.summary.rounds
        names_of = {view.mean: (view.evaluated, run.summary.metric) for view in TESTED}
        names_of |= {outcome: (one.view.evaluated, one.name) for outcome, one in further_of([run]).items()}
        for outcome, places in record_of(run).examples.items():
            if outcome not in names_of:
                continue
            view, measure = names_of[outcome]
            for place, examples in places.items():
                if examples.scores.ndim == 1:
                    names = [None] * len(examples.scores) if examples.names is None else examples.names.tolist()
                    for name, score in zip(names, examples.scores.tolist(), strict=True):
                        rows.append((run.place, run.seed, last, view, place, "test", name, measure, score, 1.0))
        frame = pandas().DataFrame(rows, columns=list(RECORD_COLUMNS))
        return frame.astype({"example": "Int64"})

    @property
    def results(self) -> "DataFrame":
        """A row per client and per unseen place: the metric of its personal and of the global model on test data.

        The columns are ``kind`` ("client" or "unseen"), ``personal``, ``global`` and the numbers of ``train`` and
        ``test`` examples; ``results.attrs["metric"]`` names the metric. An unfinished run is a ValueError.

        Example:
            >>> results = confed.load_run("runs/first").results
            >>> list(results.index), results.attrs["metric"]
            (['transport', 'sports', 'educational', 'natural', 'home', 'commercial'], 'accuracy')
        """
        _ = self.summary
        run = self._record
        summary = run.summary
        personal, seen, unseen = (summary.values(view) for view in (View.PERSONAL, View.SEEN, View.UNSEEN))
        examples = summary.examples
        rows = {
            place: {
                "kind": "unseen" if place in run.summary.scenes else "client",
                "personal": personal.get(place),
                "global": seen.get(place, unseen.get(place)),
                "train": examples.get(place, {}).get("train"),
                "test": examples.get(place, {}).get("test"),
            }
            for place in dict.fromkeys((*run.summary.clients, *personal, *seen, *run.summary.scenes))
        }
        for name, view in product(summary.measures, (View.PERSONAL, View.SEEN, View.UNSEEN)):
            for place, value in summary.measured(name, view).items():
                rows[place][f"{name} personal" if view is View.PERSONAL else f"{name} global"] = value
        frame = pandas().DataFrame.from_dict(rows, orient="index").rename_axis("place")
        if summary.without_personal:
            frame = frame.drop(columns="personal")
        if summary.without_global:
            frame = frame.drop(columns="global")
        frame.attrs["metric"] = metric_of([run])
        return frame.astype({"train": "Int64", "test": "Int64"})

    def plot(self) -> "Figure":
        """Learning curves by round as a matplotlib figure: personal and global models, and losses, on validation data.

        Of an unfinished run the rounds that are done; fewer than two are a ValueError.

        Example:
            >>> figure = confed.load_run("runs/first").plot()
            >>> figure.axes[0].get_title(loc="left")
            'personal models'
        """
        return learning_curves(load(self.folder))

    def report(self) -> Report:
        """The run's page, written again; a notebook shows it.

        Example:
            >>> confed.load_run("runs/first").report().path.name
            'report.html'
        """
        return Report(write_folder_report(self.folder))

    # Models ---------------------------------------------------------------------------------------------------

    def personal(self, client: str) -> "nn.Module":
        """A client's personal model in evaluation mode, a copy of its own.

        Args:
            client: the client's name; an unknown one, or a method without personal models, is a ValueError.

        Example:
            >>> run = confed.load_run("runs/first")
            >>> run.personal("sports")(run.batch("sports", count=3)).logits.shape[0]
            3
        """
        return self.model(client).model

    def global_model(self) -> "nn.Module":
        """The global model in evaluation mode, a copy of its own; a method without one is a ValueError.

        Example:
            >>> confed.load_run("runs/first").global_model().training
            False
        """
        return self.model().model

    def model(self, client: str | None = None, *, shared: bool = False) -> "TrainedModel":
        """A trained model with its tokenizer and its answers, a copy of its own.

        Args:
            client: whose personal model; None for the global one.
            shared: with a client: the global values of what is shared, with the client's own private tensors.

        Example:
            >>> trained = confed.load_run("runs/first").model("sports")
            >>> len(trained.answers), trained.image_size
            (44, 64)
        """
        self._finished.check(client, shared=shared)
        with threads_kept():
            self._finished.load()
        trained = self._finished.model(client, shared=shared)
        return replace(trained, model=deepcopy(trained.model).eval())

    def batch(self, place: str, split: "Role" = "test", count: int = 8) -> "Batch":
        """The first examples of a client or of an unseen place as tensors, as models of this run read them.

        Args:
            place: name of the client or place.
            split: "train", "validation" or "test".
            count: number of examples, at most.

        Example:
            >>> sorted(confed.load_run("runs/first").batch("home", count=2))[:2]
            ['image', 'index']
        """
        with threads_kept():
            self._finished.load()
        return self._finished.batch(place, split, count)

    def predict(
        self,
        image: "PictureSource | Sequence[PictureSource] | None" = None,
        question: str | Sequence[str] | None = None,
        client: str | None = None,
        *,
        top: int | None = None,
        shared: bool = False,
        image2: "PictureSource | None" = None,
        choices: Sequence[str] = (),
        text: str | None = None,
        known: Sequence[str] = (),
    ) -> dict[str, Any]:
        """What a trained model says about a picture or a text.

        Args:
            image: a file, an array uint8 (H, W, 3) or a PIL picture of any size; several for a conversation.
            question: the question; several for a conversation.
            client: whose personal model answers; None for the global one.
            top: how many answers (3 by default) or labels (all).
            shared: with a client: the global values of what is shared, with the client's own private tensors.
            image2: the second picture, where the task has two.
            choices: the texts to choose from, where the task is choosing.
            text: a text, for models that label texts.
            known: labels whose state is known, such as "sky=yes", for models that label.

        Returns:
            ``model`` ("global" or the client) and ``answers`` with ``answer`` and ``probability``, ``caption``,
            ``labels`` or ``turns``; what ``confed predict --json`` prints.

        Example:
            >>> import numpy as np
            >>> picture = np.zeros((64, 64, 3), np.uint8)
            >>> found = confed.load_run("runs/first").predict(picture, "is there a car?", client="sports")
            >>> found["model"], len(found["answers"])
            ('sports', 3)
        """
        from confed.inference.ask import ask

        with threads_kept():
            return ask(
                self._finished, image, question, client, top=top, shared=shared, image2=image2, choices=choices,
                text=text, known=known,
            )  # fmt: skip

    def export(self, folder: Path | str, *, merged: bool = False, client: str | None = None) -> dict[str, Path]:
        """All models written for confed, transformers and peft; see :func:`confed.load_exported`.

        Args:
            folder: to be written; must not exist.
            merged: of a model by name: one whole model for transformers, with what was trained merged.
            client: with ``merged``: the client whose personal model; None for the global one.

        Returns:
            Name of a model -> its folder.

        Example:
            >>> sorted(confed.load_run("runs/first").export("exported"))[:2]
            ['clients/educational', 'clients/natural']
            >>> confed.load_exported("exported", "sports").image_size
            64
        """
        from confed.inference.export import export_models

        with threads_kept():
            written = export_models(self.folder, Path(folder), merged=merged, client=client)
        return {name: Path(path) for name, path in written.items()}

    # Going on -------------------------------------------------------------------------------------------------

    def resume(self, *, progress: Shown = True) -> "Run":
        """The same run, finished: it goes on after its last whole round, with the numbers of a run in one go.

        Args:
            progress: show it, or a callback that is called with every event.

        Example:
            >>> confed.load_run("runs/first").resume().finished
            True
        """
        if not self.finished:
            _carry_out(self.recipe, self.folder, progress)
        return self

    @property
    def _record(self) -> Record:
        """What the folder's files say now."""
        return load(self.folder).runs[0]

    @cached_property
    def _finished(self) -> "FinishedRun":
        from confed.inference.finished_run import FinishedRun

        return FinishedRun(self.folder)


def run(
    recipe: str | Path | Recipe = "fedvqa_scenes",
    overrides: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
    folder: Path | str | None = None,
    progress: Shown = True,
    **settings: Any,
) -> Run:
    """Execution of one method of a recipe with one seed.

    Ctrl-C, or the button of a notebook, stops it with a KeyboardInterrupt once the last whole round is saved; the same
    call with the run's folder goes on, as :meth:`Run.resume` does.

    Args:
        recipe: a recipe that comes with confed, a file, or an object.
        overrides: ``section.key`` -> value, as ``confed run`` has them; None takes a key away.
        method: a row of the recipe's study, or the name of any method; by default the recipe's ``[algorithm]``.
        folder: of the run. One that holds this run goes on, or is returned if the run is finished; by default a new one
            under ``runs/``.
        progress: show it, or a callback that is called with every event.
        settings: a section as a name, an object or a mapping of keys (``algorithm=FedP3(lam=0.1)``,
            ``local={"lr": 1e-3}``), or a key of ``[run]`` (``rounds=2``, ``seed=1``).

    Raises:
        ValueError: an unknown recipe, key or method, settings of another algorithm than the method's, faulty data, or a
            folder that holds something else.

    Example:
        >>> small = {"data.train": 8, "data.validation": 4, "data.test": 4, "model.name": "vilt_tiny"}
        >>> run = confed.run("fedvqa_scenes", small, method="fedavg", rounds=2, folder="runs/first", progress=False)
        >>> run
        Run FedAvg, seed 0, 2 rounds, finished: runs/first
    """
    chosen = recipe_of(recipe, overrides, settings, _OF_A_STUDY)
    if method is not None and "algorithm" in {**settings, **(overrides or {})}:
        raise ValueError(f"give either method or algorithm, got method={method!r} besides")
    single = chosen.single if method is None else chosen.method(method)
    if method is not None:
        instead = f"leave method={method!r} out and give algorithm with a name and keywords, or leave the setting out"
        check_reached(overrides, settings, {method: single}, instead)
    place = free_folder(single.name) if folder is None else folder_for(Path(folder), single)
    if not RunFolder(place).summary.is_file():
        _carry_out(single, place, progress)
    return Run(place)


def load_run(folder: Path | str) -> Run:
    """A run that is there, finished or not, of this version or an earlier one.

    Args:
        folder: the run folder; any other is a ValueError.

    Example:
        >>> confed.load_run("runs/first").clients
        ('transport', 'sports', 'educational', 'natural')
    """
    return Run(folder)


def _carry_out(recipe: Recipe, folder: Path, progress: Shown) -> None:
    """Execution or continuation of a run, and its report."""
    with showing(folder, progress, "run") as shown:
        run_single(in_this_session(recipe, shown), folder, shown)
    write_folder_report(folder)
