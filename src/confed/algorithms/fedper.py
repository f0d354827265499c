"""FedPer: a shared body with private heads.

Arivazhagan et al., "Federated learning with personalization layers", 2019 (arXiv 1912.00818), Algorithm 1: body and
head train together; only the body is sent and averaged, as in FedAvg.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Task
from confed.federation.structure import head_rules, private_head
from confed.federation.traits import Traits


@dataclass(frozen=True)
class FedPer(Algorithm):
    """FedAvg of the body, with a private head.

    There is no model for a place without a head of its own, hence no global model: unseen places stay empty.

    Attributes:
        head: names of the submodules that are private; the model's ``answer_head`` if none are given.
    """

    head: tuple[str, ...] = ()
    traits = Traits(group="personalisation", has_global=False, neutral="the head is never shared")

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the head of the model."""
        return replace(self, head=private_head(model, self.head, "FedPer"))

    def rules(self, client: ClientInfo) -> Rules:
        """The head is private, the rest is shared; a ``ValueError`` before :meth:`configure`."""
        return {**head_rules(self.head, "FedPer"), "*": Scope.SHARED}
