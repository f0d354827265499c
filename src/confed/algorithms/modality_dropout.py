"""FedAvg with modality dropout: a baseline for missing modalities.

The idea of ModDrop (Neverova, Wolf, Taylor and Nebout, "ModDrop: adaptive multi-modal gesture recognition", TPAMI
38(8), 2016), there with zeros in place of a dropped modality; a model that reads batches without one is simply not
given it here. Every modality of a batch is dropped with probability p, independently; where all would be, one of them
stays, each with the same probability. Nothing is dropped in evaluation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.ownership import owned, restricted
from confed.federation.protocols import Batch
from confed.federation.ranges import BELOW_ONE
from confed.federation.structure import reads_absent
from confed.federation.train import Objective
from confed.federation.traits import Traits


@dataclass(frozen=True)
class ModalityDropout(Algorithm):
    """FedAvg with modality dropout.

    Attributes:
        rate: p in [0, 1), the probability with which a batch loses each of its modalities.
    """

    traits = Traits(
        label="Modality dropout",
        group="modalities",
        made_for="modalities",
        requires=(reads_absent,),
        neutral={"rate": 0.0},
        search={"rate": (0.1, 0.3, 0.5)},
    )
    rate: Annotated[float, BELOW_ONE] = 0.3

    def objective(self, client: Client) -> Objective:
        """The task's loss of what is left of the batch."""
        rng = client.rng("modality dropout")

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            left = restricted(batch, kept(owned(batch), self.rate, rng))
            yield client.task.loss(model(left), left)

        return losses


def kept(modalities: Sequence[str], rate: float, rng: torch.Generator) -> tuple[str, ...]:
    """The modalities that stay: each with probability 1 - rate, and never none of them."""
    draws = torch.rand(len(modalities), generator=rng)
    last = int(torch.randint(len(modalities), (), generator=rng))
    return tuple(m for number, m in enumerate(modalities) if draws[number] >= rate) or (modalities[last],)
