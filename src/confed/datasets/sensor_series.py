"""Sensor time series with texts, from a folder of CSV files.

The folder holds ``examples.csv`` with a header and one row per example:

- ``id``: a name of its own, ``client``: whose it is, ``label``: the answer;
- ``split``: "train", "validation" or "test";
- ``series``: the name of a file in the folder ``series/`` without its ending, or nothing;
- ``text``: a written note, or nothing;
- ``type``, where wanted: rows of the per-type accuracy; by default what the example has, such as "text+series";

and ``series/NAME.csv``, each with a header of channels, the same for all files, and one row of numbers per step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split, presence
from confed.data.federate import floors, words
from confed.data.intake.account import Account, settled
from confed.data.intake.tables import read_cells
from confed.data.intake.values import plain_text
from confed.data.modalities import modalities_in
from confed.data.modality_names import set_names, sort_modalities
from confed.data.options import Options
from confed.data.owners import with_owner
from confed.data.partitions import hold_out
from confed.data.picture_tables import NoPictures
from confed.data.ragged import end_to_end
from confed.data.refusals import (
    Distinct,
    check_choice,
    check_distinct,
    check_finite,
    existing,
    expecting,
    left_for_clients,
    refuse,
)
from confed.data.seeding import generator
from confed.data.sounds import Series
from confed.datasets.reader import reader

_COLUMNS = ("id", "client", "split", "series", "text", "label")
_ROLES = ("train", "validation", "test")
_NAME = 200
"""Bytes of a series' name, at most: with its ending it is a file's."""


@reader("root * unseen validation standardise modalities seed", validation=0.1)
def sensor_series(
    options: Options, standardise: bool = True, modalities: dict[str, tuple[str, ...]] | None = None
) -> FederatedDataset:
    """Series of sensors, texts, or both, by client.

    Options:
        unseen: clients of the file who do not train; each is a place that is tested on all its examples.
        validation: of a client without validation examples, the share of its training examples that become some.
        standardise: take from every channel its mean over all clients' training steps and divide by its deviation;
            both follow from two sums per channel that clients could send.
        modalities: client -> what it owns, "text" and "series" or one of them; default: what its training and
            validation examples have.
        seed: chooses validation examples.

    Raises ``ValueError``: a file is missing or faulty (names the file and the line), an unknown client or split, no
    client who trains, or a client who owns something that its training examples do not have.
    """
    root, unseen, account = options.folder, options.unseen, Account()
    rows = list(_rows(root / "examples.csv", account))
    account.check_remains(len(rows))
    rows = with_owner(rows, [row.values["client"] for row in rows], "client")
    account = account.keep([row.values["id"] for row in rows], "no client")
    names = dict.fromkeys(row.values["client"] for row in rows)
    check_distinct("unseen", unseen, names)
    clients = left_for_clients(names, unseen)
    used = (row.values["series"] for row in rows if row.values["series"])
    numbers = {name: number for number, name in enumerate(dict.fromkeys(used))}
    series = _read_series(root, list(numbers)) if numbers else None
    parts = _parts(rows, clients, options)
    if series is not None and standardise:
        training = chain.from_iterable(parts[name]["train"] for name in clients)
        steps = [numbers[row.values["series"]] for row in training if row.values["series"]]
        series = _standardised(series, steps)
    splits: dict[str, Split] = {}
    for name in clients:
        splits[name] = Split(*(_examples(parts[name][role], series, numbers) for role in _ROLES))
    for name, split in splits.items():
        if not len(split.train):
            refuse(root / "examples.csv", f"a training example of client {name!r}", found="none")
    places: dict[str, Examples] = {}
    for name in unseen:
        places[name] = _examples(list(chain.from_iterable(parts[name].values())), series, numbers)
    declared = modalities or {}
    check_distinct("data.modalities", list(declared), splits)
    owned = {
        name: sort_modalities(declared[name], f"data.modalities.{name}")
        if name in declared
        else modalities_in([split.train, split.validation])
        for name, split in splits.items()
    }
    texts = [row.values["text"] for row in rows]
    channels = ", ".join(series.channels) if series is not None else "none"
    facts = {"origin": f"{root}", "channels": channels, **floors(splits)}
    answers = tuple(sorted({row.values["label"] for row in rows}))
    dataset = FederatedDataset("sensor_series", answers, splits, places, words(texts), facts, modalities=owned)
    return settled(dataset, account, "of no client")


@dataclass(frozen=True)
class _Row:
    where: str
    values: Mapping[str, str]


def _parts(rows: Sequence[_Row], clients: Sequence[str], options: Options) -> dict[str, dict[str, list[_Row]]]:
    """Client or place -> role -> its rows; of clients without validation rows, some training rows become some."""
    parts: dict[str, dict[str, list[_Row]]] = {}
    for row in rows:
        roles = parts.setdefault(row.values["client"], {role: [] for role in _ROLES})
        roles[row.values["split"]].append(row)
    for number, name in enumerate(clients):
        train = parts[name]["train"]
        if train and not parts[name]["validation"]:
            rng = generator(options.seed, "validation", str(number))
            held = hold_out(np.arange(len(train)), options.validation, rng).tolist()
            parts[name]["validation"] = [row for row, chosen in zip(train, held, strict=True) if chosen]
            parts[name]["train"] = [row for row, chosen in zip(train, held, strict=True) if not chosen]
    return parts


def _rows(file: Path, account: Account) -> Iterator[_Row]:
    """The rows of ``examples.csv``, checked; those without a label are left out."""
    distinct = Distinct("id")
    rows = list(_csv(file, _COLUMNS))
    account.rows[str(file)] = len(rows)
    account.note_encoding(file)
    for number, values in rows:
        where = f"{file}, row {number}"
        if not values["label"]:
            account.leave("no label", where)
            continue
        if not values["id"] or not (values["series"] or values["text"]):
            refuse(where, "an id, and a series or a text", values)
        distinct.add(values["id"], file, number)
        check_choice(f"{where}: split", values["split"], _ROLES)
        if Path(values["series"]).name != values["series"] or len(values["series"].encode()) > _NAME:
            refuse(where, f"a name inside series/ of at most {_NAME} bytes", values["series"])
        account.used[values["id"]] = where
        yield _Row(where, values)


def _csv(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Numbers and cells of the rows of a table that has the columns."""
    rows, _ = read_cells(existing(file), blank=True)
    for number, row in rows:
        if not set(columns) <= row.keys():
            refuse(file, f"the columns {', '.join(columns)}", found=", ".join(row))
        yield number, {name: plain_text(value) or "" for name, value in row.items()}


def _read_series(root: Path, names: Sequence[str]) -> Series:
    """The named files, end to end."""
    channels: tuple[str, ...] = ()
    parts: list[np.ndarray] = []
    for name in names:
        file = root / "series" / f"{name}.csv"
        steps: list[list[float]] = []
        header: tuple[str, ...] = ()
        for number, row in _csv(file, ()):
            header = tuple(row)
            with expecting(f"{file}, row {number}", "numbers", ValueError):
                steps.append([float(value) for value in row.values()])
        if not steps:
            refuse(file, "a row at least", found="none")
        channels = channels or header
        if header != channels:
            refuse(file, f"the channels {', '.join(channels):.80}", found=f"{', '.join(header):.80}")
        parts.append(np.array(steps, dtype=np.float32))
        check_finite(f"{file}: values", parts[-1])
    return Series(*end_to_end(parts), channels)


def _standardised(series: Series, rows: Sequence[int]) -> Series:
    """All series by the mean and deviation of some of them."""
    if not rows:
        return series
    steps = series.take(np.array(sorted(set(rows)))).values
    return series.standardised(steps.mean(axis=0, dtype=np.float64), steps.std(axis=0, dtype=np.float64))


def _examples(rows: Sequence[_Row], series: Series | None, numbers: Mapping[str, int]) -> Examples:
    n = len(rows)
    named = [row.values["series"] for row in rows]
    text = np.array([bool(row.values["text"]) for row in rows], dtype=bool)
    present = (
        {"text": text} if series is None else {"text": text, "series": np.array([bool(s) for s in named], dtype=bool)}
    )
    examples = Examples(
        NoPictures(1),
        np.zeros(n, np.int64),
        [row.values["text"] for row in rows],
        [row.values["label"] for row in rows],
        [row.values.get("type", "") for row in rows],
        [row.values["id"] for row in rows],
        series=series,
        series_index=None if series is None else np.array([numbers.get(name, 0) for name in named], dtype=np.int64),
        present=present,
    )
    sets = set_names(presence(examples))
    return replace(examples, types=[kind or set_name for kind, set_name in zip(examples.types, sets, strict=True)])
