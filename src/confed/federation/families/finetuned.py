"""Fine-tuning of the final model at every client."""

from collections.abc import Sequence

from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Scalar
from confed.federation.state import ServerState

__all__ = ["personalise_all"]


def personalise_all(method: Algorithm, server: ServerState, clients: Sequence[ClientInfo], **scalars: Scalar) -> Flow:
    """A method's ``finish``: every client runs the action ``personalise`` on the final global model.

    Args:
        method: whose broadcast and action.
        server: after the last round; stays as it is.
        clients: the clients that take part.
        **scalars: sent with the model, such as ``epochs``.
    """
    sent = [method.broadcast(server, client) for client in clients]
    messages = [Message(message.tensors, {**message.scalars, **scalars}) for message in sent]
    for _ in (yield [Call(c, "personalise", message) for c, message in zip(clients, messages, strict=True)]):
        pass
    return server
