"""Which modalities an example has: pictures, text, sound, sensor values, or only some of them.

An example's *set* is what it has, written like "image+audio" in the fixed order of
:data:`confed.federation.ownership.MODALITIES`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from confed.data.picture_tables import NoPictures
from confed.federation.ownership import MODALITIES

if TYPE_CHECKING:
    from confed.data.examples import Examples, FederatedDataset, Split

__all__ = [
    "MODALITIES",
    "check_ownership",
    "check_presence",
    "in_order",
    "in_turns",
    "is_modal",
    "longest",
    "modalities_in",
    "modalities_of",
    "presence",
    "relabelled",
    "set_name",
    "set_names",
]

RUN = 64
"""Rows with the same set that stand behind each other, at most, where a table has several sets."""


def in_order(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Modalities in the fixed order, each once.

    Args:
        names: some of :data:`MODALITIES`.
        where: what names them, for messages.

    Raises:
        ValueError: an unknown name.
    """
    given = list(names)
    for name in given:
        if name not in MODALITIES:
            raise ValueError(f"{where} names no modality {name!r}; there are {', '.join(MODALITIES)}")
    return tuple(name for name in MODALITIES if name in given)


def set_name(row: Sequence[bool] | np.ndarray) -> str:
    """How a set is written.

    Args:
        row: whether each of :data:`MODALITIES` is there.
    """
    return "+".join(name for name, there in zip(MODALITIES, row, strict=True) if there)


def set_names(present: np.ndarray) -> list[str]:
    """How the sets of N examples are written.

    Args:
        present: bool, shape (N, 4).
    """
    kinds, inverse = np.unique(present, axis=0, return_inverse=True)
    written = [set_name(kind) for kind in kinds]
    return [written[number] for number in inverse.reshape(-1).tolist()]


def presence(examples: "Examples") -> np.ndarray:
    """What each example has, in the order of :data:`MODALITIES`, bool, shape (N, 4)."""
    tables = {
        "image": not isinstance(examples.images, NoPictures) or examples.regions is not None,
        "text": True,
        "audio": examples.sounds is not None,
        "series": examples.series is not None,
    }
    said: Mapping[str, np.ndarray] = examples.present or {}
    columns = [
        np.asarray(said[name], dtype=bool) if there and name in said else np.full(len(examples), there)
        for name, there in tables.items()
    ]
    return np.stack(columns, axis=1)


def check_presence(examples: "Examples") -> None:
    """Checks sounds, series and what is said to be there of examples.

    Raises:
        ValueError: an index without its table or the other way round, an index of another shape or out of range, an
            unknown modality, one said to be there that has no table, or an example that has nothing.
    """
    n = len(examples.questions)
    for name, table in (("sound", examples.sounds), ("series", examples.series)):
        index = examples.sound_index if name == "sound" else examples.series_index
        if (table is None) != (index is None):
            raise ValueError(f"{name}_index must be given with its table, and only then")
        if table is None or index is None:
            continue
        if index.shape != (n,):
            raise ValueError(f"{name}_index must have one entry per question ({n}), got shape {index.shape}")
        if n and not (int(index.min()) >= 0 and int(index.max()) < len(table)):
            raise ValueError(f"{name}_index must lie in [0, {len(table)}), got up to {index.max()}")
    said: Mapping[str, np.ndarray] = examples.present or {}
    in_order(said, "present")
    for name, there in said.items():
        if there.shape != (n,) or there.dtype != np.bool_:
            raise ValueError(f"present[{name!r}] must be bool of shape ({n},), got {there.dtype} {there.shape}")
    found = presence(examples)
    for column, name in enumerate(MODALITIES):
        if name in said and (strange := np.flatnonzero(said[name] & ~found[:, column])).size:
            raise ValueError(
                f"example {examples.names[int(strange[0])]!r} is said to have {name}, of which there is none"
            )
    if (nothing := np.flatnonzero(~found.any(axis=1))).size:
        first = examples.names[int(nothing[0])]
        raise ValueError(f"example {first!r} has none of {', '.join(MODALITIES)} ({nothing.size} such rows)")


def is_modal(dataset: "FederatedDataset") -> bool:
    """Whether there is more to a dataset than pictures with texts that are always there."""
    return bool(dataset.modalities) or any(
        e.sounds is not None or e.series is not None or e.present is not None for e in _parts(dataset)
    )


def longest(dataset: "FederatedDataset") -> dict[str, tuple[int, float]]:
    """The longest sound and the longest series that some example has, as far as there are any.

    Returns:
        "audio" -> its samples, and the samples of a second; "series" -> its steps, and 1.
    """
    found: dict[str, tuple[int, float]] = {}
    for examples in _parts(dataset):
        there = presence(examples)
        tables = (
            ("audio", examples.sounds, examples.sound_index, 1.0 if examples.sounds is None else examples.sounds.rate),
            ("series", examples.series, examples.series_index, 1.0),
        )
        for name, table, index, unit in tables:
            if table is None or index is None:
                continue
            lengths = np.diff(table.offsets)[index[there[:, MODALITIES.index(name)]]]
            found[name] = max(found.get(name, (0, unit)), (int(lengths.max(initial=0)), unit))
    return found


def modalities_of(dataset: "FederatedDataset") -> dict[str, tuple[str, ...]]:
    """What each client owns, in the fixed order; where the dataset does not say, what any client's examples have."""
    if dataset.modalities:
        return {name: in_order(dataset.modalities[name], f"client {name!r}") for name in dataset.clients}
    return dict.fromkeys(dataset.clients, modalities_in(e for s in dataset.clients.values() for e in _roles(s)))


def check_ownership(dataset: "FederatedDataset") -> None:
    """Checks what clients are said to own against what their examples have.

    Raises:
        ValueError: an unknown modality or client, a client of which nothing is said, a modality that a client owns
            and has no training example of, or has an example of and does not own.
    """
    if not dataset.modalities:
        return
    strange = [name for name in dataset.modalities if name not in dataset.clients]
    silent = [name for name in dataset.clients if not dataset.modalities.get(name)]
    if strange or silent:
        raise ValueError(
            f"the modalities of {dataset.name!r} must be given for each client and no other; "
            + (f"there is no client {strange[0]!r}" if strange else f"nothing is said of {silent[0]!r}")
        )
    for name, split in dataset.clients.items():
        owned = in_order(dataset.modalities[name], f"client {name!r}")
        train, everywhere = modalities_in([split.train]), modalities_in(_roles(split))
        for modality in MODALITIES:
            if modality in owned and modality not in train:
                raise ValueError(f"client {name!r} declares {modality} and has no training example with it")
            if modality not in owned and modality in everywhere:
                raise ValueError(f"client {name!r} has examples with {modality}, which it does not declare: {owned}")


def in_turns(dataset: "FederatedDataset") -> "FederatedDataset":
    """A dataset of whose examples those with one set stand together, in runs of up to :data:`RUN`.

    Batches have one set each, and evaluations take rows as they are stored, sometimes the first few only: so the sets
    take turns, as often as they occur.
    """
    clients = {
        name: replace(split, train=_turns(split.train), validation=_turns(split.validation), test=_turns(split.test))
        for name, split in dataset.clients.items()
    }
    return replace(dataset, clients=clients, unseen={name: _turns(e) for name, e in dataset.unseen.items()})


def _turns(examples: "Examples") -> "Examples":
    found = presence(examples)
    if len(found) == 0 or bool((found == found[0]).all()):
        return examples
    _, kind = np.unique(found, axis=0, return_inverse=True)
    runs: list[tuple[float, np.ndarray]] = []
    for number in range(int(kind.max()) + 1):
        rows = np.flatnonzero(kind.reshape(-1) == number)
        parts = np.array_split(rows, -(-len(rows) // RUN))
        # The middle of each run, as a share of the set's rows, says when its turn comes.
        runs += [((position + 0.5) / len(parts), part) for position, part in enumerate(parts)]
    return examples.take(np.concatenate([part for _, part in sorted(runs, key=lambda run: (run[0], int(run[1][0])))]))


def relabelled(before: "Examples", after: "Examples") -> "Examples":
    """Where an example's type was the name of its set, it follows the set.

    Args:
        before: examples.
        after: the same ones, which have lost some modalities.
    """
    was, now = set_names(presence(before)), set_names(presence(after))
    types = [new if own == old else own for own, old, new in zip(after.types, was, now, strict=True)]
    return replace(after, types=types)


def modalities_in(parts: "Iterable[Examples]") -> tuple[str, ...]:
    """The modalities of which some of the examples have something."""
    found = np.zeros(len(MODALITIES), dtype=bool)
    for examples in parts:
        found |= presence(examples).any(axis=0)
    return tuple(name for name, there in zip(MODALITIES, found.tolist(), strict=True) if there)


def _roles(split: "Split") -> "tuple[Examples, Examples, Examples]":
    return split.train, split.validation, split.test


def _parts(dataset: "FederatedDataset") -> "Iterable[Examples]":
    for split in dataset.clients.values():
        yield from _roles(split)
    yield from dataset.unseen.values()
