"""Features that the language part of a model of ``transformers`` reads of pictures, kept apart from the pass.

The library's models take what its picture encoder and connector made in place of pictures (``mm_encoder_outputs``), so
that a language part can learn behind frozen features that are computed once.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["BESIDE", "PictureStates", "check_count", "encoded"]

BESIDE = ("image_grid_thw",)
"""Inputs made of pictures that the language part reads beside their features: Qwen's, for positions."""

_FLAT, _LIST = 0, -1


class PictureStates(NamedTuple):
    """What a picture encoder and a connector make of each example's pictures.

    Attributes:
        features: N tokens for the language part, and as many for each of its first S layers where these read pictures,
            too (Qwen3-VL): (B, 1 + S, N, d).
        each: tokens of a picture where the library has one tensor (P, T, d); 0 for (P T, d), -1 for a list of tensors.
    """

    features: Tensor
    each: int

    def of(self, rows: Tensor) -> "PictureStates":
        """Those of some of the examples, which may come several times."""
        return PictureStates(self.features[rows], self.each)

    def outputs(self) -> dict[str, Any]:
        """What the library's model takes as ``mm_encoder_outputs``."""
        pooled, *deep = self.features.unbind(1)
        whole: Any = list(pooled)
        if self.each != _LIST:
            whole = pooled.reshape(-1, *((self.each,) if self.each else ()), pooled.shape[-1])
        found = SimpleNamespace(pooler_output=whole)
        if deep:
            found.deepstack_features = [list(level) for level in deep]
        return {"image": found}


def encoded(body: Any, inputs: Mapping[str, Tensor], examples: int) -> PictureStates:
    """What picture encoder and connector make of pictures.

    Args:
        body: the library's model.
        inputs: of its picture encoder.
        examples: B; all have equally many pictures of one size.

    Raises:
        ValueError: examples have different numbers of tokens.
    """
    found = body.get_image_features(**inputs, return_dict=True)
    pooled = found.pooler_output
    each = _LIST if not isinstance(pooled, Tensor) else pooled.shape[1] if pooled.ndim == 3 else _FLAT
    levels = [_rows(pooled), *map(_rows, found.get("deepstack_features") or ())]
    tokens = len(levels[0])
    if tokens % examples:
        raise ValueError(f"{examples} examples with pictures of one size have {tokens} tokens of pictures in all")
    return PictureStates(torch.stack([level.view(examples, -1, level.shape[-1]) for level in levels], 1), each)


def check_count(body: Any, inputs: Mapping[str, Tensor], tokens: int, size: tuple[int, int]) -> None:
    """Check that a picture has as many tokens in a prompt as the picture encoder gives features.

    Args:
        body: the library's model.
        inputs: of its picture encoder, of one picture.
        tokens: in a prompt.
        size: height and width of the picture in pixels.

    Raises:
        ValueError: the numbers differ.
    """
    found = body.get_image_features(**inputs)
    features = len(_rows(getattr(found, "pooler_output", found)))
    if features != tokens:
        raise ValueError(
            f"a picture of {size[0]} x {size[1]} pixels has {tokens} tokens in a prompt and {features} features of "
            "the picture encoder: processor and model do not fit together"
        )


def _rows(found: Any) -> Tensor:
    """One tensor or several as tokens, (N, d)."""
    return torch.cat([part.flatten(0, -2) for part in ([found] if isinstance(found, Tensor) else found)])
