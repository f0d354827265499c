"""Classification of built-in pictures of one thing each in six styles, one client per style.

FedDAT (AAAI 2024, section 3.4 and table 1) motivates its method with DomainNet, pictures of the same things in six
styles, one style per client. This set has the same shape in small: the drawings of the built-in benchmark
(:mod:`confed.datasets.scenes.drawings`), enlarged, turned and mirrored, in styles that are named after DomainNet's:

* ``clipart``: flat, vivid colours and dark contours on white;
* ``infograph``: small, among panels, rows of text-like marks and bars;
* ``painting``: few muted colours on a cloudy ground, smeared, with the weave of a canvas;
* ``quickdraw``: contours only, black on white, drawn with an unsteady hand;
* ``real``: shaded by a light from one side, on the grounds of the benchmark's places, with blur and noise;
* ``sketch``: grey contours and hatching on grained paper.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import words
from confed.data.options import DrawnOptions
from confed.data.refusals import check_choice, check_distinct, left_for_clients
from confed.data.seeding import generator
from confed.datasets.reader import reader
from confed.datasets.scenes.backgrounds import PICTURE, PLACES, VARIANTS, place, random_backgrounds
from confed.datasets.scenes.drawings import CELL, DRAWINGS, FINE, Canvas
from confed.datasets.scenes.graph import NOUNS
from confed.datasets.scenes.render import WHEEL, palette
from confed.federation.ranges import Range, check_value

QUESTION = "what is it?"
CHUNK = 128
NAMED_TURN = 0.2
"""How far the wheel is turned at most where colours have to keep their names, as in the public pictures."""
_Y, _X = np.mgrid[0:PICTURE, 0:PICTURE].astype(np.float32) - np.float32((PICTURE - 1) / 2)
_LINE = 0.35  # half the width of a contour, in units of the drawing


@reader(
    "classes * styles train validation test unseen test_seed seed",
    things="pictures", train=220, validation=110, test=440,
)  # fmt: skip
def six_styles(
    options: DrawnOptions, classes: int | tuple[str, ...] = len(NOUNS), styles: tuple[str, ...] = ()
) -> FederatedDataset:
    """Pictures of 64 x 64 pixels, drawn on the spot; equal arguments give equal bytes.

    Every part has as many pictures of each class, give or take one.

    Raises ``ValueError``: an unknown class or style, fewer than two classes, no client, or a number out of its range.

    Options:
        classes: what is drawn: the first so many of the benchmark's nouns, or their names.
        styles: the clients; all six if none are given.
        test: test pictures per client and unseen style.
        unseen: styles that no client trains on; taken out of ``styles``.
    """
    shown, unseen = _classes(classes), options.unseen
    check_distinct("styles", styles, STYLES)
    check_distinct("unseen", unseen, STYLES)
    clients = left_for_clients(styles or STYLES, unseen)

    def part(style: str, role: str) -> Examples:
        count, rng = options.size(role), generator(options.seed_of(role), "six styles", style, role)
        labels = rng.permutation(np.arange(count) % len(shown))
        nouns = np.array([NOUNS.index(noun) for noun in shown])[labels]
        return Examples(
            _drawn(STYLES[style], rng, nouns),
            np.arange(count),
            [QUESTION] * count,
            [shown[label] for label in labels],
            [style] * count,
            [f"{style}/{role}/{number}" for number in range(count)],
        )

    splits: dict[str, Split] = {}
    for style in clients:
        splits[style] = Split(part(style, "train"), part(style, "validation"), part(style, "test"))
    facts = {
        "origin": "drawn by the package itself, in the manner of DomainNet",
        "counts": f"{len(splits)} clients; {options.train} train, {options.validation} validation, {options.test} test "
        f"pictures each; {len(shown)} classes, equally often",
        "chance": f"{1 / len(shown):.3f}",
    }
    tests = {style: part(style, "test") for style in unseen}
    return FederatedDataset("six_styles", tuple(shown), splits, tests, words([QUESTION]), facts)


def plain_objects(count: int, seed: int, classes: Sequence[str] = NOUNS) -> tuple[np.ndarray, np.ndarray]:
    """Single things in none of the six styles, for pre-training: uint8 (M, 64, 64, 3), and their nouns (M,)."""
    shown, rng = _classes(tuple(classes)), generator(seed, "plain objects")
    labels = rng.integers(len(shown), size=count)
    return _drawn(_plain, rng, np.array([NOUNS.index(noun) for noun in shown])[labels]), labels


def coloured_objects(
    nouns: np.ndarray, colours: np.ndarray, rng: np.random.Generator, style: str = "plain"
) -> np.ndarray:
    """Single things of given colours, uint8, shape (M, 64, 64, 3)."""
    check_choice("style", style, COLOURED)
    return _drawn(COLOURED[style], rng, nouns, colours)


def _classes(classes: int | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(classes, int):
        check_value(classes, Annotated[int, Range(2, len(NOUNS))], "classes")
        return NOUNS[:classes]
    check_distinct("classes", classes, NOUNS, least=2)
    return tuple(classes)


Layers = np.ndarray
"""What is painted where, float32 (N, 4, 64, 64): how much of the thing's colour, light of any colour, how much of the
ground is covered, and contours."""

Style = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""From nouns (N,) to pictures (N, 64, 64, 3) in about [0, 1]."""

Named = np.ndarray | None
"""Positions of colours, (N,), where they are given."""


def _drawn(
    style: Callable[..., np.ndarray], rng: np.random.Generator, nouns: np.ndarray, *colours: np.ndarray
) -> np.ndarray:
    pictures = np.empty((len(nouns), PICTURE, PICTURE, 3), dtype=np.uint8)
    for start in range(0, len(nouns), CHUNK):
        rows = slice(start, start + CHUNK)
        exact = style(nouns[rows], rng, *(given[rows] for given in colours))
        pictures[rows] = np.clip(exact, 0, 1) * np.float32(255) + np.float32(0.5)
    return pictures


@cache
def _plates() -> np.ndarray:
    """Every noun's drawing as large as a picture, without the dark rim: layers, float32 (22, 4, 64, 64)."""
    plates = np.zeros((len(NOUNS), 4, PICTURE, PICTURE), dtype=np.float32)
    step = CELL * FINE // PICTURE
    reach = round(_LINE * FINE)
    for number, noun in enumerate(NOUNS):
        canvas = Canvas(1.0)
        DRAWINGS[noun](canvas)
        key = canvas.alpha + 2 * canvas.tint + 7 * canvas.grey  # another value for every ink
        changes = np.zeros(key.shape, dtype=bool)
        changes[:, 1:] |= key[:, 1:] != key[:, :-1]
        changes[1:] |= key[1:] != key[:-1]
        contour = np.zeros_like(changes)
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                if dx * dx + dy * dy <= reach * reach:
                    contour |= np.roll(changes, (dy, dx), axis=(0, 1))  # nothing is near the border
        for layer, fine in enumerate((canvas.tint, canvas.grey, canvas.alpha, contour.astype(float))):
            plates[number, layer] = fine.reshape(PICTURE, step, PICTURE, step).mean(axis=(1, 3))
    return plates


def _pose(
    nouns: np.ndarray,
    rng: np.random.Generator,
    *,
    size: tuple[float, float] = (0.6, 1.0),
    shift: float = 6.0,
    turn: float = 15.0,
    wobble: float = 0.0,
) -> Layers:
    """Things at random places, sizes and angles, half of them mirrored."""

    def draw(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (len(nouns), 1, 1)).astype(np.float32)

    scale, angle = draw(*size), np.deg2rad(draw(-turn, turn))
    x, y = _X - draw(-shift, shift), _Y - draw(-shift, shift)
    if wobble:
        x = x + wobble * _waves(len(nouns), rng)
        y = y + wobble * _waves(len(nouns), rng)
    mirror = np.where(rng.random((len(nouns), 1, 1)) < 0.5, np.float32(-1), np.float32(1))
    c, s = np.cos(angle) / scale, np.sin(angle) / scale
    across, down = mirror * (c * x + s * y), c * y - s * x
    middle, last = np.float32((PICTURE - 1) / 2), PICTURE - 1
    across, down = np.clip(across + middle, 0, last), np.clip(down + middle, 0, last)
    # Bilinear reading: the four neighbours of every point, weighted by nearness.
    left, top = np.minimum(across.astype(np.int64), last - 1), np.minimum(down.astype(np.int64), last - 1)
    fx, fy = (across - left)[:, None], (down - top)[:, None]
    plates, n, k = _plates(), nouns[:, None, None, None], np.arange(4)[:, None, None]
    left, top = left[:, None], top[:, None]
    upper = plates[n, k, top, left] * (1 - fx) + plates[n, k, top, left + 1] * fx
    lower = plates[n, k, top + 1, left] * (1 - fx) + plates[n, k, top + 1, left + 1] * fx
    return (upper * (1 - fy) + lower * fy).astype(np.float32)


def _waves(number: int, rng: np.random.Generator, longest: float = 40.0) -> np.ndarray:
    """Smooth random fields of unit variance: sums of four plane waves, float32 (N, 64, 64)."""
    total = np.zeros((number, PICTURE, PICTURE), dtype=np.float32)
    for _ in range(4):
        angle, period, phase = (
            rng.uniform(low, high, (number, 1, 1)).astype(np.float32)
            for low, high in ((0, np.pi), (longest / 4, longest), (0, 2 * np.pi))
        )
        total += np.sin(2 * np.pi / period * (_X * np.cos(angle) + _Y * np.sin(angle)) + phase)
    return total * np.float32(0.5**0.5)


def _colours(
    number: int,
    rng: np.random.Generator,
    *,
    turn: float = 0.3,
    muted: float = 0.0,
    named: np.ndarray | None = None,
) -> np.ndarray:
    """One colour each, float32 (N, 3), drawn towards its own grey by the share ``muted``."""
    wheel = palette(rng.uniform(-turn, turn, number) * (1.0 if named is None else NAMED_TURN / turn))
    drawn = rng.integers(len(WHEEL), size=number)
    colour = wheel[np.arange(number), drawn if named is None else named]
    return colour + np.float32(muted) * (colour.mean(-1, keepdims=True) - colour)


def _over(layers: Layers, colour: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """Things of some colour (N, 3) over grounds (N or 1, 64, 64, 3)."""
    tint, grey, cover = (layers[:, k, ..., None] for k in range(3))
    return tint * colour[:, None, None] + grey + (1 - cover) * ground


def _blur(pictures: np.ndarray) -> np.ndarray:
    """The mean of each pixel and its neighbours to the right and below, then of those to the left and above."""
    for axis in (1, 2):
        pictures = (np.roll(pictures, 1, axis) + 2 * pictures + np.roll(pictures, -1, axis)) / 4
    return pictures


def _grain(pictures: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    return pictures + np.float32(strength) * rng.standard_normal((*pictures.shape[:3], 1), dtype=np.float32)


def _clipart(nouns: np.ndarray, rng: np.random.Generator, named: Named = None) -> np.ndarray:
    layers = _pose(nouns, rng)
    ground = 1 - rng.uniform(0, 0.08, (len(nouns), 1, 1, 3)).astype(np.float32)
    picture = _over(layers, _colours(len(nouns), rng, named=named), ground)
    return picture * (1 - np.float32(0.9) * layers[:, 3, ..., None])


def _infograph(nouns: np.ndarray, rng: np.random.Generator, named: Named = None) -> np.ndarray:
    number = len(nouns)
    layers = _pose(nouns, rng, size=(0.45, 0.65), shift=12.0, turn=5.0)
    page = np.empty((number, PICTURE, PICTURE, 3), dtype=np.float32)
    paper, accents = 0.75 + 0.25 * rng.random((number, 3)), _colours(3 * number, rng, muted=0.3).reshape(-1, 3, 3)
    for sheet, colour, accent in zip(page, paper, accents, strict=True):
        sheet[:] = colour
        sheet[: rng.integers(6, 12)] = accent[0]
        side = rng.integers(40, 52)
        sheet[14:40, side:] = 0.5 * colour + 0.5 * accent[1]
        for row in range(14, 62, 4):  # text: rows of dashes of any length
            dashes = rng.random(16).repeat(4)[: rng.integers(20, 60)] < 0.7
            sheet[row : row + 2, 2 : 2 + len(dashes)][:, dashes] = 0.25
        for bar in range(rng.integers(3, 6)):
            sheet[62 - rng.integers(4, 20) : 62, 62 - 5 * bar - 4 : 62 - 5 * bar] = accent[2]
    return _grain(_over(layers, _colours(number, rng, muted=0.4, named=named), page), 0.02, rng)


def _painting(nouns: np.ndarray, rng: np.random.Generator, named: Named = None) -> np.ndarray:
    number = len(nouns)
    layers = _pose(nouns, rng, wobble=1.2)
    low, high = (_colours(number, rng, turn=0.5, muted=0.6)[:, None, None] * share for share in (0.45, 0.85))
    clouds = (0.5 + 0.3 * _waves(number, rng, 90.0))[..., None].astype(np.float32)
    colour = _colours(number, rng, turn=0.5, muted=0.45, named=named)
    picture = _over(layers * np.float32(0.9), colour, low + clouds * (high - low))
    brush = _waves(number, rng, 12.0)[..., None] * np.float32(0.05)
    weave = np.float32(0.04) * (np.sin(_X * 2.1) * np.sin(_Y * 2.1))[None, ..., None]
    return _blur(_blur(picture + brush)) + weave


def _quickdraw(nouns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    layers = _pose(nouns, rng, size=(0.75, 1.0), wobble=1.4, turn=20.0)
    ink = np.clip(2.2 * layers[:, 3] - 0.9, 0, 1)[..., None]
    return np.repeat(1 - ink, 3, axis=-1)


def _real(nouns: np.ndarray, rng: np.random.Generator, named: Named = None) -> np.ndarray:
    number = len(nouns)
    layers = _pose(nouns, rng, turn=25.0, wobble=0.4)
    scenes = np.stack([place(scene) for scene in PLACES])
    ground = scenes[rng.integers(len(PLACES), size=number), rng.integers(VARIANTS, size=number)]
    angle = rng.uniform(0, 2 * np.pi, (number, 1, 1)).astype(np.float32)
    light = 0.85 + 0.3 * (_X * np.cos(angle) + _Y * np.sin(angle)) / PICTURE
    shaded = _over(layers, _colours(number, rng, muted=0.25, named=named), ground) * light[..., None].astype(np.float32)
    return _grain(_blur(shaded), 0.04, rng)


def _sketch(nouns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    number = len(nouns)
    layers = _pose(nouns, rng, wobble=0.6)
    angle = rng.uniform(0, np.pi, (number, 1, 1)).astype(np.float32)
    hatch = np.sin(1.6 * (_X * np.cos(angle) + _Y * np.sin(angle))) > 0
    dark = np.clip(layers[:, 2] - layers[:, 0] * 0.6 - layers[:, 1], 0, 1)  # light inks stay paper
    pencil = np.maximum(0.75 * layers[:, 3], 0.5 * hatch * dark)
    pencil = pencil * (0.8 + 0.2 * _waves(number, rng, 16.0))
    paper = rng.uniform(0.8, 0.95, (number, 1, 1)).astype(np.float32)
    tone = rng.uniform(0.95, 1.0, (number, 1, 1, 3)).astype(np.float32)
    return _grain((paper - 0.7 * pencil)[..., None] * tone, 0.05, rng).astype(np.float32)


def _plain(nouns: np.ndarray, rng: np.random.Generator, named: Named = None) -> np.ndarray:
    number = len(nouns)
    layers = _pose(nouns, rng, size=(0.45, 1.0), shift=10.0, turn=20.0, wobble=0.5)
    strength = np.where(rng.random((number, 1, 1, 1)) < 0.5, rng.uniform(0, 0.9, (number, 1, 1, 1)), 0.0)
    picture = _over(layers, _colours(number, rng, turn=0.5, named=named), random_backgrounds(number, rng))
    picture = picture * (1 - strength.astype(np.float32) * layers[:, 3, ..., None])
    noise = rng.uniform(0, 0.08, (number, 1, 1, 1)).astype(np.float32)
    return picture + noise * rng.standard_normal(picture.shape, dtype=np.float32)


STYLES: Mapping[str, Style] = {
    "clipart": _clipart,
    "infograph": _infograph,
    "painting": _painting,
    "quickdraw": _quickdraw,
    "real": _real,
    "sketch": _sketch,
}

COLOURED: Mapping[str, Callable[[np.ndarray, np.random.Generator, np.ndarray], np.ndarray]] = {
    "plain": _plain,
    "clipart": _clipart,
    "infograph": _infograph,
    "painting": _painting,
    "real": _real,
}
"""Styles in which things have a colour."""
