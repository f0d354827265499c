"""Tokens of class names, with room for learned context, as a dual encoder's own tokenizer makes them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def plain_names(answers: Sequence[str] | int) -> tuple[str, ...]:
    """Class names as they stand in prompts: underscores are spaces."""
    if isinstance(answers, int):
        raise ValueError(f"the model 'clip' reads the names of classes, got only their number, {answers}")
    names = tuple(" ".join(name.replace("_", " ").split()) for name in answers)
    if not names or not all(names):
        raise ValueError(f"class names must not be empty, got {', '.join(map(repr, names)) or 'none'}")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"class names must differ in prompts, where underscores are spaces, got {doubles[0]!r} twice")
    return names


class ClassTexts:
    """Prompts of C classes as token ids.

    Attributes:
        start: position of the first token behind what begins every text.
    """

    def __init__(self, tokenizer: Any, names: Sequence[str], length: int, whole: bool) -> None:
        self.names, self._tokenizer, self._length, self._whole = tuple(names), tokenizer, length, whole
        first = self._rows(["x"])[0][0]
        begins = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
        self.start = int(first in begins)

    def words(self, text: str) -> list[int]:
        """Tokens of some words alone, without what begins and ends a text."""
        return self._rows([text])[0][self.start : -1]

    def plain(self, template: str) -> tuple[Tensor, Tensor]:
        """Ids and mask of handwritten prompts, int64 (C, L)."""
        if template.count("{}") != 1:
            raise ValueError(f"a template must have {{}} once, where the class name goes, got {template!r}")
        return self._padded([template.format(name) for name in self.names], 0)

    def with_room(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of "name.", with places for context behind what begins a text, int64 (C, L).

        The places hold the name's first token; what they are is replaced. Name and context that are too long together
        are a ``ValueError``.
        """
        return self._padded([f"{name}." for name in self.names], tokens)

    def _padded(self, texts: Sequence[str], room: int) -> tuple[Tensor, Tensor]:
        rows = self._rows(texts)
        rows = [[*row[: self.start], *[row[self.start]] * room, *row[self.start :]] for row in rows]
        longest = max(map(len, rows))
        if longest > self._length:
            name, row = max(zip(self.names, rows, strict=True), key=lambda pair: len(pair[1]))
            raise ValueError(
                f"the text encoder reads at most {self._length} tokens, and the prompt of class {name!r} has "
                f"{len(row)}, {room} of them learned: shorten the name, model.template or model.context"
            )
        width = self._length if self._whole else longest
        pad = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return ids, mask

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(row) for row in self._tokenizer(list(texts))["input_ids"]]
