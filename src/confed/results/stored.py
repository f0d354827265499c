"""Records of a run: every number that it measured, by view, and their files.

A finished run has ``records/<view>.safetensors`` with a tensor per column, in up to four tables:

| table | a row is | columns |
|---|---|---|
| ``examples`` | a test example | :data:`EXAMPLE_COLUMNS`, and ``measure/NAME`` of what measures keep of each |
| ``tests`` | a final model at a place | every metric of the task, ``owner`` of the model, ``weight`` (test examples) |
| ``rounds`` | a round and a place | every metric of the task on validation data; of ``training`` losses and bytes |
| ``means`` | a round | metrics whose columns had no room in ``rounds``, as means over the places |

Places are positions (int32) in the list of names, which lies beside the columns as JSON; so do the facts of rounds that
are no columns (errors, say), in ``training.safetensors``, which is written last: without it ``metrics.jsonl`` is read
instead.
Whole numbers are int32 or int64, -1 where there is none; other numbers are float64 up to :data:`EXACT` of them in a
table, then float32, NaN where there is none. A table has room for :data:`MOST` numbers: of 100,000 clients and 20
rounds four columns, and of what a task measures besides the mean over the clients in each round.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from confed.federation.checkpoint import write_atomically
from confed.federation.measure import KEPT
from confed.federation.reading import FAULTS, check_header
from confed.results.run_files import lines_of
from confed.results.views import EVALUATED

EXACT, MOST = 1_000_000, 8_400_000  # numbers of a table up to which they are exact, and numbers of a table at most
ORDERED = 1000  # places of a round that decide the order of columns

TRAINING, POOLED = "training", "pooled"
"""Views of what is no test: losses and bytes by round and client, metrics of all places together by round and view."""

EXAMPLE_COLUMNS = ("name", "truth", "answer", "correct", "prediction", "probabilities", "labels")
"""Hash of the example's name, position and hash of its right answer, headline score, what the model said; multi-label
runs keep the probability of every label."""

NONE = -1
"""What stands where a column of whole numbers has no value, as where sites do not say how many examples they have."""

_TRAINED = ("bytes_down", "bytes_up", "loss", "staleness")
_SPENT = "update_privacy"

Columns = Mapping[str, np.ndarray]
Places = Mapping[str, Columns]  # place -> column -> a row per example


@dataclass(frozen=True)
class Values:
    """Numbers by round and place, a row for each pair."""

    names: tuple[str, ...]  # the places
    rounds: np.ndarray  # int32, shape (N,)
    places: np.ndarray  # positions in `names`, int32, shape (N,)
    columns: Columns  # measure -> shape (N,)
    means: "Values | None" = None  # measures that have no column here, by round

    def by_round(self, measure: str) -> dict[int, dict[str, float]]:
        """Round -> place -> value, of finite ones."""
        column = self.columns.get(measure)
        if column is None:
            return {} if self.means is None else self.means.by_round(measure)
        there = np.isfinite(column) if column.dtype.kind == "f" else column != NONE
        values: dict[int, dict[str, float]] = {}
        numbers = column[there].astype(np.float64).tolist()
        rows = zip(self.rounds[there].tolist(), self.places[there].tolist(), numbers, strict=True)
        for round_of, place, value in rows:
            values.setdefault(round_of, {})[self.names[place]] = value
        return values

    def measured(self) -> dict[int, dict[str, dict[str, float]]]:
        """Round -> place -> measure -> value."""
        values: dict[int, dict[str, dict[str, float]]] = {}
        for measure in (*self.columns, *(() if self.means is None else self.means.columns)):
            for round_of, places in self.by_round(measure).items():
                for place, value in places.items():
                    values.setdefault(round_of, {}).setdefault(place, {})[measure] = value
        return values


@dataclass(frozen=True)
class FinalResult:
    """A final model on the test data of a place; ``weight`` counts the examples."""

    owner: str
    place: str
    weight: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Records:
    """What a run measured, without its test examples (:func:`read_examples`)."""

    # Facts of every round: "event" ("round", or "finish" for what follows the last one), "round", "errors", "digest"
    # of its line in the history, and what else is no number of a client.
    rounds: tuple[Mapping[str, Any], ...] = ()
    # Facts of every evaluation: "round", "split", "digest", "unanswered".
    evaluations: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, Values] = field(default_factory=dict[str, Values])  # view -> its numbers by round
    # View -> the final models on test data, also on that of other clients; empty for older runs.
    tests: Mapping[str, Sequence[FinalResult]] = field(default_factory=dict[str, Any])

    @property
    def reached(self) -> int:
        """The last round that is done."""
        return max((int(facts["round"]) for facts in self.rounds if facts["event"] == "round"), default=0)

    def by_round(self, view: str, measure: str) -> dict[int, dict[str, float]]:
        """Round -> place -> value."""
        return self.values[view].by_round(measure) if view in self.values else {}

    def measured(self, view: str) -> dict[int, dict[str, dict[str, float]]]:
        """Round -> place -> measure -> value."""
        return self.values[view].measured() if view in self.values else {}


# Records of a history's lines ---------------------------------------------------------------------------------


class _Table:
    """What was measured of a view, round by round."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # place -> its position
        self.blocks: list[tuple[int, np.ndarray, Columns]] = []  # round, positions of places, a value for each
        self.orders: set[tuple[str, ...]] = set()  # in which places have measures

    def add(self, round_of: int, columns: Mapping[str, Mapping[str, Any]], places: Iterable[str]) -> None:
        names, values = list(places), dict[str, np.ndarray]()
        for measure, of_places in columns.items():
            numbers = map(of_places.get, names)  # of a damaged line some are none
            numbers = [value if isinstance(value, int | float) else np.nan for value in numbers]
            values[measure] = np.array(numbers, np.float64)
        self.blocks.append((round_of, _codes(map(str, names), self.numbers), values))

    def values(self) -> Values:
        rounds, places, of_rounds = zip(*self.blocks, strict=True)
        sizes = list(map(len, places))
        before = {measure: set[str]() for measure in chain.from_iterable(of_rounds)}
        for order in sorted(self.orders):
            for earlier, later in pairwise(order):
                before[later].add(earlier)
        try:  # an order that is that of every place, if there is one
            measures = [*TopologicalSorter(before).static_order()]
        except CycleError:
            measures = [*before]
        columns: dict[str, np.ndarray] = {}
        for measure in measures:
            parts = [of.get(measure, np.full(size, np.nan)) for of, size in zip(of_rounds, sizes, strict=True)]
            columns[measure] = np.concatenate(parts)
        of_rows = np.repeat(np.array(rounds, np.int32), sizes)
        return Values(tuple(self.numbers), of_rows, np.concatenate(places), columns)


class Recorder:
    """Records of a run under way, which grow line by line of its history."""

    def __init__(self) -> None:
        self._rounds: list[Mapping[str, Any]] = []
        self._evaluations: list[Mapping[str, Any]] = []
        self._tables: dict[str, _Table] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        if line.get("event") in ("round", "finish"):
            self._rounds.append(_facts(line, _TRAINED))
            columns = {key: line[key] for key in _TRAINED if isinstance(line.get(key), Mapping)}
            if epsilon := (line.get(_SPENT) or {}).get("epsilon"):
                columns["epsilon"] = epsilon
            if clients := dict.fromkeys(chain.from_iterable(columns.values())):
                self._tables.setdefault(TRAINING, _Table()).add(int(line["round"]), columns, clients)
        elif line.get("event") == "evaluation":
            self._evaluations.append(_facts(line, (*EVALUATED, POOLED)))
            for view in (*EVALUATED, POOLED):
                if places := line.get(view):
                    table = self._tables.setdefault(view, _Table())
                    table.add(int(line["round"]), _by_measure(places), places)
                    table.orders.update(map(tuple, islice(places.values(), ORDERED)))

    def records(self, tests: Mapping[str, Sequence[FinalResult]] | None = None) -> Records:
        """What was recorded so far, with the results of final models where there are any."""
        values = {view: table.values() for view, table in self._tables.items()}
        return Records(tuple(self._rounds), tuple(self._evaluations), values, tests or {})


def records_of(lines: Iterable[Mapping[str, Any]]) -> Records:
    """Records of a history."""
    recorder = Recorder()
    for line in lines:
        recorder.add(line)
    return recorder.records()


def _by_measure(places: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Measure -> place -> value."""
    columns: dict[str, dict[str, Any]] = {}
    for place, values in places.items():
        for measure, value in values.items():
            columns.setdefault(measure, {})[place] = value
    return columns


def _facts(line: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """A line without its columns."""
    return {key: value for key, value in line.items() if key not in {*columns, _SPENT}}


# Files --------------------------------------------------------------------------------------------------------


def records_file(folder: Path, view: str) -> Path:
    """The file of a view's records."""
    return folder / "records" / f"{view}.safetensors"


def write_records(folder: Path, records: Records, examples: Mapping[str, Places]) -> None:
    """Files of all views, that of training last; ``examples``: view -> its test examples."""
    records_file(folder, TRAINING).parent.mkdir(parents=True, exist_ok=True)
    views = dict.fromkeys([*records.values, *examples, *records.tests])
    for view in [*(view for view in views if view != TRAINING), TRAINING]:
        names: dict[str, int] = {}
        tensors: dict[str, np.ndarray] = {}
        values = records.values.get(view)
        if values is not None:
            names |= {name: number for number, name in enumerate(values.names)}
            tensors |= _at_rest(values)
        tensors |= {f"examples/{name}": column for name, column in _stacked(examples.get(view, {}), names).items()}
        tensors |= {f"tests{name}": column for name, column in _tests(records.tests.get(view, ()), names).items()}
        texts: dict[str, Any] = {"names": list(names), "columns": [] if values is None else list(values.columns)}
        if view == TRAINING:
            texts["facts"] = {"rounds": records.rounds, "evaluations": records.evaluations}
        for name, content in texts.items():
            tensors[name] = np.frombuffer(json.dumps(content, ensure_ascii=False).encode(), np.uint8)
        write_atomically(records_file(folder, view), save(tensors, {"format": "1"}))


def _codes(texts: Iterable[str], names: dict[str, int]) -> np.ndarray:
    return np.array([names.setdefault(text, len(names)) for text in texts], np.int32)


def _tests(rows: Sequence[FinalResult], names: dict[str, int]) -> dict[str, np.ndarray]:
    if not rows:
        return {}
    columns: dict[str, np.ndarray] = {":weight": np.array([row.weight for row in rows], np.int32)}
    columns |= {":owner": _codes([row.owner for row in rows], names)}
    columns |= {":place": _codes([row.place for row in rows], names)}
    for name in dict.fromkeys(chain.from_iterable(row.metrics for row in rows)):
        columns[f"/{name}"] = np.array([row.metrics.get(name, np.nan) for row in rows], np.float64)
    return columns


def _at_rest(values: Values) -> dict[str, np.ndarray]:
    rows = len(values.rounds)
    room = max(1, MOST // max(rows, 1))
    kept = dict(list(values.columns.items())[:room])
    exact = rows * len(kept) <= EXACT
    measured, counts = np.unique(values.rounds, return_counts=True)
    tensors = {"rounds:round": measured.astype(np.int32), "rounds:rows": counts.astype(np.int32)}
    places = values.places.reshape(len(measured), -1) if rows == len(measured) * counts[0] else None
    # Rounds with the same places in the same order have them once.
    same = places is not None and bool((places == places[0]).all()) and len(set(counts.tolist())) == 1
    tensors["rounds:place"] = values.places[: counts[0]] if same else values.places
    tensors |= {f"rounds/{name}": _narrow(column, exact) for name, column in kept.items()}
    for name, column in list(values.columns.items())[room:]:
        there = np.isfinite(column)
        totals = np.bincount(np.searchsorted(measured, values.rounds[there]), column[there], len(measured))
        sizes = np.bincount(np.searchsorted(measured, values.rounds[there]), minlength=len(measured))
        tensors[f"means/{name}"] = np.where(sizes > 0, totals / np.maximum(sizes, 1), np.nan)
    return tensors


def _narrow(column: np.ndarray, exact: bool) -> np.ndarray:
    """A column of whole numbers as these, another in the precision that there is room for."""
    finite = np.isfinite(column)
    if column.dtype.kind == "f" and finite.any() and (column[finite] >= 0).all() and (column[finite] % 1 == 0).all():
        whole = np.where(finite, column, NONE)
        if whole.max() >= 2**31:
            return whole.astype(np.int64)
        return whole.astype(np.int32)
    return column if exact else column.astype(np.float32)


def _stacked(places: Places, names: dict[str, int]) -> dict[str, np.ndarray]:
    """Columns over the examples of all places, where the first says of which place each is."""
    places = {place: columns for place, columns in places.items() if len(columns.get("correct", ()))}
    counts = [len(columns["correct"]) for columns in places.values()]
    if not counts:
        return {}
    stacked = {"place": np.repeat(_codes(places, names), counts)}
    for name in dict.fromkeys(chain.from_iterable(places.values())):
        present = [columns[name] for columns in places.values() if name in columns]
        widest = max(present, key=lambda column: column.shape[1:])
        blocks: list[np.ndarray] = []
        for columns, count in zip(places.values(), counts, strict=True):
            empty = {"i": NONE, "u": 0}.get(widest.dtype.kind, np.nan)
            block = np.full((count, *widest.shape[1:]), empty, widest.dtype)
            if name in columns:
                column = columns[name] if columns[name].ndim == widest.ndim else columns[name][:, None]
                block[tuple(map(slice, column.shape))] = column
            blocks.append(block)
        stacked[name] = np.concatenate(blocks)
    return stacked


def read_records(folder: Path) -> Records:
    """Records of a run: from their files where it is finished, else from its history."""
    if records_file(folder, TRAINING).is_file():
        try:
            values: dict[str, Values] = {}
            tests: dict[str, list[FinalResult]] = {}
            facts: Mapping[str, Any] = {}
            for view in (*EVALUATED, POOLED, TRAINING):
                if records_file(folder, view).is_file():
                    tensors = _tensors(folder, view, ("rounds", "means", "tests", "names", "columns", "facts"))
                    facts = _json(tensors["facts"]) if "facts" in tensors else facts
                    if "rounds:round" in tensors:
                        values[view] = _from_rest(tensors)
                    if "tests:place" in tensors:
                        tests[view] = list(_tested(tensors))
            return Records(tuple(facts["rounds"]), tuple(facts["evaluations"]), values, tests)
        except (OSError, SafetensorError, *FAULTS):  # a damaged file: the history has the same
            pass
    return records_of(lines_of(folder / "metrics.jsonl"))


def _from_rest(tensors: Columns) -> Values:
    names = tuple(map(str, _json(tensors["names"])))
    measured, counts, places = (tensors[f"rounds:{name}"] for name in ("round", "rows", "place"))
    if len(places) < counts.sum():
        places = np.tile(places, len(measured))
    if len(places) != counts.sum() or (len(places) and not 0 <= places.min() <= places.max() < len(names)):
        raise ValueError("places must be positions in the list of names, a row for each")
    rounds = np.repeat(measured, counts)
    order = list(map(str, _json(tensors["columns"])))
    columns = {name: tensors[f"rounds/{name}"] for name in order if f"rounds/{name}" in tensors}
    means = {name: tensors[f"means/{name}"] for name in order if f"means/{name}" in tensors}
    if any(len(column) != len(rounds) for column in columns.values()):
        raise ValueError("every column must have as many rows as there are rounds and places")
    whose = tuple(f"mean of {count} places" for count in counts.tolist())
    over = Values(whose, measured, np.arange(len(measured)), means)
    return Values(names, rounds, places, columns, over if means else None)


def _tested(tensors: Columns) -> Iterator[FinalResult]:
    names = _json(tensors["names"])
    metrics = {name.removeprefix("tests/"): tensors[name] for name in tensors if name.startswith("tests/")}
    codes = zip(*(tensors[f"tests:{name}"].tolist() for name in ("owner", "place", "weight")), strict=True)
    for row, (owner, place, weight) in enumerate(codes):
        values = {name: float(column[row]) for name, column in metrics.items() if not np.isnan(column[row])}
        yield FinalResult(names[owner], names[place], weight, values)


def _tensors(folder: Path, view: str, tables: tuple[str, ...]) -> dict[str, np.ndarray]:
    path = records_file(folder, view)
    check_header(path)
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith(tables)}  # noqa: SIM118


def _json(tensor: np.ndarray) -> Any:
    return json.loads(tensor.tobytes().decode())


# Test examples ------------------------------------------------------------------------------------------------


def read_examples(folder: Path, view: str) -> dict[str, dict[str, np.ndarray]]:
    """Place -> column -> a row per test example of one view; empty where they are missing or cannot be read."""
    try:
        if not records_file(folder, TRAINING).is_file():
            path = folder / "predictions.safetensors"
            if path.is_file():
                check_header(path)
            return examples_of_predictions(load_file(path) if path.is_file() else {}, view)
        if not records_file(folder, view).is_file():
            return {}
        tensors = _tensors(folder, view, ("examples/", "names"))
        names = _json(tensors.pop("names"))
        columns = {name.removeprefix("examples/"): column for name, column in tensors.items()}
        places: dict[str, dict[str, np.ndarray]] = {}
        if "place" not in columns:
            return {}
        codes = columns.pop("place")
        for code in np.unique(codes):
            rows = codes == code
            place_columns = {name: column[rows] for name, column in columns.items()}
            places[names[code]] = {name: column for name, column in place_columns.items() if not _is_empty(column)}
        return places
    except (OSError, SafetensorError):
        return {}


def _is_empty(column: np.ndarray) -> bool:
    """Whether the examples of a place have none of it, where those of other places have."""
    return bool(np.isnan(column).all() if column.dtype.kind == "f" else (column == NONE).all())


def examples_of_predictions(arrays: Columns, view: str) -> dict[str, dict[str, np.ndarray]]:
    """The same of the content of ``predictions.safetensors``."""
    places: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        place, _, name = key.removeprefix(f"{view}/").rpartition("/")
        if f"/{KEPT}" in key:
            place, name = key.removeprefix(f"{view}/").split(f"/{KEPT}", 1)
            name = f"{KEPT}{name}"
        if key.startswith(f"{view}/"):
            places.setdefault(place, {})[name] = array
    for place, columns in places.items():
        for name, stored in (("name", "names"), ("truth", "truth"), ("answer", "answers"), ("labels", "labels")):
            if f"{stored}/{place}" in arrays:
                columns[name] = arrays[f"{stored}/{place}"]
    return places
