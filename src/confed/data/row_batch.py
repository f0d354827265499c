"""Batch of rows of a table whose tensors are gathered when they are read."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from confed.federation.protocols import FromRows

__all__ = ["RowBatch"]


class RowBatch(Mapping[str, Tensor], FromRows):
    """A batch that says which rows it has; a :class:`confed.federation.protocols.FromRows`.

    Where features of frozen layers are kept, nobody reads the pictures, and they are not gathered from memory or disk.
    A batch with anything else in it is made of copies: ``{**batch, "image": other}`` is an ordinary dictionary.

    Args:
        source: the same object for all batches of a table, and for no other's.
        rows: (B,).
        parts: key -> how its tensor is gathered.
    """

    def __init__(self, source: object, rows: Tensor, parts: Mapping[str, Callable[[], Tensor]]) -> None:
        self.source, self.rows = source, rows
        self._parts = parts
        self._gathered: dict[str, Tensor] = {}

    @property
    def untouched(self) -> bool:
        """Whether no tensor was changed in place."""
        return all(tensor._version == 0 for tensor in self._gathered.values())

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._gathered:
            self._gathered[key] = self._parts[key]()
        return self._gathered[key]

    def __contains__(self, key: object) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
