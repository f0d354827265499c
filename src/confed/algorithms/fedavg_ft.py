"""FedAvg followed by local fine-tuning: a simple and strong baseline of personalisation.

Cheng et al., "Fine-tuning is fine in federated learning", 2021 (arXiv 2108.07313); Matsuda et al., "An empirical
study of personalized federated learning", 2022 (arXiv 2206.13190).
"""

from dataclasses import dataclass
from typing import Annotated

from confed.federation.algorithm import Algorithm
from confed.federation.families.last_head import after_last_round
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.traits import Traits


@dataclass(frozen=True)
class FedAvgFT(Algorithm):
    """FedAvg; after the last round every client fine-tunes the global model and keeps the result.

    Attributes:
        finetune_epochs: passes over the client's examples after the last round; 0 keeps the global model.
    """

    finetune_epochs: Annotated[int, NOT_NEGATIVE] = 2
    traits = Traits(
        label="FedAvg + FT",
        group="personalisation",
        reference=2,
        neutral={"finetune_epochs": 0},
        search={"finetune_epochs": (1, 2, 4)},
    )

    finish = after_last_round(epochs="finetune_epochs")
