"""The words of a question as an attack sees them: which is the last, where it is looked up, what may replace it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Forward


@dataclass(frozen=True)
class Text:
    """What replaces a word needs to know.

    Attributes:
        embedding: the model's word embedding, (V, d).
        words: ids of the ordinary words, int64 (W,): what may stand in a question.
        special: ids that are no words of a question ([CLS], [SEP], [PAD]), int64.
    """

    embedding: nn.Embedding
    words: Tensor
    special: Tensor


def word_embedding(predict: Forward, model: nn.Module, batch: Batch) -> nn.Embedding:
    """The embedding that a model looks a batch's ``text`` up in, found by watching a pass."""
    embeddings: list[nn.Embedding] = []

    def watch(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        del output
        if isinstance(module, nn.Embedding) and _same(arguments[0], batch["text"]):
            embeddings.append(module)

    handles = [m.register_forward_hook(watch) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.no_grad():
            predict(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not embeddings:
        raise ValueError(f"{type(model).__name__} looks its text up in no nn.Embedding, which this attack changes")
    return embeddings[0]


@contextmanager
def inserted(embedding: nn.Embedding, ids: Tensor, position: Tensor, vectors: Tensor) -> Iterator[None]:
    """Within the block, the words at some places have other embeddings."""

    def replace(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        del module
        if not _same(arguments[0], ids):
            return output
        here = F.one_hot(position, ids.shape[1]).to(torch.bool).unsqueeze(-1)
        return torch.where(here, vectors.unsqueeze(1).to(output.dtype), output)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def last_words(batch: Batch, special: Tensor) -> Tensor:
    """The place of every question's last word, int64 (B,): the last token that is neither padding nor special."""
    real = (batch["text_mask"] != 0) & ~torch.isin(batch["text"], special.to(batch["text"].device))
    places = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, places, -1).amax(1)
    if bool((last < 0).any()):
        raise ValueError("every question must have a word that could be replaced, got one of special tokens only")
    return last


def nearest_words(vectors: Tensor, text: Text, but: Tensor) -> Tensor:
    """The ordinary words whose embeddings are nearest to the given ones."""
    words = text.words.to(vectors.device)
    distance = torch.cdist(vectors, text.embedding.weight.detach()[words])
    return words[distance.masked_fill(words == but.unsqueeze(1), torch.inf).argmin(1)]


def with_words(batch: Batch, position: Tensor, token: Tensor) -> dict[str, Tensor]:
    """The batch with other words at some places, (B,) each."""
    changed = batch["text"].clone()
    changed[torch.arange(len(changed), device=changed.device), position] = token
    return {**batch, "text": changed}


def _same(given: object, ids: Tensor) -> bool:
    return isinstance(given, Tensor) and given.shape == ids.shape and bool(torch.equal(given, ids))
