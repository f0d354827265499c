"""DKD: decoupled knowledge distillation, as compared in FedVQA.

Zhao et al., "Decoupled knowledge distillation", CVPR 2022, Eq. 7, between the frozen global model received this round
(the teacher T) and the local model (the student S), as FedVQA compares it (Lao et al., ACM MM 2023). Distributions
are softened by a temperature tau; t is an example's right answer:

    TCKD = tau^2 * KL of (p(t), 1 - p(t))
    NCKD = tau^2 * KL of the distributions over all answers but t
    L = L_ce + lambda * w * (alpha * TCKD + beta * NCKD),    w = min((r - r0 + 1) / warmup, 1)

with r the round and r0 the first with the term. Plain distillation (ST) has the second part's weight tied to how
unsure the teacher is of the right answer; here it is free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Self

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.protocols import Batch, Task, single_label
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from confed.federation.teacher import global_logits
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.distillation import decoupled

NEED = "DKD treats the right answer apart from the others"


@dataclass(frozen=True)
class DKD(Algorithm):
    """FedAvg whose clients distil from the frozen global model of the round, right answer and others apart.

    Attributes:
        lam: weight lambda of both parts.
        alpha: weight of the part about the right answer.
        beta: weight of the part about the others; the authors use 8 on CIFAR-100 and 0.5 on ImageNet.
        temperature: tau; the authors use 4 on CIFAR-100 and 1 on ImageNet.
        warmup: rounds over which the term rises to its full weight. The authors count epochs (20 on CIFAR-100, 1 on
            ImageNet), of which a federation of few rounds has too few.
        start_round: first round, counted from 0, with the term; in round 0 the global head is random.
    """

    traits = Traits(label="DKD", group="distillation", neutral={"lam": 0.0}, search={"lam": (0.003, 0.01, 0.03, 0.1)})
    lam: Annotated[float, NOT_NEGATIVE] = 1.0
    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    beta: Annotated[float, NOT_NEGATIVE] = 8.0
    temperature: Annotated[float, POSITIVE] = 4.0
    warmup: Annotated[int, AT_LEAST_ONE] = 1
    start_round: Annotated[int, NOT_NEGATIVE] = 1

    def configure(self, model: nn.Module, task: Task) -> Self:
        """The method itself.

        Raises ``ValueError``: the task's examples do not have one right answer each.
        """
        single_label(task, NEED)
        return self

    def objective(self, client: Client) -> Objective:
        """Task loss plus the two parts (Eq. 7)."""
        if self.lam == 0 or client.round < self.start_round:
            return super().objective(client)
        task = single_label(client.task, NEED)
        teacher = global_logits(client)
        weight = self.lam * min((client.round - self.start_round + 1) / self.warmup, 1.0)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            teacher_output = teacher(batch)
            output = model(batch)
            loss = client.task.loss(output, batch)
            tckd, nckd = decoupled(output.logits, teacher_output, task.labels(batch), self.temperature)
            yield loss + weight * (self.alpha * tckd + self.beta * nckd)

        return losses
