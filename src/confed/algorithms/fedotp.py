"""FedOTP: a global and a local prompt per class, matched with patches of the picture by unbalanced optimal transport.

Li et al., "Global and local prompts cooperation via optimal transport for federated learning", CVPR 2024 (arXiv
2403.00041).

Notation: G (V, D) features of a picture's patches; h_c (2, D) those of class c's two prompts; gamma the mass moved.

    C_c = 1 - G h_c^T                                                       cost, (V, 2)
    T_c = argmin <C_c, T> - eps H(T),  rows at most 1 / V, columns gamma / 2   (:mod:`confed.losses.transport`)
    score of c = 1 - <C_c, T_c>, divided by the temperature

T_c has no gradient. The global prompt is averaged, the local one never leaves the client. With gamma below 1 patches
that fit neither prompt, such as the background, do not count.

Deviations: the local prompt starts from the same words as the global one and a little noise; the global model, which
has no local prompt, has the global one twice.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.families.prompts import CONTEXT, as_classifier, classes_of, learned_context, scores_of
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, Range
from confed.federation.traits import Traits
from confed.losses.transport import transport_plan

LOCAL = "local_context"  # the module with the local prompt


@dataclass(frozen=True)
class FedOTP(Deploying):
    """Global and local prompts, matched with patches.

    Attributes:
        mass: gamma.
        strength: eps, weight of the entropy.
        steps: most iterations of the solver.
    """

    traits = Traits(
        steps_alone=True,
        label="FedOTP",
        group="prompts",
        private_beside=True,
        made_for="prompts",
        requires=(learned_context,),
        neutral="scores are those of patches, of two prompts",
        search={"mass": (0.6, 0.8, 1.0)},
    )
    mass: Annotated[float, Range(0, 1, above=True)] = 0.8
    strength: Annotated[float, POSITIVE] = 0.1
    steps: Annotated[int, AT_LEAST_ONE] = 100

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The local prompt: the global one's initial values and N(0, 0.02)."""
        start = as_classifier(model).initial_context()
        local = nn.Module()
        local.vectors = nn.Parameter(start + 0.02 * torch.randn(start.shape, generator=rng).to(start))
        model.add_module(LOCAL, local)

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with both prompts and the transport."""
        return _Transporting(model, self)

    def rules(self, client: ClientInfo) -> Rules:
        """The local prompt is private, the context is shared."""
        return {f"{LOCAL}.*": Scope.PRIVATE, "*": Scope.SHARED}

    def initial_private(self, shared: Params) -> Params:
        """The global prompt in the place of the local one, for the global model."""
        return {f"{LOCAL}.vectors": shared[CONTEXT]}


class _Transporting(nn.Module):
    def __init__(self, model: nn.Module, method: FedOTP) -> None:
        super().__init__()
        self.model, self._method = model, method

    def forward(self, batch: Batch) -> Output:
        reads, method = as_classifier(self.model), self._method
        patches = reads.patch_features(batch)
        classes = classes_of(batch, reads.class_count).to(patches.device)
        prompts = [self.model.get_parameter(name) for name in (CONTEXT, f"{LOCAL}.vectors")]
        both = torch.cat([prompt.expand(len(classes), -1, -1) for prompt in prompts])
        texts = torch.stack(reads.class_features(both, classes.repeat(2)).chunk(2))  # (2, K, D)
        cost = 1 - torch.einsum("bvd,nkd->bkvn", patches, texts)
        plan = transport_plan(cost, mass=method.mass, strength=method.strength, steps=method.steps)
        scores = reads.similarity_scores(1 - (plan * cost).sum((2, 3)))
        return Output(scores_of(scores, classes, batch, reads.class_count), reads.image_features(batch))
