"""Base of methods whose deployed network is more than the model: it is what is trained and what evaluations ask."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from confed.federation.actions import action
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.evaluation import Evaluation
from confed.federation.messages import Message
from confed.federation.protocols import Batch
from confed.federation.train import Objective

__all__ = ["Deploying"]


@dataclass(frozen=True)
class Deploying(Algorithm):
    """FedAvg, trained and evaluated with :meth:`Algorithm.deployed_model`."""

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
