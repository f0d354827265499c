"""Description of a client at the server: name, number of examples, modalities, head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """Description of a client that a server has before any message.

    Attributes:
        id: unique name.
        num_examples: number of training examples (the weight N_k of FedAvg).
        modalities: what the client's examples contain, such as ("image", "text").
        head: which of the model's heads answers its questions; "" for a model's only one.
    """

    id: str
    num_examples: int
    modalities: tuple[str, ...] = ()
    head: str = ""


@runtime_checkable
class NamesClients(Protocol):
    """Protocol of methods with settings that name clients."""

    def named_clients(self) -> Mapping[str, Sequence[str]]:
        """Setting -> the clients that it names, each of which must be one of the federation's."""
        ...
