"""Finished runs on new data: any of a run's models on the test examples of another data section, with paired tests.

The run's answers, labels, tokenizer and metric stay. Of new data all examples are tests but those that the run has
learned from, unless only their test examples are asked for. Questions whose answer the models cannot give count as
wrong, words that they do not know are read as unknown, and both are counted. Of several models, and of a second run,
the mean over places is compared example by example.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from confed.data.examples import Examples, FederatedDataset, Split, TableData, presence
from confed.data.lazy import Taken
from confed.data.refusals import listed
from confed.data.table import concatenate_tables
from confed.engines.local import InProcess, Setup
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_tallies
from confed.federation.file_names import file_name
from confed.federation.measure import Measure, values_of
from confed.federation.messages import Call, Message
from confed.federation.specs import task_spec
from confed.federation.state import MemoryStore
from confed.inference.finished_run import FinishedRun, unknown_words
from confed.metrics.multilabel import class_average_precision, mean_over_classes
from confed.metrics.scores import summarise
from confed.metrics.statistics import holm
from confed.metrics.stratified import flip_interval, sign_flip
from confed.models.tokenizer import CountsShortened
from confed.recipes.recipe import load_recipe
from confed.report.tables.control_marks import SIGN
from confed.report.tables.table import Cell, Column, Table, to_csv, to_markdown
from confed.results.folder import RunFolder
from confed.results.records import is_blind
from confed.results.run_files import NAMES, TRUTH, name_hashes
from confed.results.stored import FinalResult, Records, write_records
from confed.results.summary import Summary
from confed.results.views import View
from confed.runs.build import tasks_of
from confed.runs.dataset import Source, load_source
from confed.runs.encode import RunData, encoded
from confed.runs.evaluate import restriction


@dataclass(frozen=True)
class Tried:
    """One model on one place's test examples."""

    run: str  # the run's folder, as it was given
    model: str
    place: str  # client or unseen place of the new data
    metric: str  # name of the headline metric
    values: Mapping[str, float]
    correct: Tensor  # each example's score, float32 (N,)
    prediction: Tensor  # what was answered, as the run's predictions have it
    names: Tensor  # hashes of the examples' names, int64 (N,)
    # positions of the right answers, -1 for one that the model cannot give, int64 (N,); None of labels
    truth: Tensor | None
    further: tuple[Measure, ...] = ()  # of the run, as far as they have a value here

    @property
    def metrics(self) -> dict[str, Measure | None]:
        """Names of the headline metric and of further measures -> the measure."""
        return {self.metric: None, **{measure.name: measure for measure in self.further}}


Pairs = Sequence[tuple[Sequence[Tried], Sequence[Tried]]]


def by_model(tried: Sequence[Tried]) -> dict[tuple[str, str], list[Tried]]:
    """Results in groups of one model of one run, in order."""
    groups: dict[tuple[str, str], list[Tried]] = {}
    for one in tried:
        groups.setdefault((one.run, one.model), []).append(one)
    return groups


def comparable_pairs(tried: Sequence[Tried]) -> int:
    """The number of pairs of models, of all runs, that a test could compare: the family of tests of an evaluation."""
    return sum(bool(_common(a, b)) for a, b in combinations(by_model(tried).values(), 2))


def corrected_tests(tests: Sequence[Mapping[str, Any]], family: int) -> list[dict[str, Any]]:
    """The tests with ``p_holm`` beside ``p``, corrected for the choice of the smallest of a family of so many."""
    adjusted = holm({str(i): test["p"] for i, test in enumerate(tests)}, tests=family).adjusted if tests else {}
    return [{**test, "p_holm": adjusted[str(i)]} for i, test in enumerate(tests)]


def blind_notes(summaries: tuple[Summary, Summary], models: Sequence[str]) -> list[str]:
    """A warning where, in both runs, models of a kind did not beat their controls on the runs' own data."""
    views = {View.SEEN if model == "global" else View.PERSONAL for model in models}
    notes: list[str] = []
    for view in sorted(views):
        if all(is_blind(summary, view) for summary in summaries):
            why = "neither model is shown to use its input (their own controls); their difference says little"
            notes.append(f"{SIGN} The {view.evaluated} models of the two runs: {why}")
    return notes


def _unpaired(a: "Tried", b: "Tried") -> str:
    """Why two models' scores at a place are no pairs; "" where they are."""
    if a.metric != b.metric:
        return f"the metrics differ ({a.metric}, not {b.metric})"
    if not len(a.names) or not len(b.names):
        return "a model saw only some of the examples"
    return "" if a.names.equal(b.names) else "the examples differ"


def left_out(pairs: Pairs) -> list[str]:
    """Notes on places and on whole pairs of models that are in no test."""
    notes: list[str] = []
    apart = 0
    for a, b in pairs:
        other = {t.place: t for t in b}
        common = [(t, other[t.place]) for t in a if t.place in other]
        apart += not common
        why = {x.place: text for x, y in common if (text := _unpaired(x, y))}
        for text in sorted({*why.values()}):
            places = [place for place, reason in why.items() if reason == text]
            more = f" and {len(places) - _NAMED} more places" if len(places) > _NAMED else ""
            names = " and ".join(_pair_names(a, b))
            notes.append(f"{names} are not compared on {', '.join(map(repr, places[:_NAMED]))}{more}: {text}")
    if apart:
        notes.append(f"{apart} of {len(pairs)} pairs of models have no place in common and are not compared")
    return notes


def _pair_names(a: Sequence[Tried], b: Sequence[Tried]) -> list[str]:
    return [f"{t.model} of {t.run}" if a[0].run != b[0].run else t.model for t in (a[0], b[0])]


def _common(a: Sequence[Tried], b: Sequence[Tried]) -> list[tuple[Tried, Tried]]:
    """Results of two models on the places where both have the same examples."""
    other = {t.place: t for t in b}
    return [(t, other[t.place]) for t in a if t.place in other and not _unpaired(t, other[t.place])]


def paired_test(a: Sequence[Tried], b: Sequence[Tried]) -> dict[str, Any]:
    """One model against another on the places that both were tried on; empty without any."""
    pairs = _common(a, b)
    if not pairs:
        return {}
    strata = [(x.correct.double() - y.correct.double()).numpy()[None] for x, y in pairs]
    interval, signs = flip_interval(strata), sign_flip(strata)
    names = _pair_names(a, b)
    return {
        "a": names[0], "b": names[1], "places": [x.place for x, _ in pairs], "difference": signs.difference,
        "low": interval and interval.low, "high": interval and interval.high, "p": signs.p, "won": signs.won,
        "lost": signs.lost,
    }  # fmt: skip


PERSONAL = "personal:"
Used = Literal["all", "test"]
"""Which examples of new data are tests: all that the run has not learned from, or those that the data hold out."""
CAPS = ("max_train", "max_test")
"""Keys of data that thin examples out; of new data they count only where they are given with it."""
_PART = "\0"  # between a client and the role of its other examples, in the names of places within this module
_NAMED = 5  # answers and words that a note names


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found."""

    data: Mapping[str, Any]  # the new section [data]
    tried: tuple[Tried, ...]  # a line per run, model and place
    # differences of means over places, each with a, b, places, difference, low and high (95 % interval of the sign
    # flips; None with too few examples), p (two-sided stratified sign flips), p_holm (after Holm's correction over
    # family), won and lost examples
    tests: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())  # what did not fit, and how it counts
    family: int = 0  # the number of pairs of models that could be tested

    def content(self) -> dict[str, Any]:
        """As ``evaluation.json`` has it."""
        rows = [
            {"run": t.run, "model": t.model, "place": t.place, "examples": len(t.correct), "metric": t.metric,
             "values": dict(t.values)}
            for t in self.tried
        ]  # fmt: skip
        return {"data": dict(self.data), "results": rows, "means": self.means(), "tests": [dict(t) for t in self.tests],
                "notes": [*self.notes]}  # fmt: skip

    def means(self) -> list[dict[str, Any]]:
        """Of every model, the mean over places of the headline metric, then of each further measure by its name."""
        groups: dict[tuple[str, str, str], list[float]] = {}
        for one in self.tried:
            for name, measure in one.metrics.items():
                key = one.run, one.model, "" if measure is None else name
                groups.setdefault(key, []).append(one.values[name])
        means: list[dict[str, Any]] = []
        for (run, model, metric), values in groups.items():
            mean = {"run": run, "model": model, "places": len(values), "mean": sum(values) / len(values)}
            means.append({**mean, "metric": metric} if metric else mean)
        return means

    def table(self) -> Table:
        """A row per run, model and place; then the means over places."""
        words = [Column(name, words=True) for name in ("run", "model", "place")]
        further: dict[str, Measure] = {}
        rows: list[tuple[Cell, ...]] = []
        for t in self.tried:
            start = (Cell(t.run), Cell(t.model), Cell(t.place), Cell(str(len(t.correct)), len(t.correct)))
            further |= {measure.name: measure for measure in t.further}
            rows += [(*start, *_value(name, t.values[name], measure)) for name, measure in t.metrics.items()]
        unit = "%" if all(measure.unit == "%" for measure in further.values()) else ""
        columns = (*words, Column("examples"), Column("metric", words=True), Column("value", unit=unit))
        metrics = {(t.run, t.model): t.metric for t in self.tried}
        means: list[tuple[Cell, ...]] = []
        for m in self.means():
            name = m.get("metric", metrics[m["run"], m["model"]])
            start = (Cell(m["run"]), Cell(m["model"]), Cell("mean over places"), Cell(""))
            means.append((*start, *_value(name, m["mean"], further.get(m.get("metric", "")))))
        tests = tuple(
            f"{t['a']} minus {t['b']}: {100 * t['difference']:+.1f} points on {_places(t['places'])} ({_interval(t)}"
            f"sign flips within places, p = {t['p']:.2g}"
            + (f", after Holm's correction over {self.family} pairs {t['p_holm']:.2g})." if self.family > 1 else ").")
            for t in self.tests
        )
        return Table("Finished models on new data", columns, (tuple(rows), tuple(means)), (*tests, *self.notes))


def evaluate(
    folder: Path,
    data: Sequence[str] = (),
    models: Sequence[str] = ("global",),
    against: Path | None = None,
    examples: Used = "all",
) -> Evaluation:
    """Accuracy of finished models on other data."""
    if examples not in get_args(Used):
        raise ValueError(f"examples must be one of {', '.join(get_args(Used))}, got {examples!r}")
    first = _Trial(folder)
    recipe = load_recipe(RunFolder(folder).recipe, [f"data.{change}" for change in data])
    section, seed = recipe.sections["data"], recipe.run.seed
    used: Used | None = examples if data else None
    if used == "all":
        given = {change.partition("=")[0].strip() for change in data}
        section = {**section, **dict.fromkeys((section.keys() & set(CAPS)) - given)}
    source = load_source(json.dumps(section, default=str), seed)
    runs = [first] if against is None else [first, _Trial(against)]
    learned_from = [run.run.dataset for run in runs]
    tried, notes = first.on(source, models, used, learned_from)
    if against is not None:
        second = runs[1]
        others, more = second.on(source, models, used, learned_from)
        notes = list(dict.fromkeys([*notes, *more]))
        of = {model: rows for (_, model), rows in by_model(tried).items()}
        against_of = {model: rows for (_, model), rows in by_model(others).items()}
        for model in [m for m in (*of, *against_of) if (m in of) != (m in against_of)]:
            notes.append(f"{model} is a model of one run only and not compared")
        pairs = [(model_rows, against_of[model]) for model, model_rows in of.items() if model in against_of]
        tried = [*tried, *others]
        summaries = first.run.summary, second.run.summary
        notes += blind_notes(summaries, [model_rows[0].model for model_rows, _ in pairs])
    else:
        base, *rest = by_model(tried).values()
        pairs = [(base, other) for other in rest]
    account = [source.dataset.facts[key] for key in ("account", "read") if key in source.dataset.facts]
    notes += [*left_out(pairs), *(account if data else ())]
    family = comparable_pairs(tried)
    tests = corrected_tests([test for a, b in pairs if (test := paired_test(a, b))], family)
    return Evaluation(section, tuple(tried), tuple(tests), tuple(notes), family)


def write_evaluation(evaluation: Evaluation, out: Path) -> dict[str, Path]:
    """Files of an evaluation."""
    names = ("evaluation.json", "evaluation.csv", "evaluation.md", "predictions.safetensors")
    files = {name: out / name for name in names}
    if files["evaluation.json"].exists():
        raise ValueError(f"{out} has an evaluation already: give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    runs = list(dict.fromkeys(t.run for t in evaluation.tried))
    examples: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    results: dict[str, list[FinalResult]] = {}
    for t in evaluation.tried:
        view = file_name(t.model if len(runs) == 1 else f"{runs.index(t.run)}-{t.model}")
        owner = t.model.removeprefix(PERSONAL) if t.model.startswith(PERSONAL) else t.place
        results.setdefault(view, []).append(FinalResult(owner, t.place, len(t.correct), t.values))
        columns = {"correct": t.correct, "prediction": t.prediction}
        columns |= {"name": t.names} if len(t.names) else {}
        columns |= {} if t.truth is None else {"truth": t.truth}
        of_place = {name: column.numpy() for name, column in columns.items()}
        examples.setdefault(view, {})[t.place] = of_place
        start = f"{runs.index(t.run)}/{t.model}/{t.place}"  # runs are numbered as evaluation.json lists them
        tensors |= {f"{start}/correct": t.correct, f"{start}/prediction": t.prediction}
        if len(t.names):  # a model that reads only some of the modalities does not say which examples it saw
            tensors[f"{NAMES}/{t.place}"] = t.names
        if t.truth is not None:
            tensors[f"{runs.index(t.run)}/{TRUTH}/{t.place}"] = t.truth
    write_records(out, Records(tests=results), examples)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, files[names[3]])
    files[names[1]].write_text(to_csv(evaluation.table()), encoding="utf-8")
    files[names[2]].write_text(to_markdown(evaluation.table()), encoding="utf-8")
    content = {**evaluation.content(), "runs": runs}
    files[names[0]].write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return files


class _Trial:
    """A finished run's models, and data that are put into the terms that these know."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = FinishedRun(folder)
        self.run.load()
        self.setup = self.run.setup

    def on(
        self, source: Source, models: Sequence[str], used: Used | None, learned_from: Sequence[Any]
    ) -> tuple[list[Tried], list[str]]:
        """Results of every model, and notes on examples that were left out."""
        chosen, counted = _tests_of(source.dataset, used, learned_from)
        fitted, notes = self._fitted(Source(chosen, source.fill))
        notes = counted + notes
        recipe = self.run.recipe
        run_data = encoded(fitted, recipe.sections["model"], self.run.tokenizer)
        self._check_shapes(run_data)
        task, tasks = tasks_of(recipe, run_data)
        places, names = _places_of(run_data)
        if not places:
            raise ValueError(f"the data {fitted.dataset.name!r} have no test examples")
        jobs: list[tuple[str, str]] = []
        for model in self._models(models):
            jobs += [(model, place) for place in self._places(model, places)]
        setup = replace(self.setup, observers=places, task=task, tasks=tasks)
        ask = InProcess(setup, self.run.workspace if setup.device == "cpu" else None)
        tried: list[Tried] = []
        for model, place in jobs:
            shown = self._shown(model, place, places[place])
            if shown is None:
                notes.append(f"{model} reads nothing of what the examples of {place!r} have")
                continue
            measured = {"measures": True} if setup.measures else {}
            message = Message(self._tensors(model, place), {**shown, **measured})
            (reply,) = ask([Call(ClientInfo(place, 0), "examine", message)], MemoryStore(), setup.rounds + 2)
            if reply.error is not None:
                raise ValueError(f"{model} of {self.folder} cannot be tried on {place!r}: {reply.error}")
            tried.append(self._tried(model, place, names[place], places[place], reply.message, setup))
        return tried, notes

    def _tried(
        self, model: str, place: str, named: Iterable[str], data: TableData, answers: Message, setup: Setup
    ) -> Tried:
        metric, table = setup.task_of(place).metric, data.tables[2]
        further = values_of(setup.measures, answers.tensors)
        values = summarise(read_tallies(answers.scalars, "examined")) | further
        if "probabilities" in answers.tensors:
            undefined = task_spec(self.setup.task).undefined
            truth = answers.tensors["labels"]
            precision = class_average_precision(answers.tensors["probabilities"], truth)
            values["C-AP"] = mean_over_classes(precision, truth.sum(0, dtype=torch.int64).numpy(), undefined)
        names = torch.from_numpy(name_hashes(named))
        # Of an examination with some modalities only, rows may be left out: then nothing says which ones are there.
        whole = len(answers.tensors["correct"]) == len(names)
        return Tried(
            str(self.folder), model, place, metric, values, answers.tensors["correct"], answers.tensors["prediction"],
            names if whole else names[:0], table.columns.get("label") if whole else None,
            tuple(measure for measure in setup.measures if measure.name in further),
        )  # fmt: skip

    def _models(self, requested: Sequence[str]) -> list[str]:
        names: list[str] = []
        for model in requested:
            if model == "all":
                shared = self.run.global_file.is_file()
                # Where the method makes no personal models, their files repeat the global one.
                owners = self.run.owners if self.run.summary.traits.has_personal or not shared else []
                names += [*(["global"] if shared else []), *(PERSONAL + name for name in owners)]
                continue
            if model != "global" and not model.startswith(PERSONAL):
                raise ValueError(f"a model is global, personal:<client> or all, got {model!r}")
            if model.startswith(PERSONAL):
                self.run.check(model.removeprefix(PERSONAL))
            elif not self.run.needs_own_parts:
                self.run.check(None)
            names.append(model)
        return list(dict.fromkeys(names))

    def _places(self, model: str, places: Mapping[str, TableData]) -> list[str]:
        owner = model.removeprefix(PERSONAL)
        if model != "global":
            return [owner] if owner in places else [*places]
        if not self.run.needs_own_parts:
            return [*places]
        owner_places = [place for place in places if place in self.run.owners]
        if not owner_places:
            raise ValueError(
                f"{self.run.summary.label} answers with each client's own parts, and the data have none of "
                f"{', '.join(self.run.owners)}"
            )
        return owner_places

    def _tensors(self, model: str, place: str) -> dict[str, Tensor]:
        if model != "global":
            return self.run.trained(model.removeprefix(PERSONAL))
        # At a client of the run what is private to it goes with what is global, if that does not answer alone.
        with_own_parts = self.run.needs_own_parts and place in self.run.owners
        return self.run.trained(place if with_own_parts else None, shared=True)

    def _shown(self, model: str, place: str, data: TableData) -> Mapping[str, Any] | None:
        """What of a place's examples a personal model reads: what its owner has taught it."""
        owner = model.removeprefix(PERSONAL)
        return {} if model == "global" or owner == place else restriction(data, self.run.info(owner).modalities)

    def _check_shapes(self, run_data: RunData) -> None:
        for what, trained in self.run.shapes.items():
            if run_data.shapes.get(what, trained) != trained:
                raise ValueError(
                    f"the run's models were trained with {what.replace('_', ' ')} {trained}, and that of the data "
                    f"{run_data.dataset.name!r} is {run_data.shapes[what]}"
                )

    def _fitted(self, source: Source) -> tuple[Source, list[str]]:
        """The data with the run's answers or labels, without training examples, and notes on what was left out."""
        trained_on, new = self.run.dataset, source.dataset
        if new.elsewhere is not None:
            raise ValueError(f"a card stands for the data {new.name!r}: there are no examples to try models on")
        if trained_on.kind != new.kind and "labels" in (trained_on.kind, new.kind):
            kinds = trained_on.kind, new.kind
            raise ValueError(f"the run's models give {kinds[0]}, and the examples of {new.name!r} have {kinds[1]}")
        if new.kind == "labels":
            if new.answers != trained_on.answers:
                strange = [label for label in new.answers if label not in trained_on.answers]
                lost = [label for label in trained_on.answers if label not in new.answers]
                raise ValueError(
                    f"the labels of {new.name!r} must be the run's {len(trained_on.answers)} in its order; unknown to "
                    "the "
                    f"run: {_some(strange)}; not in the data: {_some(lost)}"
                )
            return source, []
        clients = {name: Split(s.train.take([]), s.validation.take([]), s.test) for name, s in new.clients.items()}
        owners = {place: place.partition(_PART)[0] for place in (*clients, *new.unseen)}
        answer_sets = {
            p: trained_on.answer_set(owner) for p, owner in owners.items() if owner in trained_on.answer_sets
        }
        tasks = {name: trained_on.tasks[name] for name in clients if name in trained_on.tasks}
        fitted = replace(
            new, answers=trained_on.answers, clients=clients, answer_sets=answer_sets, tasks=tasks, outside=True,
            mixture=(), types=tuple(dict.fromkeys((*new.types, *trained_on.types))),
        )  # fmt: skip
        return Source(fitted, source.fill), self._misfits(fitted)

    def _misfits(self, dataset: FederatedDataset) -> list[str]:
        """Answers and words that the run's models do not know, counted."""
        parts: dict[str, Examples] = {**dataset.unseen, **{name: split.test for name, split in dataset.clients.items()}}
        strange: list[str] = []
        written = dataset.kind == "captions" or task_spec(self.run.task(None)).judges == "texts"
        total = sum(map(len, parts.values()))
        for name, examples in parts.items():
            pool = set(dataset.answer_set(name))
            strange += [answer for answer in examples.answers if answer not in pool] if not written else []
        notes: list[str] = []
        if strange:
            notes.append(
                f"{len(strange)} of {total} test questions have an answer that the run's models cannot give and count "
                f"as wrong: {_some(list(dict.fromkeys(strange)))}"
            )
        questions = list(chain.from_iterable(examples.questions for examples in parts.values()))
        unknown = unknown_words(self.run.tokenizer, list(chain.from_iterable(_words(text) for text in questions)))
        if unknown:
            hit = 0
            for text in questions:
                hit += any(word in unknown for word in _words(text))
            notes.append(f"{hit} of {total} test questions have a word that the run's models do not know: "
                         f"{_some(sorted(unknown))}")  # fmt: skip
        tokenizer = self.run.tokenizer
        if isinstance(tokenizer, CountsShortened) and questions and (cut := tokenizer.shortened(questions)):
            notes.append(f"{cut} of {total} test questions are longer than the run's models read and lose their end")
        return notes


def _tests_of(dataset: Any, used: Used | None, learned_from: Sequence[Any]) -> tuple[Any, list[str]]:
    """New data whose tests are the examples to be used, and a note on how many of how many these are."""
    if used is None or dataset.elsewhere is not None:
        return dataset, []
    alike = [data for data in learned_from if (data.kind == "labels") == (dataset.kind == "labels")]
    splits: dict[str, Split] = {name: dataset.clients[name] for name in dataset.clients}
    further: dict[str, Examples] = {}
    for name, split in splits.items():
        for role in ("train", "validation") if used == "all" else ():
            further[f"{name}{_PART}{role}"] = split.roles[role]
    fresh = _not_learned(further, alike)
    if dataset.kind == "labels":  # a client's examples are rows of one table
        splits = {name: _joined(name, split, fresh) for name, split in splits.items()}
        chosen, fresh = replace(dataset, clients=splits), {}
    else:
        chosen = replace(dataset, unseen={**dataset.unseen, **fresh})
    used_rows = sum(len(split.test) for split in splits.values()) + sum(map(len, fresh.values()))
    unseen = sum(map(len, dataset.unseen.values()))
    total = sum(len(examples) for _, _, examples in dataset.placed())
    why = "the models have learned from the others" if used == "all" else "only those that the data hold out as tests"
    note = f"{used_rows + unseen} of {total} examples of these data are used"
    return chosen, [note if used_rows + unseen == total else f"{note}: {why}"]


def _joined(client: str, split: Split, fresh: Mapping[str, Examples]) -> Split:
    """A client whose further examples are tests too, as far as they are rows of one table."""
    labels = split.test.labels
    assert labels is not None
    rows = [labels.rows]
    for role in split.roles:
        further = fresh.get(f"{client}{_PART}{role}")
        if further is not None and further.labels is not None and further.labels.table is labels.table:
            rows.append(further.labels.rows)
    kinds = split.test.types.column if isinstance(split.test.types, Taken) else None
    whole = Examples.labelled(labels.table, split.test.images, np.concatenate(rows), kinds)
    return Split(split.train.take([]), split.validation.take([]), whole)


def _not_learned(parts: Mapping[str, Examples], data: Sequence[FederatedDataset]) -> dict[str, Examples]:
    """Of each part the examples whose pictures, texts and answers no run has learned from or chosen settings on."""
    learned_parts: list[Examples] = []
    for dataset in data:
        for name in dataset.clients:
            learned_parts += list(dataset.clients[name].roles.values())[:2]
    wanted = set(chain.from_iterable(_texts(examples) for examples in parts.values()))
    learned: set[tuple[str, bytes]] = set()
    for examples in learned_parts:
        learned |= {(text, _seen(examples, row)) for row, text in enumerate(_texts(examples)) if text in wanted}
    known_texts = {text for text, _ in learned}
    fresh: dict[str, Examples] = {}
    for name, examples in parts.items():
        rows: list[int] = []
        for row, text in enumerate(_texts(examples)):
            if text not in known_texts or (text, _seen(examples, row)) not in learned:
                rows.append(row)
        fresh |= {name: examples.take(rows)} if rows else {}
    return fresh


def _texts(examples: Examples) -> list[str]:
    before = examples.conversations or [()] * len(examples)
    answers = [examples.right_answer(row) for row in range(len(examples))] if examples.labels else examples.answers
    return [repr(fields) for fields in zip(examples.questions, answers, before, strict=True)]


def _seen(examples: Examples, row: int) -> bytes:
    """Digest of an example's pictures; of one without, its name, or of a text with labels nothing."""
    if not examples.images.shape[1] or not presence(examples.take([row]))[0, 0]:
        return b"" if examples.labels is not None else examples.names[row].encode()
    return _digest(examples.images[number] for number in np.ravel(examples.image_index[row]).tolist())


def _digest(pictures: Iterable[np.ndarray]) -> bytes:
    digest = blake2b(digest_size=16)
    for picture in pictures:
        digest.update(picture.tobytes())
    return digest.digest()


def _places_of(run_data: RunData) -> tuple[dict[str, TableData], dict[str, list[str]]]:
    """Test examples of clients and unseen places as tables, and their names; a client's further examples with them."""
    data = run_data.dataset
    places = {name: tables for name, tables in run_data.unseen.items() if _PART not in name}
    names = {name: [*data.unseen[name].names] for name in places}
    for client, client_data in run_data.clients.items():
        more = [name for name in run_data.unseen if name.startswith(f"{client}{_PART}")]
        tables = [client_data.tables[2], *(run_data.unseen[name].tables[2] for name in more)]
        if sum(map(len, tables)):
            test = concatenate_tables([table for table in tables if len(table)]) if more else tables[0]
            places[client] = TableData(*client_data.tables[:2], test) if more else client_data
            names[client] = [
                *data.clients[client].test.names,
                *chain.from_iterable(data.unseen[name].names for name in more),
            ]
    return places, names


def _interval(test: Mapping[str, Any]) -> str:
    if test["low"] is None:
        return ""
    return f"95 % CI {100 * test['low']:+.1f} to {100 * test['high']:+.1f}; "


def _places(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} places"


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _some(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names], _NAMED)


def _value(name: str, value: float, measure: Measure | None) -> tuple[Cell, Cell]:
    """A metric's name, with its unit where that is not per cent, and its value."""
    if measure is None or measure.unit == "%":
        return Cell(name), Cell(f"{100 * value:.1f}", 100 * value)
    return Cell(f"{name} ({measure.unit})"), Cell(f"{value:.1f}", value)
