"""Drawings of the 22 things as sprites of 16 x 16 pixels, made of simple shapes.

A drawing is a list of strokes on a canvas whose origin is the middle of the cell (x to the right, y down,
units of one pixel at size "large", everything within 6.3 of the origin). A stroke is painted in the
object's own colour ("body"), a darker or lighter tone of it ("shade", "tint"), or in near-black ("dark"),
grey or white ("light"), which stay the same for every colour. A thin dark outline separates the thing from
any background.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import numpy as np

from confed.datasets.scenes.graph import NOUNS, SIZES

CELL = 16
JITTERS = tuple((dx, dy) for dy, dx in product((-1, 0, 1), repeat=2))
SCALE = {"small": 0.64, "large": 1.0}
OUTLINE = 0.65
FINE = 8  # sub-pixels per pixel and axis

# How much of the object's colour a stroke takes, and how much constant light it adds.
INKS = {
    "body": (1.0, 0.0),
    "shade": (0.55, 0.0),
    "tint": (0.55, 0.45),
    "dark": (0.0, 0.1),
    "grey": (0.0, 0.6),
    "light": (0.0, 0.97),
}

Mask = np.ndarray


class Canvas:
    """Canvas of one drawing: boolean masks from shapes, later strokes over earlier ones."""

    def __init__(self, scale: float) -> None:
        centre = (np.arange(CELL * FINE) + 0.5) / FINE - CELL / 2
        self._x, self._y = centre[None, :] / scale, centre[:, None] / scale
        self._scale = scale
        self.alpha = np.zeros((CELL * FINE, CELL * FINE))
        self.tint, self.grey = self.alpha.copy(), self.alpha.copy()

    def paint(self, ink: str, *masks: Mask) -> None:
        """Filling of the masks with an ink."""
        for mask in masks:
            self.tint[mask], self.grey[mask] = INKS[ink]
            self.alpha[mask] = 1.0

    def ellipse(self, x: float, y: float, rx: float, ry: float | None = None, turn: float = 0.0) -> Mask:
        """Filled ellipse around (x, y), its first axis turned by ``turn`` degrees."""
        c, s = np.cos(np.deg2rad(turn)), np.sin(np.deg2rad(turn))
        dx, dy = self._x - x, self._y - y
        return ((c * dx + s * dy) / rx) ** 2 + ((c * dy - s * dx) / (ry or rx)) ** 2 <= 1

    def box(self, left: float, top: float, right: float, bottom: float, round_: float = 0.0) -> Mask:
        """Filled rectangle, with rounded corners of the given radius."""
        dx = np.abs(self._x - (left + right) / 2) - (right - left) / 2 + round_
        dy = np.abs(self._y - (top + bottom) / 2) - (bottom - top) / 2 + round_
        return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0) <= round_

    def polygon(self, *points: tuple[float, float]) -> Mask:
        """Filled polygon (even-odd rule)."""
        inside = np.zeros(self.alpha.shape, dtype=bool)
        for (x0, y0), (x1, y1) in zip(points, (*points[1:], points[0]), strict=True):
            if y0 == y1:
                continue
            crossing = x0 + (self._y - y0) * (x1 - x0) / (y1 - y0)
            inside ^= ((self._y < y0) != (self._y < y1)) & (self._x < crossing)
        return inside

    def line(self, width: float, *points: tuple[float, float]) -> Mask:
        """Poly-line with round ends."""
        mask = np.zeros(self.alpha.shape, dtype=bool)
        for (x0, y0), (x1, y1) in pairwise(points):
            dx, dy = x1 - x0, y1 - y0
            t = np.clip(((self._x - x0) * dx + (self._y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
            mask |= np.hypot(self._x - x0 - t * dx, self._y - y0 - t * dy) <= width / 2
        return mask

    def ring(self, x: float, y: float, rx: float, ry: float, width: float, *, turn: float = 0.0) -> Mask:
        """Elliptic ring whose outer edge has the given radii."""
        return self.ellipse(x, y, rx, ry, turn) & ~self.ellipse(x, y, rx - width, ry - width, turn)

    def outline(self) -> None:
        """Dark outline of everything painted so far, equally thick at every size."""
        reach = round(OUTLINE * FINE)
        solid, grown = np.pad(self.alpha > 0, reach), np.zeros(self.alpha.shape, dtype=bool)
        side = self.alpha.shape[0]
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                if dx * dx + dy * dy <= reach * reach:
                    grown |= solid[reach + dy : reach + dy + side, reach + dx : reach + dx + side]
        self.paint("dark", grown & (self.alpha == 0))


def _person(c: Canvas) -> None:
    c.paint("shade", c.line(1.9, (-1.5, 1), (-1.9, 5.3)), c.line(1.9, (1.5, 1), (1.9, 5.3)))
    c.paint("body", c.line(1.6, (-2.6, -1.4), (-5, 1.4)), c.line(1.6, (2.6, -1.4), (5, 1.4)))
    c.paint("body", c.polygon((-3, -2.2), (3, -2.2), (2.4, 2), (-2.4, 2)))
    c.paint("tint", c.ellipse(0, -4.2, 2.1))
    c.paint("dark", c.ellipse(-0.8, -4.4, 0.35), c.ellipse(0.8, -4.4, 0.35))


def _dog(c: Canvas) -> None:
    c.paint("body", c.line(1.3, (-4.4, -0.2), (-5.6, -3.2)))
    c.paint("shade", c.line(1.5, (-2.5, 2), (-2.5, 5.4)), c.line(1.5, (3.2, 2), (3.2, 5.4)))
    c.paint("body", c.line(1.6, (-4, 1.5), (-4.3, 5.3)), c.line(1.6, (1.6, 2), (1.6, 5.3)))
    c.paint("body", c.box(-5, -1, 3.6, 2.8, 1.6), c.polygon((0.6, 0), (1.8, -4), (4.6, -1), (3.4, 2)))
    c.paint("body", c.box(1.2, -5, 4.6, -1.2, 1.2), c.box(3, -3.4, 6.3, -1.2, 0.9))
    c.paint("shade", c.polygon((1, -5.2), (2.4, -5.2), (2.2, -1.2), (0.4, -1.6)))
    c.paint("dark", c.ellipse(5.6, -3, 0.7), c.ellipse(3.6, -3.7, 0.45))


def _box(c: Canvas) -> None:
    c.paint("body", c.polygon((-5.8, -2), (1.4, -2), (1.4, 5.6), (-5.8, 5.6)))
    c.paint("shade", c.polygon((1.4, -2), (5.8, -5), (5.8, 2.4), (1.4, 5.6)))
    c.paint("tint", c.polygon((-5.8, -2), (-1.4, -5), (5.8, -5), (1.4, -2)))
    c.paint("light", c.polygon((-3, -2), (1.2, -5), (2.6, -5), (-1.4, -2)), c.box(-3, -2, -1.4, 0.6))
    c.paint("dark", c.line(0.5, (-5.8, -2), (1.4, -2), (1.4, 5.6)), c.line(0.5, (1.4, -2), (5.8, -5)))


def _clock(c: Canvas) -> None:
    c.paint("shade", c.line(1.4, (-3.4, 4.2), (-4.6, 5.6)), c.line(1.4, (3.4, 4.2), (4.6, 5.6)))
    c.paint("body", c.ellipse(-3.8, -4.4, 1.9), c.ellipse(3.8, -4.4, 1.9), c.ellipse(0, 0, 5.6))
    c.paint("light", c.ellipse(0, 0, 3.6))
    c.paint("dark", c.line(0.9, (0, 0.2), (0, -2.6)), c.line(0.9, (0, 0.2), (2, 1.2)))


def _car(c: Canvas) -> None:
    c.paint("body", c.polygon((-4.2, 0), (-2.6, -3.8), (2, -3.8), (4.2, 0)), c.box(-6.3, -0.8, 6.3, 3, 1.3))
    c.paint("light", c.polygon((-2.9, -0.6), (-1.9, -2.8), (-0.6, -2.8), (-0.6, -0.6)))
    c.paint("light", c.polygon((0.4, -0.6), (0.4, -2.8), (1.5, -2.8), (2.8, -0.6)), c.ellipse(5.6, 0.7, 0.6))
    for x in (-3.4, 3.4):
        c.paint("dark", c.ellipse(x, 3, 1.9))
        c.paint("light", c.ellipse(x, 3, 0.75))


def _bus(c: Canvas) -> None:
    c.paint("body", c.box(-6.3, -5.4, 6.3, 3.8, 1))
    c.paint("light", *(c.box(x, -4, x + 2.2, -1.2) for x in (-5.6, -2.7, 0.2)), c.box(3.4, -4, 5.6, 3))
    c.paint("dark", c.line(0.4, (4.5, -4), (4.5, 3)))
    c.paint("shade", c.box(-6.3, 0.6, 2.6, 1.8))
    for x in (-3.8, 1.6):
        c.paint("dark", c.ellipse(x, 4, 1.6))
        c.paint("light", c.ellipse(x, 4, 0.6))


def _sign(c: Canvas) -> None:
    c.paint("grey", c.box(-0.6, 1, 0.6, 6.2))
    r, k, y = 4.6, 1.9, -1.7
    top, bottom = ((-k, y - r), (k, y - r), (r, y - k)), ((r, y + k), (k, y + r), (-k, y + r), (-r, y + k))
    c.paint("body", c.polygon(*top, *bottom, (-r, y - k)))
    c.paint("light", c.box(-2.9, y - 1, 2.9, y + 1))


def _ball(c: Canvas) -> None:
    whole = c.ellipse(0, 0, 5.9)
    c.paint("body", whole)
    c.paint("tint", c.ellipse(-2.4, -2.6, 1.6))
    turns = np.arange(5) * 2 * np.pi / 5
    corners = [(2.1 * np.sin(a), -2.1 * np.cos(a)) for a in turns]
    for x, y in corners:
        c.paint("dark", c.line(0.55, (x, y), (1.9 * x, 1.9 * y)))
        c.paint("dark", c.ellipse(2.8 * x, 2.8 * y, 1.75) & whole)
    c.paint("dark", c.polygon(*corners))


def _racket(c: Canvas) -> None:
    c.paint("shade", c.line(1.9, (-2, 2), (-5.2, 5.2)))
    c.paint("light", c.ellipse(1.8, -1.8, 4, 3.2, -45))
    for step in (-2.4, -0.8, 0.8, 2.4):
        net = c.line(0.4, (1.8 + step, -6), (1.8 + step, 3)), c.line(0.4, (-3, -1.8 + step), (6, -1.8 + step))
        c.paint("dark", *(n & c.ellipse(1.8, -1.8, 3.6, 2.8, -45) for n in net))
    c.paint("body", c.ring(1.8, -1.8, 4.8, 4.1, 1.6, turn=-45), c.line(2, (-1.4, 1.4), (-2.6, 2.6)))


def _net(c: Canvas) -> None:
    c.paint("dark", c.polygon((-5.4, -4), (5.4, -4), (5.4, 5), (-5.4, 5)))
    for x in (-3.4, -1.15, 1.15, 3.4):
        c.paint("tint", c.line(0.45, (x, -4), (x, 5)))
    for y in (-1.2, 1, 3.2):
        c.paint("tint", c.line(0.45, (-5, y), (5, y)))
    c.paint("body", c.line(2, (-5.2, 5.2), (-5.2, -4), (5.2, -4), (5.2, 5.2)))


def _book(c: Canvas) -> None:
    c.paint("shade", c.polygon((-6.3, -3.2), (0, -2), (6.3, -3.2), (6.3, 4.4), (0, 5.4), (-6.3, 4.4)))
    c.paint("body", c.polygon((-5.7, -4.4), (-3, -4.8), (0, -3.4), (0, 4.4), (-3, 3), (-5.7, 3.4)))
    c.paint("body", c.polygon((5.7, -4.4), (3, -4.8), (0, -3.4), (0, 4.4), (3, 3), (5.7, 3.4)))
    for y in (-2.9, -0.9, 1.1):
        c.paint("light", c.line(0.8, (-4.6, y), (-1.4, y + 0.8)), c.line(0.8, (4.6, y), (1.4, y + 0.8)))
    c.paint("dark", c.line(0.6, (0, -3.4), (0, 4.4)))


def _lamp(c: Canvas) -> None:
    c.paint("dark", c.line(1.2, (0, 0), (0, 5)))
    c.paint("light", c.ellipse(0, 0.6, 1.7))
    c.paint("body", c.polygon((-2.6, -6), (2.6, -6), (5.8, 0.4), (-5.8, 0.4)), c.box(-3.4, 4.2, 3.4, 6, 0.8))
    c.paint("tint", c.polygon((-1.6, -6), (-0.4, -6), (-1.2, 0.4), (-3.6, 0.4)))


def _globe(c: Canvas) -> None:
    c.paint("grey", c.ring(-0.4, -1, 6.1, 5.3, 0.9) & c.polygon((0, -7), (7, -7), (7, 7), (-3, 7)))
    c.paint("grey", c.box(-0.5, 4, 0.9, 5.6), c.box(-3, 5.2, 3.4, 6.3, 0.4))
    earth = c.ellipse(-1.2, -1, 4.2)
    c.paint("dark", c.ellipse(-1.2, -1, 4.6))
    c.paint("body", earth)
    c.paint("light", c.polygon((-4.4, -3), (-1.8, -4.4), (-1, -3.2), (-2.4, -2), (-2.6, -0.8), (-4, -1.6)) & earth)
    c.paint("light", c.polygon((-2.8, 0.2), (-0.8, 0.8), (-1.6, 2.8), (-2.2, 2.4)) & earth)
    c.paint("light", c.polygon((0.6, -3.4), (3, -2.6), (2.6, 0.8), (1.6, 2), (1.2, -0.4), (0, -1.2)) & earth)


def _tree(c: Canvas) -> None:
    c.paint("dark", c.box(-1, 3, 1, 6.2))
    c.paint("body", c.polygon((0, -1.4), (5.2, 4), (-5.2, 4)))
    c.paint("shade", c.polygon((0, -1), (3.2, 1.3), (-3.2, 1.3)))
    c.paint("body", c.polygon((0, -4.4), (4.2, 0.7), (-4.2, 0.7)))
    c.paint("shade", c.polygon((0, -4), (2.4, -2), (-2.4, -2)))
    c.paint("body", c.polygon((0, -6.3), (3.1, -2.5), (-3.1, -2.5)))
    c.paint("tint", c.line(0.8, (-0.4, -4.8), (-1.4, -3.4)), c.line(0.8, (-1, -1.4), (-2.2, -0.2)))


def _deer(c: Canvas) -> None:
    c.paint("shade", c.line(1.1, (-3, 1.5), (-3, 5.7)), c.line(1.1, (1, 1.5), (1, 5.7)))
    c.paint("body", c.line(1.2, (-4.2, 1), (-4.4, 5.7)), c.line(1.2, (2.2, 1), (2.4, 5.7)))
    c.paint("body", c.ellipse(-1.2, 0.6, 4, 2.1), c.polygon((0.8, 1.4), (2.4, -3), (4.2, -2.4), (2.8, 1.6)))
    c.paint("body", c.ellipse(4, -2.2, 2.1, 1.2, 25), c.ellipse(-5, -0.6, 0.9))
    c.paint("light", c.ellipse(-2.6, -0.2, 0.5), c.ellipse(-1, 0.4, 0.5), c.ellipse(0.6, -0.2, 0.5))
    for tip in (-1.2, 1.2):
        x = 2.8 + tip
        c.paint(
            "shade",
            c.line(0.8, (2.8, -3), (x, -4.4), (x, -5.9)),
            c.line(0.8, (x, -4.6), (x + 1.3 * tip, -5.8)),
        )
    c.paint("dark", c.ellipse(3.6, -2.7, 0.4), c.ellipse(5.8, -1.5, 0.45))


def _hill(c: Canvas) -> None:
    ground = c.box(-6.3, -7, 6.3, 4.9)
    front = c.ellipse(-2, 5, 4.4, 6.6) & ground
    c.paint("shade", c.ellipse(2.6, 5, 3.8, 9.4) & ground)
    c.paint("light", c.ellipse(2.6, 5, 3.8, 9.4) & c.box(-6, -7, 6.3, -2.2))
    c.paint("dark", c.ellipse(-2, 5, 4.9, 7.2) & ground & ~front)
    c.paint("body", front, c.box(-6.3, 3.8, 6.3, 5.1, 0.6))
    c.paint("tint", c.ellipse(-3.2, 1.6, 1, 1.8, 20))


def _cup(c: Canvas) -> None:
    c.paint("body", c.ring(3.6, 1, 2.7, 2.9, 1.3))
    c.paint("body", c.box(-5, -1.8, 3.2, 5.6, 1.8), c.box(-5, -2.2, 3.2, 2))
    c.paint("light", c.ellipse(-0.9, -2, 4.1, 1.3))
    c.paint("dark", c.ellipse(-0.9, -1.8, 3, 0.75))
    c.paint("tint", c.box(-3.8, 0.4, -2.6, 3.8, 0.5))
    for x in (-2.2, 0.4):
        c.paint("light", c.line(0.7, (x, -3.9), (x + 0.6, -4.8), (x, -5.9)))


def _chair(c: Canvas) -> None:
    c.paint("shade", c.line(1.3, (-1.2, 2), (-1.2, 5.6)), c.line(1.3, (4.4, 2), (4.4, 5.6)))
    c.paint("body", c.line(1.6, (-3.6, -5.6), (-3.6, 5.4)), c.line(1.6, (2.4, 2), (2.4, 5.4)))
    c.paint("body", c.line(1.6, (0.6, -5.2), (0.6, 0)))
    for y in (-5, -2.8):
        c.paint("body", c.line(1.3, (-3.6, y), (0.6, y)))
    c.paint("body", c.polygon((-4.4, 0.6), (-1.6, -0.8), (5.3, -0.8), (3.2, 2.4), (-4.4, 2.4)))
    c.paint("tint", c.polygon((-3.2, 0.6), (-1.4, -0.2), (4.2, -0.2), (3.2, 0.9)))


def _cat(c: Canvas) -> None:
    c.paint("shade", c.line(1.5, (2.4, 5), (4.8, 4.4), (5, 1.6), (4.4, 0.2)))
    c.paint("body", c.polygon((-2.6, 0), (2.6, 0), (3.6, 5.8), (-3.6, 5.8)))
    c.paint(
        "body",
        c.polygon((-3.8, -6.2), (-0.6, -4.2), (-3.6, -1.8)),
        c.polygon((3.8, -6.2), (0.6, -4.2), (3.6, -1.8)),
    )
    c.paint("body", c.ellipse(0, -2.2, 3.9, 3))
    c.paint("light", c.ellipse(-1.6, -2.6, 0.95), c.ellipse(1.6, -2.6, 0.95), c.ellipse(0, 3.2, 1.2, 2))
    c.paint("dark", c.ellipse(-1.6, -2.6, 0.5), c.ellipse(1.6, -2.6, 0.5), c.ellipse(0, -1.2, 0.55, 0.4))
    c.paint("dark", c.line(0.35, (-1, -0.8), (-4.8, -0.2)), c.line(0.35, (1, -0.8), (4.8, -0.2)))


def _shelf(c: Canvas) -> None:
    c.paint("dark", c.box(-5.6, -6, 5.6, 6))
    for floor, things in ((-2.3, (-3.4, -1.6, 2.6)), (1.5, (-2.4, 1.2, 3.2)), (5, (-3.4, -0.4, 2.4))):
        c.paint("light", *(c.box(x - 0.7, floor - 1.9, x + 0.7, floor) for x in things))
    c.paint("body", c.box(-6, -6.2, -4.4, 6.2), c.box(4.4, -6.2, 6, 6.2))
    for y in (-6.2, -2.3, 1.5, 4.8):
        c.paint("body", c.box(-6, y, 6, y + 1.5))


def _till(c: Canvas) -> None:
    c.paint("light", c.polygon((-4.4, -6.2), (-1.2, -6.2), (-1.2, -2), (-4.4, -2)))
    c.paint("shade", c.box(2.1, -4, 3.3, 0))
    c.paint("body", c.box(-0.2, -6, 5.6, -3.2, 0.4))
    c.paint("dark", c.box(0.6, -5.3, 4.8, -3.9))
    c.paint("body", c.polygon((-4.8, -2.6), (4.8, -2.6), (5.8, 2.6), (-5.8, 2.6)))
    for y in (-1.7, 0.1):
        c.paint("light", *(c.box(x, y, x + 1.3, y + 1.1) for x in (-3.6, -1.5, 0.6, 2.7)))
    c.paint("shade", c.box(-6.2, 2.6, 6.2, 6, 0.4))
    c.paint("light", c.box(-1.6, 3.8, 1.6, 4.7))


def _bag(c: Canvas) -> None:
    c.paint("shade", c.ring(0, -1.8, 3.2, 4.3, 1.2) & c.box(-4, -7, 4, -1))
    c.paint("body", c.polygon((-4.4, -1.8), (4.4, -1.8), (5.8, 5.8), (-5.8, 5.8)))
    c.paint("tint", c.polygon((-4.4, -1.8), (4.4, -1.8), (4.7, -0.4), (-4.7, -0.4)))
    c.paint("dark", c.ellipse(-2.4, -0.9, 0.5), c.ellipse(2.4, -0.9, 0.5))
    c.paint("light", c.ellipse(0, 2.8, 1.5))


DRAWINGS: Mapping[str, Callable[[Canvas], None]] = {noun: globals()[f"_{noun}"] for noun in NOUNS}
"""A thing's drawing is the function of its name."""


@dataclass(frozen=True)
class Sprites:
    """Drawings by noun, size and jitter; over a background b, in colour c: ``tint * c + grey + (1 - alpha) * b``."""

    tint: np.ndarray
    grey: np.ndarray
    alpha: np.ndarray


@cache
def sprites() -> Sprites:
    """The sprite tables; drawn on the first call."""
    shape = (len(NOUNS) + 1, len(SIZES), len(JITTERS), CELL, CELL)
    tint, grey, alpha = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    for n, noun in enumerate(NOUNS, start=1):
        for s, size in enumerate(SIZES):
            canvas = Canvas(SCALE[size])
            DRAWINGS[noun](canvas)
            canvas.outline()
            for table, fine in ((tint, canvas.tint), (grey, canvas.grey), (alpha, canvas.alpha)):
                pixels = fine.reshape(CELL, FINE, CELL, FINE).mean(axis=(1, 3))
                for j, (dx, dy) in enumerate(JITTERS):
                    table[n, s, j] = np.roll(pixels, (dy, dx), axis=(0, 1))  # one empty pixel on every side
    return Sprites(tint, grey, alpha)
