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

from confed.data.caption_batches import MixedData
from confed.data.chat_tables import Prompts, unread
from confed.data.encode import SharedPictures, SharedTexts, encode, with_captions, with_modalities
from confed.data.examples import Examples, FederatedDataset, TableData
from confed.data.lazy import Lazy, NoTexts, shared_columns
from confed.data.regions import Regions
from confed.data.table import Table
from confed.federation.specs import ModelSpec, model_spec
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
MOST_ANSWERS = 10  # different answers to one question that a model which writes its answers learns


@dataclass(frozen=True)
class RunData:
    """Data as tensors and what is needed to build the model; shared by all methods of a study."""

    dataset: FederatedDataset
    # Client -> its examples as tensors; of data with labels made when they are asked for.
    clients: Mapping[str, TableData]
    unseen: Mapping[str, TableData]  # scene -> its examples as tensors, in every role
    types: tuple[str, ...]  # names of the question types
    tokenizer: Any
    answer_tokens: Tensor | None = None  # for a model that writes its answers, the tokens of all answers, int64 (C, T)
    region_width: int = 0  # features per region, W, for a model that reads regions; else 0
    encoder: str = ""  # for such a model, what made the regions from pictures; empty if unknown

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes as far as there are any: ``picture_size`` (H, W), ``sample_rate``, ``series_channels``."""
        shapes: dict[str, Any] = {}
        for examples in self.dataset.everything:
            if examples.images.shape[1] > 0:
                shapes.setdefault("picture_size", tuple(examples.images.shape[1:3]))
            if examples.sounds is not None:
                shapes.setdefault("sample_rate", examples.sounds.rate)
            if examples.series is not None:
                shapes.setdefault("series_channels", len(examples.series.channels))
        return shapes

    @cached_property
    def texts_cut(self) -> tuple[int, int]:
        """Number of different texts longer than the tokenizer's ``max_length``, and of all texts; 0 if not counted."""
        if not isinstance(self.tokenizer, CountsShortened):
            return 0, 0
        texts = list(dict.fromkeys(_texts_read(self.dataset)))
        return (self.tokenizer.shortened(texts) if texts else 0), len(texts)


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
    spec = model_spec(models[options["name"]])
    gaps = source.modal and spec.reads_absent
    source = source if gaps else source.whole
    dataset = source.dataset
    if not dataset.clients:
        raise ValueError(f"dataset {dataset.name!r} has no clients; a federation needs at least one")
    words = dataset.words or ("nothing",)  # a tokenizer has words, also where there is nothing to read
    if tokenizer is None:
        tokenizer = create_tokenizer(options["name"], words, **tokenizer_options(options, dataset.answers))
    check_combination(combination(options["name"], dataset, reads_answers=isinstance(tokenizer, AnswerTokenizer)))
    encoder = _Encoder(source, tokenizer, gaps, spec)

    def client_data(client: str) -> TableData:
        split, answers = dataset.clients[client], dataset.answer_set(client)
        for examples in split.roles.values():
            dataset.check_labels(client, examples)
        train, validation = encoder.training(split.train, answers, client), encoder.table(split.validation, answers)
        test = encoder.table(split.test, answers, outside=dataset.outside)
        return table_data(train, validation, test, dataset.mixture)

    if isinstance(dataset.clients, Lazy):
        clients: Mapping[str, TableData] = Lazy(dataset.clients, client_data, dataset.clients.sizes)
        _check_tables(dataset, encoder)
    else:
        clients = {name: client_data(name) for name in dataset.clients}
    unseen: dict[str, TableData] = {}
    for name, examples in dataset.unseen.items():
        rows = encoder.table(examples, dataset.answer_set(name), outside=dataset.outside)
        unseen[name] = TableData(rows, rows, rows)
    read = next(iter(encoder.regions.values()), None)
    return RunData(
        dataset, clients, unseen, encoder.types, tokenizer, encoder.tokens, 0 if read is None else read.shape[2],
        "" if read is None else read.encoder,
    )  # fmt: skip


def table_data(train: Table, validation: Table, test: Table, mixture: Sequence[float] = ()) -> TableData:
    """A client's tables, in mixed batches where texts are learned from examples that may lack modalities."""
    if mixture and train.present is not None:
        return MixedData(train, validation, test, mixture)
    return TableData(train, validation, test)


def _check_tables(dataset: FederatedDataset, encoder: "_Encoder") -> None:
    """Check of tables before training, of which most examples are rows of one and the same."""
    for examples in {(id(e.labels and e.labels.table), id(e.images)): e for e in dataset.everything}.values():
        encoder.table(examples.take([]), dataset.answers)


class _Encoder:
    """Examples of a dataset as tables for a model; what belongs to many examples is made once."""

    def __init__(self, source: Source, tokenizer: Any, gaps: bool, spec: ModelSpec) -> None:
        dataset = source.dataset
        self._dataset, self._tokenizer, self._gaps = dataset, tokenizer, gaps
        # A model that writes its answers learns from their tokens.
        self._prompts = _prompts(source, tokenizer) if spec.converses else None
        listed = () if self._prompts is not None and len(dataset.answers) > MOST_CANDIDATES else dataset.answers
        self.tokens: Tensor | None = tokenizer.answers(listed) if isinstance(tokenizer, AnswerTokenizer) else None
        self._row_of = {answer: row for row, answer in enumerate(dataset.answers)}
        self.types = dataset.kinds
        # A head serves the largest pool; candidates are the client's own.
        self._width = dataset.widest if self.tokens is None else 0
        self.regions: Mapping[int, Regions] = source.regions if spec.reads == "regions" else {}
        # What stands before examples of documents has as many columns everywhere, so that rows can be put together.
        before = chain.from_iterable(examples.before or () for examples in dataset.everything)
        self._turns = max(map(len, before), default=0)
        self._texts = SharedTexts(tokenizer if self._prompts is None else unread)
        self._pictures = SharedPictures(optional=gaps)
        trained: dict[str, Examples] = {}
        if self._prompts is None and not isinstance(dataset.clients, Lazy):
            trained = {name: split.train for name, split in dataset.clients.items()}
        self._given = _answers_given(trained, tokenizer)

    def table(self, examples: Examples, answers: Sequence[str], *, outside: bool = False) -> Table:
        """Examples with these answers or labels."""
        regions = self.regions[picture_table_id(examples)] if self.regions else None
        rows = encode(
            examples, self._texts, answers, self.types, None if self.regions else self._pictures(examples),
            outside=outside, width=self._width, regions=regions,
        )  # fmt: skip
        if self._prompts is not None:
            return self._prompts.of(examples, rows)
        if not self._gaps:
            return rows
        rows = with_modalities(rows, examples)
        captioned = self._dataset.kind == "captions"
        return with_captions(rows, examples, self._tokenizer, self._turns) if captioned else rows

    def training(self, examples: Examples, answers: Sequence[str], client: str) -> Table:
        """A client's training examples, with the tokens of their answers for a model that writes these."""
        rows = self.table(examples, answers)
        if self.tokens is None or self._prompts is not None:
            return rows
        if client in self._given:
            return replace(rows, columns={**rows.columns, **self._given[client]})
        numbers = torch.tensor([self._row_of[answer] for answer in examples.answers], dtype=torch.int64)
        return replace(rows, columns={**rows.columns, "answer_tokens": self.tokens[numbers]})


def _prompts(source: Source, tokenizer: Any) -> Prompts:
    """Prompts of all examples for a model that converses."""
    trained = [split.train for split in source.dataset.clients.values()]
    ids = set(map(id, trained))
    return Prompts(trained, [examples for examples in source.dataset.everything if id(examples) not in ids], tokenizer)


def _texts_read(dataset: FederatedDataset) -> Iterator[str]:
    """All texts that a model reads in any role: questions, with the texts offered with them, or labelled texts."""
    for column in shared_columns([e.questions for e in dataset.everything if not isinstance(e.questions, NoTexts)]):
        yield from column
    for examples in dataset.everything:
        for question, offered in zip(examples.questions, examples.choices or (), strict=examples.choices is not None):
            yield from (f"{question} {text}" for text in offered)


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
