"""Pieces of a small Flower message inside the message: one request in place of one for each piece.

Flower sends a message without its content, and the pieces of the content one by one. Here the place of the content
holds the pieces, as an array record of their numbers and bytes. They are what they would be one by one: their tree is
sent beside the message, and each is checked as if it had come alone.
"""

from collections.abc import Mapping
from itertools import chain

from confed.engines.flower.private_api import ProtoMessage

INLINE = 4 * 2**20
"""Bytes of all pieces of a message that travels with them, at most; a request has up to twice that."""

PIECES = "confed.pieces"


def attach(bare: ProtoMessage, pieces: Mapping[str, bytes]) -> None:
    """Puts pieces into a message without content."""
    items = bare.content.items.add(key=PIECES).array_record.items
    for number, content in pieces.items():
        items.add(key=number).value.data = content


def detach(bare: ProtoMessage) -> dict[str, bytes]:
    """Takes the pieces out of a message, which is then as Flower sends it; number -> content."""
    if not bare.HasField("content"):
        return {}
    records = [item.array_record for item in bare.content.items if item.key == PIECES]
    items = chain.from_iterable(record.items for record in records)
    pieces = {item.key: item.value.data for item in items}
    bare.content.ClearField("items")
    return pieces
