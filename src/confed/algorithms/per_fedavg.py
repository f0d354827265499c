"""Per-FedAvg: meta-learning of an initial model that adapts in one local step (MAML).

Fallah, Mokhtari and Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach", NeurIPS 2020, Algorithm 1 and section 5.

Notation: f the client's loss, b1 to b3 batches of its examples, alpha the inner rate, beta the outer. A local step is

    theta' = theta - alpha grad f(theta; b1)
    FO:  theta <- theta - beta grad f(theta'; b2)
    HF:  theta <- theta - beta (g - alpha H g),  g = grad f(theta'; b2),
         H g = (grad f(theta + delta g; b3) - grad f(theta - delta g; b3)) / (2 delta)

and the server averages. After the last round a client takes a few steps of plain gradient descent at alpha: that is its
personal model.

Deviations: the outer step is the recipe's optimiser (``local.lr`` is beta; with ``local.optimizer = "sgd"`` the paper's
step), over ``local.epochs`` passes instead of a fixed number of steps (4 in a known implementation, with alpha 0.01,
beta 0.001 and delta 0.001); b1 and b3 are drawn beside these passes, so that b2 are FedAvg's batches. FO computes two
gradients per step, HF four.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from confed.federation.algorithm import Algorithm, action, weight_by_setting
from confed.federation.client import Client
from confed.federation.families.last_head import after_last_round
from confed.federation.families.meta import keep_adapted, look_ahead
from confed.federation.messages import Message
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.train import Objective
from confed.federation.traits import Traits


@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """FedAvg of models that are trained to adapt well, each adapted in the end.

    Attributes:
        alpha: rate of the inner step, and of the steps of adaptation.
        variant: "fo" (first-order) or "hf" (with the Hessian by a central difference).
        delta: step of that difference.
        adapt_steps: steps of adaptation after the last round; 0 leaves clients with their last local model.
        finetune_epochs: where positive, passes over the client's examples with the recipe's optimiser, as fine-tuning
            after FedAvg makes, in place of these steps.
        weighting: every client counts the same, as in the paper, or as its training examples.
    """

    traits = Traits(
        label="Per-FedAvg",
        group="personalisation",
        neutral={"alpha": 0.0, "adapt_steps": 0, "weighting": "examples"},
        search={"alpha": (0.003, 0.01, 0.03, 0.1), "adapt_steps": (1, 5, 20)},
    )
    alpha: Annotated[float, NOT_NEGATIVE] = 0.01
    variant: Literal["fo", "hf"] = "fo"
    delta: Annotated[float, POSITIVE] = 1e-3
    adapt_steps: Annotated[int, NOT_NEGATIVE] = 1
    weighting: Literal["uniform", "examples"] = "uniform"
    finetune_epochs: Annotated[int, NOT_NEGATIVE] = 0

    weight = weight_by_setting

    def objective(self, client: Client) -> Objective:
        """The loss after an inner step."""
        return look_ahead(client, self.alpha, hessian=self.variant == "hf", delta=self.delta)

    finish = after_last_round(if_any=("finetune_epochs", "adapt_steps"))

    @action
    def personalise(self, client: Client, message: Message) -> Message:
        """A few steps of plain gradient descent from the model received, or fine-tuning; keeps the result."""
        if self.finetune_epochs:
            return super().personalise(client, Message(message.tensors, {"epochs": self.finetune_epochs}))
        return keep_adapted(client, message.tensors, self.alpha, self.adapt_steps)
