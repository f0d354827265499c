"""Scene graphs: objects in cells, and their random generation.

A picture is a grid of 4 x 4 cells and holds 3 to 6 objects in distinct cells; an object is a noun, a colour
and a size. The split unit is the graph: a 64-bit fingerprint of the graph decides once and for all whether
it is public, training, validation or test material, so no choice of seeds can leak a graph from one role to
another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from confed.data.seeding import generator

GRID = 4
CELLS = GRID * GRID
SCENES = ("transport", "sports", "educational", "natural", "home", "commercial")
GENERAL_NOUNS = ("person", "dog", "box", "clock")
OWN_NOUNS: Mapping[str, tuple[str, ...]] = {
    "transport": ("car", "bus", "sign"),
    "sports": ("ball", "racket", "net"),
    "educational": ("book", "lamp", "globe"),
    "natural": ("tree", "deer", "hill"),
    "home": ("cup", "chair", "cat"),
    "commercial": ("shelf", "till", "bag"),
}
NOUNS = GENERAL_NOUNS + tuple(chain.from_iterable(OWN_NOUNS[scene] for scene in SCENES))
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
SIZES = ("small", "large")

# Sixteenths of all fingerprints; the public share is the largest because the public split is.
ROLES: Mapping[str, range] = {
    "public": range(8),
    "train": range(8, 12),
    "validation": range(12, 14),
    "test": range(14, 16),
}
CHUNK = 256


class Object(NamedTuple):
    """One thing in a picture: its cell (row-major, 0 to 15), and its noun, colour and size in words."""

    cell: int
    noun: str
    colour: str
    size: str


@dataclass(frozen=True)
class Tags:
    """Objects in the cells of M pictures: 1 + position in the word lists, 0 = empty, int64, shape (M, 16)."""

    noun: np.ndarray
    colour: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.noun)

    def take(self, rows: np.ndarray | slice) -> "Tags":
        """The given pictures."""
        return Tags(self.noun[rows], self.colour[rows], self.size[rows])

    @staticmethod
    def join(parts: Sequence["Tags"]) -> "Tags":
        """Several tables one after another."""
        tables = [(one.noun, one.colour, one.size) for one in parts]
        return Tags(*map(np.concatenate, zip(*tables, strict=True)))


def colour_prior(scene: str, seed: int, concentration: float = 0.5) -> np.ndarray:
    """Frequencies of colours in a scene: its Dirichlet draw, mixed 90/10 with uniform, shape (8,)."""
    draw = generator(seed, "colours", scene).dirichlet(np.full(len(COLOURS), concentration))
    return 0.9 * draw + 0.1 / len(COLOURS)


def fingerprint(tags: Tags) -> np.ndarray:
    """A 64-bit number per graph, uint64, shape (M,): equal graphs have equal fingerprints."""
    code = (tags.noun * 32 + tags.colour * 3 + tags.size).astype(np.uint64)
    value = np.full(len(tags), 0xCBF29CE484222325, dtype=np.uint64)
    for cell in range(CELLS):  # FNV-1a, then the finaliser of SplitMix64 so that the low bits are well mixed
        value = (value ^ code[:, cell]) * np.uint64(0x100000001B3)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(
    role: str, nouns: Sequence[str], prior: np.ndarray, rng: np.random.Generator, seen: set[int] | None = None
) -> Iterator[Tags]:
    """Endless stream of new graphs of one role, one at a time (each a :class:`Tags` of one picture)."""
    wanted = np.array([NOUNS.index(noun) + 1 for noun in nouns])
    return new_graphs(role, lambda: _candidates(CHUNK, wanted, prior, rng), set() if seen is None else seen)


def new_graphs(role: str, draw: Callable[[], Tags], seen: set[int]) -> Iterator[Tags]:
    """The graphs of one role that were not seen before, one by one, out of many that are drawn at once."""
    buckets = np.array(list(ROLES[role]), dtype=np.uint64)
    while True:
        tags = draw()
        marks = fingerprint(tags)
        for row in np.flatnonzero(np.isin(marks % np.uint64(16), buckets)):
            mark = int(marks[row])
            if mark not in seen:
                seen.add(mark)
                yield tags.take(slice(row, row + 1))


def _candidates(number: int, nouns: np.ndarray, prior: np.ndarray, rng: np.random.Generator) -> Tags:
    amount = rng.integers(3, 7, size=(number, 1))
    rank = rng.random((number, CELLS)).argsort(axis=1)  # a random order of the cells; the first ones are taken
    taken = rank < amount
    noun = nouns[rng.integers(len(nouns), size=(number, CELLS))]
    colour = np.minimum(np.searchsorted(np.cumsum(prior), rng.random((number, CELLS)), side="right"), len(COLOURS) - 1)
    size = rng.integers(1, len(SIZES) + 1, size=(number, CELLS))
    zero = np.int64(0)
    return Tags(np.where(taken, noun, zero), np.where(taken, colour + 1, zero), np.where(taken, size, zero))


def objects(tags: Tags, picture: int) -> tuple[Object, ...]:
    """One picture's objects in words, in row-major order."""
    noun, colour, size = tags.noun[picture], tags.colour[picture], tags.size[picture]
    return tuple(
        Object(int(cell), NOUNS[noun[cell] - 1], COLOURS[colour[cell] - 1], SIZES[size[cell] - 1])
        for cell in np.flatnonzero(noun)
    )
