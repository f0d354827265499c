"""ST: plain knowledge preserving ("soft targets"), as compared in FedVQA.

Lao et al., "FedVQA", ACM MM 2023, Eq. 8.4: the local model is held to the frozen global model's answer
distribution by a Kullback-Leibler divergence, here in Hinton's form with temperature tau:

    L = L_ce + lambda * tau^2 * KL(p_T^tau || p_S^tau)

Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015. The paper's row uses tau = 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.protocols import Batch
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.teacher import global_logits, without_answers
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.distillation import knowledge_preserving


@dataclass(frozen=True)
class ST(Algorithm):
    """FedAvg whose clients distil from the frozen global model of the round.

    Attributes:
        lam: weight lambda of the distillation term.
        temperature: tau.
        start_round: first round, counted from 0, with the term; in round 0 the global head is random.
    """

    traits = Traits(
        label="ST (KL)",
        group="distillation",
        answers_compared="all",
        neutral={"lam": 0.0},
        search={"lam": (0.01, 0.1, 0.3, 1.0)},
    )
    lam: Annotated[float, NOT_NEGATIVE] = 1.0
    temperature: Annotated[float, POSITIVE] = 2.0
    start_round: Annotated[int, NOT_NEGATIVE] = 1

    def objective(self, client: Client) -> Objective:
        """Task loss plus the distillation term."""
        if self.lam == 0 or client.round < self.start_round:
            return super().objective(client)
        teacher = global_logits(client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            questions = without_answers(batch)
            teacher_output = teacher(questions)
            output = model(batch)
            scores = output.logits if questions is batch else model(questions).logits
            knowledge = knowledge_preserving(scores, teacher_output, self.temperature)
            yield client.task.loss(output, batch) + self.lam * knowledge

        return losses
