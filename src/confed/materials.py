"""A run's data as tensors, and what is needed to build its model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import Tensor

from confed.data.examples import (
    Examples,
    FederatedDataset,
    StoredPictures,
    Table,
    TableData,
    channels_first,
    encode,
)
from confed.models import create_tokenizer
from confed.registry import datasets, models

__all__ = ["Materials", "load_materials", "tokenizer_options"]


@dataclass(frozen=True)
class Materials:
    """Data as tensors and what is needed to build the model; shared by all methods of a study.

    Attributes:
        dataset: strings and pictures.
        clients: client -> its examples as tensors.
        unseen: scene -> its examples as tensors, in every role.
        types: names of the question types.
        tokenizer: the model's.
    """

    dataset: FederatedDataset
    clients: Mapping[str, TableData]
    unseen: Mapping[str, TableData]
    types: tuple[str, ...]
    tokenizer: Any


@lru_cache(maxsize=2)
def load_materials(data: str, model: str, seed: int) -> Materials:
    """A recipe's data as tensors; the methods of a study share one copy.

    Args:
        data: the section ``[data]`` as JSON.
        model: the section ``[model]`` as JSON: its tokenizer reads the questions.
        seed: the run's seed, for datasets that sample.

    Raises:
        ValueError: faulty data (the message names the thing), or no clients.
    """
    section = json.loads(data)
    dataset: FederatedDataset = _construct_data(section, seed)
    options = json.loads(model)
    tokenizer = create_tokenizer(options["name"], dataset.words, **tokenizer_options(options))
    parts = [e for s in dataset.clients.values() for e in (s.train, s.validation, s.test)]
    parts += list(dataset.unseen.values())
    types = tuple(sorted({t for part in parts for t in part.types}))
    pictures: dict[int, Tensor | StoredPictures] = {}

    def table(examples: Examples, answers: Sequence[str], *, outside: bool = False) -> Table:
        # Examples often share one picture table; it becomes one tensor.
        if id(examples.images) not in pictures:
            pictures[id(examples.images)] = channels_first(examples.images)
        stored = pictures[id(examples.images)]
        return encode(examples, tokenizer, answers, types, stored, outside=outside)

    clients: dict[str, TableData] = {}
    for name, s in dataset.clients.items():
        own = dataset.pool(name)
        clients[name] = TableData(
            table(s.train, own), table(s.validation, own), table(s.test, own, outside=dataset.outside)
        )
    unseen: dict[str, TableData] = {}
    for name, examples in dataset.unseen.items():
        rows = table(examples, dataset.pool(name), outside=dataset.outside)
        unseen[name] = TableData(rows, rows, rows)
    if not clients:
        raise ValueError(f"dataset {dataset.name!r} has no clients; a federation needs at least one")
    return Materials(dataset, clients, unseen, types, tokenizer)


def tokenizer_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """What of the model's section its tokenizer must agree with: the text length, and where a checkpoint lies."""
    accepted = signature(models[model["name"]].tokenizer).parameters  # pyright: ignore[reportFunctionMemberAccess]
    options = {"max_length": model.get("max_length"), "path": model.get("pretrained")}
    return {k: v for k, v in options.items() if k in accepted and isinstance(v, int | str) and v is not False}


def _construct_data(section: Mapping[str, Any], seed: int) -> FederatedDataset:
    values = dict(section)
    constructor = datasets[values.pop("name")]
    if "seed" in signature(constructor).parameters:
        values["seed"] = seed
    return constructor(**values)
