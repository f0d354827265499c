"""Tokens of answers, for models that write their answers instead of choosing a class."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from confed.models.tokenizer import BertTokenizer, WordTokenizer

__all__ = ["AnswerTokenizer", "words_of"]


class AnswerTokenizer:
    """A question tokenizer that also reads answers; implements :class:`confed.data.encode.Tokenizer`.

    An answer becomes ``[CLS] words [SEP]``, and 0 (the id of ``[PAD]`` in BERT and in our word tokenizer) behind it:
    the first token starts the decoder, the second is its end.

    Args:
        questions: the tokenizer of questions.
        closing: whether questions end with ``[SEP]``; ALBEF was trained on questions without it.
    """

    def __init__(self, questions: WordTokenizer | BertTokenizer, closing: bool = True) -> None:
        self.questions, self.closing = questions, closing

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.questions.vocab_size

    @property
    def max_length(self) -> int:
        """L, the positions of a question."""
        return self.questions.max_length

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary's words in order; empty where it is BERT's."""
        return self.questions.words if isinstance(self.questions, WordTokenizer) else ()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding) of questions, both int64 of shape (N, L)."""
        ids, mask = self.questions(texts)
        if self.closing:
            return ids, mask
        # The last token of every text is the closing one.
        mask = mask * (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True) - 1)
        return ids * mask, mask

    def shortened(self, texts: Sequence[str]) -> int:
        """How many of some questions are longer than L tokens and so lose their end."""
        return self.questions.shortened(texts)

    def answers(self, texts: Sequence[str]) -> Tensor:
        """Token ids of answers, int64, shape (C, T): T tokens of the longest, 0 after the end of shorter ones.

        Raises:
            ValueError: two answers have the same tokens.
        """
        ids, mask = self.questions(texts)
        ids = (ids * mask)[:, : int(mask.sum(1).max()) if len(mask) else 0]
        seen: dict[tuple[int, ...], str] = {}
        for text, row in zip(texts, ids.tolist(), strict=True):
            other = seen.setdefault(tuple(row), text)
            if other != text:
                raise ValueError(f"the answers {other!r} and {text!r} have the same tokens, nothing tells them apart")
        return ids

    def save(self, directory: Path | str) -> None:
        """Writes the tokenizer's folder; see :meth:`confed.models.tokenizer.WordTokenizer.save`."""
        self.questions.save(directory)


def words_of(answers: Sequence[str]) -> tuple[str, ...]:
    """The words of answers in order, without repetitions: what a word tokenizer must know to write them."""
    return tuple(dict.fromkeys(word for answer in answers for word in re.findall(r"[^\W_]+", answer.lower())))
