"""Clients that join late and leave early."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from confed.federation.client_info import ClientInfo
from confed.federation.protocols import ClientData

# Population of a federation: its registered clients -----------------------------------------------------------

_LISTED = 50  # clients that an error names at most


def listed(names: Sequence[str]) -> str:
    """The first names, and how many there are besides, for messages about clients."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class Population(Protocol):
    """The registered clients; infos and data are made on demand, so that millions cost nothing."""

    def __len__(self) -> int: ...

    def info(self, number: int) -> ClientInfo:
        """Who client ``number`` is."""
        ...

    def data(self, client_id: str) -> ClientData:
        """A client's examples."""
        ...


class Members:
    """A population whose examples a mapping holds, or makes when they are asked for."""

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
        name = self._names[number]
        size = len(self._data[name]) if self._sizes is None else int(self._sizes[number])
        owned = self._modalities if isinstance(self._modalities, tuple) else self._modalities.get(name, ())
        return ClientInfo(name, size, owned, self._heads.get(name, ""))

    def data(self, client_id: str) -> ClientData:
        if client_id not in self._data:
            raise ValueError(f"no client is called {client_id!r}; there are {listed(self._names)}")
        return self._data[client_id]


# Clients that join late and leave early -----------------------------------------------------------------------


@dataclass(frozen=True)
class Participation:
    """Rounds in which clients belong to the federation; clients that are not named always do.

    A client takes part from round ``joins`` on and until the round before ``leaves``, rounds counted from 1. Before
    and after, the federation does not know it: it is in no cohort, in no count of clients and in no evaluation of a
    round. What it left behind may still be looked at (:meth:`Simulation.examine`).
    """

    # client -> the first round in which it may take part
    joins: Mapping[str, int] = field(default_factory=dict[str, int])
    # client -> the first round in which it no longer does
    leaves: Mapping[str, int] = field(default_factory=dict[str, int])

    def holds(self, client_id: str, round: int) -> bool:
        """Whether the client belongs to the federation in a round, counted from 1."""
        return self.joins.get(client_id, 1) <= round and not self.leaves.get(client_id, round + 1) <= round

    def members(self, population: Population, round: int) -> Sequence[int]:
        """The numbers of the clients that belong to the federation in a round, ascending."""
        everyone = range(len(population))
        if not self.joins and not self.leaves:
            return everyone
        return [number for number in everyone if self.holds(population.info(number).id, round)]

    def check(self, clients: Sequence[str], rounds: int) -> None:
        """Check that all named clients exist and that no round is empty."""
        client_names = frozenset(clients)
        for key, named in (("joins", self.joins), ("leaves", self.leaves)):
            unknown = [name for name in named if name not in client_names]
            if unknown:
                raise ValueError(f"run.{key} names no client {unknown[0]!r}; there are {listed(clients)}")
        for round in range(1, rounds + 1):
            if not any(self.holds(name, round) for name in clients):
                raise ValueError(
                    f"run.joins and run.leaves leave no client in round {round}; a round needs at least one"
                )
