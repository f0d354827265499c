"""SP: similarity-preserving distillation, as compared in FedVQA.

Tung and Mori, "Similarity-preserving knowledge distillation", ICCV 2019, Eqs. 1 to 5, between the frozen global model
received this round (the teacher T) and the local model (the student S), as FedVQA compares it (Lao et al., ACM MM
2023). F are the pooled features of a batch of B examples, G = F F^T with each row divided by its L2 norm:

    L = L_ce + lambda * ||G_T - G_S||^2 / B^2

Examples that the global model sees as alike shall stay alike, whatever becomes of their coordinates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.protocols import Batch
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.teacher import global_features
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.distillation import similarity_preserving


@dataclass(frozen=True)
class SP(Algorithm):
    """FedAvg whose clients preserve the likenesses of examples that the global model of the round sees.

    Attributes:
        lam: weight lambda; the authors use 3000 on CIFAR-10. The term is an average over B^2 squared differences of
            entries that are about 1 / sqrt(B), hence the size.
        start_round: first round, counted from 0, with the term; in round 0 there is nothing to preserve.
    """

    traits = Traits(label="SP", group="distillation", neutral={"lam": 0.0}, search={"lam": (0.3, 3.0, 30.0, 300.0)})
    lam: Annotated[float, NOT_NEGATIVE] = 3000.0
    start_round: Annotated[int, NOT_NEGATIVE] = 1

    def objective(self, client: Client) -> Objective:
        """Task loss plus the similarity term."""
        if self.lam == 0 or client.round < self.start_round:
            return super().objective(client)
        teacher = global_features(client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            teacher_output = teacher(batch)
            output = model(batch)
            yield client.task.loss(output, batch) + self.lam * similarity_preserving(output.features, teacher_output)

        return losses
