"""A last pass over clients' own heads, after the final average of what they share.

Methods with private heads deploy the averaged part with a head that was trained beside the client's own, not yet
averaged, version of it. After the last round each client may therefore train its head alone on the final average.
"""

from collections.abc import Sequence

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import held
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Scope
from confed.federation.state import ServerState
from confed.federation.train import train

__all__ = ["fit_heads", "train_head"]


def fit_heads(method: Algorithm, server: ServerState, clients: Sequence[ClientInfo], epochs: int) -> Flow:
    """A method's ``finish``: every client is asked to ``fit_head`` on the final shared values.

    Args:
        method: whose action it is.
        server: after the last round.
        clients: all of them.
        epochs: passes over a client's examples; 0 asks nobody.
    """
    if not epochs:
        return server
    replies = yield [
        Call(c, "fit_head", Message(method.broadcast(server, c).tensors, {"epochs": epochs})) for c in clients
    ]
    for _ in replies:
        pass
    return server


def train_head(method: Algorithm, client: Client, message: Message) -> Message:
    """Training of what is private by the task's loss, what is shared being held; the client keeps both.

    The client's personal model is then the one that it deploys. Only the loss is sent.

    Args:
        method: whose task loss it is.
        client: who.
        message: the final shared values, and ``epochs``.
    """
    client.load(message.tensors)
    with held(client, Scope.SHARED):
        loss = train(client, Algorithm.objective(method, client), int(message.scalars.get("epochs", 1)), order="head")
    client.keep_personal = True
    client.remember()
    return Message({}, {"loss": loss})
