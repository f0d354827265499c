"""Layout of captioning batches: parts of mixed batches, texts as arrays, and next tokens.

A batch may be *mixed* of texts alone, pictures with texts, and documents (pictures and texts in turns). The keys of
each but the second then have a beginning of their own, and rows stand part by part. Where the rows of one source have
several sets of modalities, each set is a part: keys of those after the first have the set's number besides.
"""

import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

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
    """The tokens that follow another one of their text, row after row and part after part.

    Returns:
        Token ids (M,), and which of the batch's rows they are in (M,), both int64.
    """
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
