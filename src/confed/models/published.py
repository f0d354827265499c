"""Bodies from ``transformers``: with random weights that depend on a seed alone, or from a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["published", "seeded"]

Body = TypeVar("Body")


def seeded(seed: int, build: Callable[[], Body]) -> Body:
    """What ``build`` returns; the library's initial values come from ``seed`` and the global generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def published(kind: type[Body], source: Path | str, seed: int, **options: Any) -> Body:
    """A checkpoint as a model of the library.

    Args:
        kind: a class of ``transformers`` with ``from_pretrained``.
        source: a folder written by ``save_pretrained``, or a hub name "owner/name".
        seed: of what the checkpoint lacks.
        options: passed on, such as dropout probabilities.

    Raises:
        ValueError: there is no such checkpoint.
    """
    model: Any = kind
    name, family = str(source), kind.__name__.removesuffix("Model")
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if not path.is_dir() and (looks_local or path.exists()):
        raise ValueError(f"expected a folder with a {family} checkpoint or a hub name owner/name, got {name!r}")
    where = str(path) if path.is_dir() else name
    try:
        return seeded(seed, lambda: model.from_pretrained(where, **options))
    except OSError as error:
        raise ValueError(f"no {family} checkpoint could be read from {name!r}: {error}") from error
