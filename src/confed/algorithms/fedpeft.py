"""FedPEFT: federated averaging of a small finetuned part of a frozen backbone, with private heads.

Sun et al., "Exploring parameter-efficient fine-tuning for improving communication efficiency in federated learning",
2022 (arXiv 2210.01708), as FedDAT (AAAI 2024, section 3.3 and tables 2 and 3) compares it: what travels is what the
model's finetuning trains (adapters, LoRA factors, prompts, biases, or everything), Eq. 3; every client keeps a
classification head for its own answers. Which of them it is, is the model's matter (``model.trainable``).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from torch import nn

from confed.federation.algorithm import action, weight_by_setting
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.fisher import FisherWeighted
from confed.federation.families.last_head import after_last_round, train_head
from confed.federation.messages import Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Task
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.structure import head_rules, private_head
from confed.federation.traits import Traits

Weighting = Literal["uniform", "examples"]
"""Every client counts the same (FedDAT's Algorithm 1 and released code), or as its training examples (its Eq. 3)."""


@dataclass(frozen=True)
class FedPEFT(FisherWeighted):
    """FedAvg of the finetuned part, evaluated as FedDAT does: the averaged part with each client's own head.

    With ``aggregation = "fisher"`` it is FedNano's merge (:mod:`confed.federation.families.fisher`).

    Attributes:
        weighting: how the server weighs clients.
        head: names of the submodules that are private; the model's heads if none are given.
        head_epochs: after the last round, passes in which each client trains its head alone on the final average.
    """

    weighting: Weighting = "uniform"
    head: tuple[str, ...] = ()
    head_epochs: Annotated[int, NOT_NEGATIVE] = 0

    traits = Traits(group="finetuning", neutral="the head is never shared")

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the heads of the model."""
        return replace(self, head=private_head(model, self.head, "FedPEFT", optional=True))

    def rules(self, client: ClientInfo) -> Rules:
        """Heads are private, the rest of what is trained is shared; a ``ValueError`` before :meth:`configure`."""
        return {**head_rules(self.head, "FedPEFT"), "*": Scope.SHARED}

    weight = weight_by_setting

    finish = after_last_round("fit_head", epochs="head_epochs", if_any=("head_epochs",))

    @action
    def fit_head(self, client: Client, message: Message) -> Message:
        """Training of the head alone, beside the values received; keeps the result."""
        return train_head(self, client, message)
