"""FedP³: federated pairwise preference preserving.

Lao et al., "FedVQA: Personalized Federated Visual Question Answering over Heterogeneous Scenes", ACM MM 2023
(equation numbers: chapter 8 of the thesis that reprints it).

Notation: S the student, which is the local model being trained; T the teacher, which is the frozen global model
received this round; p their answer probabilities; M(i, j) the soft matchup of answers i and j (Eq. 8.9); r(i) how
much of answer i is forgotten (Eq. 8.12). Per example the N answers with the largest r are compared:

    L = L_ce + lambda * sum over i, j in Top-N(r) of |M_T(i, j) - M_S(i, j)|            (Eqs. 8.2 and 8.14)

The server averages as FedAvg (Eq. 8.3). A client's personal model is its last local model before averaging.

``pairs`` replaces the inner sum: by all pairs of answers (Eq. 8.7), by the same in O(C log C) through sorting, or
by an unbiased estimate from sampled pairs; ``g`` replaces the sigmoid-like function of Eq. 8.8. These cheaper
approximations, which the chapter leaves for later, are derived in ``losses/preference.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.protocols import Batch
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE
from confed.federation.teacher import global_logits, without_answers
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.preference import (
    Filter,
    Matchup,
    Reduction,
    Space,
    forgotten,
    most_forgotten,
    pairwise_preference,
    sampled_preference,
    sorted_preference,
)


@dataclass(frozen=True)
class FedP3(Algorithm):
    """FedAvg whose clients preserve the global model's preferences among easily forgotten answers.

    Attributes:
        lam: weight lambda of the preference term.
        top_n: answers compared per example, N.
        pairs: "filtered" (the forgotten-knowledge filter), "all" (every pair of answers, Eq. 8.7), "sorted" (the same
            in O(C log C): exact for the linear g, else within 0.01 %) or "sampled" (an unbiased estimate of it).
        filter: what ranks answers: "gain" (Eq. 8.12), "diff" (Eq. 8.11), "p_t", "p_s" or "random".
        samples: pairs drawn per example where ``pairs`` is "sampled"; 400 is as many as 20 answers have.
        g: the sigmoid-like function: "logistic" (Eq. 8.8), "linear", "arctan" or "erf".
        space: compare probabilities (the paper) or raw logits.
        reduction: over the pairs of one example, "sum" (Eq. 8.14), "mean" or "rows" (the sum over N); over examples
            always the mean. The sum has N (N - 1) terms, so that a weight of 1 means 400 times as much with "sum" as
            with "mean" where N is 20.
        start_round: first round, counted from 0, with the preference term. In round 0 the global model's head
            is random, so there is nothing to preserve.
    """

    traits = Traits(
        label="FedP³",
        group="distillation",
        answers_compared="filtered",
        neutral={"lam": 0.0},
        search={"lam": (0.001, 0.003, 0.01, 0.1), "top_n": (5, 20)},
    )
    lam: Annotated[float, NOT_NEGATIVE] = 1.0
    top_n: int = 20
    pairs: Literal["filtered", "all", "sorted", "sampled"] = "filtered"
    filter: Filter = "gain"
    samples: Annotated[int, AT_LEAST_ONE] = 400
    g: Matchup = "logistic"
    space: Space = "prob"
    reduction: Reduction = "sum"
    start_round: Annotated[int, NOT_NEGATIVE] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs == "sorted" and self.space == "logit" and self.g != "linear":
            raise ValueError(
                'algorithm.pairs "sorted" needs algorithm.space "prob" or algorithm.g "linear": logits have no '
                f'bounds; got space "logit" and g "{self.g}"'
            )
        if self.top_n < 2:
            raise ValueError(f"algorithm.top_n must be at least 2 (a pair of answers), got {self.top_n}")

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Weights that make the term as large as those of ``traits.search`` make the sum."""
        size = self.top_n ** {"sum": 0, "rows": 1, "mean": 2}[self.reduction]
        return {**self.traits.search, "lam": tuple(float(f"{size * lam:.6g}") for lam in self.traits.search["lam"])}

    @property
    def answer_filter(self) -> Filter | None:
        """The filter, where it ranks answers (:class:`confed.losses.preference.FiltersAnswers`)."""
        return self.filter if self.pairs == "filtered" and self.filter != "random" else None

    def objective(self, client: Client) -> Objective:
        """Task loss plus the preference term (Eq. 8.14)."""
        if self.lam == 0 or client.round < self.start_round:
            return super().objective(client)
        teacher = global_logits(client)
        noise = client.rng("filter" if self.pairs == "filtered" else "pairs")

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            questions = without_answers(batch)
            teacher_output = teacher(questions)
            output = model(batch)
            scores = output.logits if questions is batch else model(questions).logits
            preference = self._preference(scores, teacher_output, noise)
            yield client.task.loss(output, batch) + self.lam * preference.mean()

        return losses

    def _preference(self, student: Tensor, teacher: Tensor, noise: torch.Generator) -> Tensor:
        """The sum over pairs, per example, (B,); logits (B, C) come in."""
        if self.pairs == "sorted":
            return sorted_preference(student, teacher, self.space, self.reduction, self.g)
        if self.pairs == "sampled":
            return sampled_preference(student, teacher, self.samples, noise, self.space, self.reduction, self.g)
        selected = None
        if self.pairs == "filtered":
            scores = forgotten(student, teacher, self.filter, noise)
            selected = most_forgotten(scores, min(self.top_n, scores.shape[1]))
        return pairwise_preference(student, teacher, selected, self.space, self.reduction, self.g)
