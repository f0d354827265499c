"""Encoding of a run's data as tensors, and the model options that follow from the data."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from confed.data.caption_tables import MixedData, with_captions
from confed.data.chat_tables import Prompts, unread
from confed.data.encode import encode
from confed.data.examples import Examples, FederatedDataset, StoredPictures, TableData, channels_first
from confed.data.label_tables import encode_labels
from confed.data.labelled import LabelDataset
from confed.data.modal_tables import ModalTable, with_modalities
from confed.data.picture_tables import NoPictures
from confed.data.table import Table
from confed.federation.specs import model_spec
from confed.models import create_tokenizer
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.tokenizer import CountsShortened
from confed.registry import models
from confed.runs.combinations import check_combination, combination
from confed.runs.dataset import Source, load_source, picture_table_id

TOKENIZER_KEYS = ("max_length", "pretrained", "vocabulary", "pieces", "source", "revision", "text")
"""Options of models that their tokenizers depend on."""
MOST_CANDIDATES = 5000
"""Answers of a dataset that a model which writes freely can choose from; with more, it writes only."""
MOST_ANSWERS = 10
"""Different answers to one question that a model which writes its answers learns."""
_NONE = torch.zeros(1, 3, 0, 0, dtype=torch.uint8)
"""The picture table of examples that have no pictures."""


@dataclass(frozen=True)
class RunData:
    """Data as tensors and what is needed to build the model; shared by all methods of a study."""

    dataset: FederatedDataset | LabelDataset
    # Client -> its examples as tensors; of multi-label data made when they are asked for.
    clients: Mapping[str, TableData]
    unseen: Mapping[str, TableData]  # scene -> its examples as tensors, in every role
    types: tuple[str, ...]  # names of the question types
    tokenizer: Any
    answer_tokens: Tensor | None = None  # for a model that writes its answers, the tokens of all answers, int64 (C, T)
    region_width: int = 0  # features per region, W, for a model that reads regions; else 0
    encoder: str = ""  # for such a model, what made the regions from pictures; empty if unknown

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of pictures, sounds and series, as far as there are any.

        ``picture_size``: (H, W) in pixels; ``sample_rate``: of sounds; ``series_channels``: values per step.
        """
        if isinstance(self.dataset, LabelDataset):
            pictures = next(iter(self.dataset.clients.values())).train.pictures
            return {} if pictures is None else {"picture_size": tuple(pictures.shape[1:3])}
        shapes: dict[str, Any] = {}
        for table in (*self.dataset.parts, *self.dataset.unseen.values()):
            if table.images.shape[1] > 0:
                shapes.setdefault("picture_size", tuple(table.images.shape[1:3]))
            if table.sounds is not None:
                shapes.setdefault("sample_rate", table.sounds.rate)
            if table.series is not None:
                shapes.setdefault("series_channels", len(table.series.channels))
        return shapes

    @cached_property
    def texts_cut(self) -> tuple[int, int]:
        """Number of different texts longer than the tokenizer's ``max_length``, which are truncated, and of all texts.

        Both are 0 for a tokenizer that does not count them.
        """
        if not isinstance(self.tokenizer, CountsShortened):
            return 0, 0
        texts = list(dict.fromkeys(_texts_read(self.dataset)))
        return (self.tokenizer.shortened(texts) if texts else 0), len(texts)

    @property
    def questions(self) -> FederatedDataset:
        """The dataset, where it has questions with answers."""
        if isinstance(self.dataset, LabelDataset):
            raise ValueError(f"this needs questions with answers; the examples of {self.dataset.name!r} have labels")
        return self.dataset


@lru_cache(maxsize=2)
def load_run_data(data: str, model: str, seed: int) -> RunData:
    """A recipe's data as tensors; the methods of a study share one copy."""
    options = json.loads(model)
    if "fill" in json.loads(data).get("missing", {}) and model_spec(models[options["name"]]).reads_absent:
        raise ValueError(
            f"data.missing.fill must be left out for the model {options['name']!r}: it reads examples with gaps, so "
            'nothing is put in them (a method that does so is "modality_fill")'
        )
    return encoded(load_source(data, seed), options)


def encoded(source: Source, options: Mapping[str, Any], tokenizer: Any = None) -> RunData:
    """Data as tensors."""
    if isinstance(source.dataset, LabelDataset):
        return _with_labels(source.dataset, options, tokenizer)
    gaps = source.modal and model_spec(models[options["name"]]).reads_absent
    source = source if gaps else source.whole
    dataset = source.questions
    if not dataset.clients:
        raise ValueError(f"dataset {dataset.name!r} has no clients; a federation needs at least one")
    words = dataset.words or ("nothing",)  # a tokenizer has words, also where there is nothing to read
    if tokenizer is None:
        tokenizer = create_tokenizer(options["name"], words, **tokenizer_options(options, dataset.answers))
    # A model that writes its answers learns from their tokens.
    prompts = _prompts(options["name"], source, tokenizer)
    listed = () if prompts is not None and len(dataset.answers) > MOST_CANDIDATES else dataset.answers
    tokens = tokenizer.answers(listed) if isinstance(tokenizer, AnswerTokenizer) else None
    row_of = {answer: row for row, answer in enumerate(dataset.answers)}
    types = tuple(sorted(set(chain.from_iterable(examples.types for examples in source.parts)) | {*dataset.types}))
    width = dataset.widest if tokens is None else 0  # a head serves the largest pool; candidates are the client's own
    pictures: dict[int, Tensor | StoredPictures] = {}
    regions = source.regions if model_spec(models[options["name"]]).reads == "regions" else None
    # What stands before examples of documents has as many columns everywhere, so that rows can be put together.
    turns = max(map(len, chain.from_iterable(examples.before or () for examples in source.parts)), default=0)
    reader = tokenizer if prompts is None else unread

    def modal(rows: Table, examples: Examples) -> Table:
        if prompts is not None:
            return prompts.of(examples, rows)
        if not gaps:
            return rows
        rows = with_modalities(rows, examples)
        return with_captions(rows, examples, tokenizer, turns) if dataset.captioned else rows

    def table(examples: Examples, answers: Sequence[str], *, outside: bool = False) -> Table:
        if regions is not None:
            of_pictures = regions[picture_table_id(examples)]
            rows = encode(examples, reader, answers, types, outside=outside, width=width, regions=of_pictures)
            return modal(rows, examples)
        # Examples often share one picture table; it becomes one tensor.
        if id(examples.images) not in pictures:
            bare = gaps and isinstance(examples.images, NoPictures)
            pictures[id(examples.images)] = _NONE if bare else channels_first(examples.images)
        stored = pictures[id(examples.images)]
        return modal(encode(examples, reader, answers, types, stored, outside=outside, width=width), examples)

    trained = {name: split.train for name, split in dataset.clients.items()}
    given = {} if prompts is not None else _answers_given(trained, tokenizer)

    def training(examples: Examples, answers: Sequence[str], client: str) -> Table:
        rows = table(examples, answers)
        if tokens is None or prompts is not None:
            return rows
        if client in given:
            return replace(rows, columns={**rows.columns, **given[client]})
        written = tokens[torch.tensor([row_of[answer] for answer in examples.answers], dtype=torch.int64)]
        return replace(rows, columns={**rows.columns, "answer_tokens": written})

    clients: dict[str, TableData] = {}
    for name, s in dataset.clients.items():
        answers = dataset.answer_set(name)
        train, validation = training(s.train, answers, name), table(s.validation, answers)
        test = table(s.test, answers, outside=dataset.outside)
        if dataset.mixture and isinstance(train, ModalTable):
            clients[name] = MixedData(train, validation, test, dataset.mixture)
        else:
            clients[name] = TableData(train, validation, test)
    tests = {n: table(e, dataset.answer_set(n), outside=dataset.outside) for n, e in dataset.unseen.items()}
    unseen = {name: TableData(rows, rows, rows) for name, rows in tests.items()}
    read = next(iter(regions.values())) if regions else None
    return RunData(
        dataset, clients, unseen, types, tokenizer, tokens, 0 if read is None else read.shape[2],
        "" if read is None else read.encoder,
    )  # fmt: skip


def _prompts(model: str, source: Source, tokenizer: Any) -> Prompts | None:
    """Prompts of all examples for a model that converses; None for others."""
    if not model_spec(models[model]).converses:
        return None
    trained = [split.train for split in source.questions.clients.values()]
    ids = set(map(id, trained))
    return Prompts(trained, [examples for examples in source.parts if id(examples) not in ids], tokenizer)


def _texts_read(dataset: FederatedDataset | LabelDataset) -> Iterator[str]:
    """All texts that a model reads in any role: questions, with the texts offered with them, or labelled texts."""
    if isinstance(dataset, LabelDataset):
        first = next(iter(dataset.clients.values())).train
        tables = {id(examples.table): examples.table for examples in (first, *dataset.unseen.values())}
        for table in tables.values():
            yield from table.texts or ()
        return
    splits = chain.from_iterable((split.train, split.validation, split.test) for split in dataset.clients.values())
    for examples in chain(splits, dataset.unseen.values()):
        yield from examples.questions
        for question, offered in zip(examples.questions, examples.choices or (), strict=examples.choices is not None):
            yield from (f"{question} {text}" for text in offered)


def _with_labels(dataset: LabelDataset, options: Mapping[str, Any], tokenizer: Any = None) -> RunData:
    """Multi-label examples for a model.

    Raises ``ValueError``: the model does not score labels.
    """
    words = dataset.words or ("picture",)  # a tokenizer has words, also where there is nothing to read
    if tokenizer is None:
        tokenizer = create_tokenizer(options["name"], words, **tokenizer_options(options, dataset.labels))
    check_combination(combination(options["name"], dataset, reads_answers=isinstance(tokenizer, AnswerTokenizer)))
    clients, unseen, types = encode_labels(dataset, tokenizer)
    return RunData(dataset, clients, unseen, types, tokenizer)


def derived_options(name: str, region_width: int, words: Sequence[str], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Model options that follow from the data, as far as the model's function takes them."""
    options: dict[str, Any] = {"region_width": region_width, "words": tuple(words), **shapes}
    return {key: value for key, value in options.items() if key in signature(models[name]).parameters}


def _answers_given(clients: Mapping[str, Examples], tokenizer: Any) -> dict[str, dict[str, Tensor]]:
    """Training targets of a generative model where several annotators answered each question, as columns by client.

    All answers that they gave, as in ALBEF (Li et al., NeurIPS 2021; its ``model_vqa.py``): each weighs the share of
    the people who gave it, also where it is not in the client's pool. Such an answer cannot be chosen, so that it is
    no candidate in evaluations, but its words teach the decoder how sure people were of the others. Answers with the
    same tokens are one. Left out, with their weight, are answers with a word that the tokenizer does not know, and of
    more than :data:`MOST_ANSWERS` different ones the rarer; a question all of whose answers are left out has its label.
    """
    if not isinstance(tokenizer, AnswerTokenizer) or all(split.annotations is None for split in clients.values()):
        return {}
    # No vocabulary has a letter of the Gothic alphabet: this is how an unknown word looks.
    unknown = int(tokenizer.questions(["\U00010348"])[0][0, 1])
    people: dict[str, list[tuple[str]] | Sequence[Sequence[str]]] = {}
    for name, e in clients.items():
        people[name] = [(answer,) for answer in e.answers] if e.annotations is None else e.annotations
    texts = set(chain.from_iterable(chain.from_iterable(people.values())))
    texts |= set(chain.from_iterable(examples.answers for examples in clients.values()))
    ids, mask = tokenizer.questions(list(texts))
    cut = zip(texts, ids.tolist(), mask.sum(1).tolist(), strict=True)
    tokens_of = {text: tuple(row[:length]) for text, row, length in cut}

    def learned(row: Sequence[str], label: str) -> list[tuple[tuple[int, ...], float]]:
        counts = Counter(tokens_of[text] for text in row)
        spelled = [(t, n / len(row)) for t, n in counts.most_common() if len(t) > 2 and unknown not in t]
        return spelled[:MOST_ANSWERS] or [(tokens_of[label], 1.0)]

    rows = {name: list(map(learned, given, clients[name].answers)) for name, given in people.items()}
    each = list(chain.from_iterable(rows.values()))
    most = max(map(len, each), default=1)
    longest = max((len(tokens) for tokens, _ in chain.from_iterable(each)), default=2)
    columns: dict[str, dict[str, Tensor]] = {}
    for name, questions in rows.items():
        written: list[list[tuple[int, ...]]] = []
        weights: list[list[float]] = []
        for answers in questions:
            padded = [*answers, *[((), 0.0)] * (most - len(answers))]
            written.append([(*tokens, *[0] * (longest - len(tokens))) for tokens, _ in padded])
            weights.append([share for _, share in padded])
        tokens = torch.tensor(written, dtype=torch.int64).view(-1, most, longest)
        columns[name] = {"answer_tokens": tokens, "answer_weight": torch.tensor(weights).view(-1, most)}
    return columns


def tokenizer_options(model: Mapping[str, Any], answers: Sequence[str] = ()) -> dict[str, Any]:
    """Tokenizer options that must agree with the model's."""
    accepted = signature(model_spec(models[model["name"]]).tokenizer or (lambda words: words)).parameters
    options = {{"pretrained": "path"}.get(key, key): model.get(key) for key in TOKENIZER_KEYS}
    given = {k: v for k, v in options.items() if k in accepted and isinstance(v, int | str) and v is not False}
    return given | ({"answers": answers} if "answers" in accepted else {})
