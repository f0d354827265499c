"""Store of the pieces of Flower's messages: on disk, and never more of them than was announced.

Flower sends a message without its content, and the pieces of the content one by one. Here the place of the content
holds the pieces of a small message, as an array record of their numbers and bytes, so that one request does. Their tree
is sent beside the message, and each is checked as if it had come alone. A site's request for its next message carries
its reply to the one before, in a field that Flower's messages do not have; a server says with it that it reads it.
"""

import json
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from flwr.app import Array
from google.protobuf.unknown_fields import UnknownFieldSet

from confed.engines.flower.private_api import (
    NoObjectInStoreError,
    ObjectStore,
    ObjectTree,
    ProtoMessage,
    get_object_body,
    get_object_head_values_from_object_content,
    get_object_id,
    is_valid_sha256_hash,
    validate_object_content,
)
from confed.engines.remote.sites import patiently

INLINE = 4 * 2**20  # bytes of all pieces of a message that travels with them, at most; a request has up to twice that
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


CARRIED = 1000  # number of the field with a reply


def carry(message: Any, reply: bytes) -> None:
    """Puts a reply into a request for a message, or says in a response that such a request is read."""
    message.MergeFromString(_varint(CARRIED << 3 | 2) + _varint(len(reply)) + reply)


def carried(message: Any) -> bytes | None:
    """What a request carries; None where there is nothing."""
    return next((bytes(field.data) for field in UnknownFieldSet(message) if field.field_number == CARRIED), None)


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])


PIECE = 8 * 2**20  # bytes of one request or response, at most; Flower cuts what is larger into pieces of 5 MiB
IN_MEMORY = 4 * 2**20  # bytes of pieces that wait in memory, of all messages together; others are in files
DEPTH = 8  # levels of a message: itself, its records, their arrays, and chunks of these make five


def most_pieces(largest: int) -> int:
    """The most pieces that a message of so many bytes may consist of; Flower's have up to 5 MiB."""
    return 64 + largest // (4 * 2**20)


def pieces_of(tree: ObjectTree, most: int = sys.maxsize) -> tuple[str, ...]:
    """The numbers of a message's pieces, each once.

    A tree may name a piece again and again, and if it named different parts of it each time, or if it were put together
    from several trees, its paths would double with every level. Hence it is walked as it was sent, and only so far.
    """
    parts: dict[str, list[str]] = {}
    waiting, seen = [(tree, 1)], 0
    while waiting:
        node, level = waiting.pop()
        seen += 1
        if level > DEPTH or seen + len(waiting) + len(node.children) > most:
            raise ValueError(f"a message has at most {most} pieces in {DEPTH} levels")
        if not is_valid_sha256_hash(node.object_id):
            raise ValueError("the number of a piece is its SHA-256")
        children = [child.object_id for child in node.children]
        if parts.setdefault(node.object_id, children) != children:
            raise ValueError("a piece has the same parts wherever it is named")
        waiting += [(child, level + 1) for child in node.children]
    return tuple(parts)


@dataclass(frozen=True)
class _Whole:
    run: int
    tree: ObjectTree
    pieces: tuple[str, ...]


class PieceStore(ObjectStore):
    """Flower's store of pieces; the contents of all but a few are in files, as many sites may send at once."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._wholes: dict[str, _Whole] = {}
        self._uses: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._memory: dict[str, bytes] = {}
        self._bytes_in_memory = 0

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        pieces = pieces_of(object_tree)
        with self._lock:
            if object_tree.object_id not in self._wholes:
                self._wholes[object_tree.object_id] = _Whole(run_id, object_tree, pieces)
                for piece in pieces:
                    self._uses[piece] = self._uses.get(piece, 0) + 1
            return [piece for piece in pieces if piece not in self._sizes]

    def get_object_tree(self, object_id: str) -> ObjectTree:
        with self._lock:
            if object_id not in self._wholes:
                raise NoObjectInStoreError(f"no message {object_id}")
            return self._wholes[object_id].tree

    def put(self, object_id: str, object_content: bytes) -> None:
        if object_id != get_object_id(object_content):
            raise ValueError(f"{object_id} does not match content hash")
        validate_object_content(object_content)
        self.keep(object_id, object_content)

    def keep(self, object_id: str, object_content: bytes) -> None:
        """Puts a piece of this process's own, which need not be checked."""
        with self._lock:
            if object_id not in self._uses:
                raise NoObjectInStoreError(f"no message has a piece {object_id}")
            if object_id in self._sizes:
                return
            if self._root is None or self._bytes_in_memory + len(object_content) <= IN_MEMORY:
                self._memory[object_id] = object_content
                self._bytes_in_memory += len(object_content)
            else:
                path = self._root / object_id
                patiently(lambda: path.write_bytes(object_content))
            self._sizes[object_id] = len(object_content)

    def get(self, object_id: str) -> bytes | None:
        with self._lock:
            if object_id not in self._sizes:
                return b"" if object_id in self._uses else None
            if self._root is None or object_id in self._memory:
                return self._memory[object_id]
            return patiently((self._root / object_id).read_bytes)

    def size(self, pieces: Collection[str]) -> int:
        """Bytes of those of the pieces that have come."""
        with self._lock:
            return sum(self._sizes.get(piece, 0) for piece in pieces)

    def complete(self, pieces: Collection[str]) -> bool:
        with self._lock:
            return all(piece in self._sizes for piece in pieces)

    def small(self, object_id: str, most: int) -> dict[str, bytes] | None:
        """All pieces of a message; None while some have not come, and where they have more bytes together than that."""
        with self._lock:
            whole = self._wholes.get(object_id)
            if whole is None or not self.complete(whole.pieces) or self.size(whole.pieces) > most:
                return None
            return {piece: self.get(piece) or b"" for piece in whole.pieces}

    def delete(self, object_id: str) -> None:
        """See Flower's ``ObjectStore``; only whole messages can be deleted, and what no other has goes with them."""
        with self._lock:
            whole = self._wholes.pop(object_id, None)
            for piece in () if whole is None else whole.pieces:
                self._uses[piece] -= 1
                if not self._uses[piece]:
                    del self._uses[piece]
                    self._sizes.pop(piece, None)
                    if (content := self._memory.pop(piece, None)) is not None:
                        self._bytes_in_memory -= len(content)
                    elif self._root is not None:
                        (self._root / piece).unlink(missing_ok=True)

    def delete_objects_in_run(self, run_id: int) -> None:
        with self._lock:
            for number in [number for number, whole in self._wholes.items() if whole.run == run_id]:
                self.delete(number)

    def clear(self) -> None:
        with self._lock:
            for number in list(self._wholes):
                self.delete(number)

    def __contains__(self, object_id: str) -> bool:
        with self._lock:
            return object_id in self._uses

    def __len__(self) -> int:
        with self._lock:
            return len(self._uses)


def check_expansion(contents: Mapping[str, bytes], largest: int) -> None:
    """Checks that pieces become no more than they may when Flower puts them together.

    An array says which of its pieces comes where, and one piece may come any number of times: a megabyte of numbers
    would ask for terabytes.
    """
    total = 0
    for content in contents.values():
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            header: Any = json.loads(get_object_body(content, Array))
            sizes = [len(contents[piece]) for piece in parts]
            total += sum(sizes[number] for number in header["arraychunk_ids"])
            if total > largest:
                raise ValueError(f"a message of at most {largest} bytes would become one of more than {total}")
