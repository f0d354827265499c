"""Finished runs on new data: any of a run's models on the test examples of another data section, with paired tests.

The run's answers, labels, tokenizer and metric stay. Questions whose answer the models cannot give count as wrong,
words that they do not know are read as unknown, and both are counted. Of several models, and of a second run, the mean
over places is compared example by example.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from confed.data.examples import Examples, FederatedDataset, Split, TableData
from confed.data.labelled import LabelDataset
from confed.engines.local import InProcess
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_tallies
from confed.federation.messages import Call, Message
from confed.federation.specs import task_spec
from confed.federation.state import MemoryStore
from confed.inference.evaluation_tests import Tried, blind_notes, by_model, corrected_tests, left_out, paired_test
from confed.inference.finished_run import FinishedRun
from confed.metrics.multilabel import class_average_precision, mean_over_classes
from confed.models.tokenizer import CountsShortened
from confed.recipes.recipe import load_recipe
from confed.report.tables.table import Cell, Column, Table, to_csv, to_markdown
from confed.results.example_names import NAMES, TRUTH, name_hashes
from confed.results.folder import RunFolder
from confed.runs.build import tasks_of
from confed.runs.dataset import Source, load_source
from confed.runs.encode import RunData, encoded
from confed.runs.modality_subsets import restriction
from confed.tasks.vqa import summarise

__all__ = ["Evaluation", "evaluate", "write_evaluation"]

PERSONAL = "personal:"
_NAMED = 5
"""Answers and words that a note names."""
_STRANGE = "ꙮ"
"""A letter that no vocabulary has: its token is the one for unknown words."""


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found.

    Attributes:
        data: the new section ``[data]``.
        tried: a line per run, model and place.
        tests: differences of means over places, each with ``a``, ``b``, ``places``, ``difference``, ``low`` and
            ``high`` (95 % bootstrap interval within places), ``p`` (two-sided stratified sign flips), ``p_holm`` (after
            Holm's correction over these tests), ``won`` and ``lost`` examples.
        notes: what did not fit, and how it counts.
    """

    data: Mapping[str, Any]
    tried: tuple[Tried, ...]
    tests: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())

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
        """Of every model, the mean over places of the headline metric."""
        groups: dict[tuple[str, str], list[float]] = {}
        for one in self.tried:
            groups.setdefault((one.run, one.model), []).append(one.values[one.metric])
        return [{"run": r, "model": m, "places": len(v), "mean": sum(v) / len(v)} for (r, m), v in groups.items()]

    def table(self) -> Table:
        """A row per run, model and place; then the means over places."""
        words = [Column(name, words=True) for name in ("run", "model", "place")]
        columns = (*words, Column("examples"), Column("metric", words=True), Column("value", unit="%"))
        rows = tuple(
            (Cell(t.run), Cell(t.model), Cell(t.place), Cell(str(len(t.correct)), len(t.correct)), Cell(t.metric),
             _percent(t.values[t.metric]))
            for t in self.tried
        )  # fmt: skip
        metrics = {(t.run, t.model): t.metric for t in self.tried}
        means = tuple(
            (Cell(m["run"]), Cell(m["model"]), Cell("mean over places"), Cell(""), Cell(metrics[m["run"], m["model"]]),
             _percent(m["mean"]))
            for m in self.means()
        )  # fmt: skip
        tests = tuple(
            f"{t['a']} minus {t['b']}: {100 * t['difference']:+.1f} points on {_places(t['places'])} (95 % CI "
            f"{100 * t['low']:+.1f} to {100 * t['high']:+.1f}; sign flips within places, p = {t['p']:.2g}"
            + (
                f", after Holm's correction over {len(self.tests)} tests {t['p_holm']:.2g})."
                if len(self.tests) > 1
                else ")."
            )
            for t in self.tests
        )
        return Table("Finished models on new data", columns, (rows, means), (*tests, *self.notes))


def evaluate(
    folder: Path,
    data: Sequence[str] = (),
    models: Sequence[str] = ("global",),
    against: Path | None = None,
) -> Evaluation:
    """Accuracy of finished models on the test examples of other data.

    A folder without a finished run, a model that does not exist, or data that do not fit the run's model are refused
    with a ValueError that says what does not fit.

    Args:
        folder: a finished run.
        data: changes of its section ``[data]``, "key=value" each; another ``name`` drops its other keys. Without any,
            the run's own test examples.
        models: "global", "personal:<client>" or "all". A personal model is tried at the place of its client's name, or
            on all places where the data have none.
        against: a second run, whose models of the same names are tried on the same examples and compared; without it
            the first model is compared with each other one.
    """
    first = _Trial(folder)
    recipe = load_recipe(RunFolder(folder).recipe, [f"data.{change}" for change in data])
    section, seed = recipe.sections["data"], recipe.run.seed
    source = load_source(json.dumps(section, default=str), seed)
    tried, notes = first.on(source, models)
    if against is not None:
        second = _Trial(against)
        others, more = second.on(source, models)
        notes = list(dict.fromkeys([*notes, *more]))
        of, against_of = by_model(tried), by_model(others)
        for model in [m for m in (*of, *against_of) if (m in of) != (m in against_of)]:
            notes.append(f"{model} is a model of one run only and not compared")
        pairs = [(own, against_of[model]) for model, own in of.items() if model in against_of]
        tried = [*tried, *others]
        summaries = first.run.summary, second.run.summary
        notes += blind_notes(summaries, [own[0].model for own, _ in pairs])
    else:
        base, *rest = by_model(tried).values()
        pairs = [(base, other) for other in rest]
    notes += left_out(pairs)
    tests = corrected_tests([test for a, b in pairs if (test := paired_test(a, b))])
    return Evaluation(section, tuple(tried), tuple(tests), tuple(notes))


def write_evaluation(found: Evaluation, out: Path) -> dict[str, Path]:
    """Writes ``evaluation.json``, ``.csv`` and ``.md``, and ``predictions.safetensors`` with names and right answers.

    Args:
        found: the results.
        out: a folder, made if it is not there.

    Returns:
        Name -> file.

    Raises:
        ValueError: the folder has an evaluation already.
    """
    names = ("evaluation.json", "evaluation.csv", "evaluation.md", "predictions.safetensors")
    files = {name: out / name for name in names}
    if files["evaluation.json"].exists():
        raise ValueError(f"{out} has an evaluation already: give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    runs = list(dict.fromkeys(t.run for t in found.tried))
    for t in found.tried:
        start = f"{runs.index(t.run)}/{t.model}/{t.place}"  # runs are numbered as evaluation.json lists them
        tensors |= {f"{start}/correct": t.correct, f"{start}/prediction": t.prediction}
        if len(t.names):  # a model that reads only some of the modalities does not say which examples it saw
            tensors[f"{NAMES}/{t.place}"] = t.names
        if t.truth is not None:
            tensors[f"{runs.index(t.run)}/{TRUTH}/{t.place}"] = t.truth
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, files[names[3]])
    files[names[1]].write_text(to_csv(found.table()), encoding="utf-8")
    files[names[2]].write_text(to_markdown(found.table()), encoding="utf-8")
    content = {**found.content(), "runs": runs}
    files[names[0]].write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return files


class _Trial:
    """A finished run's models, and data that are put into the terms that these know."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = FinishedRun(folder)
        self.run.load()
        self.setup = self.run.setup

    def on(self, source: Source, models: Sequence[str]) -> tuple[list[Tried], list[str]]:
        """Results of every model, and notes on examples that were left out."""
        fitted, notes = self._fitted(source)
        recipe = self.run.recipe
        run_data = encoded(fitted, recipe.sections["model"], self.run.tokenizer)
        self._check_shapes(run_data)
        task, tasks = tasks_of(recipe, run_data)
        places: dict[str, TableData] = {**run_data.unseen}
        places |= {name: data for name, data in run_data.clients.items() if len(data.tables[2])}
        if not places:
            raise ValueError(f"the data {fitted.dataset.name!r} have no test examples")
        jobs = [(model, place) for model in self._models(models) for place in self._places(model, places)]
        setup = replace(self.setup, observers=places, task=task, tasks=tasks)
        ask = InProcess(setup, self.run.workspace if setup.device == "cpu" else None)
        found: list[Tried] = []
        for model, place in jobs:
            shown = self._shown(model, place, places[place])
            if shown is None:
                notes.append(f"{model} reads nothing of what the examples of {place!r} have")
                continue
            message = Message(self._tensors(model, place), shown)
            (reply,) = ask([Call(ClientInfo(place, 0), "examine", message)], MemoryStore(), setup.rounds + 2)
            if reply.error is not None:
                raise ValueError(f"{model} of {self.folder} cannot be tried on {place!r}: {reply.error}")
            found.append(self._tried(model, place, run_data, reply.message, setup.task_of(place).metric))
        return found, notes

    def _tried(self, model: str, place: str, run_data: RunData, said: Message, metric: str) -> Tried:
        dataset = run_data.dataset
        examples = dataset.unseen[place] if place in dataset.unseen else dataset.clients[place].test
        table = (run_data.unseen if place in run_data.unseen else run_data.clients)[place].tables[2]
        values = summarise(read_tallies(said.scalars, "examined"))
        if "probabilities" in said.tensors:
            undefined = task_spec(self.setup.task).undefined
            truth = said.tensors["labels"]
            found = class_average_precision(said.tensors["probabilities"], truth)
            values["C-AP"] = mean_over_classes(found, truth.sum(0, dtype=torch.int64).numpy(), undefined)
        names = torch.from_numpy(name_hashes(examples.names))
        # Of an examination with some modalities only, rows may be left out: then nothing says which ones are there.
        whole = len(said.tensors["correct"]) == len(names)
        return Tried(
            str(self.folder), model, place, metric, values, said.tensors["correct"], said.tensors["prediction"],
            names if whole else names[:0], table.columns.get("label") if whole else None,
        )  # fmt: skip

    def _models(self, asked: Sequence[str]) -> list[str]:
        found: list[str] = []
        for model in asked:
            if model == "all":
                shared = self.run.global_file.is_file()
                # Where the method makes no personal models, their files repeat the global one.
                own = self.run.owners if self.run.summary.get("has_personal", True) or not shared else []
                found += [*(["global"] if shared else []), *(PERSONAL + name for name in own)]
                continue
            if model != "global" and not model.startswith(PERSONAL):
                raise ValueError(f"a model is global, personal:<client> or all, got {model!r}")
            if model.startswith(PERSONAL):
                self.run.check(model.removeprefix(PERSONAL))
            elif not self.run.needs_own_parts:
                self.run.check(None)
            found.append(model)
        return list(dict.fromkeys(found))

    def _places(self, model: str, places: Mapping[str, TableData]) -> list[str]:
        owner = model.removeprefix(PERSONAL)
        if model != "global":
            return [owner] if owner in places else [*places]
        if not self.run.needs_own_parts:
            return [*places]
        there = [place for place in places if place in self.run.owners]
        if not there:
            raise ValueError(
                f"{self.run.summary['label']} answers with each client's own parts, and the data have none of "
                f"{', '.join(self.run.owners)}"
            )
        return there

    def _tensors(self, model: str, place: str) -> dict[str, Tensor]:
        if model != "global":
            return self.run.trained(model.removeprefix(PERSONAL))
        # At a client of the run what is private to it goes with what is global, if that does not answer alone.
        own = self.run.needs_own_parts and place in self.run.owners
        return self.run.trained(place if own else None, shared=True)

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
        known, new = self.run.dataset, source.dataset
        if new.elsewhere is not None:
            raise ValueError(f"a card stands for the data {new.name!r}: there are no examples to try models on")
        if isinstance(known, LabelDataset) != isinstance(new, LabelDataset):
            kinds = ["labels" if isinstance(d, LabelDataset) else "answers" for d in (known, new)]
            raise ValueError(f"the run's models give {kinds[0]}, and the examples of {new.name!r} have {kinds[1]}")
        if isinstance(new, LabelDataset) or isinstance(known, LabelDataset):
            if new.answers != known.answers:
                strange = [label for label in new.answers if label not in known.answers]
                lost = [label for label in known.answers if label not in new.answers]
                raise ValueError(
                    f"the labels of {new.name!r} must be the run's {len(known.answers)} in its order; unknown to the "
                    f"run: {_some(strange)}; not in the data: {_some(lost)}"
                )
            return source, []
        clients = {name: Split(s.train.take([]), s.validation.take([]), s.test) for name, s in new.clients.items()}
        answer_sets = {name: known.answer_set(name) for name in (*clients, *new.unseen) if name in known.answer_sets}
        tasks = {name: known.tasks[name] for name in clients if name in known.tasks}
        fitted = replace(
            new, answers=known.answers, clients=clients, answer_sets=answer_sets, tasks=tasks, outside=True, mixture=(),
            types=tuple(dict.fromkeys((*new.types, *known.types))),
        )  # fmt: skip
        return Source(fitted, source.fill), self._misfits(fitted)

    def _misfits(self, dataset: FederatedDataset) -> list[str]:
        """Answers and words that the run's models do not know, counted."""
        parts: dict[str, Examples] = {**dataset.unseen, **{name: split.test for name, split in dataset.clients.items()}}
        strange: list[str] = []
        written = dataset.captioned or task_spec(self.run.task(None)).judges == "texts"
        total = sum(map(len, parts.values()))
        for name, part in parts.items():
            pool = set(dataset.answer_set(name))
            strange += [answer for answer in part.answers if answer not in pool] if not written else []
        notes: list[str] = []
        if strange:
            notes.append(
                f"{len(strange)} of {total} test questions have an answer that the run's models cannot give and count "
                f"as wrong: {_some(list(dict.fromkeys(strange)))}"
            )
        questions = [text for part in parts.values() for text in part.questions]
        unknown = self._unknown(questions)
        if unknown:
            hit = sum(any(word in unknown for word in _words(text)) for text in questions)
            notes.append(f"{hit} of {total} test questions have a word that the run's models do not know: "
                         f"{_some(sorted(unknown))}")  # fmt: skip
        tokenizer = self.run.tokenizer
        if isinstance(tokenizer, CountsShortened) and questions and (cut := tokenizer.shortened(questions)):
            notes.append(f"{cut} of {total} test questions are longer than the run's models read and lose their end")
        return notes

    def _unknown(self, questions: Sequence[str]) -> set[str]:
        words = list(dict.fromkeys(word for text in dict.fromkeys(questions) for word in _words(text)))
        if not words:
            return set()
        ids, _ = self.run.tokenizer([_STRANGE, *words])
        unknown = ids[0, 1] if ids.shape[1] > 1 else ids[0, 0]
        rows = (ids[1:] == unknown).any(1).tolist()
        return {word for word, strange in zip(words, rows, strict=True) if strange}


def _places(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} places"


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more if names else "none"


def _percent(value: float) -> Cell:
    return Cell(f"{100 * value:.1f}", 100 * value)
