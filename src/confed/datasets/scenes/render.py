"""Rendering of scene graphs to pictures of 64 x 64 pixels."""

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
    pictures: list[np.ndarray] = []
    for chunk in _chunks(tags):
        number = len(chunk)
        light = rng.uniform(0.92, 1.06, (number, 1, 1, 1)).astype(np.float32)
        ground = backgrounds[rng.integers(len(backgrounds), size=number)] * light
        turn, gain = np.full(number, conflict * style.hue), np.full(number, style.gain)
        pictures.append(
            _render(chunk, ground=ground, turn=turn, gain=gain, noise=np.full(number, style.noise), rng=rng)
        )
    return _join(pictures)


def render_neutral(tags: Tags, rng: np.random.Generator) -> np.ndarray:
    """Pictures on plain grey, as the presets without scenes use them; see :func:`render_scene`."""
    pictures = []
    for chunk in _chunks(tags):
        number = len(chunk)
        ground = np.full((number, PICTURE, PICTURE, 3), 0.55, dtype=np.float32)
        gain, noise = np.full(number, NEUTRAL.gain), np.full(number, NEUTRAL.noise)
        pictures.append(_render(chunk, ground=ground, turn=np.zeros(number), gain=gain, noise=noise, rng=rng))
    return _join(pictures)


def render_public(tags: Tags, rng: np.random.Generator) -> np.ndarray:
    """Pictures in randomised styles, for pre-training; see :func:`render_scene`."""
    pictures = []
    for chunk in _chunks(tags):
        number = len(chunk)
        ground = random_backgrounds(number, rng)
        turn = rng.uniform(-PUBLIC_HUE_JITTER, PUBLIC_HUE_JITTER, number)
        gain, noise = rng.uniform(0.7, 1.0, number), rng.uniform(0.0, 0.1, number)
        pictures.append(_render(chunk, ground=ground, turn=turn, gain=gain, noise=noise, rng=rng))
    return _join(pictures)


def _chunks(tags: Tags) -> list[Tags]:
    return [tags.take(slice(start, start + CHUNK)) for start in range(0, len(tags), CHUNK)]


def _join(pictures: list[np.ndarray]) -> np.ndarray:
    empty = np.zeros((0, PICTURE, PICTURE, 3), dtype=np.uint8)
    return np.concatenate(pictures) if pictures else empty


def _render(
    tags: Tags,
    *,
    ground: np.ndarray,
    turn: np.ndarray,
    gain: np.ndarray,
    noise: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Objects over backgrounds, then pixel noise."""
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
