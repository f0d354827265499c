"""FedRep: alternating training of a private head and a shared body.

Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021, Algorithm 1. The
body is averaged as in FedAvg; the head never leaves its client. As in the paper's experiments, the two trainings
divide a round's epochs between them, so that a client computes no more than in other methods.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Self

from torch import nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import held
from confed.federation.messages import Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Task
from confed.federation.ranges import AT_LEAST_ONE
from confed.federation.structure import head_rules, private_head
from confed.federation.train import LocalTraining, Train
from confed.federation.traits import Traits


@dataclass(frozen=True)
class FedRep(Algorithm):
    """FedAvg of the body; head and body are trained one after the other.

    There is no model for a place without a head of its own, hence no global model: unseen places stay empty.

    Attributes:
        head_epochs: the first epochs of a round's ``local.epochs``, which train the head; the body gets the rest,
            and one where nothing is left.
        head: names of the submodules that are private; the model's ``answer_head`` if none are given.
    """

    head_epochs: Annotated[int, AT_LEAST_ONE] = 1
    head: tuple[str, ...] = ()
    traits = Traits(
        steps_alone=True,
        unbatchable_reason="",
        group="personalisation",
        has_global=False,
        in_epochs=True,
        neutral="the head is never shared",
        search={"head_epochs": (1, 2)},
    )

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the head of the model."""
        return replace(self, head=private_head(model, self.head, "FedRep"))

    def rules(self, client: ClientInfo) -> Rules:
        """The head is private, the rest is shared; a ``ValueError`` before :meth:`configure`."""
        return {**head_rules(self.head, "FedRep"), "*": Scope.SHARED}

    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """Local training of the head, which stays, then of the body, which is sent."""
        client.load(message.tensors)
        with held(client, Scope.SHARED):
            yield Train(self.objective(client), self.head_epochs, order="order of the head")
        with held(client, Scope.PRIVATE):
            loss = yield Train(self.objective(client), max(1, client.local.epochs - self.head_epochs))
        client.remember()
        return client.upload(loss=loss)
