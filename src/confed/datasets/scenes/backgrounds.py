"""Backgrounds: the six places, plain grey, and the randomised ones of the public split.

A style is everything about a picture except what stands in it: background, turn of the colour wheel, gain
and noise. Places are quiet on purpose (little saturation, little contrast), so that the objects stand out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from confed.data.seeding import generator

PICTURE = 64
VARIANTS = 8

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Style:
    """Style of a scene: turn of the colour wheel in colour names, brightness, deviation of the noise in [0, 1]."""

    hue: float
    gain: float
    noise: float


STYLES: Mapping[str, Style] = {
    "transport": Style(+0.5, 0.9, 0.05),
    "sports": Style(+1.0, 1.0, 0.05),
    "educational": Style(0.0, 0.7, 0.05),
    "natural": Style(-0.5, 0.8, 0.10),
    "home": Style(-1.0, 0.9, 0.05),
    "commercial": Style(+0.25, 0.8, 0.08),
}
NEUTRAL = Style(0.0, 0.9, 0.05)

_Y, _X = np.mgrid[0:PICTURE, 0:PICTURE].astype(np.float64)


def _plain(colour: Colour) -> np.ndarray:
    return np.tile(np.array(colour), (PICTURE, PICTURE, 1))


def _over(picture: np.ndarray, mask: np.ndarray, colour: Colour, strength: float = 1.0) -> None:
    picture[mask] += strength * (np.array(colour) - picture[mask])


def _road(rng: np.random.Generator) -> np.ndarray:
    """Asphalt between two kerbs, seen from above; the stripes are its lane markings."""
    picture = _plain((0.20, 0.23, 0.33))
    picture += rng.normal(0, 0.012, (PICTURE, PICTURE, 1))
    _over(picture, (_X < 5) | (_X >= 59), (0.44, 0.45, 0.49))
    _over(picture, ((_X >= 5) & (_X < 6)) | ((_X >= 58) & (_X < 59)), (0.66, 0.66, 0.68))
    phase = rng.integers(16)
    _over(picture, ((_Y + phase) % 16 < 9) & (np.abs(_X - 31.5) < 1), (0.85, 0.85, 0.82))
    for x in (18.5, 44.5):
        _over(picture, ((_Y + phase + 5) % 16 < 6) & (np.abs(_X - x) < 0.6), (0.52, 0.54, 0.58))
    return picture


def _pitch(rng: np.random.Generator) -> np.ndarray:
    """A playing field with its white lines; the dots are tufts of grass."""
    picture = _plain((0.25, 0.47, 0.25))
    dx, dy = rng.integers(6, size=2)
    _over(picture, ((_X + dx) % 6 < 2) & ((_Y + dy) % 6 < 2), (0.36, 0.58, 0.32), 0.8)
    _over(picture, ((_X + dx + 3) % 6 < 2) & ((_Y + dy + 3) % 6 < 2), (0.20, 0.40, 0.21), 0.8)
    white = (0.80, 0.86, 0.78)
    radius = np.hypot(_X - 31.5, _Y - 31.5)
    _over(picture, np.abs(radius - 15.5) < 0.8, white, 0.8)
    touchline = np.abs(np.maximum(np.abs(_X - 31.5), np.abs(_Y - 31.5)) - 30.5) < 0.8
    _over(picture, (np.abs(_Y - 31.5) < 0.8) | touchline, white, 0.8)
    return picture


def _classroom(rng: np.random.Generator) -> np.ndarray:
    """A beige wall with a blackboard over a chequered floor."""
    picture = _plain((0.80, 0.74, 0.62))
    shift = rng.integers(8)
    board = (_X >= 5) & (_X < 59) & (_Y >= 4) & (_Y < 29)
    _over(picture, board, (0.55, 0.42, 0.29))
    _over(picture, (_X >= 7) & (_X < 57) & (_Y >= 6) & (_Y < 27), (0.20, 0.29, 0.26))
    for y in (10, 15, 20):
        writing = (y == _Y) & (_X >= 10) & (52 - 4 * rng.integers(5) > _X) & ((_X + 3 * y + shift) % 7 < 5)
        _over(picture, writing, (0.62, 0.68, 0.64))
    _over(picture, (_Y >= 29) & (_Y < 31), (0.60, 0.47, 0.34))
    floor = _Y >= 36
    _over(picture, floor, (0.72, 0.65, 0.53))
    _over(picture, floor & (((_X + shift) // 8 + (_Y - 36) // 7) % 2 == 0), (0.60, 0.53, 0.42))
    _over(picture, (_Y >= 34) & (_Y < 36), (0.52, 0.42, 0.32))
    return picture


def _meadow(rng: np.random.Generator) -> np.ndarray:
    """Dark grass under a strip of evening sky; the noise is in the grass."""
    picture = _plain((0.17, 0.30, 0.17))
    picture += 0.05 * rng.normal(0, 1, (PICTURE // 2, PICTURE // 2, 1)).repeat(2, 0).repeat(2, 1)
    a, b = rng.uniform(0, 2 * np.pi, 2)
    edge = 13 + 2.5 * np.sin(_X / 9 + a) + 1.2 * np.sin(_X / 4 + b)
    sky = np.stack([0.47 + 0.006 * _Y, 0.58 + 0.005 * _Y, 0.70 - 0.004 * _Y], axis=-1)
    picture = np.where((edge > _Y)[..., None], sky, picture)
    _over(picture, (edge <= _Y) & (edge + 2 > _Y), (0.24, 0.40, 0.22))
    for x, y in zip(rng.integers(1, 62, 26), rng.integers(20, 62, 26), strict=True):
        blades = ((x == _X) & (y - 2 <= _Y) & (y >= _Y)) | ((np.abs(_X - x) == 1) & (y - 1 == _Y))
        _over(picture, blades, (0.34, 0.50, 0.26))
    return picture


def _room(rng: np.random.Generator) -> np.ndarray:
    """A brown wall that darkens to one side, with a window, a skirting board and a rug on a wooden floor."""
    light = 0.62 - 0.22 * _X / PICTURE - 0.10 * _Y / PICTURE
    picture = light[..., None] * np.array([1.12, 0.86, 0.64])
    left = 4 + rng.integers(4)
    _over(picture, (left <= _X) & (left + 24 > _X) & (_Y >= 4) & (_Y < 26), (0.88, 0.86, 0.80))
    for x in (left + 2, left + 13):
        for y in (6, 16):
            pane = (x <= _X) & (x + 9 > _X) & (y <= _Y) & (y + 8 > _Y)
            _over(picture, pane, (0.62, 0.74, 0.82))
    _over(picture, (_Y >= 40) & (_Y < 42), (0.85, 0.79, 0.70))
    floor = _Y >= 42
    planks = 0.40 - 0.10 * _X / PICTURE - 0.05 * (((_Y - 42) // 5) % 2)
    picture[floor] = (planks[..., None] * np.array([1.10, 0.78, 0.54]))[floor]
    rug = ((_X - 34) / 25) ** 2 + ((_Y - 54) / 8) ** 2
    _over(picture, rug < 1, (0.66, 0.60, 0.54))
    _over(picture, (rug < 0.8) & (rug > 0.62), (0.52, 0.44, 0.42))
    return picture


def _shop(rng: np.random.Generator) -> np.ndarray:
    """A light front with a striped awning, a lit window and a hatched counter."""
    picture = _plain((0.80, 0.80, 0.78))
    shift = rng.integers(6)
    hatch = ((_X + _Y + shift) % 6 < 1) | ((_X - _Y + shift) % 6 < 1)
    _over(picture, hatch, (0.71, 0.71, 0.72))
    scallop = 9 + 2.2 * np.sin(np.pi * (_X % 8) / 8)
    awning = scallop > _Y
    _over(picture, awning, (0.93, 0.91, 0.88))
    _over(picture, awning & ((_X // 8) % 2 == 0), (0.66, 0.44, 0.44))
    _over(picture, (scallop <= _Y) & (scallop + 1 > _Y), (0.50, 0.48, 0.48))
    counter = _Y >= 51
    _over(picture, counter, (0.58, 0.55, 0.53))
    _over(picture, counter & ((_X + shift) % 16 < 1), (0.44, 0.42, 0.42))
    _over(picture, (_Y >= 49) & (_Y < 51), (0.72, 0.66, 0.58))
    return picture


PLACES: Mapping[str, Callable[[np.random.Generator], np.ndarray]] = {
    "transport": _road,
    "sports": _pitch,
    "educational": _classroom,
    "natural": _meadow,
    "home": _room,
    "commercial": _shop,
}


@cache
def place(scene: str) -> np.ndarray:
    """A scene's backgrounds in a few variants (where grass grows), float32, shape (8, 64, 64, 3)."""
    rng = generator(0, "background", scene)
    return np.stack([np.clip(PLACES[scene](rng), 0, 1) for _ in range(VARIANTS)]).astype(np.float32)


def random_backgrounds(number: int, rng: np.random.Generator) -> np.ndarray:
    """Backgrounds of the public split: a random colour, plain or with stripes, checks or coarse noise."""

    def draw(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (number, 1, 1)).astype(np.float32)

    x, y = _X.astype(np.float32), _Y.astype(np.float32)
    angle, period, phase, contrast = draw(0, np.pi), draw(4, 40), draw(0, 2 * np.pi), draw(0.03, 0.25)
    step = (2 * np.pi / period).astype(np.float32)
    stripes = np.sign(np.sin(step * (x * np.cos(angle) + y * np.sin(angle)) + phase))
    checker = np.sign(np.sin(step * x + phase)) * np.sign(np.sin(step * y + 2 * phase))
    coarse = rng.standard_normal((number, PICTURE // 2, PICTURE // 2), dtype=np.float32) * np.float32(0.6)
    noise = coarse.repeat(2, axis=1).repeat(2, axis=2)
    kind = rng.integers(4, size=(number, 1, 1))
    texture = np.select([kind == 1, kind == 2, kind == 3], [stripes, checker, noise], np.float32(0))
    grey = rng.uniform(0.15, 0.85, (number, 1))
    colour = grey + rng.uniform(-0.18, 0.18, (number, 3))
    direction = 1 + rng.uniform(-0.5, 0.5, (number, 3))  # a texture may also change the hue a little
    picture = colour[:, None, None, :] + (0.5 * contrast * texture)[..., None] * direction[:, None, None, :]
    return np.clip(picture, 0, 1).astype(np.float32)
