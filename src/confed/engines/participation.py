"""Clients that join late and leave early."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from confed.engines.population import Population, listed

__all__ = ["Participation"]


@dataclass(frozen=True)
class Participation:
    """Rounds in which clients belong to the federation; clients that are not named always do.

    A client takes part from round ``joins`` on and until the round before ``leaves``, rounds counted from 1. Before
    and after, the federation does not know it: it is in no cohort, in no count of clients and in no evaluation of a
    round. What it left behind may still be looked at (:meth:`Simulation.examine`).

    Attributes:
        joins: client -> the first round in which it may take part.
        leaves: client -> the first round in which it no longer does.
    """

    joins: Mapping[str, int] = field(default_factory=dict[str, int])
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
        """Check that all named clients exist and that no round is empty.

        Raises:
            ValueError: an unknown client, or a round without clients.
        """
        there = frozenset(clients)
        for key, named in (("joins", self.joins), ("leaves", self.leaves)):
            unknown = [name for name in named if name not in there]
            if unknown:
                raise ValueError(f"run.{key} names no client {unknown[0]!r}; there are {listed(clients)}")
        for round in range(1, rounds + 1):
            if not any(self.holds(name, round) for name in clients):
                raise ValueError(
                    f"run.joins and run.leaves leave no client in round {round}; a round needs at least one"
                )
