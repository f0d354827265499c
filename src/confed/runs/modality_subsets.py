"""Evaluation of final models with subsets of the modalities.

A model is tried at home only, with every set of modalities that some of the test examples there have and that its
owner's data taught it to read. Examples that lack one of a set's modalities have no part in that set's number.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations, product

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
    """Restriction of examples to a set of modalities, as scalars of the action ``examine``.

    What its owner does not have its model has never learned to read.
    """
    present = set(chain.from_iterable(sets_at(data)))
    left = [name for name in MODALITIES if name in present and name in owned]
    if not owned or len(left) == len(present):
        return {}
    return {"modalities": written(left)} if left else None
