"""Pieces of Flower's messages while they are on their way: on disk, and never more of them than was sent.

As :mod:`confed.engines.flower_link`, this uses parts of Flower that are not its public interface.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

__all__ = ["PieceStore", "check_expansion"]


class PieceStore(InMemoryObjectStore):
    """Flower's store of pieces with their contents in files: many sites may send at once.

    Args:
        root: a folder of its own, which must be there.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def put(self, object_id: str, object_content: bytes) -> None:
        """See Flower's ``ObjectStore``; it has checked that the number is the content's SHA-256."""
        super().put(object_id, object_content)
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is not None and entry.content:
                (self._root / object_id).write_bytes(entry.content)
                entry.content = b""

    def get(self, object_id: str) -> bytes | None:
        """See Flower's ``ObjectStore``."""
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is None or not entry.is_available:
                return None if entry is None else b""
            return (self._root / object_id).read_bytes()

    def delete(self, object_id: str) -> None:
        """See Flower's ``ObjectStore``; it calls this for what the object consists of, too."""
        with self.lock_store:
            super().delete(object_id)
            if object_id not in self.store:
                (self._root / object_id).unlink(missing_ok=True)

    def clear(self) -> None:
        """See Flower's ``ObjectStore``."""
        with self.lock_store:
            super().clear()
            for path in self._root.iterdir():
                path.unlink()


def check_expansion(contents: Mapping[str, bytes], largest: int) -> None:
    """Checks that pieces become no more than they may when Flower puts them together.

    An array says which of its pieces comes where, and one piece may come any number of times: a megabyte of numbers
    would ask for terabytes.

    Args:
        contents: number -> content of the pieces of one message.
        largest: bytes that arrays may have together.

    Raises:
        ValueError: they have more, or are no pieces of Flower's.
    """
    total = 0
    for content in contents.values():
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            said: Any = json.loads(get_object_body(content, Array))
            sizes = [len(contents[part]) for part in parts]
            total += sum(sizes[number] for number in said["arraychunk_ids"])
            if total > largest:
                raise ValueError(f"a message of at most {largest} bytes would become one of more than {total}")
