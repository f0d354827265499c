"""Backbones of ``transformers``: randomly initialised from a seed, or from a checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from confed.models.hub_names import hub_name
from confed.models.pretrained import WEIGHTS

__all__ = ["published", "seeded", "unread_because", "without_progress_bars"]

Body = TypeVar("Body")


def seeded(seed: int, build: Callable[[], Body]) -> Body:
    """What ``build`` returns; the library's initial values come from ``seed`` and the global generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def published(kind: type[Body], source: Path | str, seed: int, **options: Any) -> Body:
    """A checkpoint as a model of the library.

    Tensors of the checkpoint that the model has no use for, such as heads, are left out.

    Args:
        kind: a class of ``transformers`` with ``from_pretrained``.
        source: a folder written by ``save_pretrained``, or a hub name "owner/name".
        seed: of a pooler, which alone the checkpoint may lack.
        options: passed on, such as dropout probabilities.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or it is one of another model: tensors are missing or
            have other shapes (names the first few).
    """
    from safetensors import SafetensorError

    model: Any = kind
    name, family = str(source), _family(kind)
    path = Path(name).expanduser()
    # A Path is a folder's here as a text is: recipes give either.
    where = checked_folder(path) if path.is_dir() else hub_name(name)
    if where is None:
        raise ValueError(
            f"expected a folder with a {family} checkpoint or a hub name owner/name, got {name!r}: there is no such "
            "folder (hub:owner/name is always a hub name)"
        )
    # With other shapes the library ends in an error that does not say which; they are reported here instead.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        body, found = seeded(
            seed, lambda: model.from_pretrained(where, trust_remote_code=False, use_safetensors=True, **options)
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"no {family} checkpoint could be read from {name!r}: {unread_because(error)}") from error
    faults = [
        f"{tensor} has shape {tuple(came)}, expected {tuple(expected)}"
        for tensor, came, expected in sorted(found["mismatched_keys"])
    ]
    faults += [f"{tensor} is missing" for tensor in sorted(found["missing_keys"]) if "pooler." not in tensor]
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ValueError(f"{name!r} is not a checkpoint of this {family}: {'; '.join(faults[:3])}{more}")
    return body


def place_of(source: str, expected: str) -> str:
    """A packaged model's folder, a folder, or a name on the hub; a ValueError that says what is expected."""
    packaged = WEIGHTS / source
    path = packaged if packaged.parent == WEIGHTS and packaged.is_dir() else Path(source).expanduser()
    where = checked_folder(path) if source and path.is_dir() else hub_name(source)
    if where is None:
        raise ValueError(f"model.source must be {expected}; there is no folder {source!r}")
    return where


def checked_folder(folder: Path) -> str:
    """A folder with a model of the library; a ValueError where it has pickles alone, or adapts a model elsewhere."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds an adapter of another model (adapter_config.json), which is not followed")
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has its weights in {pickled[0]}, and runs read safetensors only: `confed convert model {folder} "
            "OUT` writes them so, without running what is in the file"
        )
    return str(folder)


def unread_because(error: Exception) -> str:
    """What the library says of a model that it cannot read, on one line, without its advice to run foreign code."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "its files bring code of their own (auto_map), which is never run; classes of `transformers` alone are"
    if "use_safetensors" in text:
        return (
            "it has no weights as safetensors, and runs read no others: `confed convert model FOLDER OUT` writes them"
        )
    return text[:300]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Context in which the library draws no bars between the lines of a run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _family(kind: type[Any]) -> str:
    """What people call the model of a class of ``transformers``."""
    name = kind.__name__.removesuffix("Model").removesuffix("ForQuestionAnswering")
    return {"Vilt": "ViLT", "Bert": "BERT", "ViT": "ViT", "Blip": "BLIP"}.get(name, name)
