"""Dataset cards: the facts that a federation's server needs of data that it does not hold, without examples.

A server counts, averages and writes the report; for that it needs the answers in their order, the question types, the
words, the names of clients and places, and the shapes of pictures, sounds and series. A card says these in one JSON
file (:mod:`confed.data.card_files`). From it follows a dataset with all clients and no examples (:func:`card`), so that
whatever works on data works on a card. A site whose own data do not have all answers or words puts them in a card's
terms (:mod:`confed.datasets.card`).

What a card does tell: every answer, type and word that occurs at the places that it was written from, and how many
examples unseen places have. Of clients it says names, modalities, and their own answers or task where they have some.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from confed.data.card_files import Card, CardClient, digest_of, read_card
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.label_tables import kinds_of
from confed.data.labelled import LabelDataset, LabelExamples, LabelSplit, known_sizes
from confed.data.ml_files.table import MultiLabelTable
from confed.data.modalities import is_modal, modalities_of
from confed.data.picture_tables import NoPictures
from confed.data.ragged import PackedTexts, Ragged
from confed.data.regions import HeldRegions
from confed.data.sounds import Sounds
from confed.data.time_series import Series
from confed.registry import register_dataset

Dataset = FederatedDataset | LabelDataset


def card_of(dataset: Dataset, name: str) -> Card:
    """The card of a dataset."""
    if isinstance(dataset, LabelDataset):
        first = next(iter(dataset.clients.values())).train
        return Card(
            name, True, dataset.labels, kinds_of(dataset), tuple(dict.fromkeys(dataset.words)),
            {client: CardClient() for client in dataset.clients},
            _places(dataset), texts=first.table.texts is not None, coarse=dict(dataset.coarse),
            picture=None if first.pictures is None else _size(first.pictures.shape),
        )  # fmt: skip
    parts = list(_parts(dataset))
    owned = modalities_of(dataset) if is_modal(dataset) else {}
    seen = next((e.images for e in parts if e.images.shape[1] > 0), None)
    regions = next((e.regions for e in parts if e.regions is not None), None)
    return Card(
        name, False, dataset.answers, tuple(sorted({*dataset.types}.union(*(e.types for e in parts)))),
        tuple(dict.fromkeys(dataset.words)),
        {
            client: CardClient(
                tuple(dataset.answer_sets.get(client, ())), dataset.tasks.get(client, ""), owned.get(client, ())
            )
            for client in dataset.clients
        },
        _places(dataset),
        outside=dataset.outside, captioned=dataset.captioned,
        picture=None if seen is None else _size(seen.shape),
        sample_rate=next((e.sounds.rate for e in parts if e.sounds is not None), None),
        channels=next((e.series.channels for e in parts if e.series is not None), ()),
        regions=None if regions is None else regions.shape[1:], encoder="" if regions is None else regions.encoder,
    )  # fmt: skip


def without_examples(card: Card) -> Dataset:
    """The dataset that a card describes, whose clients and places have no examples."""
    facts = {"examples": "none here: a card stands for the data"}
    if card.labels:
        none = _no_labelled(card)
        clients = {name: LabelSplit(none, none, none) for name in card.clients}
        return LabelDataset(
            card.data, card.answers, clients, dict.fromkeys(card.places, none), facts, card.words, dict(card.coarse),
            types=card.types, elsewhere=dict(card.places),
        )  # fmt: skip
    nothing = _no_examples(card)
    return FederatedDataset(
        card.data, card.answers, {name: Split(nothing, nothing, nothing) for name in card.clients},
        dict.fromkeys(card.places, nothing), card.words, facts, card.outside,
        answer_sets={name: client.answers for name, client in card.clients.items() if client.answers},
        tasks={name: client.task for name, client in card.clients.items() if client.task},
        modalities={name: client.modalities for name, client in card.clients.items() if client.modalities},
        types=card.types, elsewhere=dict(card.places),
    )  # fmt: skip


@register_dataset
def card(file: str, digest: str = "") -> Dataset:
    """Data that are elsewhere, as their card describes them: for the server of a federation.

    Args:
        file: the card, which `confed federation card` writes.
        digest: of the card that a run began with; empty for any.

    Raises:
        ValueError: there is no such card, it is damaged, or it is another than the run began with.
    """
    file_digest = digest_of(Path(file))
    if digest and file_digest != digest:
        raise ValueError(
            f"{file} is not the card that this run began with: its digest was {digest}, and is {file_digest}"
        )
    return without_examples(read_card(Path(file)))


def _parts(dataset: FederatedDataset) -> Iterator[Examples]:
    for split in dataset.clients.values():
        yield from (split.train, split.validation, split.test)
    yield from dataset.unseen.values()


def _places(dataset: Dataset) -> dict[str, int]:
    """Unseen place -> number of its examples."""
    if dataset.elsewhere is not None:
        return dict(dataset.elsewhere)
    return {name: len(examples) for name, examples in dataset.unseen.items()}


def _size(shape: Sequence[int]) -> tuple[int, int]:
    """(H, W) of pictures (M, H, W, 3)."""
    return int(shape[1]), int(shape[2])


def _no_examples(card: Card) -> Examples:
    """No questions over no pictures, with all shapes right."""
    index, clips = np.zeros(0, np.int64), np.zeros(1, np.int64)
    sounds = series = regions = None
    if card.sample_rate is not None:
        sounds = Sounds(np.zeros(0, np.int16), clips, card.sample_rate)
    if card.channels:
        series = Series(np.zeros((0, len(card.channels)), np.float32), clips, card.channels)
    if card.regions is not None:
        count, width = card.regions
        regions = HeldRegions(np.zeros((0, count, width), np.float32), np.zeros((0, count, 4)), card.encoder)
    return Examples(
        NoPictures(0) if card.picture is None else np.zeros((0, *card.picture, 3), np.uint8), index, [], [], [], [],
        regions=regions, sounds=sounds, sound_index=None if sounds is None else index,
        series=series, series_index=None if series is None else index, captions=[] if card.captioned else None,
    )  # fmt: skip


def _no_labelled(card: Card) -> LabelExamples:
    nothing, start = PackedTexts.of(()), np.zeros(1, np.int64)
    texts = nothing if card.texts else None
    table = MultiLabelTable(card.answers, Ragged(np.zeros(0, np.int32), start), nothing, nothing, texts, nothing, start)
    pictures = None if card.picture is None else np.zeros((0, *card.picture, 3), np.uint8)
    return LabelExamples(table, pictures, np.zeros(0, np.int64), np.zeros(0, str) if card.types else None)


# Alignment of a site's data with a dataset card (card): answers, types ----------------------------------------


def aligned_to_card(dataset: Dataset, card: Card) -> Dataset:
    """A site's own data with a card's answers, types, words and clients; clients elsewhere have no examples."""
    if isinstance(dataset, LabelDataset) != card.labels:
        have, card_has = ("answers", "labels") if card.labels else ("labels", "answers")
        raise ValueError(f"the card is of data with {card_has}, and the examples of {dataset.name!r} have {have}")
    strange = [name for name in dataset.clients if name not in card.clients]
    if strange:
        raise ValueError(f"the card has no client {strange[0]!r}; it has {', '.join(list(card.clients)[:50])}")
    whole = without_examples(card)
    if isinstance(dataset, LabelDataset) and isinstance(whole, LabelDataset):
        return _labels_aligned(dataset, whole, card)
    assert isinstance(dataset, FederatedDataset)
    assert isinstance(whole, FederatedDataset)
    _check_terms(dataset, card)
    client_splits = {name: (dataset if name in dataset.clients else whole).clients[name] for name in card.clients}
    return replace(
        dataset, answers=whole.answers, words=whole.words, types=whole.types, outside=whole.outside,
        clients=client_splits,
        answer_sets=whole.answer_sets, tasks=whole.tasks, modalities=whole.modalities,
        unseen={**whole.unseen, **dataset.unseen},
    )  # fmt: skip


def _check_terms(dataset: FederatedDataset, card: Card) -> None:
    parts: list[Examples] = list(dataset.unseen.values())
    for split in dataset.clients.values():
        parts += (split.train, split.validation, split.test)
    _check_names(set(chain.from_iterable(e.types for e in parts)), card.types, "question type")
    _check_names({*dataset.words}, card.words, "word")
    _check_sizes((e.images.shape for e in parts), card)
    owned = modalities_of(dataset)
    for name in dataset.clients:
        card_client = card.clients[name]
        modalities = card_client.modalities or ("image", "text")
        if not set(owned[name]) <= set(modalities):
            raise ValueError(
                f"client {name!r} has {'+'.join(owned[name])} here, and by the card {'+'.join(modalities)}"
            )
        if dataset.tasks.get(name, "") != card_client.task:
            raise ValueError(
                f"client {name!r} has the task {dataset.tasks.get(name)!r} here, {card_client.task!r} by the card"
            )
        if bool(card_client.answers) != bool(dataset.answer_sets.get(name)):
            whose = ("all", "its own") if card_client.answers else ("its own", "all")
            raise ValueError(f"client {name!r} has {whose[0]} answers here, and by the card {whose[1]}")
        _check_names({*dataset.answer_set(name)}, card_client.answers or card.answers, "answer")


def _labels_aligned(dataset: LabelDataset, whole: LabelDataset, card: Card) -> LabelDataset:
    _check_names({*dataset.labels}, card.answers, "label")
    _check_names({*dataset.words}, card.words, "word")
    kinds = kinds_of(dataset)
    _check_names({*kinds}, card.types, "kind of examples")
    first = next(iter(dataset.clients.values()), None)
    if first is not None:
        if bool(kinds) != bool(card.types):
            raise ValueError(f"the card has kinds of examples, {', '.join(card.types)}, and the data here have none")
        if (first.train.table.texts is not None) != card.texts or (first.train.pictures is None) != (not card.picture):
            raise ValueError("the card and the data here do not both have pictures, or do not both have texts")
        _check_sizes([() if first.train.pictures is None else first.train.pictures.shape], card)
    numbered = _Renumbered(dataset.labels, card.answers)
    unseen = {name: numbered.examples(examples) for name, examples in dataset.unseen.items()}
    return replace(
        dataset, labels=whole.labels, words=whole.words, types=whole.types, coarse=whole.coarse,
        clients=_OwnClients(dataset.clients, whole.clients, numbered), unseen={**whole.unseen, **unseen},
    )  # fmt: skip


def _check_names(here: set[str], known: Sequence[str], what: str) -> None:
    strange = sorted(here.difference(known))
    if strange:
        raise ValueError(
            f"the card has no {what} {strange[0]!r} ({len(strange)} such); unite it with a card of these data by "
            "`confed federation card --merge`, and give the result to all parties"
        )


def _check_sizes(shapes: Iterable[Sequence[int]], card: Card) -> None:
    sizes = {(int(shape[1]), int(shape[2])) for shape in shapes if len(shape) > 2 and shape[1]}
    if sizes and card.picture is not None and card.picture not in sizes:
        (h, w), (height, width) = sorted(sizes)[0], card.picture
        raise ValueError(f"pictures have {h} x {w} pixels here, and by the card {height} x {width}")


class _Renumbered:
    """Tables of labels with the numbers that a card gives them; each table is made once."""

    def __init__(self, labels: Sequence[str], known: Sequence[str]) -> None:
        position = {label: number for number, label in enumerate(known)}
        self._number = np.array([position[label] for label in labels], dtype=np.int32)
        self._labels = tuple(known)
        # Keyed by identity, with the object itself, so that no other one can come to its place in memory.
        self._made: dict[int, tuple[MultiLabelTable, MultiLabelTable]] = {}

    def examples(self, examples: LabelExamples) -> LabelExamples:
        """The same rows of the renumbered table."""
        table = examples.table
        if id(table) not in self._made:
            self._made[id(table)] = (table, table.renumbered(self._labels, self._number))
        return replace(examples, table=self._made[id(table)][1])


class _OwnClients(Mapping[str, LabelSplit]):
    """All clients of a card, of which only those that are here have examples."""

    def __init__(
        self, own: Mapping[str, LabelSplit], everybody: Mapping[str, LabelSplit], numbered: _Renumbered
    ) -> None:
        self._own, self._everybody, self._numbered = own, everybody, numbered
        sizes = known_sizes(own)
        # int64, shape (clients,), where it is known without making splits.
        self.sizes: np.ndarray | None = None
        if sizes is not None:
            count = dict(zip(own, sizes.tolist(), strict=True))
            self.sizes = np.array([count.get(name, 0) for name in everybody], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._everybody)

    def __iter__(self) -> Iterator[str]:
        return iter(self._everybody)

    def __contains__(self, client: object) -> bool:
        return client in self._everybody

    def __getitem__(self, client: str) -> LabelSplit:
        if client not in self._own:
            return self._everybody[client]
        split = self._own[client]
        return LabelSplit(*map(self._numbered.examples, (split.train, split.validation, split.test)))
