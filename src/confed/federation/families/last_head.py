"""A last pass over clients' own heads, after the final average of what they share.

Methods with private heads deploy the averaged part with a head that was trained beside the client's own, not yet
averaged, version of it. After the last round each client may therefore train its head alone on the final average.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, keeps_protections
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import held
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Scalar, Scope
from confed.federation.protocols import Batch
from confed.federation.state import ServerState
from confed.federation.train import Objective, train

# Base of methods whose deployed network is more than the model ------------------------------------------------


@dataclass(frozen=True)
class Deploying(Algorithm):
    """FedAvg, trained with the network that is evaluated, :meth:`Algorithm.deployed_model`."""

    @keeps_protections("record_privacy")
    def objective(self, client: Client) -> Objective:
        """The task's loss of the deployed network's output."""
        network = self.deployed_model(client.model)

        def losses(_model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(network(batch), batch)

        return losses


# Fine-tuning of the final model at every client ---------------------------------------------------------------


def after_last_round(action: str = "personalise", *, epochs: str = "", if_any: tuple[str, ...] = ()) -> Any:
    """The hook ``finish`` of a method whose clients all run an action on the final global model; the server keeps it.

    Args:
        action: what they do, such as ``fit_head`` of :func:`train_head`.
        epochs: name of the setting that is sent with the model as the scalar ``epochs``.
        if_any: names of settings; where all of them are 0 nothing is done.
    """

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def finish(self: Any, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
        if if_any and not any(getattr(self, name) for name in if_any):
            return server
        scalars: dict[str, Scalar] = {"epochs": getattr(self, epochs)} if epochs else {}
        sent: list[Message] = [self.broadcast(server, client) for client in clients]
        messages = [Message(message.tensors, {**message.scalars, **scalars}) for message in sent]
        for _ in (yield [Call(c, action, message) for c, message in zip(clients, messages, strict=True)]):
            pass
        return server

    return finish


# A last pass over clients' own heads --------------------------------------------------------------------------


def train_head(method: Algorithm, client: Client, message: Message) -> Message:
    """Training of what is private by the task's loss, what is shared being held; the client keeps both.

    The client's personal model is then the one that it deploys. Only the loss is sent.
    """
    client.load(message.tensors)
    with held(client, Scope.SHARED):
        loss = train(client, Algorithm.objective(method, client), int(message.scalars.get("epochs", 1)), order="head")
    client.keep_personal = True
    client.remember()
    return Message({}, {"loss": loss})
