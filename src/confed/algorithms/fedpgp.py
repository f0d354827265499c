"""FedPGP: a global prompt held near handwritten ones, with a low-rank personal part.

Cui et al., "Harmonizing generalization and personalization in federated prompt learning", ICML 2024 (arXiv 2405.09771).

Notation: p_G the shared context (M, d); U_i (M, b) and V_i (b, d) a client's own; s the cosine of text features.

    p_i = p_G + U_i V_i                                         the client's context
    L = L_task(p_i) + mu * mean_c L_con(c)
    L_con = -log e^(s(g(p_G), h) / tau) / (e^(s(g(p_G), h) / tau) + e^(s(g(p_G), g(p_i)) / tau))

h are the features of handwritten prompts. p_G is averaged; U_i and V_i never leave the client, and the global model is
p_G alone. Both contexts of a step go through the text encoder in one batch.

Deviations: h is ``model.template`` (in the released code the tokens of "X ... X name." unless words are given to start
from); V starts at zero, so that a client starts from p_G.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from confed.federation.algorithm import keeps_protections
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.families.prompts import (
    CONTEXT,
    as_classifier,
    classes_of,
    learned_context,
    prompt_pass,
    scores_of,
)
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.prompts import text_contrast

PERSONAL = "personal_context"  # the module with U and V


@dataclass(frozen=True)
class FedPGP(Deploying):
    """A shared prompt and a private low-rank one.

    Attributes:
        rank: b.
        mu: weight of the contrast.
        temperature: tau of the contrast.
    """

    traits = Traits(
        steps_alone=True,
        label="FedPGP",
        group="prompts",
        private_beside=True,
        made_for="prompts",
        requires=(learned_context,),
        neutral="a client's low-rank part is always trained",
        search={"mu": (0.0, 0.5, 1.0), "rank": (1, 4, 8)},
    )
    rank: Annotated[int, AT_LEAST_ONE] = 8
    mu: Annotated[float, NOT_NEGATIVE] = 1.0
    temperature: Annotated[float, POSITIVE] = 0.5

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """U from N(0, 0.02), V of zeros."""
        tokens, width = as_classifier(model).context_shape
        model.add_module(PERSONAL, _LowRank(tokens, width, self.rank, rng))

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with p_G + U V as its context."""
        return _Personal(model)

    def rules(self, client: ClientInfo) -> Rules:
        """U and V are private, the context is shared."""
        return {f"{PERSONAL}.*": Scope.PRIVATE, "*": Scope.SHARED}

    def initial_private(self, shared: Params) -> Params:
        """V of zeros: the global model, and a place without a client, have p_G alone."""
        return {f"{PERSONAL}.v": torch.zeros(self.rank, shared[CONTEXT].shape[1])}

    @keeps_protections("record_privacy")
    def objective(self, client: Client) -> Objective:
        """The task's loss with the personal context, plus the contrast."""

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            reads, shared = as_classifier(model), client.tensors[CONTEXT]
            personal = shared + model.get_submodule(PERSONAL)()
            if not self.mu:
                yield client.task.loss(prompt_pass(model, batch, personal).output, batch)
                return
            features = reads.image_features(batch)
            classes = classes_of(batch, reads.class_count).to(features.device)
            both = torch.cat([c.expand(len(classes), -1, -1) for c in (personal, shared)])
            own_texts, common = reads.class_features(both, classes.repeat(2)).chunk(2)
            scores = scores_of(reads.similarity_scores(features @ own_texts.T), classes, batch, reads.class_count)
            contrast = text_contrast(common, reads.handwritten_features(classes), own_texts, self.temperature)
            yield client.task.loss(Output(scores, features), batch) + self.mu * contrast

        return losses


class _LowRank(nn.Module):
    def __init__(self, tokens: int, width: int, rank: int, rng: torch.Generator) -> None:
        super().__init__()
        self.u = nn.Parameter(0.02 * torch.randn(tokens, rank, generator=rng))
        self.v = nn.Parameter(torch.zeros(rank, width))

    def forward(self) -> Tensor:
        return self.u @ self.v


class _Personal(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Output:
        personal = self.model.get_parameter(CONTEXT) + self.model.get_submodule(PERSONAL)()
        return prompt_pass(self.model, batch, personal).output
