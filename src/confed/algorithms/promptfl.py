"""PromptFL: federated averaging of learned context in front of class names, everything else frozen.

Guo et al., "PromptFL: let federated participants cooperatively learn prompts instead of models", IEEE Transactions on
Mobile Computing 2023 (arXiv 2208.11625), also called FedCoOp: CoOp (Zhou et al., IJCV 2022) at every client. M vectors
of width d travel, 2,048 values for M = 4 of CLIP ViT-B/16.

Without regularisers this is FedAvg of a model with ``trainable = "prompt"``. Options hold learned prompts near
handwritten ones; h_c are the features of class c's handwritten prompt (``model.template`` or ``model.templates``):

    L = L_task + knowledge * mean_c ||g(t_c) - h_c||^2                      KgCoOp (CVPR 2023), there 8
               + consistency * (25 * mean |g(t_c) - h_c| + KL(p_h || p))    PromptSRC (ICCV 2023), there 1

Deviations: KgCoOp's released code minimises 1 - cos, half of the squared distance that its paper prints. Of PromptSRC
the terms for text and for scores are here; its term for pictures is zero without prompts in the picture tower, and its
mean of prompts over epochs is left to the mean over clients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, keeps_protections
from confed.federation.client import Client
from confed.federation.families.prompts import CONTEXT, as_classifier, learned_context, prompt_pass
from confed.federation.protocols import Batch
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.train import Objective
from confed.federation.traits import Traits
from confed.losses.prompts import knowledge_guidance, score_consistency, text_consistency

TEXT_WEIGHT = 25.0  # PromptSRC's weight of the term for texts beside that for scores


@dataclass(frozen=True)
class PromptFL(Algorithm):
    """FedAvg of learned context.

    Attributes:
        knowledge: weight of KgCoOp's distance to handwritten prompts.
        consistency: weight of PromptSRC's two terms.
    """

    traits = Traits(
        steps_alone=True,
        label="PromptFL",
        group="prompts",
        made_for="prompts",
        requires=(learned_context,),
        neutral={"knowledge": 0.0, "consistency": 0.0},
        search={"knowledge": (1.0, 4.0, 8.0), "consistency": (0.1, 0.3, 1.0)},
    )
    knowledge: Annotated[float, NOT_NEGATIVE] = 0.0
    consistency: Annotated[float, NOT_NEGATIVE] = 0.0

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Weights of the regularisers that are on, so that tuning turns no row into another method."""
        on = {"knowledge": self.knowledge, "consistency": self.consistency}
        return {name: values for name, values in self.traits.search.items() if on[name]}

    @keeps_protections("record_privacy")
    def objective(self, client: Client) -> Objective:
        """The task's loss plus the regularisers."""
        if not self.knowledge and not self.consistency:
            return Algorithm.objective(self, client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            passed = prompt_pass(model, batch, client.tensors[CONTEXT])
            loss = client.task.loss(passed.output, batch)
            reads = as_classifier(model)
            plain = reads.handwritten_features(passed.classes)
            if self.knowledge:
                loss = loss + self.knowledge * knowledge_guidance(passed.texts, plain)
            if self.consistency:
                scores = passed.output.logits[:, passed.classes]
                wanted = reads.similarity_scores(passed.output.features @ plain.T)
                terms = TEXT_WEIGHT * text_consistency(passed.texts, plain) + score_consistency(scores, wanted)
                loss = loss + self.consistency * terms
            yield loss

        return losses
