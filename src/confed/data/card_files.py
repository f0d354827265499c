"""JSON files of dataset cards (:mod:`confed.datasets.card`): reading, validation and merging."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from confed.data.modality_names import sort_modalities
from confed.data.refusals import existing, expecting, refuse
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
    """Description of a client in a dataset card.

    Attributes:
        answers: its own answers, in order, where clients do not share all of them.
        task: its own task; empty for the recipe's.
        modalities: what it owns; empty where all examples are pictures with questions.
    """

    answers: tuple[str, ...] = ()
    task: str = ""
    modalities: tuple[str, ...] = ()


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
        return json.dumps({"confed_card": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


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
    _check_keys(values, [f.name for f in fields(CardClient)], where)
    modalities = sort_modalities(_names(values["modalities"], f"{where}.modalities"), f"{where}.modalities")
    task = _of_kind(values["task"], str, f"{where}.task")
    return CardClient(_names(values["answers"], f"{where}.answers"), task, modalities)


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
