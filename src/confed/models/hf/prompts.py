"""Prompts of vision-language models: a question in the model's own chat template, and answers as tokens.

A prompt's token ids hold the *placeholder* of its picture, as the chat template writes it, such as ``<image>``. How
many tokens a picture becomes depends on its size; :class:`Placeholder` puts them in when the picture is at hand. That
this gives the ids that the processor gives is checked when the tokenizer is made.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confed.models.answer_tokenizer import AnswerTokenizer

__all__ = ["ChatTokenizer", "Placeholder"]


class Placeholder:
    """Tokens of a picture within a prompt.

    Args:
        processor: of ``transformers``, with a chat template, a tokenizer and an image processor.

    Attributes:
        text: what the chat template writes for a picture.
        ids: its token ids before the picture is known.

    Raises:
        ValueError: the processor has no chat template, or writes nothing for a picture.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._expanded: dict[tuple[int, ...], list[int]] = {}
        if not getattr(processor, "chat_template", None):
            raise ValueError(
                f"the processor {type(processor).__name__} has no chat template; take an instruction-tuned model, or "
                "put a chat_template.jinja into its folder"
            )
        there, without = _rendered(processor, "q", picture=True), _rendered(processor, "q", picture=False)
        start = next(
            (i for i, pair in enumerate(zip(there, without, strict=False)) if pair[0] != pair[1]), len(without)
        )
        self.text = there[start : start + len(there) - len(without)]
        self.ids: list[int] = processor.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        if not self.text or not self.ids:
            raise ValueError(f"the chat template of {type(processor).__name__} writes nothing for a picture")

    def tokens(self, picture: np.ndarray) -> list[int]:
        """What stands for a picture in a prompt, ids; pictures of one size have the same.

        Args:
            picture: uint8, shape (H, W, 3).
        """
        if picture.shape not in self._expanded:
            read = self._processor(text=[self.text], images=[[picture]], add_special_tokens=False)
            ids = read["input_ids"][0]
            self._expanded[picture.shape] = list(map(int, ids))
        return self._expanded[picture.shape]

    def put_in(self, text: Tensor, mask: Tensor, picture: np.ndarray) -> tuple[Tensor, Tensor]:
        """Prompts with the tokens of pictures of one size in place of the placeholder.

        Args:
            text: ids, int64 (B, L).
            mask: int64 (B, L).
            picture: any of the pictures.

        Returns:
            Ids and mask, (B, L - placeholder + tokens of a picture).

        Raises:
            ValueError: a prompt has no placeholder.
        """
        width, tokens = len(self.ids), torch.tensor(self.tokens(picture), device=text.device)
        own = torch.tensor(self.ids, device=text.device)
        found = (text.unfold(1, width, 1) == own).all(2)
        if not bool(found.any(1).all()):
            raise ValueError(f"a prompt lacks the placeholder {self.text!r} of its picture")
        start = found.int().argmax(1)
        rows = [torch.cat([row[:i], tokens, row[i + width :]]) for row, i in zip(text, start.tolist(), strict=True)]
        more = mask.new_ones(len(mask), len(tokens) - width) if len(tokens) >= width else None
        if more is None:
            raise ValueError(f"a picture has fewer tokens ({len(tokens)}) than its placeholder ({width})")
        return torch.stack(rows), torch.cat([mask, more], 1)


class ChatTokenizer(AnswerTokenizer):
    """Questions as prompts of one turn with one picture, ending where the answer begins; answers as tokens.

    Prompts are padded on the left, so that an answer follows its prompt directly.

    Args:
        processor: see :class:`Placeholder`.
        max_length: most tokens of a prompt without its picture's.

    Raises:
        ValueError: see :class:`Placeholder`; or the processor's own ids of a prompt differ from ours.
    """

    def __init__(self, processor: Any, max_length: int = 256) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.placeholder = Placeholder(processor)
        self._max_length, self.closing = max_length, True
        self._check()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer)

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt, without its picture's."""
        return self._max_length

    @property
    def words(self) -> tuple[str, ...]:
        """Empty: the vocabulary is the model's."""
        return ()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (1 = token, 0 = padding on the left) of prompts, both int64 of shape (N, L).

        Raises:
            ValueError: a question is too long.
        """
        rows = [self._prompt(text) for text in texts]
        length = max(map(len, rows), default=0)
        longest = max(range(len(rows)), key=lambda i: len(rows[i]), default=0)
        if length > self.max_length:
            raise ValueError(
                f"the prompt of {texts[longest][:60]!r} has {length} tokens, more than model.max_length = "
                f"{self.max_length}: raise it, or leave the question out"
            )
        pad = self._pad
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], dtype=torch.int64)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], dtype=torch.int64)
        return ids.view(len(rows), length), mask.view(len(rows), length)

    def shortened(self, texts: Sequence[str]) -> int:
        """0: a question that is too long is an error, nothing is cut."""
        del texts
        return 0

    def answers(self, texts: Sequence[str]) -> Tensor:
        """Token ids of answers, int64, shape (C, T): a start, the answer, the end of the turn, and 0 behind it.

        What is learned is what the answer adds to the prompt's ids: the rule does not depend on the template.

        Raises:
            ValueError: an answer adds no token, or one with the id 0, or two answers have the same tokens.
        """
        rows, seen = list[list[int]](), dict[tuple[int, ...], str]()
        bare = _rendered(self.processor, "q", picture=True)
        prompt = self._ids(bare)
        for text in texts:
            whole = self._ids(_rendered(self.processor, "q", picture=True, answer=text))
            common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            added = whole[common:]
            if not added or (len(self._ids(bare + text)) <= len(prompt)):
                raise ValueError(f"the answer {text!r} adds no token to its prompt")
            if 0 in added:
                raise ValueError(f"the answer {text!r} has the token with id 0, which marks padding here")
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
        self.processor.save_pretrained(directory)

    @classmethod
    def load(cls, directory: Path | str, max_length: int = 256) -> "ChatTokenizer":
        """The tokenizer of a folder that :meth:`save` wrote.

        Args:
            directory: the folder.
            max_length: most tokens of a prompt without its picture's.
        """
        from transformers import AutoProcessor

        return cls(AutoProcessor.from_pretrained(directory), max_length)

    @property
    def _pad(self) -> int:
        own = self.tokenizer.pad_token_id
        return int(own if own is not None else self.tokenizer.eos_token_id)

    def _prompt(self, text: str) -> list[int]:
        return self._ids(_rendered(self.processor, text, picture=True))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check(self) -> None:
        """Compares our ids of a prompt with a picture with the processor's."""
        picture = np.zeros((32, 48, 3), np.uint8)
        question = "What is in the picture?"
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        read = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt",
        )  # fmt: skip
        ids, mask = self([question])
        ours, _ = self.placeholder.put_in(ids, mask, picture)
        if not torch.equal(ours, read["input_ids"]):
            raise ValueError(
                f"the prompts of {type(self.processor).__name__} cannot be split into text and picture: it gives "
                f"{read['input_ids'].shape[1]} tokens where its parts give {ours.shape[1]}"
            )


def _rendered(processor: Any, question: str, *, picture: bool, answer: str | None = None) -> str:
    """A conversation of one question as the chat template writes it, with its answer or up to where that begins."""
    content = [*([{"type": "image"}] if picture else []), {"type": "text", "text": question}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if answer is not None:
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return processor.apply_chat_template(turns, add_generation_prompt=answer is None, tokenize=False)
