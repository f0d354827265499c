"""Tensor columns of conversations: prompts, answers to learn, numbers of pictures, and answers to compare with."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from confed.data.caption_batches import pack_texts
from confed.data.chat import Conversation, asked, pictures_shown
from confed.data.examples import Examples
from confed.data.table import Table

MOST_ANSWERS = 10
"""Different answers to one question that are learned; the rarer ones are left out."""


class Converser(Protocol):
    """Protocol of tokenizers of conversations."""

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids up to where the answer begins."""
        ...

    def learned(self, conversation: Conversation, answers: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Token ids up to where any of the answers begins, and those of each answer behind that."""
        ...

    def padded(self, rows: Sequence[Sequence[int]], width: int = 0) -> tuple[Tensor, Tensor]:
        """Ids and mask of prompts, at least so wide."""
        ...


def right_answers(examples: Examples) -> list[tuple[str, ...]]:
    """Right answers of each example: its captions, those of all annotators, or its one answer."""
    several = examples.captions or examples.annotations
    return [(answer,) for answer in examples.answers] if several is None else [tuple(row) for row in several]


def unread(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids and mask of texts that are read in another way, int64 (N, 1)."""
    return torch.zeros(len(texts), 1, dtype=torch.int64), torch.zeros(len(texts), 1, dtype=torch.int64)


class Prompts:
    """Prompts of all examples of a dataset, so wide that rows of several parts can be put together."""

    def __init__(self, train: Sequence[Examples], other: Sequence[Examples], tokenizer: Converser) -> None:
        self._tokenizer = tokenizer
        self._learned = {id(examples): _each(examples, _given(examples), tokenizer) for examples in train}
        self._asked = {id(examples): _each(examples, None, tokenizer) for examples in other}
        everything = list(chain.from_iterable((*self._learned.values(), *self._asked.values())))
        self._width = max((len(prompt) for prompt, _ in everything), default=0)
        answers = [answers for prompt, answers in everything if answers]
        self._most = max(map(len, answers), default=1)
        self._longest = max(map(len, chain.from_iterable(answers)), default=1) + 1

    def of(self, examples: Examples, rows: Table) -> Table:
        """A part's table with its prompts in place of its questions.

        Training rows have ``answer_tokens`` and ``answer_weight``, (N, K, T) and (N, K); others ``references``, uint8
        (N, R, B). Of conversations ``image_count`` (N,) is added.
        """
        learned = self._learned.get(id(examples))
        prompts = self._asked[id(examples)] if learned is None else learned
        text, mask = self._tokenizer.padded([prompt for prompt, _ in prompts], self._width)
        columns: dict[str, Tensor] = {**rows.columns, "text": text, "text_mask": mask}
        if learned is None:
            columns["references"] = pack_texts(right_answers(examples))
        else:
            columns |= self._answers(learned, _given(examples))
        if examples.conversations is not None:
            counts = [pictures_shown(turns) for turns in examples.conversations]
            columns["image_count"] = torch.tensor(counts, dtype=torch.int64)
        return replace(rows, columns=columns)

    def _answers(
        self, rows: Sequence[tuple[list[int], list[list[int]]]], given: Sequence[Mapping[str, float]]
    ) -> dict[str, Tensor]:
        tokens = torch.zeros(len(rows), self._most, self._longest, dtype=torch.int64)
        weight = torch.zeros(len(rows), self._most)
        for n, ((prompt, answers), shares) in enumerate(zip(rows, given, strict=True)):
            for k, (answer, share) in enumerate(zip(answers, shares.values(), strict=True)):
                tokens[n, k, : len(answer) + 1] = torch.tensor([prompt[-1], *answer])
                weight[n, k] = share
        return {"answer_tokens": tokens, "answer_weight": weight}


def _given(examples: Examples) -> list[dict[str, float]]:
    """Answers to learn of each example, the most frequent first, with the share of the people who gave each."""
    if examples.annotations is None:
        return [{answer: 1.0} for answer in examples.answers]
    counts: list[Counter[str]] = []
    for row in examples.annotations:
        counts.append(Counter(text for text in row if text.strip()))
    result: list[dict[str, float]] = []
    for answer_counts, answer in zip(counts, examples.answers, strict=True):
        result.append(
            {text: n / sum(answer_counts.values()) for text, n in answer_counts.most_common(MOST_ANSWERS)}
            or {answer: 1.0}
        )
    return result


def _each(
    examples: Examples, given: Sequence[Mapping[str, float]] | None, tokenizer: Converser
) -> list[tuple[list[int], list[list[int]]]]:
    """Prompt and answers of each example."""
    turns = examples.conversations or [asked(question) for question in examples.questions]
    prompts: list[tuple[list[int], list[list[int]]]] = []
    for row, (name, conversation) in enumerate(zip(examples.names, turns, strict=True)):
        try:
            prompts.append(
                (tokenizer.prompt(conversation), [])
                if given is None
                else tokenizer.learned(conversation, list(given[row]))
            )
        except ValueError as error:
            raise ValueError(f"example {name!r}: {error}") from error
    return prompts
