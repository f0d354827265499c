"""Final evaluation of a run's models on all test examples, also with subsets of the modalities.

With subsets a model is tried at home only, with every set of modalities that some of the test examples there have and
that its owner's data taught it to read. Examples that lack one of a set's modalities have no part in that set's number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from confed.data.controls import PERMUTED, WordAnswers, controls_of
from confed.data.examples import Examples, FederatedDataset, TableData
from confed.data.federate import AnswerTable, label_numbers
from confed.data.modalities import is_modal
from confed.data.table import Table
from confed.engines.local import Setup, Simulation
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_tallies
from confed.federation.measure import values_of
from confed.federation.messages import Message
from confed.federation.ownership import MODALITIES, modalities_of
from confed.federation.params import Scalar
from confed.federation.protocols import Counting, Output
from confed.federation.specs import HasAnswers, HasCandidates, task_spec
from confed.federation.state import ServerState
from confed.metrics.controls import LabelVerdict, label_verdict, mean_over_places, verdict
from confed.metrics.multilabel import (
    Undefined,
    class_average_precision,
    flair_metrics,
    in_order,
    label_counts,
    mean_over_classes,
    overall_average_precision,
)
from confed.metrics.scores import summarise
from confed.results.summary import VALIDATION
from confed.results.views import OF_EVALUATED
from confed.runs.encode import RunData
from confed.system import format as formats
from confed.system.events import Progress, RunProgress, ignore

MATRIX_LIMIT = 20  # up to this many clients every personal model is tried on every client's data; beyond, at home only
MOST = 1000  # clients whose test examples are looked at; of more, so many that are spread evenly

CONTROLLED = 100
"""Places of a view on which models are tried with permuted and blank inputs; of more, so many that are spread evenly.

Each takes as long as the place's own examination, once per modality and once for blank pictures.
"""

LISTED = 50  # clients that a note names
Set = tuple[str, ...]  # modalities, in the fixed order

Key = tuple[str, str, str]
"""(view: "personal", "global" or "unseen"; the model's owner; the place whose data it is tried on)."""

Job = tuple[Key, str, Mapping[str, Tensor], Mapping[str, Scalar]]
"""What is tried where, under which condition, the model's tensors, and what of the examples it is shown."""

Item = TypeVar("Item")


@dataclass
class Examination:
    """Results of the final evaluation."""

    # Metric values, and the per-example tensors "correct" and "prediction".
    results: dict[Key, tuple[dict[str, float], Mapping[str, Tensor]]] = field(default_factory=dict)
    # (view, place) -> set of modalities, such as "image+text" -> metric values where nothing else of the place's
    # examples is shown, and how many examples have all of these; of models at home only.
    subsets: dict[tuple[str, str], dict[str, tuple[dict[str, float], int]]] = field(default_factory=dict)
    # (view, place) -> control condition (confed.data.controls) -> the per-example tensors under it, likewise.
    controls: dict[tuple[str, str], dict[str, Mapping[str, Tensor]]] = field(default_factory=dict)
    without_controls: dict[str, str] = field(default_factory=dict)  # view, or "all" -> why no controls were tried
    personal: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)  # client -> trained tensors of its model
    notes: list[str] = field(default_factory=list)  # what a reader of the numbers must know


def evenly(items: Sequence[Item], count: int) -> Sequence[Item]:
    """So many of the items, spread evenly over them; all where there are no more."""
    return [items[number * len(items) // count] for number in range(count)] if len(items) > count else items


def examine(
    simulation: Simulation,
    servers: Mapping[str, ServerState],
    run_data: RunData,
    progress: Progress = ignore,
    subsets: bool = False,
    controls: bool = False,
) -> Examination:
    """Evaluation of the final models on all test examples; ``subsets``: with every set of modalities, too."""
    setup, examined = simulation.setup, Examination()
    algorithm = setup.algorithm
    seen = [name for name, data in run_data.clients.items() if len(data.tables[2])]
    unseen = [name for name, data in run_data.unseen.items() if name in setup.observers and len(data.tables[2])]
    if len(seen) < len(run_data.clients):
        names = sorted(set(run_data.clients) - set(seen))
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        examined.notes.append(f"left out, for want of test examples: {names[:LISTED]}{more}")
    if len(seen) > MOST:
        examined.notes.append(f"{len(seen)} clients have test examples; every {len(seen) / MOST:.3g}th is examined")
    seen = evenly(seen, MOST)
    wanted = set(seen)
    infos = {info.id: info for info in map(setup.population.info, range(len(setup.population))) if info.id in wanted}
    common = _models(examined, simulation, servers, seen, unseen, infos)
    several = not algorithm.traits.centralised and algorithm.traits.has_personal
    jobs = _personal_jobs(examined, setup, run_data, seen, infos, several)
    if algorithm.global_model != "none":
        jobs += [(("global", name, name), "", common[name], {}) for name in seen]
    if algorithm.global_model == "alone":
        jobs += [(("unseen", name, name), "", common[name], {}) for name in unseen]
    elif algorithm.global_model == "with own parts" and unseen:
        examined.notes.append(
            "the global model answers with parts that each client keeps to itself, so it is not tried in unseen places"
        )
    measured = {"measures": True} if setup.measures else {}
    trials = [(key, "", tensors, {**shown, **measured}) for key, _, tensors, shown in jobs]
    for key, _, message in _tried(simulation, trials, progress):
        values = summarise(read_tallies(message.scalars, "examined")) | values_of(setup.measures, message.tensors)
        examined.results[key] = values, message.tensors
    at_home = [job for job in jobs if job[0][1] == job[0][2] and (several or job[0][0] != "personal")]
    if controls and not several:
        examined.without_controls["personal"] = (
            "all data are in one place: the one model is tried as the global one"
            if algorithm.traits.centralised
            else "the method makes no personal models: the global model is everybody's"
        )
    if controls:
        _with_controls(examined, simulation, at_home, run_data, progress)
    if subsets and len(seen) <= MATRIX_LIMIT:
        _with_less(examined, simulation, at_home, run_data, progress)
    return examined


def _personal_jobs(
    examined: Examination, setup: Setup, run_data: RunData, seen: Sequence[str], infos: Mapping[str, ClientInfo],
    several: bool,
) -> list[Job]:  # fmt: skip
    """Personal models on data of every client, or at home only."""
    same = not run_data.dataset.answer_sets and not run_data.dataset.tasks
    # Every example's scores are kept of a task that counts: for each model at home, not for each pair.
    everywhere = len(seen) <= MATRIX_LIMIT and several and same and not isinstance(setup.task, Counting)
    at_home = several and not everywhere
    examined.notes += _on_personal(setup.algorithm, same, at_home, len(seen) > MATRIX_LIMIT)
    partly, jobs = False, list[Job]()
    for owner, tensors in examined.personal.items():
        for place in seen if everywhere else [owner]:
            shown = restriction(run_data.clients[place], infos[owner].modalities) if place != owner else {}
            partly |= bool(shown) or shown is None
            jobs += [] if shown is None else [(("personal", owner, place), "", tensors, shown)]
    if partly:
        examined.notes.append("of other clients' examples a personal model is shown the modalities that its owner has")
    return jobs


def _models(
    examined: Examination,
    simulation: Simulation,
    servers: Mapping[str, ServerState],
    seen: Sequence[str],
    unseen: Sequence[str],
    infos: Mapping[str, ClientInfo],
) -> dict[str, Mapping[str, Tensor]]:
    """The global model as each place has it; the clients' own are put into ``examined.personal``."""
    setup = simulation.setup
    algorithm = setup.algorithm
    common: dict[str, Mapping[str, Tensor]] = {}
    absent: list[str] = []
    for name in [*seen, *unseen]:
        shared = simulation.shared(servers, infos[name] if name in infos else simulation.observer(name))
        state = simulation.store.load(name) if name in infos else None
        private = {} if state is None else state.tensors.get("private", {})
        beside = {} if algorithm.global_model == "alone" else private
        common[name] = {**shared, **beside, **algorithm.initial_private(shared)}
        if name not in seen:
            continue
        personal = None if state is None else state.tensors.get("personal")
        if personal is None and setup.keep_personal:
            # A client that never took part has what the server would send it, and initial values where nothing is
            # sent; a pooled run's one model serves all clients.
            absent += [] if algorithm.traits.centralised or not algorithm.traits.has_personal else [name]
            examined.personal[name] = {**private, **common[name]}
        elif personal is not None:
            examined.personal[name] = {**private, **personal}
    if absent:
        model = "shared part with untrained private values" if algorithm.global_model == "none" else "global model"
        those = formats.counted(len(absent), "client")
        examined.notes.append(f"{those} never took part; the {model} stands in for their own")
    return common


def _tried(simulation: Simulation, jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Key, str, Message]]:
    """What each job shows of which model, under which condition, with progress."""
    setup = simulation.setup
    trials = [(key[2], tensors, shown) for key, _, tensors, shown in jobs]
    for (key, condition, _, _), message in zip(jobs, simulation.examine(trials, setup.rounds + 2), strict=True):
        yield key, condition, message
        with_what = f" with {condition.replace('_', ' ')}" if condition else ""
        text = f"evaluated the {key[0]} model on {key[2]}{with_what}"
        progress(RunProgress(setup.rounds, setup.rounds, "evaluated", text))


def _with_less(
    examined: Examination, simulation: Simulation, at_home: Sequence[Job], run_data: RunData, progress: Progress
) -> None:
    """Evaluation of models at their own client with every set of modalities."""
    broad = widest(run_data.unseen)
    jobs: list[Job] = []
    for key, _, tensors, _ in at_home:
        if key[0] == "unseen" and key[2] not in broad:
            continue
        sets = sets_at((run_data.unseen if key[0] == "unseen" else run_data.clients)[key[2]])
        for tried in sets_tried(sets, tensors):
            if sets == [tried]:  # all that there is: tried already
                values, rows = examined.results[key]
                examined.subsets.setdefault((key[0], key[2]), {})[written(tried)] = values, len(rows["correct"])
            else:
                shown = {"modalities": written(tried), "complete": True}
                jobs.append((key, f"{written(tried)} only", tensors, shown))
    for key, condition, message in _tried(simulation, jobs, progress):
        count = len(message.tensors["correct"])
        if count:  # what is asked for, such as a caption, is not shown
            values = summarise(read_tallies(message.scalars, "examined"))
            tried = condition.removesuffix(" only")
            examined.subsets.setdefault((key[0], key[2]), {})[tried] = values, count


def _with_controls(
    examined: Examination, simulation: Simulation, at_home: Sequence[Job], run_data: RunData, progress: Progress
) -> None:
    """Evaluation of models at their own client under control conditions."""
    jobs: list[Job] = []
    for view in dict.fromkeys(job[0][0] for job in at_home):
        of_view = [job for job in at_home if job[0][0] == view]
        if len(of_view) > CONTROLLED:
            examined.notes.append(
                f"{view}: {len(of_view)} places have test examples; every {len(of_view) / CONTROLLED:.3g}th is "
                "examined with permuted and blank inputs"
            )
        for key, _, tensors, _ in evenly(of_view, CONTROLLED):
            table = (run_data.unseen if view == "unseen" else run_data.clients)[key[2]].tables[2]
            jobs += [(key, control, tensors, {"control": control}) for control in controls_of(table)]
    names = ("correct", "probabilities") if isinstance(simulation.setup.task, Counting) else ("correct",)
    for key, control, message in _tried(simulation, jobs, progress):
        rows = {name: message.tensors[name] for name in names if name in message.tensors}
        examined.controls.setdefault((key[0], key[2]), {})[control] = rows
    if not jobs and "all" not in examined.without_controls:
        examined.without_controls["all"] = "no place has test examples with different inputs of any modality"


def _on_personal(algorithm: Algorithm, same: bool, at_home: bool, many: bool) -> list[str]:
    """Notes on personal models that are tried at home only: answers differ (not ``same``), or clients are many."""
    lines: list[str] = []
    if not algorithm.traits.has_personal:
        lines.append("the method makes no personal models: the global model is everybody's")
    if not same:
        lines.append("clients have answers or tasks of their own: personal models are tried at home only")
    elif at_home:
        why = f"more than {MATRIX_LIMIT} clients: " if many else ""
        lines.append(f"{why}personal models are tried at home only")
    return lines


# Subsets of the modalities -------------------------------------------------------------------------------------


def written(names: Sequence[str]) -> str:
    """Name of a set of modalities, such as "image+text"."""
    return "+".join(names)


def sets_at(data: TableData) -> list[Set]:
    """The sets of modalities of a place's test examples; none where examples cannot lack any."""
    table = data.tables[2]
    return [] if table.present is None else table.sets()


def sets_tried(sets: Iterable[Set], tensors: Mapping[str, Tensor]) -> list[Set]:
    """Every set that a model can be shown of examples with the given sets, the smallest first."""
    reads, every = modalities_of(tensors), set[Set]()
    for names in sets:
        read = [name for name in names if name in reads]
        for size in range(1, len(read) + 1):
            every.update(combinations(read, size))
    return sorted(every, key=lambda names: (len(names), list(map(MODALITIES.index, names))))


def widest(places: Mapping[str, TableData]) -> list[str]:
    """The places whose test examples have sets that are part of no other place's."""
    sets_of = {name: sets_at(data) for name, data in places.items()}

    def is_within(name: str, other: str) -> bool:
        pairs = product(sets_of[name], sets_of[other])
        covered = {names for names, others in pairs if set(names) < set(others)}
        return name != other and covered == set(sets_of[name])

    narrow = {name for name, other in product(places, places) if is_within(name, other)}
    return [name for name in places if sets_of[name] and name not in narrow]


def restriction(data: TableData, owned: Sequence[str]) -> Mapping[str, Scalar] | None:
    """Restriction of examples to a set of modalities, as scalars of the action ``examine``."""
    present = set(chain.from_iterable(sets_at(data)))
    left = [name for name in MODALITIES if name in present and name in owned]
    if not owned or len(left) == len(present):
        return {}
    return {"modalities": written(left)} if left else None


# Results under control conditions: permuted or blank inputs, and answers without input ------------------------
#
# `summary.json` has them under `controls`::
#
#     {"personal": {"right": {place: value}, "permuted_image": {...}, "blank_image": {...}, "permuted_text": {...},
#                   "constant": {...}, "words": {...},
#                   "means": {"right": mean over places, "permuted_image": ..., ...},
#                   "p": {"permuted_image": one-sided p-value, ...},
#                   "passed": true, "reasons": []},
#      "global_seen": {...}, "global_unseen": {...},
#      "left_out": {"personal": "why", ...}}
#
# Values are means of the examples' scores (the headline metric of the place's task). `constant` is the most frequent
# training answer; of multi-label data the frequency of every label; `words` answers from the question's words alone
# (`WordAnswers`). Both learn from the training data that the model had: a personal
# model's from its client's, a global one's from all. `passed` follows from
# `verdict` and from nothing else. Of multi-label data `C-AP` says besides what the mean
# average precision of all places' examples together is under each condition, and this decides
# (`label_verdict`): `p`, `passed` and `reasons` are of it.


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


# Metrics of multi-label runs over all places together, per label, and at two levels of labels -----------------
#
# Means over classes are no means over examples, so that clients' values cannot be averaged: while a run trains, counts
# are added over places (`PooledCounts`); at its end the scores of all test examples are put together
# (`summarise_labels`), and average precision is exact.
#
# Where a dataset says which coarse label each label belongs to, a coarse label is present where any of its labels is,
# and its score is the largest of theirs.


KEPT = 4_000_000
"""Entries (examples times labels, over all views) up to which a run keeps the probabilities of its test examples."""


TOGETHER = 30  # labels, the most frequent ones, of which a run counts how often any two are on one example


class PooledCounts:
    """The counts of a task, added over places while a round is evaluated."""

    def __init__(self, task: object, algorithm: Algorithm, unseen: Iterable[str]) -> None:
        self._task = task if isinstance(task, Counting) else None
        self._pooled, self._unseen = algorithm.traits.centralised, frozenset(unseen)
        self._counts: dict[str, dict[str, Tensor]] = {}

    def add(self, view: str, place: str, counts: Mapping[str, Tensor]) -> None:
        """One place's counts of one view; see :meth:`confed.engines.local.Simulation.evaluate`."""
        if view == "unseen":
            # Of a pooled run the clients look on too: to them its one model is the global one.
            view = f"unseen/{place}" if place in self._unseen else "global"
        before = self._counts.setdefault(view, {})
        for key, value in counts.items():
            before[key] = before[key] + value if key in before else value

    def values(self) -> dict[str, dict[str, float]]:
        """View ("global", "personal", "unseen/<place>") -> metrics of all its places together."""
        if self._task is None:
            return {}
        return {view: self._task.values(counts) for view, counts in sorted(self._counts.items())}

    def lines(self) -> dict[str, Any]:
        """Fields for the line of an evaluation in the history; empty if the task does not count."""
        return {"pooled": values} if (values := self.values()) else {}


def kept_probabilities(examined: Examination) -> dict[str, Tensor]:
    """Float32 probabilities and uint8 labels (N, C) for ``predictions.safetensors``; empty beyond :data:`KEPT`."""
    probabilities: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    for (view, owner, place), (_, rows) in examined.results.items():
        if owner == place and "probabilities" in rows:
            probabilities[f"{view}/{place}/probabilities"] = rows["probabilities"]
            labels[f"labels/{place}"] = rows["labels"]
    return {} if sum(map(Tensor.numel, probabilities.values())) > KEPT else probabilities | labels


def summarise_labels(
    setup: Setup, run_data: RunData, examined: Examination, left: Sequence[str] = ()
) -> dict[str, Any]:
    """The section ``multilabel`` of ``summary.json``; empty for other runs."""
    dataset, task = run_data.dataset, setup.task
    if not isinstance(task, Counting):
        return {}
    if not all("probabilities" in tensors for _, tensors in examined.results.values()):
        return {}  # single examples' scores stay at the sites of a federation across machines
    threshold, undefined = task_spec(task).threshold, task_spec(task).undefined
    summary: dict[str, Any] = {}
    classes: dict[str, list[dict[str, Any]]] = {}
    coarse_classes: dict[str, list[dict[str, Any]]] = {}
    pairs: dict[str, Any] = {}
    train = label_numbers(split.train for split in dataset.clients.values()) + np.zeros(len(dataset.answers), np.int64)
    for view, places in _views(setup, run_data, examined, left).items():
        scores, truth = _together([examined.results[key][1] for key in places])
        summary[view], classes[view] = _judged(scores, truth, dataset.answers, threshold, undefined)
        for row, count in zip(classes[view], train.tolist(), strict=True):
            row["train"] = count
        pairs = pairs or _together_counts(scores, truth, dataset.answers, train, threshold)
        summary[view]["top3"] = label_counts(scores, truth, threshold=threshold, top=3).summary(undefined)
        summary[view]["flair"] = flair_metrics(scores, truth)
        if dataset.coarse:
            names, scores, truth = _coarse(scores, truth, dataset)
            summary[view]["coarse"], coarse_classes[view] = _judged(scores, truth, names, threshold, undefined)
    if not summary:
        return {}
    first = next(iter(summary))
    clients: dict[str, dict[str, dict[str, float]]] = {view: {} for view in ("global", "personal") if view in summary}
    for (view, owner, place), (values, _) in examined.results.items():
        if view in clients and owner == place:
            clients[view][place] = {name: value for name, value in values.items() if "/" not in name}
    return {
        **summary,
        "headline": first,
        "undefined": undefined,
        "threshold": threshold,
        "per_class": classes[first],
        **({"per_class_coarse": coarse_classes[first]} if dataset.coarse else {}),
        "co_occurrence": pairs,
        "clients": clients,
    }


def _views(
    setup: Setup, run_data: RunData, examined: Examination, left: Sequence[str]
) -> dict[str, list[tuple[str, str, str]]]:
    """View -> the keys of its results, views without any left out; the first is what the run is judged by."""
    keys = [key for key in examined.results if key[1] == key[2] and len(examined.results[key][1].get("labels", ()))]
    has_personal = setup.algorithm.traits.has_personal and not setup.algorithm.traits.centralised
    unseen = [key for key in keys if key[0] == "unseen"]
    views = {
        "global": [key for key in keys if key[0] == "global" and key[2] not in left],
        "unseen": [key for key in unseen if key[2] != VALIDATION],
        "personal": [key for key in keys if key[0] == "personal" and has_personal and key[2] not in left],
    }
    views |= {f"unseen/{key[2]}": [key] for key in unseen}
    return {view: places for view, places in views.items() if places}


def _together(parts: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """All probabilities and labels (N, C); those of a single place, which may be large, are not copied."""
    if len(parts) == 1:
        return parts[0]["probabilities"], parts[0]["labels"]
    probabilities = torch.cat([tensors["probabilities"] for tensors in parts])
    return probabilities, torch.cat([tensors["labels"] for tensors in parts])


def _coarse(scores: Tensor, truth: Tensor, dataset: FederatedDataset) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Names, scores and labels of the coarse labels, in the order of their first fine ones."""
    groups: dict[str, list[int]] = {}
    for number, label in enumerate(dataset.answers):
        if label in dataset.coarse:
            groups.setdefault(dataset.coarse[label], []).append(number)
    return (
        tuple(groups),
        torch.stack([scores[:, members].amax(1) for members in groups.values()], 1),
        torch.stack([truth[:, members].amax(1) for members in groups.values()], 1),
    )


def _judged(
    scores: Tensor, truth: Tensor, names: Sequence[str], threshold: float, undefined: Undefined
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The eight metrics of one view, those over classes by both conventions; and counts and metrics of each class."""
    counts, precision = label_counts(scores, truth, threshold=threshold), class_average_precision(scores, truth)
    overall = overall_average_precision(scores, truth)

    def metrics(convention: Undefined) -> dict[str, float]:
        over_classes = mean_over_classes(precision, counts.positives, convention)
        return in_order({"C-AP": over_classes, "O-AP": overall, **counts.summary(convention)})

    other: Undefined = "omit" if undefined == "zero" else "zero"
    judged = {
        **metrics(undefined),
        "examples": len(scores),
        "classes": len(names),
        "without_positives": int((counts.positives == 0).sum()),
        other: {name: value for name, value in metrics(other).items() if name.startswith("C-")},
    }
    columns = {
        "positives": counts.positives, "predicted": counts.predicted, "true_positives": counts.true_positives,
        "AP": precision, "P": counts.precision, "R": counts.recall, "F1": counts.f1,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, *row in zip(names, *(column.tolist() for column in columns.values()), strict=True):
        values = dict(zip(columns, row, strict=True))
        # Without positives there is no AP.
        rows.append({"label": name, **values, "AP": None if np.isnan(values["AP"]) else values["AP"]})
    return judged, rows


def _together_counts(
    scores: Tensor, truth: Tensor, names: Sequence[str], train: np.ndarray, threshold: float
) -> dict[str, Any]:
    """Co-occurrence counts of labels, by the truth and by predictions."""
    order = np.argsort(-train, kind="stable")[:TOGETHER]
    chosen = torch.from_numpy(order)
    real, predicted = truth[:, chosen].double(), (scores[:, chosen] >= threshold).double()
    return {
        "labels": [names[number] for number in order.tolist()],
        "truth": (real.T @ real).long().tolist(),
        "predicted": (predicted.T @ predicted).long().tolist(),
    }
