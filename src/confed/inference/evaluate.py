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
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from confed.data.examples import Examples, FederatedDataset, Split, TableData, presence
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


class Pair(NamedTuple):
    """Results of two models at the places where both were tried."""

    names: tuple[str, str]
    same: Sequence[tuple[Tried, Tried]]  # those on the same examples
    apart: Mapping[str, str]  # place -> why the results there are no pairs


def paired(a: Sequence[Tried], b: Sequence[Tried]) -> Pair:
    """The results of two models, by places that both have."""
    other = {t.place: t for t in b}
    both = [(t, other[t.place]) for t in a if t.place in other]
    apart = {x.place: why for x, y in both if (why := _unpaired(x, y))}
    first, second = (f"{t.model} of {t.run}" if a[0].run != b[0].run else t.model for t in (a[0], b[0]))
    return Pair((first, second), [(x, y) for x, y in both if x.place not in apart], apart)


def _unpaired(a: Tried, b: Tried) -> str:
    """Why two models' scores at a place are no pairs; "" where they are."""
    if a.metric != b.metric:
        return f"the metrics differ ({a.metric}, not {b.metric})"
    if not len(a.names) or not len(b.names):
        return "a model saw only some of the examples"
    return "" if a.names.equal(b.names) else "the examples differ"


def compared(pairs: Sequence[Pair], family: int) -> list[dict[str, Any]]:
    """One model against another on all places with the same examples.

    ``p_holm`` is corrected for the choice of the smallest p of a family of so many.
    """
    tests: list[dict[str, Any]] = []
    for names, same, _ in pairs:
        if same:
            strata = [(x.correct.double() - y.correct.double()).numpy()[None] for x, y in same]
            interval, signs = flip_interval(strata), sign_flip(strata)
            tests.append({
                "a": names[0], "b": names[1], "places": [x.place for x, _ in same], "difference": signs.difference,
                "low": interval and interval.low, "high": interval and interval.high, "p": signs.p, "won": signs.won,
                "lost": signs.lost,
            })  # fmt: skip
    adjusted = holm({str(i): test["p"] for i, test in enumerate(tests)}, tests=family).adjusted
    return [{**test, "p_holm": adjusted[str(i)]} for i, test in enumerate(tests)]


def left_out(pairs: Sequence[Pair]) -> list[str]:
    """Notes on places and on whole pairs of models that are in no test."""
    notes: list[str] = []
    for names, _, apart in pairs:
        for why in sorted({*apart.values()}):
            places = [place for place, reason in apart.items() if reason == why]
            notes.append(f"{' and '.join(names)} are not compared on {_some(places)}: {why}")
    if without := sum(not pair.same and not pair.apart for pair in pairs):
        notes.append(f"{without} of {len(pairs)} pairs of models have no place in common and are not compared")
    return notes


def blind_notes(summaries: Sequence[Summary], models: Sequence[str]) -> list[str]:
    """A warning where, in both runs, models of a kind did not beat their controls on the runs' own data."""
    why = "neither model is shown to use its input (their own controls); their difference says little"
    notes: list[str] = []
    for view in sorted({View.SEEN if model == "global" else View.PERSONAL for model in models}):
        if all(is_blind(summary, view) for summary in summaries):
            notes.append(f"{SIGN} The {view.evaluated} models of the two runs: {why}")
    return notes


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
                groups.setdefault((one.run, one.model, name if measure else ""), []).append(one.values[name])
        means: list[dict[str, Any]] = []
        for (run, model, metric), values in groups.items():
            mean = {"run": run, "model": model, "places": len(values), "mean": sum(values) / len(values)}
            means.append({**mean, "metric": metric} if metric else mean)
        return means

    def table(self) -> Table:
        """A row per run, model and place; then the means over places."""
        further: dict[str, Measure] = {}
        rows: list[tuple[Cell, ...]] = []
        for t in self.tried:
            start = (*map(Cell, (t.run, t.model, t.place)), Cell(str(len(t.correct)), len(t.correct)))
            further |= {measure.name: measure for measure in t.further}
            rows += [(*start, *_value(name, t.values[name], measure)) for name, measure in t.metrics.items()]
        headlines = {(t.run, t.model): t.metric for t in self.tried}
        means: list[tuple[Cell, ...]] = []
        for m in self.means():
            name = m.get("metric", headlines[m["run"], m["model"]])
            start = map(Cell, (m["run"], m["model"], "mean over places", ""))
            means.append((*start, *_value(name, m["mean"], further.get(m.get("metric", "")))))
        words = [Column(name, words=True) for name in ("run", "model", "place")]
        unit = "%" if all(measure.unit == "%" for measure in further.values()) else ""
        columns = (*words, Column("examples"), Column("metric", words=True), Column("value", unit=unit))
        notes = (*map(self._told, self.tests), *self.notes)
        return Table("Finished models on new data", columns, (tuple(rows), tuple(means)), notes)

    def _told(self, test: Mapping[str, Any]) -> str:
        """A test in words."""
        places, percent = test["places"], {key: 100 * (test[key] or 0) for key in ("difference", "low", "high")}
        where = places[0] if len(places) == 1 else f"{len(places)} places"
        interval = "" if test["low"] is None else "95 % CI {low:+.1f} to {high:+.1f}; ".format(**percent)
        holm = f", after Holm's correction over {self.family} pairs {test['p_holm']:.2g}" if self.family > 1 else ""
        return (
            f"{test['a']} minus {test['b']}: {percent['difference']:+.1f} points on {where} ({interval}sign flips "
            f"within places, p = {test['p']:.2g}{holm})."
        )


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
    runs = [_Trial(one) for one in (folder, against) if one is not None]
    recipe = load_recipe(RunFolder(folder).recipe, [f"data.{change}" for change in data])
    section, seed = recipe.sections["data"], recipe.run.seed
    used: Used | None = examples if data else None
    if used == "all":
        given = {change.partition("=")[0].strip() for change in data}
        section = {**section, **dict.fromkeys((section.keys() & set(CAPS)) - given)}
    source = load_source(json.dumps(section, default=str), seed)
    learned_from = [run.run.dataset for run in runs]
    results, told = zip(*(run.on(source, models, used, learned_from) for run in runs), strict=True)
    notes, first, second = [*chain.from_iterable(told)], results[0], results[-1]
    if against is None:
        base, *rest = first.values()
        pairs = [paired(base, other) for other in rest]
    else:
        alone = [model for model in (*first, *second) if (model in first) != (model in second)]
        notes += [f"{model} is a model of one run only and not compared" for model in alone]
        common = [model for model in first if model in second]
        pairs = [paired(first[model], second[model]) for model in common]
        notes += blind_notes([run.run.summary for run in runs], common)
    account = [source.dataset.facts[key] for key in ("account", "read") if key in source.dataset.facts]
    notes += [*left_out(pairs), *(account if data else ())]
    groups = list(chain.from_iterable(of_run.values() for of_run in results))
    family = sum(bool(paired(a, b).same) for a, b in combinations(groups, 2))
    tried, tests = chain.from_iterable(groups), compared(pairs, family)
    return Evaluation(section, tuple(tried), tuple(tests), tuple(dict.fromkeys(notes)), family)


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
        number = runs.index(t.run)  # runs are numbered as evaluation.json lists them
        columns = {"correct": t.correct, "prediction": t.prediction}
        tensors |= {f"{number}/{t.model}/{t.place}/{name}": column for name, column in columns.items()}
        if len(t.names):  # a model that reads only some of the modalities does not say which examples it saw
            columns["name"] = tensors[f"{NAMES}/{t.place}"] = t.names
        if t.truth is not None:
            columns["truth"] = tensors[f"{number}/{TRUTH}/{t.place}"] = t.truth
        examples.setdefault(view, {})[t.place] = {name: column.numpy() for name, column in columns.items()}
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
        self.folder, self.run = folder, FinishedRun(folder)
        self.run.load()

    def on(
        self, source: Source, models: Sequence[str], used: Used | None, learned_from: Sequence[FederatedDataset]
    ) -> tuple[dict[str, list[Tried]], list[str]]:
        """Model -> its results, and notes on examples that were left out."""
        run = self.run
        chosen, notes = _tests_of(source.dataset, used, learned_from)
        fitted, misfits = self._fitted(Source(chosen, source.fill))
        notes += misfits
        run_data = encoded(fitted, run.recipe.sections["model"], run.tokenizer)
        for what, trained in run.shapes.items():
            if run_data.shapes.get(what, trained) != trained:
                raise ValueError(
                    f"the run's models were trained with {what.replace('_', ' ')} {trained}, and that of the data "
                    f"{run_data.dataset.name!r} is {run_data.shapes[what]}"
                )
        places, names = _places_of(run_data)
        if not places:
            raise ValueError(f"the data {fitted.dataset.name!r} have no test examples")
        task, tasks = tasks_of(run.recipe, run_data)
        setup = replace(run.setup, observers=places, task=task, tasks=tasks)
        ask = InProcess(setup, run.workspace if setup.device == "cpu" else None)
        measured = {"measures": True} if setup.measures else {}
        tried: dict[str, list[Tried]] = {}
        jobs: list[tuple[str | None, str]] = []
        for owner in self._owners(models):
            jobs += [(owner, place) for place in self._places(owner, places)]
        for owner, place in jobs:
            model, shown = "global" if owner is None else PERSONAL + owner, {}
            if owner not in (None, place):  # a personal model reads what its owner has taught it
                shown = restriction(places[place], run.info(owner).modalities)
            if shown is None:
                notes.append(f"{model} reads nothing of what the examples of {place!r} have")
                continue
            # At a client of the run what is private to it goes with what is global, if that does not answer alone.
            own = place if run.needs_own_parts and place in run.owners else None
            tensors = run.trained(own, shared=True) if owner is None else run.trained(owner)
            message = Message(tensors, {**shown, **measured})
            (reply,) = ask([Call(ClientInfo(place, 0), "examine", message)], MemoryStore(), setup.rounds + 2)
            if reply.error is not None:
                raise ValueError(f"{model} of {self.folder} cannot be tried on {place!r}: {reply.error}")
            result = self._tried(model, place, names[place], places[place], reply.message, setup)
            tried.setdefault(model, []).append(result)
        return tried, notes

    def _tried(
        self, model: str, place: str, named: Iterable[str], data: TableData, answers: Message, setup: Setup
    ) -> Tried:
        kept, further = answers.tensors, values_of(setup.measures, answers.tensors)
        values = summarise(read_tallies(answers.scalars, "examined")) | further
        if "probabilities" in kept:
            truth, undefined = kept["labels"], task_spec(setup.task).undefined
            precision = class_average_precision(kept["probabilities"], truth)
            values["C-AP"] = mean_over_classes(precision, truth.sum(0, dtype=torch.int64).numpy(), undefined)
        names = torch.from_numpy(name_hashes(named))
        # Of an examination with some modalities only, rows may be left out: then nothing says which ones are there.
        whole = len(kept["correct"]) == len(names)
        return Tried(
            str(self.folder), model, place, setup.task_of(place).metric, values, kept["correct"], kept["prediction"],
            names if whole else names[:0], data.tables[2].columns.get("label") if whole else None,
            tuple(measure for measure in setup.measures if measure.name in further),
        )  # fmt: skip

    def _owners(self, requested: Sequence[str]) -> list[str | None]:
        """Whose models are asked for; None is the global one."""
        owners: list[str | None] = []
        for model in requested:
            owner = model.removeprefix(PERSONAL) if model.startswith(PERSONAL) else None
            if model == "all":
                shared = self.run.global_file.is_file()
                # Where the method makes no personal models, their files repeat the global one.
                personal = self.run.summary.traits.has_personal or not shared
                owners += [*([None] if shared else []), *(self.run.owners if personal else [])]
            elif owner is None and model != "global":
                raise ValueError(f"a model is global, personal:<client> or all, got {model!r}")
            else:
                if owner is not None or not self.run.needs_own_parts:
                    self.run.check(owner)
                owners.append(owner)
        return list(dict.fromkeys(owners))

    def _places(self, owner: str | None, places: Mapping[str, TableData]) -> list[str]:
        if owner is not None or not self.run.needs_own_parts:
            return [place for place in places if place == owner] or [*places]
        owner_places = [place for place in places if place in self.run.owners]
        if not owner_places:
            raise ValueError(
                f"{self.run.summary.label} answers with each client's own parts, and the data have none of "
                f"{', '.join(self.run.owners)}"
            )
        return owner_places

    def _fitted(self, source: Source) -> tuple[Source, list[str]]:
        """The data with the run's answers or labels, without training examples, and notes on what was left out."""
        trained_on, new = self.run.dataset, source.dataset
        if new.elsewhere is not None:
            raise ValueError(f"a card stands for the data {new.name!r}: there are no examples to try models on")
        if trained_on.kind != new.kind and "labels" in (trained_on.kind, new.kind):
            of, kind = trained_on.kind, new.kind
            raise ValueError(f"the run's models give {of}, and the examples of {new.name!r} have {kind}")
        if new.kind == "labels":
            if new.answers != trained_on.answers:
                strange = [label for label in new.answers if label not in trained_on.answers]
                lost = [label for label in trained_on.answers if label not in new.answers]
                raise ValueError(
                    f"the labels of {new.name!r} must be the run's {len(trained_on.answers)} in its order; unknown to "
                    f"the run: {_some(strange)}; not in the data: {_some(lost)}"
                )
            return source, []
        clients = {name: Split(s.train.take([]), s.validation.take([]), s.test) for name, s in new.clients.items()}
        answer_sets: dict[str, Sequence[str]] = {}
        for place in (*clients, *new.unseen):
            if (owner := place.partition(_PART)[0]) in trained_on.answer_sets:
                answer_sets[place] = trained_on.answer_set(owner)
        tasks = {name: trained_on.tasks[name] for name in clients if name in trained_on.tasks}
        fitted = replace(
            new, answers=trained_on.answers, clients=clients, answer_sets=answer_sets, tasks=tasks, outside=True,
            mixture=(), types=tuple(dict.fromkeys((*new.types, *trained_on.types))),
        )  # fmt: skip
        return Source(fitted, source.fill), self._misfits(fitted)

    def _misfits(self, dataset: FederatedDataset) -> list[str]:
        """Answers and words that the run's models do not know, counted."""
        tests = {**dataset.unseen, **{name: split.test for name, split in dataset.clients.items()}}
        strange: list[str] = []
        if dataset.kind != "captions" and task_spec(self.run.task(None)).judges != "texts":
            for name, examples in tests.items():
                answer_set = set(dataset.answer_set(name))
                strange += [answer for answer in examples.answers if answer not in answer_set]
        questions = list(chain.from_iterable(examples.questions for examples in tests.values()))
        words = [re.findall(r"[^\W_]+", text.lower()) for text in questions]
        tokenizer = self.run.tokenizer
        unknown = {*unknown_words(tokenizer, chain.from_iterable(words))}
        of, notes = f"of {len(questions)} test questions", list[str]()
        if strange:
            notes.append(
                f"{len(strange)} {of} have an answer that the run's models cannot give and count as wrong: "
                f"{_some(list(dict.fromkeys(strange)))}"
            )
        if unknown:
            hit = sum(not unknown.isdisjoint(text) for text in words)
            notes.append(f"{hit} {of} have a word that the run's models do not know: {_some(sorted(unknown))}")
        if isinstance(tokenizer, CountsShortened) and questions and (cut := tokenizer.shortened(questions)):
            notes.append(f"{cut} {of} are longer than the run's models read and lose their end")
        return notes


def _tests_of(
    dataset: FederatedDataset, used: Used | None, learned_from: Sequence[FederatedDataset]
) -> tuple[FederatedDataset, list[str]]:
    """New data whose tests are the examples to be used, and a note on how many of how many these are."""
    if used is None or dataset.elsewhere is not None:
        return dataset, []
    further: dict[str, Examples] = {}
    for name in dataset.clients if used == "all" else ():
        for role in ("train", "validation"):
            further[f"{name}{_PART}{role}"] = dataset.clients[name].roles[role]
    alike = [data for data in learned_from if (data.kind == "labels") == (dataset.kind == "labels")]
    chosen = replace(dataset, unseen={**dataset.unseen, **_not_learned(further, alike)})
    tests = [examples for _, role, examples in chosen.placed() if role in ("test", "unseen")]
    count, total = sum(map(len, tests)), sum(map(len, dataset.everything))
    why = "the models have learned from the others" if used == "all" else "only those that the data hold out as tests"
    note = f"{count} of {total} examples of these data are used"
    return chosen, [note if count == total else f"{note}: {why}"]


def _not_learned(parts: Mapping[str, Examples], data: Sequence[FederatedDataset]) -> dict[str, Examples]:
    """Of each part the examples whose pictures, texts and answers no run has learned from or chosen settings on."""
    wanted = set(chain.from_iterable(map(_texts, parts.values())))
    learned: dict[str, set[bytes]] = {}
    for dataset in data:
        for _, role, examples in dataset.placed():
            for row, text in enumerate(_texts(examples) if role in ("train", "validation") else ()):
                if text in wanted:
                    learned.setdefault(text, set()).add(_seen(examples, row))
    fresh: dict[str, Examples] = {}
    for name, examples in parts.items():
        rows = [
            row for row, text in enumerate(_texts(examples))
            if text not in learned or _seen(examples, row) not in learned[text]
        ]  # fmt: skip
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
    digest = blake2b(digest_size=16)
    for number in np.ravel(examples.image_index[row]).tolist():
        digest.update(examples.images[number].tobytes())
    return digest.digest()


def _places_of(run_data: RunData) -> tuple[dict[str, TableData], dict[str, list[str]]]:
    """Test examples of clients and unseen places as tables, and their names; a client's further examples with them."""
    data = run_data.dataset
    places = {name: tables for name, tables in run_data.unseen.items() if _PART not in name}
    names = {name: [*data.unseen[name].names] for name in places}
    for client, client_data in run_data.clients.items():
        more = [name for name in run_data.unseen if name.startswith(f"{client}{_PART}")]
        parts = [client_data.tables[2], *(run_data.unseen[name].tables[2] for name in more)]
        if tables := [table for table in parts if len(table)]:
            places[client] = TableData(*client_data.tables[:2], concatenate_tables(tables)) if more else client_data
            tests = [data.clients[client].test, *(data.unseen[name] for name in more)]
            names[client] = [*chain.from_iterable(examples.names for examples in tests)]
    return places, names


def _some(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names], _NAMED)


def _value(name: str, value: float, measure: Measure | None) -> tuple[Cell, Cell]:
    """A metric's name, with its unit where that is not per cent, and its value."""
    if measure is None or measure.unit == "%":
        return Cell(name), Cell(f"{100 * value:.1f}", 100 * value)
    return Cell(f"{name} ({measure.unit})"), Cell(f"{value:.1f}", value)
