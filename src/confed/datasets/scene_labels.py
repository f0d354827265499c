"""Built-in multi-label benchmark: things, colours and relations in small drawn pictures.

Fine labels are 66 coloured things ("red ball") and 14 relations ("cat on top of chair"), coarse ones the 22 things and
the two relations. Frequencies have a long tail for four reasons that real pictures have too: pictures have themes, the
six scenes of the benchmark, of which some are rarer than others; a theme has common and rare things; a thing has a
usual colour and two less usual ones; and relations hold between certain things only. Labels depend on each other within
a theme.

Clients differ in how many pictures they have (log-normal), in what stands in them (every client likes some things and
hence some themes, :func:`confed.data.partitions.draw_preferences`), and in how they draw: each has one of the
benchmark's drawing styles. Three styles belong to no client, and "newcomers" are other people with the clients' styles.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice, product
from typing import Annotated, Literal, NamedTuple

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import label_floors, label_numbers
from confed.data.ml_files.table import MultiLabelTable
from confed.data.options import DrawnOptions
from confed.data.partitions import draw_preferences
from confed.data.ragged import PackedTexts, Ragged, offsets_of
from confed.data.refusals import check_distinct
from confed.data.seeding import generator
from confed.datasets.reader import reader
from confed.datasets.scenes.backgrounds import STYLES, Style, place
from confed.datasets.scenes.domains import DOMAINS
from confed.datasets.scenes.graph import (
    CELLS,
    CHUNK,
    COLOURS,
    GENERAL_NOUNS,
    GRID,
    NOUNS,
    OWN_NOUNS,
    SCENES,
    SIZES,
    Tags,
    new_graphs,
)
from confed.datasets.scenes.render import render_over
from confed.federation.ranges import NOT_NEGATIVE

THINGS: Mapping[str, tuple[str, str, str]] = {
    "person": ("blue", "red", "purple"),
    "dog": ("orange", "yellow", "pink"),
    "box": ("orange", "cyan", "green"),
    "clock": ("yellow", "blue", "red"),
    "car": ("red", "blue", "yellow"),
    "bus": ("yellow", "red", "green"),
    "sign": ("red", "yellow", "blue"),
    "ball": ("orange", "red", "pink"),
    "racket": ("cyan", "purple", "yellow"),
    "net": ("green", "blue", "orange"),
    "book": ("purple", "green", "red"),
    "lamp": ("yellow", "orange", "cyan"),
    "globe": ("blue", "cyan", "purple"),
    "tree": ("green", "yellow", "orange"),
    "deer": ("orange", "pink", "purple"),
    "hill": ("green", "purple", "cyan"),
    "cup": ("cyan", "pink", "blue"),
    "chair": ("red", "green", "blue"),
    "cat": ("orange", "pink", "cyan"),
    "shelf": ("pink", "purple", "yellow"),
    "till": ("blue", "green", "pink"),
    "bag": ("pink", "red", "cyan"),
}
"""A thing's colours, the usual one first; it has no other."""

ON, LEFT = "on top of", "left of"
RELATIONS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "transport": (("person", LEFT, "car"), ("clock", ON, "sign"), ("dog", LEFT, "bus")),
    "sports": (("person", LEFT, "net"), ("ball", ON, "racket")),
    "educational": (("book", ON, "box"), ("lamp", LEFT, "globe")),
    "natural": (("deer", LEFT, "tree"), ("tree", ON, "hill"), ("dog", LEFT, "deer")),
    "home": (("cat", ON, "chair"), ("cup", ON, "box")),
    "commercial": (("bag", ON, "shelf"), ("till", LEFT, "person")),
}
"""Theme -> what stands how to what, the usual relation first."""

COLOUR_SHARES = (0.60, 0.28, 0.12)
GENERAL_SHARE, OWN_SHARE = 0.45, 0.50
"""Of the things of a picture: those of all themes, and its theme's own; the rest are other themes'."""
RELATED = 0.5
"""Share of pictures into which a relation of their theme is put; chance adds others."""
EVEN = 0.1
"""Share of the common taste in a client's, so that no client lacks a thing altogether."""

_TRIPLES = tuple(chain.from_iterable(RELATIONS[theme] for theme in SCENES))
_PAIRS = tuple(chain.from_iterable(product([noun], THINGS[noun]) for noun in NOUNS))
FINE: tuple[str, ...] = (*(f"{colour} {noun}" for noun, colour in _PAIRS), *map(" ".join, _TRIPLES))
COARSE: tuple[str, ...] = (*NOUNS, ON, LEFT)
COARSE_OF: Mapping[str, str] = dict(
    zip(FINE, (*(noun for noun, _ in _PAIRS), *(relation for _, relation, _ in _TRIPLES)), strict=True)
)
"""Fine label -> its coarse one, which a picture has if it has any of the fine ones."""


class _Drawing(NamedTuple):
    ground: Callable[[], np.ndarray]
    style: Style
    finish: Callable[[np.ndarray], np.ndarray]


def _of_place(scene: str) -> _Drawing:
    return _Drawing(lambda: place(scene), STYLES[scene], lambda pictures: pictures)


DRAWING_STYLES: Mapping[str, _Drawing] = {scene: _of_place(scene) for scene in SCENES} | {
    name: _Drawing(DOMAINS[name].ground, DOMAINS[name].style, DOMAINS[name].finish)
    for name in ("art", "abstract", "blurred")
}
"""The backgrounds of the six scenes; brush strokes; clip art; and poor photographs. No style turns the colour wheel."""

LEAST = 1 / 3
"""The smallest client's number of training pictures, as a share of the mean."""


@reader(
    "level * clients styles train validation test unseen sigma alpha test_seed seed",
    things="pictures", kind="labels", clients=60, train=48, validation=10, test=16,
)  # fmt: skip
def scene_labels(
    options: DrawnOptions,
    level: Literal["fine", "coarse"] = "fine",
    styles: tuple[str, ...] = ("transport", "sports", "educational", "natural", "art", "abstract"),
    unseen: Annotated[int, NOT_NEGATIVE] = 250,
    sigma: Annotated[float, NOT_NEGATIVE] = 0.8,
) -> FederatedDataset:
    """Many users with few pictures each, generated on the spot; equal arguments give equal bytes.

    Clients are called "transport-01", "sports-01" and so on by their drawing style. What defines a client (its style,
    its tastes, its size) and all test sets are the same for all seeds.

    Options:
        level: "fine": 80 labels, with their coarse ones; "coarse": 24.
        clients: how many; they have the styles in turn.
        styles: drawing styles of those who train. The others of transport, sports, educational, natural, home,
            commercial, art, abstract and blurred are places that no client trains in.
        train: training pictures per client, in the mean.
        validation: validation pictures of every client.
        test: test pictures of every client.
        unseen: test pictures of newcomers, and of every style without a client; 0 for no such places.
        sigma: standard deviation of the logarithm of a client's number of training pictures, before those that would
            have less than a third of the mean are given so many; 0 for equal numbers.
        alpha: how much clients differ in what they draw; small is skewed, large is alike.
        test_seed: decides test sets and what defines a client.

    Raises ``ValueError``: an argument is out of its range, or a style is unknown.
    """
    check_distinct("styles", styles, DRAWING_STYLES, least=1)
    clients, test_seed = options.clients, options.test_seed
    sizes = _sizes(clients, options.train, sigma, test_seed)
    tastes = _tastes(clients, options.alpha, test_seed)
    making = _Making(test_seed, options.seed)
    owners = [f"{styles[k % len(styles)]}-{k // len(styles) + 1:02d}" for k in range(clients)]
    for k, name in enumerate(owners):
        for role, number in (("train", int(sizes[k])), ("validation", options.validation), ("test", options.test)):
            making.add(name, role, number, styles[k % len(styles)], tastes[k])
    places = [style for style in DRAWING_STYLES if style not in styles] if unseen else []
    if unseen:
        # Several styles in turn, so that the mean over newcomers is one over styles.
        for style_number, style in enumerate(styles):
            making.add("newcomers", "test", len(range(style_number, unseen, len(styles))), style, np.ones(len(NOUNS)))
        for style in places:
            making.add(style, "test", unseen, style, np.ones(len(NOUNS)))
    table, pictures, types = making.table(level)

    def examples(name: str, role: str) -> Examples:
        return Examples.labelled(table, pictures, making.rows[name, role], types)

    splits: dict[str, Split] = {}
    for name in owners:
        splits[name] = Split(*(examples(name, role) for role in ("train", "validation", "test")))
    elsewhere = {name: examples(name, "test") for name in (["newcomers", *places] if unseen else [])}
    return FederatedDataset(
        "scene_labels",
        table.labels,
        splits,
        elsewhere,
        facts=_facts(sizes, table.labels, splits, elsewhere),
        coarse=COARSE_OF if level == "fine" else {},
    )


def fine_labels(tags: Tags) -> np.ndarray:
    """Fine labels of M pictures, bool, shape (M, 80)."""
    count, rows = len(tags), np.arange(len(tags))[:, None]
    present = np.zeros((count, len(NOUNS) + 1, len(COLOURS) + 1), dtype=bool)
    present[rows, tags.noun, tags.colour] = True
    pair_columns = [present[:, NOUNS.index(noun) + 1, COLOURS.index(colour) + 1] for noun, colour in _PAIRS]
    plane = tags.noun.reshape(count, GRID, GRID)
    beside = {ON: (plane[:, :-1], plane[:, 1:]), LEFT: (plane[:, :, :-1], plane[:, :, 1:])}
    for noun, relation, other in _TRIPLES:
        first, second = beside[relation]
        pairs = (first == NOUNS.index(noun) + 1) & (second == NOUNS.index(other) + 1)
        pair_columns.append(pairs.any(axis=(1, 2)))
    return np.stack(pair_columns, axis=1)


def draw_graphs(role: str, number: int, taste: np.ndarray, rng: np.random.Generator, seen: set[int]) -> Tags:
    """New pictures' contents; :func:`confed.datasets.scenes.graph.fingerprint` decides their role, as everywhere."""
    themes, nouns = _shares(taste)
    return Tags.join([*islice(new_graphs(role, lambda: _candidates(CHUNK, themes, nouns, rng), seen), number)])


def _falling(count: int) -> np.ndarray:
    """Zipf's shares 1, 1/2, 1/3 and so on, divided by their sum."""
    return (1 / np.arange(1, count + 1)) / (1 / np.arange(1, count + 1)).sum()


def _shares(taste: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the themes (6,), and of the nouns within each (6, 22), for an owner's taste."""
    nouns = np.zeros((len(SCENES), len(NOUNS)))
    for row, theme in enumerate(SCENES):
        nouns[row] = (1 - GENERAL_SHARE - OWN_SHARE) / len(NOUNS)
        for group, share in ((GENERAL_NOUNS, GENERAL_SHARE), (OWN_NOUNS[theme], OWN_SHARE)):
            nouns[row, [NOUNS.index(noun) for noun in group]] += share * _falling(len(group))
    nouns = nouns * taste
    # A theme is liked as its things are.
    themes = _falling(len(SCENES)) * nouns.sum(axis=1)
    return themes / themes.sum(), nouns / nouns.sum(axis=1, keepdims=True)


def _candidates(number: int, themes: np.ndarray, nouns: np.ndarray, rng: np.random.Generator) -> Tags:
    theme = _draw(themes[None], rng.random((number, 1)))[:, 0]
    amount = rng.integers(3, 7, size=(number, 1))
    taken = rng.random((number, CELLS)).argsort(axis=1) < amount
    noun = _draw(nouns[theme], rng.random((number, CELLS)))
    related, which = rng.random(number) < RELATED, rng.random(number)
    cells = rng.integers(GRID, size=number), rng.integers(GRID - 1, size=number)
    for row in np.flatnonzero(related):
        triples = RELATIONS[SCENES[theme[row]]]
        first, relation, second = triples[int(_draw(_falling(len(triples))[None], which[row][None, None])[0, 0])]
        line, step = int(cells[0][row]), int(cells[1][row])
        here = line * GRID + step if relation == LEFT else step * GRID + line
        neighbour_cell = here + (1 if relation == LEFT else GRID)
        noun[row, [here, neighbour_cell]] = NOUNS.index(first), NOUNS.index(second)
        taken[row, [here, neighbour_cell]] = True
    palette = np.array([COLOURS.index(colour) for _, colour in _PAIRS]).reshape(len(NOUNS), -1)
    choice = _draw(np.array([COLOUR_SHARES]), rng.random((number, CELLS)).reshape(1, -1)).reshape(number, CELLS)
    colour = palette[noun, choice]
    size = rng.integers(1, len(SIZES) + 1, size=(number, CELLS))
    zero = np.int64(0)
    return Tags(np.where(taken, noun + 1, zero), np.where(taken, colour + 1, zero), np.where(taken, size, zero))


def _draw(shares: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Numbers with the given shares: shares (N, C) or (1, C), uniform (N, K) in [0, 1) -> int64 (N, K)."""
    bounds = np.cumsum(shares, axis=1)[:, None, :-1]
    return (uniform[..., None] >= bounds).sum(axis=-1)


def _sizes(clients: int, mean: int, sigma: float, seed: int) -> np.ndarray:
    """Training pictures per client, (K,)."""
    weight = generator(seed, "scene labels", "sizes").lognormal(0.0, sigma, clients)
    return np.maximum(weight / weight.sum() * clients * mean, max(LEAST * mean, 1)).round().astype(np.int64)


def _tastes(clients: int, alpha: float, seed: int) -> np.ndarray:
    """Preference of each client for each noun relative to the mean client, (K, 22)."""
    liking = clients * draw_preferences(len(NOUNS), clients, alpha, generator(seed, "scene labels", "tastes"))
    return (1 - EVEN) * liking + EVEN


class _Making:
    """Builder of one table from all clients' pictures."""

    def __init__(self, test_seed: int, seed: int) -> None:
        self.seeds = {"train": seed, "validation": seed, "test": test_seed}
        self.seen: set[int] = set()  # no graph comes twice, whichever client draws it
        self.tags: list[Tags] = []
        self.pictures: list[np.ndarray] = []
        self.names: list[str] = []
        self.types: list[str] = []
        self.rows: dict[tuple[str, str], np.ndarray] = {}
        self.owners: dict[str, int] = {}

    def add(self, owner: str, role: str, number: int, style: str, taste: np.ndarray) -> None:
        """Some pictures of one owner and role; an owner's calls follow each other."""
        if not number:
            return
        seed, purpose = self.seeds[role], (role, owner, style)
        self.tags.append(
            draw_graphs(role, number, taste, generator(seed, "scene labels", "graphs", *purpose), self.seen)
        )
        drawing, rng = DRAWING_STYLES[style], generator(seed, "scene labels", "pixels", *purpose)
        self.pictures.append(drawing.finish(render_over(self.tags[-1], drawing.ground(), drawing.style, 0.0, rng)))
        before, new = self.rows.get((owner, role), np.zeros(0, np.int64)), len(self.names) + np.arange(number)
        self.rows[owner, role] = np.concatenate([before, new])
        self.names += [f"{owner}/{role}/{row:06d}" for row in range(len(before), len(before) + number)]
        self.types += [style] * number
        self.owners[owner] = self.owners.get(owner, 0) + number

    def table(self, level: str) -> tuple[MultiLabelTable, np.ndarray, list[str]]:
        """All rows with their labels; their pictures; and their styles."""
        truth = fine_labels(Tags.join(self.tags))
        if level == "coarse":
            coarse = np.array([COARSE.index(COARSE_OF[label]) for label in FINE])
            truth = np.stack([truth[:, coarse == number].any(axis=1) for number in range(len(COARSE))], axis=1)
        table = MultiLabelTable(
            labels=FINE if level == "fine" else COARSE,
            present=Ragged(np.nonzero(truth)[1].astype(np.int32), offsets_of(truth.sum(axis=1))),
            names=PackedTexts.of(self.names),
            pictures=PackedTexts.of([""] * len(self.names)),
            texts=None,
            users=PackedTexts.of(self.owners),
            user_offsets=offsets_of(list(self.owners.values())),
        )
        return table, np.concatenate(self.pictures), self.types


def _facts(
    sizes: np.ndarray, labels: Sequence[str], splits: Mapping[str, Split], unseen: Mapping[str, Examples]
) -> dict[str, str]:
    positives = label_numbers(split.train for split in splits.values())
    share = positives / sizes.sum()
    common, rare = int(share.argmax()), int(share.argmin())
    return {
        **label_floors(splits, unseen.values()),
        "sizes": f"{int(np.median(sizes))} training pictures per client in the median, {sizes.min()} to {sizes.max()}",
        "labels": f"{positives.sum() / sizes.sum():.1f} of {len(labels)} per training picture; "
        f"{labels[common]!r} in {share[common]:.1%}, {labels[rare]!r} in {share[rare]:.1%}",
    }
