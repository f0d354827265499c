"""Dataset cards: the facts that a federation's server needs of data that it does not hold, without examples.

A server counts, averages and writes the report; for that it needs the answers in their order, the question types, the
words, the names of clients and places, and the shapes of pictures, sounds and series. A card says these in one JSON
file (:mod:`confed.data.card_files`). From it follows a dataset with all clients and no examples (:func:`card`), so that
whatever works on data works on a card. A site whose own data do not have all answers or words puts them in a card's
terms (:mod:`confed.datasets.card`).

What a card does tell: every answer, type and word that occurs at the places that it was written from, and how many
examples unseen places have. Of clients it says names, modalities, and their own answers or task where they have some.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from confed.data.card_files import Card, CardClient, digest_of, read_card
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.lazy import Lazy, changed, known_sizes
from confed.data.ml_files.table import MultiLabelTable
from confed.data.modalities import is_modal, modalities_of
from confed.data.picture_tables import NoPictures
from confed.data.ragged import PackedTexts, Ragged
from confed.data.refusals import refuse
from confed.data.regions import HeldRegions
from confed.data.sounds import Sounds
from confed.data.time_series import Series
from confed.datasets.reader import Nothing, reader


def card_of(dataset: FederatedDataset, name: str) -> Card:
    """The card of a dataset."""
    parts = dataset.everything
    owned = modalities_of(dataset) if is_modal(dataset) else {}
    seen = next((e.images for e in parts if e.images.shape[1] > 0), None)
    regions = next((e.regions for e in parts if e.regions is not None), None)
    clients: dict[str, CardClient] = {}
    for client in dataset.clients:
        clients[client] = CardClient(
            tuple(dataset.answer_sets.get(client, ())), dataset.tasks.get(client, ""), owned.get(client, ())
        )
    return Card(
        name, dataset.kind == "labels", dataset.answers, dataset.kinds, tuple(dict.fromkeys(dataset.words)), clients,
        _places(dataset),
        outside=dataset.outside, captioned=dataset.kind == "captions",
        texts=any(e.labels is not None and e.tables["text"] for e in parts), coarse=dict(dataset.coarse),
        picture=None if seen is None else _size(seen.shape),
        sample_rate=next((e.sounds.rate for e in parts if e.sounds is not None), None),
        channels=next((e.series.channels for e in parts if e.series is not None), ()),
        regions=None if regions is None else regions.shape[1:], encoder="" if regions is None else regions.encoder,
    )  # fmt: skip


def without_examples(card: Card) -> FederatedDataset:
    """The dataset that a card describes, whose clients and places have no examples."""
    facts = {"examples": "none here: a card stands for the data"}
    nothing = _no_labelled(card) if card.labels else _no_examples(card)
    return FederatedDataset(
        card.data, card.answers, {name: Split(nothing, nothing, nothing) for name in card.clients},
        dict.fromkeys(card.places, nothing), card.words, facts, card.outside,
        answer_sets={name: client.answers for name, client in card.clients.items() if client.answers},
        tasks={name: client.task for name, client in card.clients.items() if client.task},
        modalities={name: client.modalities for name, client in card.clients.items() if client.modalities},
        types=card.types, elsewhere=dict(card.places), coarse=dict(card.coarse),
    )  # fmt: skip


@reader("file digest")
def card(options: Nothing, file: str, digest: str = "") -> FederatedDataset:
    """Data that are elsewhere, as their card describes them: for the server of a federation.

    Options:
        file: the card, which `confed federation card` writes.
        digest: of the card that a run began with; empty for any.

    Raises ``ValueError``: there is no such card, it is damaged, or it is another than the run began with.
    """
    del options
    file_digest = digest_of(Path(file))
    if digest and file_digest != digest:
        refuse(file, f"the card that this run began with, of digest {digest}", found=file_digest)
    return without_examples(read_card(Path(file)))


def _places(dataset: FederatedDataset) -> dict[str, int]:
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


def _no_labelled(card: Card) -> Examples:
    nothing, start = PackedTexts.of(()), np.zeros(1, np.int64)
    texts = nothing if card.texts else None
    table = MultiLabelTable(card.answers, Ragged(np.zeros(0, np.int32), start), nothing, nothing, texts, nothing, start)
    pictures = None if card.picture is None else np.zeros((0, *card.picture, 3), np.uint8)
    return Examples.labelled(table, pictures, np.zeros(0, np.int64), [] if card.types else None)


# Alignment of a site's data with a dataset card (card): answers, types ----------------------------------------


def aligned_to_card(dataset: FederatedDataset, card: Card) -> FederatedDataset:
    """A site's own data with a card's answers, types, words and clients; clients elsewhere have no examples."""
    _check_equal("labels in place of answers", dataset.kind == "labels", card.labels)
    _check_names({*dataset.clients}, list(card.clients), "client")
    whole = without_examples(card)
    _check_terms(dataset, card)
    own, unseen = dataset.clients, dataset.unseen
    if card.labels:
        numbered = _Renumbered(dataset.answers, card.answers)
        own, unseen = changed(own, numbered.split), changed(unseen, numbered.examples)
    return replace(
        dataset, answers=whole.answers, words=whole.words, types=whole.types, outside=whole.outside,
        clients=_with_others(own, whole.clients), coarse=whole.coarse,
        answer_sets=whole.answer_sets, tasks=whole.tasks, modalities=whole.modalities,
        unseen={**whole.unseen, **unseen},
    )  # fmt: skip


def _with_others(own: Mapping[str, Split], everybody: Mapping[str, Split]) -> Mapping[str, Split]:
    """All clients of a card, of which only those that are here have examples."""
    sizes = known_sizes(own)
    if not isinstance(own, Lazy):
        return {name: own.get(name, nothing) for name, nothing in everybody.items()}
    count = {} if sizes is None else dict(zip(own, sizes.tolist(), strict=True))
    all_sizes = None if sizes is None else np.array([count.get(name, 0) for name in everybody], dtype=np.int64)
    return Lazy(everybody, lambda name: own[name] if name in own else everybody[name], all_sizes)


def _check_terms(dataset: FederatedDataset, card: Card) -> None:
    parts, labelled = dataset.everything, dataset.kind == "labels"
    if labelled:
        _check_names({*dataset.answers}, card.answers, "label")
    _check_names({*dataset.words}, card.words, "word")
    _check_names({*dataset.kinds}, card.types, "kind of examples" if labelled else "question type")
    if labelled and dataset.clients:
        tables = parts[0].tables
        _check_equal("kinds of examples", bool(dataset.kinds), bool(card.types))
        _check_equal("texts and pictures", (tables["text"], tables["image"]), (card.texts, card.picture is not None))
    _check_sizes((e.images.shape for e in parts), card)
    if labelled:
        return
    owned = modalities_of(dataset)
    for name in dataset.clients:
        card_client = card.clients[name]
        modalities = card_client.modalities or ("image", "text")
        who, own_answers = f"client {name!r}", bool(dataset.answer_sets.get(name))
        if not set(owned[name]) <= set(modalities):
            _check_equal(f"{who}: modalities", "+".join(owned[name]), "+".join(modalities))
        _check_equal(f"{who}: task", dataset.tasks.get(name, ""), card_client.task)
        _check_equal(f"{who}: answers of its own", own_answers, bool(card_client.answers))
        _check_names({*dataset.answer_set(name)}, card_client.answers or card.answers, "answer")


def _check_names(here: set[str], known: Sequence[str], what: str) -> None:
    strange = sorted(here.difference(known))
    if strange:
        raise ValueError(
            f"the card has no {what} {strange[0]!r} ({len(strange)} such); unite it with a card of these data by "
            "`confed federation card --merge`, and give the result to all parties"
        )


def _check_equal(what: str, here: object, by_card: object) -> None:
    if here != by_card:
        raise ValueError(f"{what} must be as the card says, {by_card!r}, and are {here!r} here")


def _check_sizes(shapes: Iterable[Sequence[int]], card: Card) -> None:
    sizes = {(int(shape[1]), int(shape[2])) for shape in shapes if len(shape) > 2 and shape[1]}
    if sizes and card.picture is not None and card.picture not in sizes:
        _check_equal("height and width of pictures", min(sizes), card.picture)


class _Renumbered:
    """Tables of labels with the numbers that a card gives them; each table is made once."""

    def __init__(self, labels: Sequence[str], known: Sequence[str]) -> None:
        position = {label: number for number, label in enumerate(known)}
        self._number = np.array([position[label] for label in labels], dtype=np.int32)
        self._labels = tuple(known)
        # Keyed by identity, with the object itself, so that no other one can come to its place in memory.
        self._made: dict[int, tuple[MultiLabelTable, MultiLabelTable]] = {}

    def examples(self, examples: Examples) -> Examples:
        """The same rows of the renumbered table."""
        assert examples.labels is not None
        table = examples.labels.table
        if id(table) not in self._made:
            self._made[id(table)] = (table, table.renumbered(self._labels, self._number))
        return replace(examples, labels=replace(examples.labels, table=self._made[id(table)][1]))

    def split(self, split: Split) -> Split:
        """The same split of the renumbered tables."""
        return Split(*map(self.examples, split.roles.values()))
