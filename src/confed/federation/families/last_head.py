"""A last pass over clients' own heads, after the final average of what they share.

Methods with private heads deploy the averaged part with a head that was trained beside the client's own, not yet
averaged, version of it. After the last round each client may therefore train its head alone on the final average.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from confed.federation.actions import action
from confed.federation.algorithm import Algorithm, keeps_protections
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import Evaluation
from confed.federation.families.branches import held
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Scalar, Scope
from confed.federation.protocols import Batch
from confed.federation.state import ServerState
from confed.federation.train import Objective, train

# Base of methods whose deployed network is more than the model ------------------------------------------------


@dataclass(frozen=True)
class Deploying(Algorithm):
    """FedAvg, trained and evaluated with :meth:`Algorithm.deployed_model`."""

    @keeps_protections("record_privacy")
    def objective(self, client: Client) -> Objective:
        """The task's loss of the deployed network's output."""
        network = self.deployed_model(client.model)

        def losses(_model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(network(batch), batch)

        return losses

    @action
    def evaluate(self, client: Client, message: Message) -> Message:
        """See :class:`confed.federation.evaluation.Evaluation`."""
        return Evaluation.evaluate(self, self._answering(client), message)

    @action
    def examine(self, client: Client, message: Message) -> Message:
        """See :class:`confed.federation.evaluation.Evaluation`."""
        return Evaluation.examine(self, self._answering(client), message)

    def _answering(self, client: Client) -> Client:
        return replace(client, model=self.deployed_model(client.model))


# Fine-tuning of the final model at every client ---------------------------------------------------------------


def personalise_all(
    method: Algorithm,
    server: ServerState,
    clients: Sequence[ClientInfo],
    action: str = "personalise",
    **scalars: Scalar,
) -> Flow:
    """A method's ``finish``: every client runs an action on the final global model.

    Args:
        method: whose broadcast and action.
        server: after the last round; stays as it is.
        clients: the clients that take part.
        action: what they do, such as ``fit_head`` of :func:`train_head`.
        **scalars: sent with the model, such as ``epochs``.
    """
    sent = [method.broadcast(server, client) for client in clients]
    messages = [Message(message.tensors, {**message.scalars, **scalars}) for message in sent]
    for _ in (yield [Call(c, action, message) for c, message in zip(clients, messages, strict=True)]):
        pass
    return server


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
