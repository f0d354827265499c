"""FedTPG: a network that makes the context from class names, learned by all clients together.

Qiu et al., "Federated text-driven prompt generation for vision-language models", ICLR 2024 (arXiv 2310.06123); written
from the paper alone.

Notation: T (K, D) text features of the class names that a client is offered; Q (M, d) learned queries.

    P(T) = MLP(CrossAttention(Q, K_T, V_T)),   K_T = T W_K,  V_T = T W_V        the context, (M, d)

The generator is averaged; the model's own context vectors are not used. Classes that nobody trained on get a context
from their names, so that the global model has one for every set of classes.

Deviations: T are the features of handwritten prompts (``model.template``), computed once; layer normalisation stands
before attention and MLP, with residual sums; the last layer starts small around the model's initial context, so that
learning starts near the words of ``model.context``.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.families.prompts import as_classifier, classes_of, learned_context, prompt_pass
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import AT_LEAST_ONE
from confed.federation.traits import Traits

GENERATOR = "prompt_generator"  # the module that makes the context


@dataclass(frozen=True)
class FedTPG(Deploying):
    """FedAvg of a prompt generator.

    Attributes:
        width: hidden features of the generator, also of keys and values.
    """

    traits = Traits(
        steps_alone=True,
        label="FedTPG",
        group="prompts",
        made_for="prompts",
        requires=(learned_context,),
        neutral="the context comes from a network, and is not averaged",
    )
    width: Annotated[int, AT_LEAST_ONE] = 32

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The generator, around the model's initial context."""
        reads = as_classifier(model)
        features = reads.handwritten_features(torch.arange(1)).shape[1]
        model.add_module(GENERATOR, PromptGenerator(reads.initial_context(), features, self.width, rng))

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with the generated context."""
        return _Generating(model)

    def rules(self, client: ClientInfo) -> Rules:
        """The generator is shared, the model's own context is not used."""
        return {f"{GENERATOR}.*": Scope.SHARED, "*": Scope.FROZEN}


class PromptGenerator(nn.Module):
    """P(T): queries that attend to class names, and a network on what they find.

    Args:
        start: the context around which learning starts, (M, d).
        features: D of the class names.
        width: hidden features.
        rng: where the initial values come from.
    """

    def __init__(self, start: Tensor, features: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        tokens, out = start.shape

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(rows, columns, generator=rng) * columns**-0.5)

        self.queries = nn.Parameter(torch.randn(tokens, width, generator=rng))
        self.keys, self.values = matrix(width, features), matrix(width, features)
        self.hidden, self.output = matrix(2 * width, width), matrix(out, 2 * width, 0.02)
        self.offset = nn.Parameter(start.detach().clone())

    def forward(self, names: Tensor) -> Tensor:
        """The context, (M, d), of class names (K, D)."""
        width = self.queries.shape[1]
        names = names * names.shape[1] ** 0.5  # of unit length, so that their features are of the order of one
        attended = functional.scaled_dot_product_attention(
            functional.layer_norm(self.queries, (width,)), names @ self.keys.T, names @ self.values.T
        )
        hidden = functional.layer_norm(self.queries + attended, (width,))
        return self.offset + functional.gelu(hidden @ self.hidden.T) @ self.output.T


class _Generating(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Output:
        reads = as_classifier(self.model)
        device = next(self.model.parameters()).device
        names = reads.handwritten_features(classes_of(batch, reads.class_count).to(device))
        return prompt_pass(self.model, batch, self.model.get_submodule(GENERATOR)(names)).output
