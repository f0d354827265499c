"""MMFed (re-implementation from abstract): averaged multimodal networks, personalised by meta-learning.

Xiong, Yang, Qi and Xu, "A unified framework for multi-modal federated learning", Neurocomputing 480, 2022. Only the
abstract was at hand: encoders per modality, a co-attention between complementary modalities, FedAvg, and
personalisation in the manner of MAML. Resolutions, all ours: the mean is weighted by numbers of examples; local
training minimises the loss after an inner step, in its first-order form (``federation/families/meta.py``), which is
Per-FedAvg's (FO); after the last round every client takes plain gradient steps at the inner rate. The network of the
paper is among the models (``models/mmfed.py``); the method works with any.
"""

from dataclasses import dataclass
from typing import Annotated

from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.families.last_head import after_last_round
from confed.federation.families.meta import keep_adapted, look_ahead
from confed.federation.messages import Message
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.train import Objective
from confed.federation.traits import Traits


@dataclass(frozen=True)
class MMFed(Algorithm):
    """FedAvg weighted by size, with first-order meta-learning.

    Attributes:
        alpha: rate of the inner step, and of the steps of personalisation.
        adapt_steps: steps of personalisation after the last round; 0 leaves clients with their last local model.
    """

    traits = Traits(
        label="MMFed (from abstract)",
        group="modalities",
        neutral={"alpha": 0.0, "adapt_steps": 0},
        search={"alpha": (0.003, 0.01, 0.03, 0.1), "adapt_steps": (1, 5, 20)},
    )
    alpha: Annotated[float, NOT_NEGATIVE] = 0.01
    adapt_steps: Annotated[int, NOT_NEGATIVE] = 5

    def objective(self, client: Client) -> Objective:
        """The loss after an inner step."""
        return look_ahead(client, self.alpha)

    finish = after_last_round(if_any=("adapt_steps",))

    @action
    def personalise(self, client: Client, message: Message) -> Message:
        """A few steps of plain gradient descent from the model received; keeps the result."""
        return keep_adapted(client, message.tensors, self.alpha, self.adapt_steps)
