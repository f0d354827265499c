"""Membership of a run: the clients that belong to the federation in a round, and cohorts drawn from them."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from confed.engines.participation import Participation
from confed.engines.perform import Setup
from confed.federation.client_info import ClientInfo
from confed.federation.ownership import MODALITIES
from confed.federation.randomness import sample_cohort
from confed.federation.specs import task_spec

MOST = 10_000  # number of clients among which every kind of client is assumed to occur


class Membership:
    """Clients of a run, round by round."""

    def __init__(
        self,
        setup: Setup,
        cohort: int | Callable[[int], int] | None = None,
        participation: Participation | None = None,
        by_size: bool = False,
    ) -> None:
        if len(setup.population) == 0:
            raise ValueError("a federation needs at least one client, got 0")
        self.setup = setup
        size = len(setup.population) if cohort is None else cohort
        self.cohort: Callable[[int], int] = size if callable(size) else lambda present: min(size, present)
        self.participation = Participation() if participation is None else participation
        self.sizes: Tensor | None = None
        self._sum: tuple[Sequence[int], int] | None = None
        if by_size:  # asked for once: a population may have to look at every client's data for it
            infos = map(setup.population.info, range(len(setup.population)))
            self.sizes = torch.tensor([info.num_examples for info in infos], dtype=torch.int64)

    def clients(self, most: int | None = None) -> list[ClientInfo]:
        """All clients, or the first ``most`` of them."""
        count = len(self.setup.population)
        return [self.setup.population.info(i) for i in range(count if most is None else min(most, count))]

    def observer(self, name: str) -> ClientInfo:
        """An unseen place as a client, which may be sent the tensors of all modalities."""
        return ClientInfo(name, 0, self._everything, task_spec(self.setup.task_of(name)).head)

    @cached_property
    def _everything(self) -> tuple[str, ...]:
        """The modalities of all clients together; empty where they are not told apart."""
        sets = {client.modalities for client in self.clients(MOST)}
        anywhere = set[str]().union(*sets)
        return () if () in sets else tuple(modality for modality in MODALITIES if modality in anywhere)

    def present(self, round: int, most: int | None = None) -> list[ClientInfo]:
        """The clients, or the first ``most`` of them, that belong to the federation in a round."""
        numbers = self.participation.members(self.setup.population, min(max(round, 1), self.setup.rounds))
        return [self.setup.population.info(number) for number in numbers[:most]]

    def sample(self, round: int) -> tuple[int, list[ClientInfo]]:
        """How many clients belong to the federation in a round, and its cohort."""
        members = self.participation.members(self.setup.population, round + 1)
        member_count = len(members)
        sizes = self.sizes
        if sizes is not None and member_count < len(sizes):
            sizes = sizes[torch.tensor(members, dtype=torch.int64)]
        numbers = sample_cohort(member_count, self.cohort(member_count), self.setup.seed, round, sizes)
        return member_count, [self.setup.population.info(members[number]) for number in numbers]

    def examples(self, round: int) -> int:
        """Training examples of all clients that belong to the federation in a round; 0 if the method does not ask."""
        if not self.setup.algorithm.traits.counts_examples:
            return 0
        members = self.participation.members(self.setup.population, round + 1)
        if self._sum is None or self._sum[0] != members:  # a population may have to look at every client's data for it
            self._sum = (members, sum(self.setup.population.info(number).num_examples for number in members))
        return self._sum[1]
