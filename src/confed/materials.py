"""A run's data as tensors, and what is needed to build its model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
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
from confed.models.answer_tokenizer import AnswerTokenizer
from confed.registry import datasets, models

__all__ = ["TOKENIZER_KEYS", "Materials", "load_materials", "tokenizer_options"]

TOKENIZER_KEYS = ("max_length", "pretrained", "vocabulary")
"""Options of models that their tokenizers depend on."""


@dataclass(frozen=True)
class Materials:
    """Data as tensors and what is needed to build the model; shared by all methods of a study.

    Attributes:
        dataset: strings and pictures.
        clients: client -> its examples as tensors.
        unseen: scene -> its examples as tensors, in every role.
        types: names of the question types.
        tokenizer: the model's.
        answer_tokens: for a model that writes its answers, the tokens of all answers, int64 (C, T).
    """

    dataset: FederatedDataset
    clients: Mapping[str, TableData]
    unseen: Mapping[str, TableData]
    types: tuple[str, ...]
    tokenizer: Any
    answer_tokens: Tensor | None = None


@lru_cache(maxsize=2)
def load_materials(data: str, model: str, seed: int) -> Materials:
    """A recipe's data as tensors; the methods of a study share one copy.

    Args:
        data: the section ``[data]`` as JSON.
        model: the section ``[model]``, or of it the name and ``TOKENIZER_KEYS``, as JSON: its tokenizer reads the
            questions.
        seed: the run's seed, for datasets that sample.

    Raises:
        ValueError: faulty data (the message names the thing), or no clients.
    """
    section = json.loads(data)
    dataset: FederatedDataset = _construct_data(section, seed)
    options = json.loads(model)
    tokenizer = create_tokenizer(options["name"], dataset.words, **tokenizer_options(options, dataset.answers))
    # A model that writes its answers learns from their tokens.
    tokens: Tensor | None = tokenizer.answers(dataset.answers) if isinstance(tokenizer, AnswerTokenizer) else None
    row_of = {answer: row for row, answer in enumerate(dataset.answers)}
    parts = [e for s in dataset.clients.values() for e in (s.train, s.validation, s.test)]
    parts += list(dataset.unseen.values())
    types = tuple(sorted({t for part in parts for t in part.types}))
    width = dataset.widest if tokens is None else 0  # a head serves the largest pool; candidates are the client's own
    pictures: dict[int, Tensor | StoredPictures] = {}

    def table(examples: Examples, answers: Sequence[str], *, outside: bool = False) -> Table:
        # Examples often share one picture table; it becomes one tensor.
        if id(examples.images) not in pictures:
            pictures[id(examples.images)] = channels_first(examples.images)
        stored = pictures[id(examples.images)]
        return encode(examples, tokenizer, answers, types, stored, outside=outside, width=width)

    def training(examples: Examples, answers: Sequence[str]) -> Table:
        rows = table(examples, answers)
        if tokens is None:
            return rows
        written = tokens[torch.tensor([row_of[answer] for answer in examples.answers], dtype=torch.int64)]
        return replace(rows, columns={**rows.columns, "answer_tokens": written})

    clients: dict[str, TableData] = {}
    for name, s in dataset.clients.items():
        own = dataset.pool(name)
        clients[name] = TableData(
            training(s.train, own), table(s.validation, own), table(s.test, own, outside=dataset.outside)
        )
    unseen: dict[str, TableData] = {}
    for name, examples in dataset.unseen.items():
        rows = table(examples, dataset.pool(name), outside=dataset.outside)
        unseen[name] = TableData(rows, rows, rows)
    if not clients:
        raise ValueError(f"dataset {dataset.name!r} has no clients; a federation needs at least one")
    return Materials(dataset, clients, unseen, types, tokenizer, tokens)


def tokenizer_options(model: Mapping[str, Any], answers: Sequence[str] = ()) -> dict[str, Any]:
    """What a model's tokenizer must agree with.

    Args:
        model: the section ``[model]``: the text length, and where a checkpoint or a vocabulary lies.
        answers: all answers, for the tokenizer of a model that writes them.
    """
    accepted = signature(models[model["name"]].tokenizer).parameters  # pyright: ignore[reportFunctionMemberAccess]
    options = {{"pretrained": "path"}.get(key, key): model.get(key) for key in TOKENIZER_KEYS}
    given = {k: v for k, v in options.items() if k in accepted and isinstance(v, int | str) and v is not False}
    return given | ({"answers": answers} if "answers" in accepted else {})


def _construct_data(section: Mapping[str, Any], seed: int) -> FederatedDataset:
    values = dict(section)
    constructor = datasets[values.pop("name")]
    if "seed" in signature(constructor).parameters:
        values["seed"] = seed
    return constructor(**values)
