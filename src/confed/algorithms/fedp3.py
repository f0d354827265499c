"""FedP³: federated pairwise preference preserving.

Lao et al., "FedVQA: Personalized Federated Visual Question Answering over Heterogeneous Scenes", ACM MM 2023
(equation numbers: chapter 8 of the thesis that reprints it).

Notation: S the student, which is the local model being trained; T the teacher, which is the frozen global model
received this round; p their answer probabilities; M(i, j) the soft matchup of answers i and j (Eq. 8.9); r(i) how
much of answer i is forgotten (Eq. 8.12). Per example the N answers with the largest r are compared:

    L = L_ce + lambda * sum over i, j in Top-N(r) of |M_T(i, j) - M_S(i, j)|            (Eqs. 8.2 and 8.14)

The server averages as FedAvg (Eq. 8.3). A client's personal model is its last local model before averaging.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.protocols import Batch
from confed.federation.train import Objective, global_logits
from confed.losses.preference import Filter, Reduction, Space, forgotten, most_forgotten, pairwise_preference

__all__ = ["FedP3"]


@dataclass(frozen=True)
class FedP3(Algorithm):
    """FedAvg whose clients preserve the global model's preferences among easily forgotten answers.

    Attributes:
        lam: weight lambda of the preference term.
        top_n: answers compared per example, N.
        pairs: "filtered" (the forgotten-knowledge filter) or "all" (every pair of answers, Eq. 8.7).
        filter: what ranks answers: "gain" (Eq. 8.12), "diff" (Eq. 8.11), "p_t", "p_s" or "random".
        space: compare probabilities (the paper) or raw logits.
        reduction: over the pairs of one example, "sum" (Eq. 8.14) or "mean"; over examples always the mean.
        start_round: first round, counted from 0, with the preference term. In round 0 the global model's head
            is random, so there is nothing to preserve.
    """

    label: ClassVar[str] = "FedP³"
    lam: float = 1.0
    top_n: int = 20
    pairs: Literal["filtered", "all"] = "filtered"
    filter: Filter = "gain"
    space: Space = "prob"
    reduction: Reduction = "sum"
    start_round: int = 1
    neutral: ClassVar[dict[str, Any]] = {"lam": 0.0}

    def __post_init__(self) -> None:
        if self.top_n < 2:
            raise ValueError(f"algorithm.top_n must be at least 2 (a pair of answers), got {self.top_n}")
        if self.start_round < 0:
            raise ValueError(f"algorithm.start_round must not be negative, got {self.start_round}")

    def objective(self, client: Client) -> Objective:
        """Task loss plus the preference term (Eq. 8.14)."""
        if self.lam == 0 or client.round < self.start_round:
            return super().objective(client)
        teacher = global_logits(client)
        noise = client.rng("filter")

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            known = teacher(batch)
            output = model(batch)
            selected = None
            if self.pairs == "filtered":
                scores = forgotten(output.logits, known, self.filter, noise)
                selected = most_forgotten(scores, min(self.top_n, scores.shape[1]))
            kept = pairwise_preference(output.logits, known, selected, self.space, self.reduction)
            yield client.task.loss(output, batch) + self.lam * kept.mean()

        return losses
