"""Prompts of generative vision-language models, and answers as tokens.

A prompt's token ids hold a placeholder for each of its pictures (:mod:`confed.models.hf.placeholder`). That these give
the ids that the processor gives is checked when the tokenizer is made.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confed.data.chat import Conversation, Said, asked, pictures_shown
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.hf.placeholder import SAMPLE, Placeholder, left_padded, padding
from confed.models.hf.processors import read_processor, save_processor


class ChatTokenizer(AnswerTokenizer):
    """Conversations as prompts that end where the answer begins, and answers as tokens; a question is one turn.

    Prompts are padded on the left, so that an answer follows its prompt directly. Control tokens that somebody spells
    in a text, such as ``<end_of_utterance>`` or a picture's placeholder, are read as text.
    """

    def __init__(self, processor: Any, max_length: int = 256) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.placeholder = Placeholder.of(processor)
        self._max_length, self.closing = max_length, True
        if fault := self.placeholder.fault(asked("What is in the picture?")):
            raise ValueError(fault)
        several = (Said("user", (None, "This?", None)), Said("assistant", ("Yes.",)), Said("user", (None, "?")))
        self._several = self.placeholder.fault(several)  # no matter as long as nobody has several turns or pictures

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer)

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer, without its pictures'."""
        return self._max_length

    @property
    def words(self) -> tuple[str, ...]:
        """Empty: the vocabulary is the model's."""
        return ()

    @property
    def pad(self) -> int:
        """The token of padding."""
        return padding(self.tokenizer)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding on the left) of prompts, both int64 of shape (N, L).

        Raises ``ValueError``: a question is too long, or holds a picture's placeholder.
        """
        return left_padded([self.prompt(asked(text)) for text in texts], self.pad)

    def padded(self, rows: Sequence[Sequence[int]], width: int = 0) -> tuple[Tensor, Tensor]:
        """Ids and mask of prompts, padded on the left to the longest or to a width."""
        return left_padded(rows, self.pad, width=width)

    def shortened(self, texts: Sequence[str]) -> int:
        """0: a question that is too long is an error, nothing is cut."""
        del texts
        return 0

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation up to where the answer begins, with a placeholder for each of its pictures."""
        count = pictures_shown(conversation)
        if self._several and (count > 1 or len(conversation) > 1):
            raise ValueError(self._several)
        ids = self.placeholder.written(conversation)
        self._check_length(len(ids))
        places = len(self.placeholder.places(ids))
        if places != count:
            raise ValueError(
                f"its prompt has {places} placeholders {self.placeholder.text!r} for {count} "
                f"picture{'' if count == 1 else 's'}: leave the placeholder out of the texts"
            )
        return ids

    def learned(self, conversation: Conversation, answers: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """A prompt up to where its answers begin to differ from it, and the ids of each answer behind that.

        What is learned is what an answer adds: the ids of prompt and answer behind their common beginning with those of
        the prompt alone. The rule does not depend on the template.
        """
        prompt = self.prompt(conversation)
        whole = [self.placeholder.written(conversation, answer) for answer in answers]
        common = len(prompt)
        for text, ids in zip(answers, whole, strict=True):
            common_length = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
            if len(ids) <= common_length or not text.strip() or not self.placeholder.adds_tokens(conversation, text):
                raise ValueError(f"the answer {text!r} adds no token to its prompt")
            if ids[-1] == 0:
                raise ValueError(f"the answer {text!r} ends in the token with id 0, which marks padding here")
            self._check_length(len(ids))
            common = min(common, common_length)
        return prompt[:common], [ids[common:] for ids in whole]

    def answers(self, texts: Sequence[str]) -> Tensor:
        """Token ids of answers, int64, shape (C, T): a start, the answer, the end of the turn, and 0 behind it."""
        rows, seen = list[list[int]](), dict[tuple[int, ...], str]()
        for text in texts:
            prompt, (added,) = self.learned(SAMPLE, [text])
            other = seen.setdefault(tuple(added), text)
            if other != text:
                raise ValueError(f"the answers {other!r} and {text!r} have the same tokens, nothing tells them apart")
            rows.append([prompt[-1], *added])
        length = max(map(len, rows), default=0)
        return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64).view(-1, length)

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of token ids, int64 (B, L)."""
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def save(self, directory: Path | str) -> None:
        """Writes the processor's folder."""
        save_processor(self.processor, directory)

    @classmethod
    def load(cls, directory: Path | str, max_length: int = 256) -> "ChatTokenizer":
        """The tokenizer of a folder that :meth:`save` wrote."""
        return cls(read_processor(str(directory), str(directory)), max_length)

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise ValueError(
                f"it has {tokens} tokens without its pictures', more than model.max_length = {self.max_length}: raise "
                "it, or leave the example out; nothing is cut"
            )
