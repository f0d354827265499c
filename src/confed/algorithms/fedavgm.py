"""FedAvgM: FedAvg with server-side momentum.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019
(arXiv 1909.06335). With w the server's weights, m the weighted mean of the clients' and d = m - w:

    v <- beta v + d,    w <- w + eta v.

The same step is an option of every method that aggregates as FedAvg does: ``algorithm.server.optimizer = "momentum"``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from confed.federation.algorithm import Algorithm, keeps_protections
from confed.federation.messages import Reply
from confed.federation.ranges import BELOW_ONE, POSITIVE
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.federation.traits import Traits


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvg with server momentum.

    Attributes:
        server_lr: the server's learning rate eta.
        momentum: beta.
    """

    server_lr: Annotated[float, POSITIVE] = 1.0
    momentum: Annotated[float, BELOW_ONE] = 0.9
    traits = Traits(
        neutral={"server_lr": 1.0, "momentum": 0.0}, search={"momentum": (0.3, 0.7, 0.9), "server_lr": (0.3, 1.0)}
    )

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """A step of momentum along the mean update."""
        optimizer = ServerOptimizer("momentum", self.server_lr, (self.momentum, 0.0))
        return optimizer.step(server, self.average(server, replies))
