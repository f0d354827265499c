"""Population of a federation: its registered clients, who they are and what examples they have."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from confed.federation.client_info import ClientInfo
from confed.federation.protocols import ClientData

__all__ = ["Members", "Population", "listed"]

_LISTED = 50
"""Clients that an error names at most."""


def listed(names: Sequence[str]) -> str:
    """The first names, and how many there are besides, for messages about clients."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class Population(Protocol):
    """The registered clients; infos and data are made on demand, so that millions cost nothing."""

    def __len__(self) -> int:
        """How many clients there are."""
        ...

    def info(self, number: int) -> ClientInfo:
        """Who client ``number`` is."""
        ...

    def data(self, client_id: str) -> ClientData:
        """A client's examples."""
        ...


class Members:
    """A population whose examples a mapping holds, or makes when they are asked for.

    Args:
        data: client id -> its examples, in the federation's fixed order.
        modalities: what every client's examples contain, or client -> what its own do.
        heads: client -> the model's head that answers its questions, where there are several.
        sizes: each client's number of training examples, where it is known without making its data.
    """

    def __init__(
        self,
        data: Mapping[str, ClientData],
        modalities: tuple[str, ...] | Mapping[str, tuple[str, ...]] = (),
        heads: Mapping[str, str] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if sizes is not None and len(sizes) != len(data):
            raise ValueError(f"sizes must have one entry per client ({len(data)}), got {len(sizes)}")
        self._data, self._names, self._sizes = data, list(data), sizes
        self._modalities, self._heads = modalities, heads or {}

    def __len__(self) -> int:
        return len(self._names)

    def info(self, number: int) -> ClientInfo:
        """See :class:`Population`."""
        name = self._names[number]
        size = len(self._data[name]) if self._sizes is None else int(self._sizes[number])
        owned = self._modalities if isinstance(self._modalities, tuple) else self._modalities.get(name, ())
        return ClientInfo(name, size, owned, self._heads.get(name, ""))

    def data(self, client_id: str) -> ClientData:
        """See :class:`Population`.

        Raises:
            ValueError: no client has that id.
        """
        if client_id not in self._data:
            raise ValueError(f"no client is called {client_id!r}; there are {listed(self._names)}")
        return self._data[client_id]
