"""Tensor tables of captioned pictures, texts and documents, and mixed training batches of the three.

A *document* is an example with something before it (:class:`confed.data.examples.Turn`): pictures and texts in turns,
of which the example's own picture and text are the last. A picture to be described with a few described ones before it
(few-shot) is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from confed.data.caption_batches import GROUPS, beginning, pack_texts
from confed.data.encode import Tokenizer
from confed.data.examples import Examples, TableData
from confed.data.modal_tables import ModalTable
from confed.data.modalities import MODALITIES
from confed.data.table import Table

_BEFORE = ("before_text", "before_text_mask", "before_shown")


@dataclass(frozen=True)
class CaptionTable(ModalTable):
    """Table of N examples, some with the preceding turns of a document.

    ``image_index`` is (N, 1 + P): the example's own picture, then those of up to P turns before it. Columns beside the
    others: ``before_text`` and ``before_text_mask`` int64 (N, P, L), all zero for a turn without a text, and
    ``before_shown`` bool (N, P), whether a turn has a picture.
    """

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The given rows as one batch: as of a table of modalities, and of documents what stands before.

        Documents have ``before_image`` uint8 (B, P, 3, H, W), unless none of their turns has a picture, besides the
        columns, all with P turns of the longest of them.
        """
        kinds = self._turns()[rows] > 0
        if len(kinds) and bool((kinds != kinds[0]).any()):
            raise ValueError("the examples of a batch must all be documents, or none of them")
        plain = ModalTable(
            **{f.name: getattr(self, f.name) for f in fields(ModalTable) if f.name != "image_index"},
            image_index=self.image_index[:, 0],
        )
        batch = plain.batch(rows)
        before = {name: batch.pop(name) for name in _BEFORE}
        if not len(kinds) or not bool(kinds[0]):
            return batch
        turns = int(self._turns()[rows].max())
        batch |= {name: column[:, :turns] for name, column in before.items()}
        if bool(batch["before_shown"].any()) and self.images is not None:
            numbers = self.image_index[rows, 1 : 1 + turns]
            batch["before_image"] = self.images[numbers.flatten()].unflatten(0, tuple(numbers.shape))
        return batch

    def _turns(self) -> Tensor:
        """Number of turns before each row, int64 (N,)."""
        present = self.columns["before_shown"] | self.columns["before_text_mask"].any(2)
        return (present * torch.arange(1, present.shape[1] + 1)).amax(1) if present.shape[1] else present.long().sum(1)

    def _kinds(self) -> Tensor:
        """Each row's set, and whether it is a document, as a number."""
        return ModalTable._kinds(self) + ((self._turns() > 0).long() << len(MODALITIES))


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

    def __init__(self, train: ModalTable, validation: Table, test: Table, mixture: Sequence[float]) -> None:
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
        assert isinstance(first, ModalTable)
        return MixedData(first.take(train), validation.take(others), test.take(others), self._shares)

    def only(self, rows: Tensor) -> "TableData":
        """See :meth:`TableData.only`."""
        fewer = super().only(rows)
        assert isinstance(fewer, MixedData)
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
        return Table.steps(self._train, batch_size, least)

    def _mixed(self, chosen: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        train = self._train
        assert isinstance(train, ModalTable)
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


def with_captions(table: ModalTable, examples: Examples, tokenizer: Tokenizer, turns: int) -> ModalTable:
    """A table of examples with reference captions and preceding turns.

    Captions are under ``references``, uint8 (N, R, K): UTF-8, 0 behind each.

    Raises ``ValueError``: a text is too long for the model.
    """
    columns = dict(table.columns)
    if examples.captions is not None:
        columns["references"] = pack_texts(examples.captions)
    if not turns:
        return replace(table, columns=columns)
    before = [tuple(turns_before) for turns_before in examples.before or ((),) * len(examples)]
    texts: list[str] = []
    for turns_before in before:
        for k in range(turns):
            texts.append(turns_before[k].text if k < len(turns_before) else "")
    text, mask = tokenizer(texts)
    mask = mask * torch.tensor([bool(t.strip()) for t in texts], dtype=torch.int64).unsqueeze(1)
    shape = (len(examples), turns)
    pictures: list[int] = []
    for turns_before in before:
        for k in range(turns):
            pictures.append(turns_before[k].picture if k < len(turns_before) else -1)
    numbers = torch.tensor(pictures, dtype=torch.int64).view(shape)
    columns |= {
        "before_text": (text * mask).view(*shape, text.shape[-1]),
        "before_text_mask": mask.view(*shape, text.shape[-1]),
        "before_shown": numbers >= 0,
    }
    index = torch.cat([table.image_index.unsqueeze(1), numbers.clamp_min(0)], dim=1)
    return _with_turns(replace(table, columns=columns, image_index=index))


def with_turns(table: Table) -> Table:
    """A table as one that knows documents, if it has the columns of these; else itself."""
    return _with_turns(table) if "before_shown" in table.columns and isinstance(table, ModalTable) else table


def _with_turns(table: ModalTable) -> CaptionTable:
    return CaptionTable(**{f.name: getattr(table, f.name) for f in fields(ModalTable)})


def _sources(table: ModalTable) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of texts alone, of pictures with texts, and of documents."""
    documents = table._turns() > 0 if isinstance(table, CaptionTable) else torch.zeros(len(table), dtype=torch.bool)
    shown = table.present[:, MODALITIES.index("image")]
    masks = (~shown & ~documents, shown & ~documents, documents)
    return tuple(mask.nonzero().flatten() for mask in masks)  # pyright: ignore[reportReturnType]


def _endless(rows: Tensor, rng: torch.Generator) -> Iterator[int]:
    """The rows in random order, again and again."""
    while len(rows):
        yield from rows[torch.randperm(len(rows), generator=rng)].tolist()
