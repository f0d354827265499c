"""Dataset cards: the facts that a federation's server needs of data that it does not hold, without examples.

A server counts, averages and writes the report; for that it needs the answers in their order, the question types, the
words, the names of clients and places, and the shapes of pictures, sounds and series. A card says these in one JSON
file (:mod:`confed.datasets.card`). From it follows a dataset with all clients and no examples (:func:`card`), so that
whatever works on data works on a card. A site whose own data do not have all answers or words puts them in a card's
terms (:mod:`confed.datasets.card`).

What a card does tell: every answer, type and word that occurs at the places that it was written from, and how many
examples unseen places have. Of clients it says names, modalities, and their own answers or task where they have some.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.lazy import Lazy, changed, known_sizes
from confed.data.ml_files.table import MultiLabelTable
from confed.data.modalities import is_modal, modalities_of
from confed.data.modality_names import sort_modalities
from confed.data.picture_tables import NoPictures
from confed.data.ragged import PackedTexts, Ragged
from confed.data.refusals import existing, expecting, refuse
from confed.data.regions import HeldRegions
from confed.data.sounds import Series, Sounds
from confed.datasets.reader import Nothing, reader
from confed.federation.reading import FAULTS, read_bounded

VERSION = 1
"""Of the file's format."""
MOST_BYTES = 32 * 2**20
"""Largest file of a card; one of 100,000 clients has about 12 MB."""
MOST_SIDE = 2**16
"""Largest side of a picture and number of features, so that no card makes a model of any size."""

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class CardClient:
    """Description of a client in a dataset card."""

    answers: tuple[str, ...] = ()
    task: str = ""
    modalities: tuple[str, ...] = ()
    consent: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Card:
    """Dataset card: what a server needs to know of a dataset.

    Attributes:
        data: the name by which a recipe has the data.
        labels: whether examples have any number of labels each, and not one answer.
        answers: all answers, or all labels, in order.
        types: all question types, or kinds of examples, sorted.
        words: what a tokenizer must know, in order.
        clients: client -> what is said of it, in the federation's order.
        places: unseen place -> number of its examples.
        outside: whether test questions may have an answer outside the vocabulary.
        captioned: whether texts are to be written about the pictures.
        texts: of data with labels, whether examples have texts.
        coarse: label -> its coarse label, where there are two levels.
        picture: (H, W) in pixels; None where there are no pictures.
        sample_rate: of sounds, in Hz; None where there are none.
        channels: of series, their names; empty where there are none.
        regions: of features that come with the data, how many per picture, and values of each; None without.
        encoder: what made these; empty if unknown.
    """

    data: str
    labels: bool
    answers: tuple[str, ...]
    types: tuple[str, ...]
    words: tuple[str, ...]
    clients: Mapping[str, CardClient]
    places: Mapping[str, int]
    outside: bool = False
    captioned: bool = False
    texts: bool = False
    coarse: Mapping[str, str] = field(default_factory=dict[str, str])
    picture: tuple[int, int] | None = None
    sample_rate: int | None = None
    channels: tuple[str, ...] = ()
    regions: tuple[int, int] | None = None
    encoder: str = ""

    def to_json(self) -> str:
        """The card as JSON text."""
        content = asdict(self)
        for client in content["clients"].values():
            if not client["consent"]:  # which earlier versions do not read
                del client["consent"]
        return json.dumps({"confed_card": VERSION, **content}, indent=1, ensure_ascii=False) + "\n"


# Several cards as one ------------------------------------------------------------------------------------------


def merged(cards: Sequence[Card]) -> Card:
    """One card for several sites' data: answers, types, words, clients and places of all, in the order of the cards."""
    if len(cards) < 2:
        raise ValueError(f"to be united there must be at least two cards, got {len(cards)}")
    values: dict[str, Any] = {}
    for key in ("data", "labels", "outside", "captioned", "texts", "encoder"):
        values[key] = _agreed([getattr(card, key) for card in cards], key)
    for key in ("picture", "sample_rate", "channels", "regions"):
        given = [value for card in cards if (value := getattr(card, key))]
        values[key] = _agreed(given, key) if given else getattr(cards[0], key)
    for key in ("answers", "words"):
        values[key] = tuple(dict.fromkeys(chain.from_iterable(getattr(card, key) for card in cards)))
    values["types"] = tuple(sorted(set(chain.from_iterable(card.types for card in cards))))
    for key in ("clients", "places", "coarse"):
        values[key] = _united([getattr(card, key) for card in cards], key)
    if len({not client.modalities for client in values["clients"].values()}) > 1:
        raise ValueError("either all cards must say which modalities their clients have, or none")
    return Card(**values)


def _agreed(values: Sequence[Any], key: str) -> Any:
    if any(value != values[0] for value in values):
        told = ", ".join(dict.fromkeys(map(repr, values)))
        raise ValueError(f"cards can be united if they agree on {key!r}, got {told}")
    return values[0]


def _united(parts: Sequence[Mapping[str, _Value]], key: str) -> dict[str, _Value]:
    united: dict[str, _Value] = {}
    for card_values in parts:
        for name, value in card_values.items():
            if united.setdefault(name, value) != value:
                raise ValueError(f"cards can be united if they say the same of {name!r} in {key!r}; they do not")
    return united


# Files ---------------------------------------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    """The SHA-256 of a card's file, in hexadecimal; a fault is a ValueError."""
    return sha256(read_bounded(existing(path), MOST_BYTES)).hexdigest()


def read_card(path: Path) -> Card:
    """A card from its file; a fault is a ValueError."""
    expected = "a card, as `confed federation card` writes it"
    with expecting(path, expected, json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        content = json.loads(read_bounded(existing(path), MOST_BYTES).decode("utf-8-sig"))
    if not isinstance(content, dict) or "confed_card" not in content:
        refuse(path, expected, found="no key 'confed_card'")
    values: dict[str, Any] = {str(key): value for key, value in content.items()}  # pyright: ignore
    if (version := values.pop("confed_card")) != VERSION:
        refuse(path, f"a card of format {VERSION}, which this version of confed reads", version)
    try:
        return _checked(values)
    except FAULTS as error:
        raise ValueError(f"{path}: {error}") from error


def _checked(values: Mapping[str, Any]) -> Card:
    _check_keys(values, [f.name for f in fields(Card)], "the card")
    clients = {
        name: _client(client, f"clients.{name}")
        for name, client in _mapping(values["clients"], dict, "clients").items()
    }
    if not clients:
        raise ValueError("clients must name at least one client")
    for key, kind in (("data", str), ("encoder", str), ("labels", bool), ("outside", bool), ("captioned", bool)):
        _of_kind(values[key], kind, key)
    answers = _names(values["answers"], "answers")
    answer_set = set(answers)
    for name, client in clients.items():
        if unknown := [answer for answer in client.answers if answer not in answer_set]:
            raise ValueError(f"clients.{name}.answers: {unknown[0]!r} is none of the card's answers")
    places: dict[str, int] = _mapping(values["places"], int, "places")
    if any(count < 0 for count in places.values()):
        raise ValueError("places must map names to numbers of examples, none negative")
    rate = values["sample_rate"]
    if values["labels"] and values["picture"] is None and not values["texts"]:
        raise ValueError("examples with labels have pictures or texts: 'picture' or 'texts' must say so")
    return Card(
        values["data"], values["labels"], answers, _names(values["types"], "types"), _names(values["words"], "words"),
        clients, places, values["outside"], values["captioned"], _of_kind(values["texts"], bool, "texts"),
        _mapping(values["coarse"], str, "coarse"), _pair(values["picture"], "picture"),
        None if rate is None else _of_kind(rate, int, "sample_rate"), _names(values["channels"], "channels"),
        _pair(values["regions"], "regions"), values["encoder"],
    )  # fmt: skip


def _client(values: Mapping[str, Any], where: str) -> CardClient:
    values = {"consent": {}, **values}
    _check_keys(values, [f.name for f in fields(CardClient)], where)
    modalities = sort_modalities(_names(values["modalities"], f"{where}.modalities"), f"{where}.modalities")
    task = _of_kind(values["task"], str, f"{where}.task")
    consent = _mapping(values["consent"], str, f"{where}.consent")
    return CardClient(_names(values["answers"], f"{where}.answers"), task, modalities, consent)


def _check_keys(values: Mapping[str, Any], wanted: Sequence[str], where: str) -> None:
    if missing := [key for key in wanted if key not in values]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if strange := [key for key in values if key not in wanted]:
        raise ValueError(f"{where} has an unknown key {strange[0]!r}; valid keys: {', '.join(wanted)}")


def _of_kind(value: Any, kind: type[_Value], where: str) -> _Value:
    if type(value) is not kind:
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    texts = tuple(_of_kind(text, str, where) for text in _of_kind(value, list, where))  # pyright: ignore
    if len(set(texts)) < len(texts):
        raise ValueError(f"{where} must have each entry once")
    return texts


def _pair(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n <= MOST_SIDE for n in value):  # pyright: ignore
        raise ValueError(f"{where} must be two whole numbers from 1 to {MOST_SIDE}, or null, got {value!r:.80}")
    return value[0], value[1]  # pyright: ignore


def _mapping(value: Any, kind: type[_Value], where: str) -> dict[str, _Value]:
    given: dict[str, Any] = _of_kind(value, dict, where)  # pyright: ignore
    return {name: _of_kind(entry, kind, f"{where}.{name}") for name, entry in given.items()}


# Dataset cards: the facts that a federation's server needs of data that it does not hold, without exa --------


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
        relabelled = _relabelled(card.answers)
        own = changed(own, lambda split: Split(*map(relabelled, split.roles.values())))
        unseen = changed(unseen, relabelled)
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
    sizes: set[tuple[int, int]] = set()
    for shape in (examples.images.shape for examples in parts):
        if len(shape) > 2 and shape[1]:
            sizes.add((int(shape[1]), int(shape[2])))
    if sizes and card.picture is not None and card.picture not in sizes:
        _check_equal("height and width of pictures", min(sizes), card.picture)
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


def _relabelled(labels: tuple[str, ...]) -> Callable[[Examples], Examples]:
    """What gives examples the numbers of labels that a card has; each table is made once."""
    # Keyed by identity, with the object itself, so that no other one can come to its place in memory.
    made: dict[int, tuple[MultiLabelTable, MultiLabelTable]] = {}

    def relabelled(examples: Examples) -> Examples:
        assert examples.labels is not None
        table = examples.labels.table
        if id(table) not in made:
            made[id(table)] = (table, table.in_order(labels))
        return replace(examples, labels=replace(examples.labels, table=made[id(table)][1]))

    return relabelled
