"""Layout of captioning batches: parts of mixed batches, texts as arrays, and next tokens.

A batch may be *mixed* of texts alone, pictures with texts, and documents (pictures and texts in turns). The keys of
each but the second then have a beginning of their own, and rows stand part by part. Where the rows of one source have
several sets of modalities, each set is a part: keys of those after the first have the set's number besides.
"""

import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from confed.data.examples import TableData
from confed.data.table import Table
from confed.federation.ownership import MODALITIES
from confed.federation.protocols import Batch

GROUPS = ("texts.", "", "documents.")
"""What the keys of texts alone, of pictures with texts and of documents begin with in a mixed batch."""


_BEGINNING = re.compile(rf"({'|'.join(re.escape(prefix) for prefix in GROUPS if prefix)}|)(?:(\d+)\.)?")


def beginning(source: int, number: int) -> str:
    """Prefix of the keys of a part in a mixed batch."""
    return GROUPS[source] + (f"{number}." if number else "")


def groups(batch: Batch) -> list[Batch]:
    """The parts of a mixed batch, in the order of their rows; any other batch itself."""
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for key, tensor in batch.items():
        match = _BEGINNING.match(key)
        assert match is not None  # it matches nothing, too
        place = GROUPS.index(match[1]), int(match[2] or 0)
        parts.setdefault(place, {})[key[match.end() :]] = tensor
    if len(parts) < 2 and (1, 0) in parts:
        return [batch]
    return [parts[place] for place in sorted(parts) if "text" in parts[place]]


def text_masks(batch: Batch) -> list[tuple[str, Tensor]]:
    """The masks of a plain batch's texts, in the order in which they stand: "before 0 text", ..., "text"."""
    named: list[tuple[str, Tensor]] = []
    if "before_text_mask" in batch:
        named += [(f"before {turn} text", mask) for turn, mask in enumerate(batch["before_text_mask"].unbind(1))]
    return [*named, ("text", batch["text_mask"])] if "text" in batch else named


def next_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens that follow another one of their text (M,), and which of the batch's rows they are in (M,), int64."""
    tokens: list[Tensor] = []
    rows: list[Tensor] = []
    before = 0
    for group in groups(batch):
        if "text" not in group:
            raise ValueError(f"learning to write needs batches with text, got {', '.join(sorted(group)) or 'none'}")
        text = group["text"]
        ids, masks = [text[:, 1:]], [mask[:, 1:] != 0 for _, mask in text_masks(group)]
        if "before_text" in group:
            ids = [*group["before_text"][:, :, 1:].unbind(1), *ids]
        token_mask = torch.cat(masks, 1)
        tokens.append(torch.cat(ids, 1)[token_mask])
        rows.append(token_mask.nonzero()[:, 0] + before)
        before += len(text)
    return torch.cat(tokens), torch.cat(rows)


def pack_texts(texts: Sequence[Sequence[str]]) -> Tensor:
    """Several texts per row as uint8 (N, R, K): UTF-8, with zeros behind each text and behind the last one."""
    coded = [list(map(str.encode, row)) for row in texts]
    most = max((len(row) for row in coded), default=0)
    longest = max(map(len, chain.from_iterable(coded)), default=0)
    packed = np.zeros((len(coded), most, longest), dtype=np.uint8)
    for n, row in enumerate(coded):
        for r, text in enumerate(row):
            packed[n, r, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    return torch.from_numpy(packed)


def unpack_texts(packed: Tensor) -> list[list[str]]:
    """The texts of :func:`pack_texts`."""
    rows = packed.cpu().numpy()
    decoded: list[list[str]] = []
    for row in rows:
        lines = [line.tobytes().rstrip(b"\0").decode() for line in row]
        decoded.append(list(filter(None, lines)))
    return decoded


# Training batches that are mixed of texts alone, pictures with texts, and documents --------------------------


class MixedData(TableData):
    """A client's data whose training batches are mixed of texts, pictures with texts, and documents.

    Cao, Sun and Yu (2025) train on 14,000 tokens of texts, 14,000 of pictures with captions and 4,000 of documents per
    batch; here the shares are of examples. In every batch, the share of each source in all rows so far is as near to
    its own as whole examples allow; sources that a client does not have leave their share to the others. A source's
    rows come in random order, and again in another one when all have come. An epoch has as many rows as the client.
    """

    samples_rows = False

    def __init__(self, train: Table, validation: Table, test: Table, mixture: Sequence[float]) -> None:
        super().__init__(train, validation, test)
        if len(mixture) != len(GROUPS) or min(mixture) < 0 or not sum(mixture) > 0:
            raise ValueError(
                "data.mixture must be three shares, of texts, of pictures with texts and of documents, none negative "
                f"and one positive, got {list(mixture)}"
            )
        documents, shown = train.turns > 0, torch.ones(len(train), dtype=torch.bool)
        if train.present is not None:
            shown = train.present[:, MODALITIES.index("image")]
        masks = (~shown & ~documents, shown & ~documents, documents)
        self._rows, self._shares = tuple(mask.nonzero().flatten() for mask in masks), tuple(mixture)
        if len(train) and not any(len(rows) and s > 0 for rows, s in zip(self._rows, mixture, strict=True)):
            raise ValueError(f"data.mixture gives no share to any of a client's examples, got {list(mixture)}")

    def with_tables(self, train: Table, validation: Table, test: Table) -> "MixedData":
        """See :meth:`TableData.with_tables`; rows of sources without a share alone are a ValueError."""
        return MixedData(train, validation, test, self._shares)

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


def _endless(rows: Tensor, rng: torch.Generator) -> Iterator[int]:
    """The rows in random order, again and again."""
    while len(rows):
        yield from rows[torch.randperm(len(rows), generator=rng)].tolist()
