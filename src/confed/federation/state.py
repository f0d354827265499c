"""State between rounds: of servers and clients, and stores of client states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.params import Params, Scalar


@dataclass(frozen=True)
class ServerState:
    """Everything a server keeps.

    Attributes:
        round: number of finished rounds.
        params: the tensors this server owns.
        slots: what its optimiser or method keeps beside them: moments, control variates, prototypes.
        clients: number of clients registered in the current round, taking part or not; set by the engine before
            each round, not saved.
        examples: number of training examples of all registered clients together; as ``clients``, and set for
            methods that ask for it only (:attr:`confed.federation.traits.Traits.counts_examples`).
        rounds: number of rounds in the run; as ``clients``.
        local: how clients train, for servers that train as well; as ``clients``.
    """

    round: int
    params: Params
    slots: Mapping[str, Params] = field(default_factory=dict[str, Params])
    clients: int = 0
    examples: int = 0
    rounds: int = 0
    local: Local | None = None

    def share(self, client: ClientInfo) -> float:
        """N_k / mean N, with the mean over all registered clients; a client without examples counts as one of one.

        Raises:
            ValueError: the engine did not say how many clients and examples there are.
        """
        if self.clients < 1 or self.examples < 1:
            raise ValueError(
                "a client's share needs the numbers of registered clients and of their examples, got "
                f"{self.clients} and {self.examples}"
            )
        return max(client.num_examples, 1) / (self.examples / self.clients)


@dataclass
class ClientState:
    """Everything a client keeps between actions; it never leaves the client.

    Attributes:
        tensors: group -> tensors. The core uses "private" (values of PRIVATE names) and "personal" (the
            client's own version of the SHARED names); methods add theirs.
        scalars: group-less numbers and strings.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    scalars: dict[str, Scalar] = field(default_factory=dict[str, Scalar])

    def __bool__(self) -> bool:
        return bool(self.tensors or self.scalars)

    def copy(self) -> "ClientState":
        """A copy whose groups and scalars can be replaced without touching this one (tensors are shared)."""
        return ClientState({group: dict(t) for group, t in self.tensors.items()}, dict(self.scalars))


class Store(Protocol):
    """Store of clients' states."""

    def begin(self, version: int) -> None:
        """States saved from now on belong to this version: the number of rounds finished when it is over."""
        ...

    def load(self, client_id: str) -> ClientState:
        """The client's last saved state; an empty one if there is none."""
        ...

    def save(self, client_id: str, state: ClientState) -> None:
        """Replaces the client's state, all of it or nothing."""
        ...


class MemoryStore:
    """Client states in memory, for runs that need not survive."""

    def __init__(self) -> None:
        self.states: dict[str, ClientState] = {}

    def begin(self, version: int) -> None:
        """See :class:`Store`; memory keeps the newest version only."""

    def load(self, client_id: str) -> ClientState:
        """See :class:`Store`; the caller may change the returned state freely."""
        state = self.states.get(client_id)
        return ClientState() if state is None else state.copy()

    def save(self, client_id: str, state: ClientState) -> None:
        """See :class:`Store`."""
        self.states[client_id] = state
