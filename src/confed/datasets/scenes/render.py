"""Rendering of scene graphs to pictures of 64 x 64 pixels."""

from collections.abc import Callable

import numpy as np

from confed.datasets.scenes.backgrounds import NEUTRAL, PICTURE, STYLES, Style, place, random_backgrounds
from confed.datasets.scenes.drawings import CELL, JITTERS, sprites
from confed.datasets.scenes.graph import GRID, Tags

# Hue (in sixths of a turn), saturation and value at which a person says "red", "orange", and so on.
WHEEL = np.array([
    (0.00, 0.88, 0.92),
    (0.50, 0.95, 1.00),
    (0.92, 0.92, 1.00),
    (2.05, 0.80, 0.72),
    (3.05, 0.75, 0.95),
    (3.72, 0.82, 0.95),
    (4.62, 0.75, 0.80),
    (5.45, 0.50, 1.00),
])  # fmt: skip
PUBLIC_HUE_JITTER = 0.2
CHUNK = 256

# Grounds of M pictures, turns of the colour wheel, brightness, and deviation of the noise.
Look = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def palette(turn: np.ndarray) -> np.ndarray:
    """The eight colours after turning the colour wheel: RGB in [0, 1], float32, shape (M, 8, 3)."""
    position = (np.arange(len(WHEEL)) + turn[:, None]) % len(WHEEL)
    closed = np.vstack([WHEEL, WHEEL[0] + (6, 0, 0)])
    anchors = np.arange(len(closed))
    hue, saturation, value = (np.interp(position, anchors, closed[:, k]) for k in range(3))
    # f(n) = V - V S max(min(k, 4 - k, 1), 0) with k = (n + H) mod 6 is HSV -> RGB without cases.
    k = (np.array([5.0, 3.0, 1.0]) + hue[..., None]) % 6
    rgb = value[..., None] * (1 - saturation[..., None] * np.clip(np.minimum(k, 4 - k), 0, 1))
    return rgb.astype(np.float32)


def render_scene(tags: Tags, scene: str, conflict: float, rng: np.random.Generator) -> np.ndarray:
    """Pictures of one of the six scenes; see :func:`_render`."""
    return render_over(tags, place(scene), STYLES[scene], conflict, rng)


def render_over(
    tags: Tags, backgrounds: np.ndarray, style: Style, conflict: float, rng: np.random.Generator
) -> np.ndarray:
    """Pictures over one of some backgrounds each; see :func:`_render`."""

    def look(number: int) -> Look:
        light = rng.uniform(0.92, 1.06, (number, 1, 1, 1)).astype(np.float32)
        ground = backgrounds[rng.integers(len(backgrounds), size=number)] * light
        return ground, np.full(number, conflict * style.hue), np.full(number, style.gain), np.full(number, style.noise)

    return _rendered(tags, look, rng)


def render_neutral(tags: Tags, rng: np.random.Generator) -> np.ndarray:
    """Pictures on plain grey, as the presets without scenes use them; see :func:`render_scene`."""

    def look(number: int) -> Look:
        ground = np.full((number, PICTURE, PICTURE, 3), 0.55, dtype=np.float32)
        return ground, np.zeros(number), np.full(number, NEUTRAL.gain), np.full(number, NEUTRAL.noise)

    return _rendered(tags, look, rng)


def render_public(tags: Tags, rng: np.random.Generator) -> np.ndarray:
    """Pictures in randomised styles, for pre-training; see :func:`render_scene`."""

    def look(number: int) -> Look:
        ground = random_backgrounds(number, rng)
        turn = rng.uniform(-PUBLIC_HUE_JITTER, PUBLIC_HUE_JITTER, number)
        return ground, turn, rng.uniform(0.7, 1.0, number), rng.uniform(0.0, 0.1, number)

    return _rendered(tags, look, rng)


def _rendered(tags: Tags, look: Callable[[int], Look], rng: np.random.Generator) -> np.ndarray:
    """Pictures whose looks and objects are drawn chunk by chunk."""
    pictures = [np.zeros((0, PICTURE, PICTURE, 3), dtype=np.uint8)]
    for start in range(0, len(tags), CHUNK):
        chunk = tags.take(slice(start, start + CHUNK))
        pictures.append(_render(chunk, look(len(chunk)), rng))
    return np.concatenate(pictures)


def _render(tags: Tags, look: Look, rng: np.random.Generator) -> np.ndarray:
    """Objects over backgrounds, then pixel noise."""
    ground, turn, gain, noise = look
    number = len(tags)
    table = sprites()
    where = (tags.noun, np.maximum(tags.size - 1, 0), rng.integers(len(JITTERS), size=tags.noun.shape))
    scale = gain.astype(np.float32)[:, None, None]
    colours = np.take_along_axis(palette(turn), np.maximum(tags.colour - 1, 0)[..., None], axis=1) * scale
    body = table.tint[where][..., None] * colours[:, :, None, None, :]  # (M, 16, 16, 16, 3)
    body += (table.grey[where] * scale[..., None])[..., None]
    body = _mosaic(body, number)
    cover = _mosaic(table.alpha[where][..., None], number)
    picture = body + (1 - cover) * ground
    grain = rng.standard_normal(picture.shape, dtype=np.float32)
    picture += grain * noise.astype(np.float32)[:, None, None, None]
    return (np.clip(picture, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def _mosaic(cells: np.ndarray, number: int) -> np.ndarray:
    channels = cells.shape[-1]
    grid = cells.reshape(number, GRID, GRID, CELL, CELL, channels).transpose(0, 1, 3, 2, 4, 5)
    return grid.reshape(number, PICTURE, PICTURE, channels)
