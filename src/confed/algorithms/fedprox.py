"""FedProx: FedAvg with a proximal term towards the global model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Eq. 2:
local loss + (mu / 2) * ||theta - w||^2, theta the local weights, w the weights received this round.

With an adaptive optimiser the loss form used here and the original perturbed gradient step differ; with SGD they
are the same.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from confed.federation.algorithm import Algorithm, keeps_protections
from confed.federation.client import Client
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.train import Objective, TaskLoss
from confed.federation.traits import Traits
from confed.losses.proximal import half_squared_distance


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg with a proximal term.

    Attributes:
        mu: weight of the proximal term.
    """

    mu: Annotated[float, NOT_NEGATIVE] = 0.01
    traits = Traits(
        steps_alone=True, unbatchable_reason="", neutral={"mu": 0.0}, search={"mu": (0.001, 0.01, 0.1, 1.0)}
    )

    @keeps_protections("record_privacy")
    def objective(self, client: Client) -> Objective:
        """The task's loss plus (mu / 2) ||theta - w||^2 over the trained shared tensors."""
        learning = {n: client.tensors[n] for n in client.incoming if client.tensors[n].requires_grad}
        received = [client.incoming[n].to(tensor.device) for n, tensor in learning.items()]

        def proximal(loss: Tensor) -> Tensor:
            return loss + self.mu * half_squared_distance(list(learning.values()), received)

        return TaskLoss(client.task, proximal if self.mu else None)
