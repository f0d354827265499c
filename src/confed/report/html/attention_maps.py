"""Attention over a picture as a dark veil that is thin where the model looks.

A veil leaves the colours, which many questions are about, as they are. A model that reads regions has its veil drawn
box by box, with a line around the box that counted most.
"""

import base64
import io
import math

import numpy as np
from PIL import Image

_VEIL = 0.7
_SIDE = 112
"""Pixels of a veil of boxes; the picture below has as many."""


def attention_overlay(attention: object, boxes: object = None) -> str:
    """A layer that darkens what the model does not look at; empty without a usable map."""
    try:
        weights = np.asarray(attention, dtype=np.float64)
        places = None if boxes is None else np.asarray(boxes, dtype=np.float64)
    except (TypeError, ValueError):
        return ""
    if weights.ndim == 1 and places is not None:
        return _boxed(weights, places)
    if weights.ndim != 2 or not weights.size or not np.isfinite(weights).all():
        return ""
    if not math.isclose(weights.max(), 0, abs_tol=1e-12):
        weights = weights / weights.max()
    # Enlarged here and not by the browser, so that the edges do not fade.
    return _layer(Image.fromarray(_dark(weights)).resize((28, 28), Image.Resampling.BICUBIC))


def _boxed(weights: np.ndarray, boxes: np.ndarray) -> str:
    """The veil of regions: where boxes overlap the one that counts most decides; what no box covers is dark."""
    sound = boxes.shape == (*weights.shape, 4) and len(weights) and np.isfinite(boxes).all()
    if not sound or not np.isfinite(weights).all() or weights.max() <= 0:
        return ""
    weights = (weights / weights.max()).clip(0, 1)
    corners = (_SIDE * boxes.clip(0, 1)).round().astype(int)
    corners[:, 2:] = np.maximum(corners[:, 2:], corners[:, :2] + 1)  # a box of no extent is still a point
    light = np.zeros((_SIDE, _SIDE))
    for weight, (left, top, right, bottom) in zip(weights, corners, strict=True):
        region = light[top:bottom, left:right]
        np.maximum(region, weight, out=region)
    pixels = _dark(light)
    left, top, right, bottom = corners[int(weights.argmax())]
    frame = np.zeros((_SIDE, _SIDE), dtype=bool)
    frame[top:bottom, left:right] = True
    frame[top + 2 : bottom - 2, left + 2 : right - 2] = False
    pixels[frame] = (255, 214, 64, 255)
    return _layer(Image.fromarray(pixels))


def _dark(weights: np.ndarray) -> np.ndarray:
    """Pixels of a veil, (rows, columns, 4), thin where weights are 1 and thick where they are 0."""
    # The root keeps places visible that get a tenth of the most looked-at one's weight.
    alpha = (255 * _VEIL * (1 - np.sqrt(weights.clip(0, 1)))).round().astype(np.uint8)
    return np.stack([np.full_like(alpha, shade) for shade in (8, 10, 16)] + [alpha], axis=-1)


def _layer(layer: Image.Image) -> str:
    """A picture laid over another one."""
    buffer = io.BytesIO()
    layer.save(buffer, format="PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<i style="background-image:url(data:image/png;base64,{data})"></i>'
