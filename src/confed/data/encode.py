"""Examples as tensors, with the tokenizer of a backbone.

A *document* is an example with something before it (:class:`confed.data.examples.Turn`): pictures and texts in turns,
of which the example's own picture and text are the last. A picture to be described with a few described ones before it
(few-shot) is the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from confed.data.caption_batches import pack_texts
from confed.data.examples import Examples, Turn, presence
from confed.data.lazy import NoTexts, Taken
from confed.data.picture_tables import StoredPictures, channels_first
from confed.data.regions import Regions
from confed.data.table import Table
from confed.data.targets import SoftTargets, SparseLabels
from confed.federation.actions import OFFERED
from confed.federation.ownership import MODALITIES

_NONE = torch.zeros(1, 3, 0, 0, dtype=torch.uint8)
"""The picture table of examples that have no pictures."""


class Tokenizer(Protocol):
    """Protocol of tokenizers of questions."""

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding), both int64 of shape (N, L)."""
        ...


class SharedTexts:
    """A tokenizer that reads a column of texts once, of which many examples are rows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Keyed by identity, with the column itself, so that no other one can come to its place in memory.
        self._read: dict[int, tuple[Sequence[str], tuple[Tensor, Tensor]]] = {}

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, both int64 of shape (N, L)."""
        if not isinstance(texts, Taken):
            return self._tokenizer(texts)
        column = texts.column
        if id(column) not in self._read:
            self._read[id(column)] = (column, self._tokenizer(list(column)))
        ids, mask = self._read[id(column)][1]
        rows = torch.from_numpy(texts.rows)
        return ids[rows], mask[rows]


class SharedPictures:
    """Tables of pictures as tensors, each made once; examples often share one."""

    def __init__(self, *, optional: bool) -> None:
        self._optional = optional
        self._read: dict[int, tuple[object, Tensor | StoredPictures]] = {}

    def __call__(self, examples: Examples) -> Tensor | StoredPictures | None:
        """The examples' pictures."""
        images = examples.images
        if not examples.has_pictures and (self._optional or examples.labels is not None):
            return _NONE if examples.labels is None else None
        if id(images) not in self._read:
            self._read[id(images)] = (images, channels_first(images))
        return self._read[id(images)][1]


def encode(
    examples: Examples,
    tokenizer: Tokenizer,
    answers: Sequence[str],
    types: Sequence[str],
    images: Tensor | StoredPictures | None = None,
    *,
    outside: bool = False,
    width: int = 0,
    regions: Regions | None = None,
) -> Table:
    """Examples as tensors."""
    columns: dict[str, Tensor] = {}
    if not isinstance(examples.questions, NoTexts):
        columns["text"], columns["text_mask"] = tokenizer(examples.questions)
    if not isinstance(examples.types, NoTexts):
        type_of = {name: number for number, name in enumerate(types)}
        if strange := next((kind for kind in examples.types if kind not in type_of), ""):
            raise ValueError(
                f"the examples that were looked at have none of the kind {strange!r}: data.types must name it"
            )
        columns["type"] = torch.tensor([type_of[kind] for kind in examples.types], dtype=torch.int64)
    if examples.labels is None:
        columns |= _answer_columns(examples, tokenizer, answers, outside, max(width, len(answers)))
        images = channels_first(examples.images) if images is None and regions is None else images
    return Table(
        images if regions is None else None,
        torch.from_numpy(np.asarray(examples.image_index, dtype=np.int64)),
        columns,
        regions,
        None
        if examples.annotations is None
        else SoftTargets.of(examples.annotations, answers, max(width, len(answers))),
        None if examples.labels is None else SparseLabels(examples.labels.table.present, len(answers)),
    )


def _answer_columns(
    examples: Examples, tokenizer: Tokenizer, answers: Sequence[str], outside: bool, width: int
) -> dict[str, Tensor]:
    """The label of each example's answer, and what it is chosen from."""
    label_of = {answer: label for label, answer in enumerate(answers)}
    for name, answer in zip(examples.names, examples.answers, strict=True):
        if not outside and answer not in label_of:
            raise ValueError(
                f"example {name!r}: the answer {answer!r} is not in the vocabulary of {len(label_of)} answers"
            )
    label = torch.tensor([label_of.get(a, -1) for a in examples.answers], dtype=torch.int64)
    columns = {"label": label, **({"answerable": label >= 0} if outside else {})}
    if examples.choices is not None:
        columns |= _choices(examples, tokenizer)
    if examples.offered is not None:
        columns[OFFERED] = _offered(examples, examples.offered, answers, width)
    return columns


def _offered(examples: Examples, offered: Sequence[str], answers: Sequence[str], width: int) -> Tensor:
    """Which of the classes each example is offered, bool (N, width)."""
    answer_set = set(answers)
    if strange := [name for name in offered if name not in answer_set]:
        raise ValueError(
            f"the class {strange[0]!r} is offered and is not in the vocabulary of {len(answer_set)} answers"
        )
    for name, answer in zip(examples.names, examples.answers, strict=True):
        if answer not in offered:
            raise ValueError(f"example {name!r}: its class {answer!r} is not among the {len(offered)} that are offered")
    row = torch.tensor([answer in set(offered) for answer in answers] + [False] * (width - len(answers)))
    return row.expand(len(examples), -1).clone()


def _choices(examples: Examples, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Every question together with each text offered with it: ``choices`` and ``choices_mask``, (N, K, L)."""
    assert examples.choices is not None
    pairs = zip(examples.questions, examples.choices, strict=True)
    texts: list[str] = []
    for question, offered_answers in pairs:
        texts += [f"{question} {offered}" for offered in offered_answers]
    text, mask = tokenizer(texts)
    k = len(examples.choices[0]) if len(examples) else 0
    shape = (len(examples), k, text.shape[-1])
    return {"choices": text.reshape(shape), "choices_mask": mask.reshape(shape)}


# What examples have besides pictures and texts ---------------------------------------------------------------


def with_modalities(table: Table, examples: Examples) -> Table:
    """A table of examples with their sounds, series and missing modalities."""
    present = presence(examples)
    image, text = (present[:, MODALITIES.index(name)] for name in ("image", "text"))
    if "choices" in table.columns and not text.all():
        raise ValueError("where an answer is one of some texts offered with a question, the question cannot be missing")
    seen = table if image.any() or not len(image) else replace(table, images=None, regions=None)
    return replace(
        seen,
        present=torch.from_numpy(present),
        sounds=examples.sounds,
        sound_index=_tensor(examples.sound_index),
        series=examples.series,
        series_index=_tensor(examples.series_index),
    )


def _tensor(index: np.ndarray | None) -> Tensor | None:
    return None if index is None else torch.from_numpy(np.asarray(index, dtype=np.int64))


def with_captions(table: Table, examples: Examples, tokenizer: Tokenizer, turns: int) -> Table:
    """A table of examples with reference captions, ``references``, uint8 (N, R, K), UTF-8, and preceding turns."""
    columns = dict(table.columns)
    if examples.captions is not None:
        columns["references"] = pack_texts(examples.captions)
    if not turns:
        return replace(table, columns=columns)
    before: list[list[Turn]] = []
    for given in examples.before or ((),) * len(examples):
        before.append([*given, *[Turn(-1, "")] * (turns - len(given))])
    texts = [turn.text for turn in chain.from_iterable(before)]
    text, mask = tokenizer(texts)
    mask = mask * torch.tensor([bool(t.strip()) for t in texts], dtype=torch.int64).unsqueeze(1)
    shape = (len(examples), turns)
    numbers = torch.tensor([turn.picture for turn in chain.from_iterable(before)], dtype=torch.int64).view(shape)
    columns |= {
        "before_text": (text * mask).view(*shape, text.shape[-1]),
        "before_text_mask": mask.view(*shape, text.shape[-1]),
        "before_shown": numbers >= 0,
    }
    index = torch.cat([table.image_index.unsqueeze(1), numbers.clamp_min(0)], dim=1)
    return replace(table, columns=columns, image_index=index)
