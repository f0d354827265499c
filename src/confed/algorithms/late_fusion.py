"""FedAvg per modality, fine-tuned at the clients and merged in their answers: "personalized FedAvg" of Cao et al.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", Journal of UESTC 54(2), 2025, have
a baseline that trains one federated model per modality, fine-tunes it at every client and merges them; they do not say
how. With L the task's loss, b_m a batch of which modality m alone is left, and f_m the network of m, a client minimises

    sum over its modalities m of L(f_m(b_m)),

so that every network is trained as if the other modalities were not there, and its average is over the owners of m. The
model merges answers (:mod:`confed.models.late_fusion`); nothing is trained through the merged ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.families.last_head import after_last_round
from confed.federation.messages import Message
from confed.federation.ownership import owned, restricted
from confed.federation.protocols import Batch
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.structure import reads_absent
from confed.federation.train import Objective, train
from confed.federation.traits import Traits


@dataclass(frozen=True)
class LateFusionFedAvg(Algorithm):
    """FedAvg of a network per modality, and fine-tuning of each after the last round.

    Attributes:
        finetune_epochs: passes over the client's examples after the last round; 0 keeps the global model.
    """

    finetune_epochs: Annotated[int, NOT_NEGATIVE] = 2

    traits = Traits(
        steps_alone=True,
        label="FedAvg per modality + FT",
        group="modalities",
        made_for="modalities",
        requires=(reads_absent,),
        neutral="the modalities of an example are trained apart, so it never becomes FedAvg of their joint loss",
        search={"finetune_epochs": (1, 2, 4)},
    )

    def objective(self, client: Client) -> Objective:
        """The sum of the task's losses of each modality alone."""

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            alone = [restricted(batch, [modality]) for modality in owned(batch)]
            yield torch.stack(
                [client.task.loss(model(modality_batch), modality_batch) for modality_batch in alone]
            ).sum()

        return losses

    finish = after_last_round(epochs="finetune_epochs")

    @action
    def personalise(self, client: Client, message: Message) -> Message:
        """Fine-tuning of every network on its own; keeps the result, and only the loss is sent."""
        client.load(message.tensors)
        loss = train(client, self.objective(client), int(message.scalars.get("epochs", 1)))
        client.keep_personal = True
        client.remember()
        return Message({}, {"loss": loss})
