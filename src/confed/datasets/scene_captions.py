"""Built-in captioning benchmark: small drawn pictures of several places with captions, also as one question.

A caption follows from what stands where (:mod:`confed.datasets.scenes.graph`). There are five ways to put it; each
client has one that most of its captions are in, and places differ in things, colours and backgrounds as in the
benchmark of questions. One client more has texts alone. Nothing is read from files.

As a question, "Describe the picture.", for models that converse: what is asked is the same everywhere, and a right
answer is what people said of the picture: all of it is learned, each caption by its share, and a written one is
compared with up to five.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, islice, product
from typing import Annotated

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split, Turn
from confed.data.federate import words
from confed.data.options import DrawnOptions
from confed.data.picture_tables import NoPictures
from confed.data.pictures import empty_table
from confed.data.refusals import check_distinct, left_for_clients, refuse
from confed.data.seeding import generator
from confed.datasets.picture_captions import to_describe
from confed.datasets.reader import reader
from confed.datasets.scenes.graph import (
    COLOURS,
    GENERAL_NOUNS,
    GRID,
    NOUNS,
    OWN_NOUNS,
    SCENES,
    SIZES,
    Object,
    Tags,
    colour_prior,
    objects,
    sample,
)
from confed.datasets.scenes.render import render_scene
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE

WAYS = ("list", "there", "sizes", "places", "count")
"""How a caption is put."""
READER = "reader"
"""The client that has texts and no pictures."""

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
_OWN = 0.7
"""How many of a client's captions are in its own way; the others are in any."""
_TURNS = 2
"""Pictures with captions before a document's last one."""
_PUBLIC = 600
"""Public texts."""
_SETTLED = ("home", "commercial")


def tell(things: Sequence[Object], way: str) -> str:
    """One caption: the largest things, from the top left to the bottom right."""
    if not things or way not in WAYS:
        raise ValueError(f"a caption needs a thing to tell about and one of the ways {', '.join(WAYS)}, got {way!r}")
    first = sorted(things, key=lambda thing: (thing.size != "large", thing.cell))
    plain = [_one(thing.colour, thing.noun) for thing in first]
    if way == "list":
        return " and ".join(plain[:3])
    if way == "there":
        return f"there is {' next to '.join(plain[:2])}"
    if way == "sizes":
        return " with ".join(_one(thing.size, thing.colour, thing.noun) for thing in first[:2])
    if way == "places":
        row, column = divmod(first[0].cell, GRID)
        where = f"{'top' if 2 * row < GRID else 'bottom'} {'left' if 2 * column < GRID else 'right'}"
        return f"{plain[0]} stands at the {where}"
    return f"{_NUMBERS[len(things)]} things and {plain[0]} is one of them"


def _one(*words: str) -> str:
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def tell_words() -> tuple[str, ...]:
    """Every word that captions may contain, in order."""
    things = [Object(cell, "thing", "any", "large") for cell in range(GRID * GRID)]
    told: set[str] = set()
    for thing, way in product(things, WAYS):
        told.update(tell([thing, thing], way).split())
    return (*sorted((told | {"a", "an", *_NUMBERS, *SIZES}) - {"any", "thing"}), *COLOURS, *NOUNS)


@reader(
    "* train validation test captions references texts documents mixture shots reader unseen conflict test_seed seed",
    things="pictures", unseen=_SETTLED,
)  # fmt: skip
def scene_captions(
    options: DrawnOptions,
    captions: Annotated[int, AT_LEAST_ONE] = 2,
    references: Annotated[int, AT_LEAST_ONE] = 5,
    texts: Annotated[int, NOT_NEGATIVE] = 200,
    documents: Annotated[int, NOT_NEGATIVE] = 40,
    mixture: tuple[float, float, float] = (14.0, 14.0, 4.0),
    shots: Annotated[int, NOT_NEGATIVE] = 0,
    reader: bool = True,
) -> FederatedDataset:
    """Pictures of 64 x 64 pixels with captions, texts alone, and documents; a client per place.

    Raises ``ValueError``: an argument is out of its range, or a place is unknown or none is left for a client.

    Options:
        captions: captions of a training picture, each an example of its own.
        references: captions of a validation or test picture, of which those that are the same count once.
        texts: training captions of pictures that are not shown, per client; the reader has twice as many.
        documents: training documents per client: two pictures with captions, then a third; put together of the
            client's own pictures.
        mixture: shares of texts, of pictures with captions and of documents in every training batch, as the paper has
            them (in tokens).
        shots: training examples of the same place that are shown before a validation or test picture.
        reader: whether there is a client with texts alone.
        test_seed: decides test pictures, their captions and the places' frequencies of colours.
        seed: decides all else.
    """
    unseen, test_seed, seed = options.unseen, options.test_seed, options.seed
    check_places(unseen)
    if options.train <= _TURNS:
        raise ValueError(f"data.train must be at least {_TURNS + 1}, got {options.train}")
    if reader and not texts:
        raise ValueError("a client with texts alone needs some: texts must be at least 1, or reader false, got 0")
    seen = tuple(scene for scene in SCENES if scene not in unseen)

    def place(scene: str, way: str | None, role: str, count: int) -> "Told":
        return Told.draw(scene, way, role, count, options)

    splits: dict[str, Split] = {}
    for number, scene in enumerate(seen):
        way = WAYS[number % len(WAYS)]
        shown = place(scene, way, "train", options.train)
        extra = _captions(scene, way, "train", texts, test_seed, seed)
        held = place(scene, way, "validation", options.validation)
        tested = place(scene, way, "test", options.test)
        splits[scene] = Split(
            _training(scene, shown, captions, extra, documents, seed),
            _described(scene, "validation", held, references, shots, shown),
            _described(scene, "test", tested, references, shots, shown),
        )
    if reader:
        text_captions = [_captions(scene, None, "train", -(-2 * texts // len(seen)), test_seed, seed) for scene in seen]
        told = list(chain.from_iterable(zip(*text_captions, strict=True)))[: 2 * texts]
        nothing = _texts(READER, [])
        splits[READER] = Split(_texts(READER, told), nothing, nothing)
    places: dict[str, Examples] = {}
    for scene in unseen:
        shown = place(scene, None, "train", shots)
        places[scene] = _described(scene, "test", place(scene, None, "test", options.test), references, shots, shown)
    owned = {name: ("text",) if name == READER else ("image", "text") for name in splits}
    public: list[str] = []
    for scene in SCENES:
        public += _captions(scene, None, "public", -(-_PUBLIC // len(SCENES)), test_seed, test_seed)
    return FederatedDataset(
        "scene_captions", ("caption",), splits, places, tell_words(), _facts(captions, references, places),
        modalities=owned if reader else {}, mixture=tuple(mixture), public=public,
    )  # fmt: skip


def _facts(captions: int, references: int, places: Mapping[str, Examples]) -> dict[str, str]:
    return {
        "origin": "drawn; captions follow from what stands where, put in five ways of which each client prefers one",
        "captions": f"{captions} of each training picture, up to {references} of each test picture to compare with",
        "unseen": "places that nobody trains in, described in all ways alike" if places else "none",
    }


class Told:
    """Pictures of a place with what people say about them."""

    def __init__(self, pictures: np.ndarray, tags: Tags, way: str | None, rng: np.random.Generator) -> None:
        self.pictures, self.tags, self._way, self._rng = pictures, tags, way, rng

    @classmethod
    def draw(cls, scene: str, way: str | None, role: str, count: int, options: DrawnOptions) -> "Told":
        """New pictures of one role."""
        seed = options.seed_of(role)
        tags = _graphs(scene, role, count, options.test_seed, generator(seed, "caption graphs", role, scene))
        pixels = generator(seed, "caption pixels", role, scene)
        pictures = render_scene(tags, scene, options.conflict, pixels) if count else empty_table(0, 64)
        return cls(pictures, tags, way, generator(seed, "captions", role, scene))

    def caption(self, picture: int) -> str:
        """A caption of a picture."""
        return tell(objects(self.tags, picture), _way(self._way, self._rng))

    def kind(self, picture: int) -> str:
        """The type of a picture: how many things stand in it."""
        return f"{int((self.tags.noun[picture] > 0).sum())} things"


def _way(usual: str | None, rng: np.random.Generator) -> str:
    return usual if usual is not None and rng.random() < _OWN else WAYS[int(rng.integers(len(WAYS)))]


def _graphs(scene: str, role: str, count: int, test_seed: int, rng: np.random.Generator) -> Tags:
    graphs = list(islice(sample(role, GENERAL_NOUNS + OWN_NOUNS[scene], colour_prior(scene, test_seed), rng), count))
    return Tags.join(graphs) if graphs else Tags(*(np.zeros((0, GRID * GRID), np.int64) for _ in range(3)))


def _captions(scene: str, way: str | None, role: str, count: int, test_seed: int, seed: int) -> list[str]:
    """Captions of pictures that are not part of the data."""
    tags = _graphs(scene, role, count, test_seed, generator(seed, "unseen graphs", role, scene))
    rng = generator(seed, "unseen captions", role, scene)
    return [tell(objects(tags, number), _way(way, rng)) for number in range(count)]


def _training(scene: str, told: Told, captions: int, texts: list[str], documents: int, seed: int) -> Examples:
    """A client's pictures with captions, then its texts, then its documents."""
    rng = generator(seed, "documents", scene)
    count = len(told.tags)
    index = np.repeat(np.arange(count), captions)
    descriptions = [told.caption(picture) for picture in index.tolist()]
    chosen = [rng.choice(count, _TURNS + 1, replace=False).tolist() for _ in range(documents)]
    before: list[list[Turn]] = []
    for row in chosen:
        before.append([Turn(p, told.caption(p)) for p in row[:-1]])
    last = np.array([row[-1] for row in chosen], dtype=np.int64)
    total = len(descriptions) + len(texts) + documents
    shown = np.ones(total, dtype=bool)
    shown[len(descriptions) : len(descriptions) + len(texts)] = False
    return Examples(
        told.pictures,
        np.concatenate([index, np.zeros(len(texts), np.int64), last]),
        [*descriptions, *texts, *(told.caption(picture) for picture in last.tolist())],
        ["caption"] * total,
        [*(told.kind(p) for p in index.tolist()), *["text"] * len(texts), *["document"] * documents],
        [f"{scene}/train/{row:06d}" for row in range(total)],
        present={"image": shown},
        before=[*[()] * (len(descriptions) + len(texts)), *before],
    )


def _described(scene: str, role: str, told: Told, references: int, shots: int, shown: Told) -> Examples:
    """Pictures to be described, each behind a few that are described already."""
    count = len(told.tags)
    rng = generator(0, "shots", role, scene)
    captions: list[tuple[str, ...]] = []
    for picture in range(count):
        captions.append(tuple(dict.fromkeys(told.caption(picture) for _ in range(references))))
    before: list[list[Turn]] = []
    for _ in range(count if shots else 0):
        rows = rng.choice(len(shown.tags), shots, replace=False).tolist()
        before.append([Turn(count + p, shown.caption(p)) for p in rows])
    return to_describe(
        np.concatenate([told.pictures, shown.pictures]) if shots else told.pictures, np.arange(count),
        [told.kind(picture) for picture in range(count)], [f"{scene}/{role}/{row:06d}" for row in range(count)],
        captions, before if shots else None,
    )  # fmt: skip


def _texts(name: str, told: list[str]) -> Examples:
    """Texts alone."""
    count = len(told)
    return Examples(
        NoPictures(1), np.zeros(count, np.int64), told, ["caption"] * count, ["text"] * count,
        [f"{name}/train/{row:06d}" for row in range(count)],
        present={"image": np.zeros(count, dtype=bool)},
    )  # fmt: skip


def check_places(unseen: Sequence[str]) -> None:
    """Check of which places have no client."""
    check_distinct("unseen", unseen, SCENES)
    left_for_clients(SCENES, unseen)


# Captions as answers to one question --------------------------------------------------------------------------


@reader(
    "* question train validation test captions references unseen conflict test_seed seed",
    things="pictures", unseen=_SETTLED,
)  # fmt: skip
def scene_descriptions(
    options: DrawnOptions,
    question: str = "Describe the picture.",
    captions: Annotated[int, AT_LEAST_ONE] = 2,
    references: Annotated[int, AT_LEAST_ONE] = 5,
) -> FederatedDataset:
    """Pictures of 64 x 64 pixels with one question, which captions answer; a client per place.

    Raises ``ValueError``: an argument is out of its range, or a place is unknown or none is left for a client.

    Options:
        question: what is asked of every picture.
        captions: captions of a training picture.
        references: captions of a validation or test picture, of which those that are the same count once.
        test_seed: decides test pictures, their captions and the places' frequencies of colours.
        seed: decides all else.
    """
    if not question.strip():
        refuse("data.question", "a word at least", question)
    check_places(options.unseen)

    def place(scene: str, way: str | None, role: str, each: int) -> Examples:
        told = Told.draw(scene, way, role, options.size(role), options)
        return _answered(scene, role, told, question, each)

    splits: dict[str, Split] = {}
    for number, scene in enumerate(scene for scene in SCENES if scene not in options.unseen):
        way = WAYS[number % len(WAYS)]
        splits[scene] = Split(
            place(scene, way, "train", captions),
            place(scene, way, "validation", references),
            place(scene, way, "test", references),
        )
    places = {scene: place(scene, None, "test", references) for scene in options.unseen}
    texts: set[str] = set()
    for split in splits.values():
        texts.update(split.train.answers, split.validation.answers)
    return FederatedDataset(
        "scene_descriptions", tuple(sorted(texts)), splits, places, words([question]),
        _facts(captions, references, places), outside=True,
    )  # fmt: skip


def _answered(scene: str, role: str, told: Told, question: str, each: int) -> Examples:
    """Pictures of one role with what people say of them, the first of it as the answer."""
    count = len(told.tags)
    everything: list[tuple[str, ...]] = []
    for picture in range(count):
        everything.append(tuple(told.caption(picture) for _ in range(each)))
    people = everything if role == "train" else [tuple(dict.fromkeys(descriptions)) for descriptions in everything]
    return Examples(
        told.pictures, np.arange(count), [question] * count, [descriptions[0] for descriptions in people],
        [told.kind(picture) for picture in range(count)], [f"{scene}/{role}/{row:06d}" for row in range(count)],
        annotations=people,
    )  # fmt: skip
