"""Evaluation of final models with subsets of the modalities.

A model is tried at home only, with every set of modalities that some of the test examples there have and that its
owner's data taught it to read. Examples that lack one of a set's modalities have no part in that set's number.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations

from torch import Tensor

from confed.data.examples import TableData
from confed.data.modal_tables import ModalTable
from confed.federation.ownership import MODALITIES, modalities_of
from confed.federation.params import Scalar

Set = tuple[str, ...]
"""Modalities, in the fixed order."""


def written(names: Sequence[str]) -> str:
    """Name of a set of modalities, such as "image+text"."""
    return "+".join(names)


def sets_at(data: TableData) -> list[Set]:
    """The sets of modalities of a place's test examples; none where examples cannot lack any."""
    table = data.tables[2]
    return table.sets() if isinstance(table, ModalTable) else []


def sets_tried(sets: Iterable[Set], tensors: Mapping[str, Tensor]) -> list[Set]:
    """Every set that a model can be shown of examples with the given sets, the smallest first."""
    reads = modalities_of(tensors)
    left: set[tuple[str, ...]] = set()
    for own in sets:
        left.add(tuple(name for name in own if name in reads))
    every = {part for own in left for size in range(len(own)) for part in combinations(own, size + 1)}
    return sorted(every, key=lambda part: (len(part), [MODALITIES.index(name) for name in part]))


def widest(places: Mapping[str, TableData]) -> list[str]:
    """The places whose test examples have sets that are part of no other place's."""
    known = {name: sets_at(data) for name, data in places.items()}

    def is_within(own: Set, others: Sequence[Set]) -> bool:
        return any(set(own) < set(other) for other in others)

    def within(sets: Sequence[Set], others: Sequence[Set]) -> bool:
        return all(is_within(own, others) for own in sets)

    return [
        name
        for name, sets in known.items()
        if sets and not any(within(sets, others) for other, others in known.items() if other != name)
    ]


def restriction(data: TableData, owned: Sequence[str]) -> Mapping[str, Scalar] | None:
    """Restriction of examples to a set of modalities, as scalars of the action ``examine``.

    What its owner does not have its model has never learned to read.
    """
    there = set(chain.from_iterable(sets_at(data)))
    left = [name for name in MODALITIES if name in there and name in owned]
    if not owned or len(left) == len(there):
        return {}
    return {"modalities": written(left)} if left else None
