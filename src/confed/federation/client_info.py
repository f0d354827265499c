"""Description of a client at the server: name, number of examples, modalities, head."""

from dataclasses import dataclass

__all__ = ["ClientInfo"]


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
