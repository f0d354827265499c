"""Training batches that are mixed of texts alone, pictures with texts, and documents."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from confed.data.caption_batches import GROUPS, beginning
from confed.data.examples import TableData
from confed.data.table import Table
from confed.federation.ownership import MODALITIES


class MixedData(TableData):
    """A client's data whose training batches are mixed of texts, pictures with texts, and documents.

    Cao, Sun and Yu (2025) train on 14,000 tokens of texts, 14,000 of pictures with captions and 4,000 of documents per
    batch; here the shares are of examples. In every batch, the share of each source in all rows so far is as near to
    its own as whole examples allow; sources that a client does not have leave their share to the others. A source's
    rows come in random order, and again in another one when all have come. An epoch has as many rows as the client.

    In a batch of one source keys are as of any batch. Of several sources, those of texts alone begin with ``texts.``
    and those of documents with ``documents.``; ``index``, ``label`` and ``type`` are of all rows, source by source.
    Rows of one source may have several sets of modalities, such as documents of which some have no picture of their own
    or have lost it: each set then has keys of its own (:func:`confed.data.caption_batches.groups` reads them all).
    """

    samples_rows = False

    def __init__(self, train: Table, validation: Table, test: Table, mixture: Sequence[float]) -> None:
        super().__init__(train, validation, test)
        if len(mixture) != len(GROUPS) or min(mixture) < 0 or not sum(mixture) > 0:
            raise ValueError(
                "data.mixture must be three shares, of texts, of pictures with texts and of documents, none negative "
                f"and one positive, got {list(mixture)}"
            )
        self._rows, self._shares = _sources(train), tuple(mixture)
        if len(train) and not any(len(rows) and s > 0 for rows, s in zip(self._rows, mixture, strict=True)):
            raise ValueError(f"data.mixture gives no share to any of a client's examples, got {list(mixture)}")

    def shortened(self, train: int, others: int) -> "MixedData":
        """See :meth:`TableData.shortened`; rows of sources without a share alone are a ValueError."""
        first, validation, test = self.tables
        return MixedData(first.take(train), validation.take(others), test.take(others), self._shares)

    def only(self, rows: Tensor) -> "MixedData":
        """See :meth:`TableData.only`."""
        fewer = copy(self)
        fewer._kept = rows
        fewer._rows = tuple(of_source[torch.isin(of_source, rows)] for of_source in self._rows)
        return fewer

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """One epoch of mixed batches; their order and content follow from ``rng`` alone."""
        orders = [_endless(rows, rng) for rows in self._rows]
        shares = [s if len(rows) else 0.0 for rows, s in zip(self._rows, self._shares, strict=True)]
        total, taken = sum(shares), [0] * len(shares)
        for first in range(0, len(self), batch_size):
            chosen: list[list[int]] = [[] for _ in shares]
            for number in range(first, min(first + batch_size, len(self))):
                # The source that is furthest behind its share; of equal ones the first.
                behind = [s / total * (number + 1) - t if s else -torch.inf for s, t in zip(shares, taken, strict=True)]
                source = max(range(len(shares)), key=behind.__getitem__)
                taken[source] += 1
                chosen[source].append(next(orders[source]))
            yield self._mixed(chosen)

    def steps(self, batch_size: int, least: int = 1) -> int:
        """Number of training batches per epoch with at least ``least`` examples."""
        return replace(self._train, present=None).steps(batch_size, least)

    def _mixed(self, chosen: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        train = self._train
        parts: list[tuple[str, dict[str, Tensor]]] = []
        for source, rows in enumerate(chosen):
            for number, alike in enumerate(train.groups(torch.tensor(rows, dtype=torch.int64))):
                parts.append((beginning(source, number), train.batch(alike)))
        if len(parts) == 1:
            return parts[0][1]
        common = ("index", "label", "type")  # the first key says how many rows there are
        batch: dict[str, Tensor] = {}
        for name in common:
            batch[name] = torch.cat([kind_batch[name] for _, kind_batch in parts])
        for prefix, kind_batch in parts:
            batch |= {f"{prefix}{name}": tensor for name, tensor in kind_batch.items() if name not in common}
        return batch


def _sources(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of texts alone, of pictures with texts, and of documents."""
    documents, shown = table.turns > 0, torch.ones(len(table), dtype=torch.bool)
    if table.present is not None:
        shown = table.present[:, MODALITIES.index("image")]
    masks = (~shown & ~documents, shown & ~documents, documents)
    return tuple(mask.nonzero().flatten() for mask in masks)  # pyright: ignore[reportReturnType]


def _endless(rows: Tensor, rng: torch.Generator) -> Iterator[int]:
    """The rows in random order, again and again."""
    while len(rows):
        yield from rows[torch.randperm(len(rows), generator=rng)].tolist()
