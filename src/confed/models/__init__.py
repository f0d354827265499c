"""Backbones by name. Every model maps a batch to an :class:`confed.federation.protocols.Output`."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from confed.data.encode import Tokenizer
from confed.federation.specs import model_spec
from confed.registry import models


def create_model(name: str, **options: Any) -> nn.Module:
    """A new model.

    Raises ``ValueError``: no model has that name.

    Args:
        name: a registered name (see :func:`list_models`) or an importable ``"package.module:function"``.
        options: keyword arguments of that model's function, such as ``answers`` and ``vocab_size``.
    """
    return models[name](**options)


def create_tokenizer(name: str, words: Sequence[str], **options: Any) -> Tokenizer:
    """The tokenizer that belongs to a model."""
    builder = model_spec(models[name]).tokenizer
    if builder is None:
        raise ValueError(
            f"the model {name!r} names no tokenizer: give its class the attribute tokenizer, or write behind its "
            "function, such as: from confed.models.tokenizer import WordTokenizer; my_model.tokenizer = WordTokenizer"
        )
    return builder(words, **options)


def list_models(glob: str = "*") -> list[str]:
    """The registered models whose names match, sorted."""
    return models.names(glob)
