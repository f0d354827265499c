"""Results under control conditions: permuted or blank inputs, and answers without input.

``summary.json`` has them under ``controls``::

    {"personal": {"right": {place: value}, "permuted_image": {...}, "blank_image": {...}, "permuted_text": {...},
                  "constant": {...}, "words": {...},
                  "means": {"right": mean over places, "permuted_image": ..., ...},
                  "p": {"permuted_image": one-sided p-value, ...},
                  "passed": true, "reasons": []},
     "global_seen": {...}, "global_unseen": {...},
     "left_out": {"personal": "why", ...}}

Values are means of the examples' scores (the headline metric of the place's task). ``constant`` is the most frequent
training answer; of multi-label data the frequency of every label; ``words`` answers from the question's words alone
(:class:`confed.data.controls.WordAnswers`). Both learn from the training data that the model had: a personal
model's from its client's, a global one's from all. ``passed`` follows from
:func:`confed.metrics.controls.verdict` and from nothing else. Of multi-label data ``C-AP`` says besides what the mean
average precision of all places' examples together is under each condition, and this decides
(:func:`confed.metrics.controls.label_verdict`): ``p``, ``passed`` and ``reasons`` are of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confed.data.controls import PERMUTED, WordAnswers
from confed.data.examples import Examples
from confed.data.federate import AnswerTable, label_numbers
from confed.data.modalities import is_modal
from confed.data.table import Table
from confed.engines.perform import Setup
from confed.federation.protocols import Output
from confed.federation.specs import HasAnswers, HasCandidates, task_spec
from confed.metrics.controls import LabelVerdict, label_verdict, mean_over_places, verdict
from confed.results.summary import VALIDATION
from confed.results.views import OF_EVALUATED
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination

_ROWS = 4096  # examples whose answers are scored at a time
Rows = Mapping[str, Mapping[str, Tensor]]  # control, or place -> tensors with a row per example


def summarise_controls(
    setup: Setup, run_data: RunData, examined: Examination, left: Sequence[str] = ()
) -> dict[str, Any]:
    """The section ``controls`` of ``summary.json``; empty where no controls were tried."""
    if not examined.controls and not examined.without_controls:
        return {}
    floors = _Floors(setup, run_data)
    summary: dict[str, Any] = {}
    aside = {*left, VALIDATION}  # a place that is looked at while training is no test
    for view, key in OF_EVALUATED.items():
        places = {p: rows for (v, p), rows in examined.controls.items() if v == view and p not in aside}
        if places:
            summary[key] = _of_view(view, places, examined, setup, run_data, floors)
    if examined.without_controls:
        summary["left_out"] = {OF_EVALUATED.get(view, view): why for view, why in examined.without_controls.items()}
    return summary


def _of_view(
    view: str, places: Mapping[str, Rows], examined: Examination, setup: Setup, run_data: RunData, floors: "_Floors"
) -> dict[str, Any]:
    tested = {place: examined.results[view, place, place][1] for place in places}
    right = {place: _scores(rows) for place, rows in tested.items()}
    shown: dict[str, dict[str, np.ndarray]] = {}
    for name in dict.fromkeys(chain.from_iterable(places.values())):
        shown[name] = {place: _scores(rows[name]) for place, rows in places.items() if name in rows}
    blind = {name: floors.scores(name, view, places) for name in ("constant", "words")}
    blind = {name: scores for name, scores in blind.items() if scores}
    permuted = {name: scores for name, scores in shown.items() if name.startswith(PERMUTED)}
    decisive = _decisive(run_data, places)
    if all("probabilities" in rows for rows in tested.values()):
        constant = torch.cat([floors.frequencies(view, p).float().expand(len(right[p]), -1) for p in places])
        judged = _over_classes(tested, places, constant, setup, decisive)
    else:
        judged = verdict(right, permuted, blind, decisive)
    columns = {"right": right, **shown, **blind}
    summary: dict[str, Any] = {}
    for name, column in columns.items():
        summary[name] = {place: float(scores.mean()) for place, scores in column.items()}
    summary["means"] = {name: mean_over_places(column) for name, column in columns.items()}
    summary |= {"p": dict(judged.p), "passed": judged.passed, "reasons": [*judged.reasons]}
    if isinstance(judged, LabelVerdict):
        summary["C-AP"] = dict(judged.values)
    return summary


def _scores(tensors: Mapping[str, Tensor]) -> np.ndarray:
    return tensors["correct"].double().numpy()


def _decisive(run_data: RunData, places: Iterable[str]) -> list[str]:
    """Pictures, where there are pictures and at most texts beside them; else all modalities that are permuted."""
    tables = [_table(run_data, place) for place in places]
    pictures = any(table.images is not None or table.regions is not None for table in tables)
    sets = chain.from_iterable(table.sets() for table in tables)
    return [f"{PERMUTED}image"] if pictures and set(chain.from_iterable(sets)) <= {"image", "text"} else []


def _table(run_data: RunData, place: str) -> Table:
    return (run_data.unseen if place in run_data.unseen else run_data.clients)[place].tables[2]


def _over_classes(
    tested: Rows,
    places: Mapping[str, Rows],
    constant: Tensor,
    setup: Setup,
    decisive: Sequence[str],
) -> LabelVerdict:
    """C-AP of all places' examples together, under every condition that all of them have, and what follows from it."""
    undefined = task_spec(setup.task).undefined
    truth = torch.cat([rows["labels"] for rows in tested.values()])
    right = torch.cat([rows["probabilities"] for rows in tested.values()])
    conditions: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(chain.from_iterable(places.values())):
        if all(name in rows for rows in places.values()):
            conditions[name] = torch.cat([rows[name]["probabilities"] for rows in places.values()]).numpy()
    conditions["constant"] = constant.numpy()
    return label_verdict(right.numpy(), conditions, truth.numpy(), undefined, decisive)


class _Floors:
    """Scores of answers that see no picture, on the test examples of places; what was learned once is kept."""

    def __init__(self, setup: Setup, run_data: RunData) -> None:
        self._setup, self._materials, self._dataset = setup, run_data, run_data.dataset
        dataset = run_data.dataset
        # Texts that are one of several inputs are no questions about the others: they tell the answer themselves.
        self._words = dataset.kind != "labels" and not is_modal(dataset)
        self._alike = not dataset.answer_sets and not dataset.tasks
        self._learned: dict[tuple[str, str], Any] = {}

    def scores(self, name: str, view: str, places: Iterable[str]) -> dict[str, np.ndarray]:
        """Place -> scores of "constant" or "words"; nothing where there is no such answer."""
        dataset = self._dataset
        if dataset.kind == "captions" or (name == "words" and not self._words):
            return {}
        if dataset.kind == "labels":
            return {place: self._score(place, self.frequencies(view, place).logit().expand) for place in places}
        scores: dict[str, np.ndarray] = {}
        for place in places:
            examples = dataset.unseen[place] if place in dataset.unseen else dataset.clients[place].test
            answers = self._answers(name, view, place, examples)
            label_of = {answer: label for label, answer in enumerate(dataset.answer_set(place))}
            task = self._setup.task_of(place)
            width = task.answers if isinstance(task, HasAnswers) else len(label_of)
            unlisted = isinstance(task, HasCandidates) and task.candidates is not None and not len(task.candidates)
            if answers is None or unlisted or not all(answer in label_of for answer in answers):
                continue
            labels = torch.tensor([label_of[answer] for answer in answers], dtype=torch.int64)
            rows = torch.nn.functional.one_hot(labels, width).float()
            scores[place] = self._score(place, lambda count, _, rows=rows: rows)
        return scores

    def frequencies(self, view: str, place: str) -> Tensor:
        """The share of training examples with each label, float64 (C,), within (0, 1)."""
        dataset, owner = self._dataset, self._owner(view, place)
        if ("labels", owner) not in self._learned:
            counts, total = np.zeros(len(dataset.answers)), 0
            for split in [dataset.clients[owner]] if owner else dataset.clients.values():
                counts, total = counts + label_numbers([split.train]), total + len(split.train)
            self._learned["labels", owner] = torch.from_numpy((counts + 0.5) / (total + 1))
        return self._learned["labels", owner]

    def _owner(self, view: str, place: str) -> str:
        """Clients whose training data count; empty for all."""
        return place if place in self._dataset.clients and (view == "personal" or not self._alike) else ""

    def _answers(self, name: str, view: str, place: str, examples: Examples) -> list[str] | None:
        dataset, owner = self._dataset, self._owner(view, place)
        parts = [dataset.clients[owner].train] if owner else [split.train for split in dataset.clients.values()]
        if not any(map(len, parts)):
            return None
        if (name, owner) not in self._learned and name == "constant":
            self._learned[name, owner] = AnswerTable(parts).majority
        elif (name, owner) not in self._learned:
            questions = list(chain.from_iterable(examples.questions for examples in parts))
            answers = list(chain.from_iterable(examples.answers for examples in parts))
            self._learned[name, owner] = WordAnswers(questions, answers)
        learned = self._learned[name, owner]
        if isinstance(learned, WordAnswers):
            return learned(examples.questions, dataset.answer_set(place))
        return [learned] * len(examples)

    def _score(self, place: str, logits: Any) -> np.ndarray:
        """Scores of answers given as logits: a function of the number of rows and -1 that returns all rows' (N, C)."""
        task, table = self._setup.task_of(place), _table(self._materials, place)
        bare = replace(table, images=None, regions=None)
        rows, scores = logits(len(table), -1), list[Tensor]()
        for batch in bare.batches(_ROWS):
            given = rows[batch["index"]]
            scores.append(task.predictions(Output(given.float(), given.new_zeros(len(given), 1)), batch))
        return torch.cat(scores).double().numpy() if scores else np.zeros(0)
