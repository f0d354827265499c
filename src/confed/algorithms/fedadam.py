"""FedAdam: server-side Adam on the mean of the clients' updates.

Reddi et al., "Adaptive federated optimization", ICLR 2021 (arXiv 2003.00295), Algorithm 2. With w the server's
weights, m the weighted mean of the clients' and d = m - w, and no correction of the moments' bias:

    v <- beta1 v + (1 - beta1) d,    s <- beta2 s + (1 - beta2) d^2,    w <- w + eta v / (sqrt(s) + tau)

with s = tau^2 at first. The same step is an option of every method that aggregates as FedAvg does:
``algorithm.server.optimizer = "adam"``.
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
class FedAdam(Algorithm):
    """FedAvg with Adam on the server.

    Attributes:
        server_lr: the server's learning rate eta; about how far a weight moves per round.
        betas: beta1 and beta2.
        tau: adaptivity; a weight whose updates are small beside it moves in proportion to them.
    """

    server_lr: Annotated[float, POSITIVE] = 0.01
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.99)
    tau: Annotated[float, POSITIVE] = 1e-3
    traits = Traits(
        neutral="an adaptive step is FedAvg's only in the limit of a large tau",
        search={"server_lr": (0.003, 0.01, 0.03, 0.1), "tau": (1e-3, 1e-2)},
    )

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """A step of Adam along the mean update."""
        optimizer = ServerOptimizer("adam", self.server_lr, self.betas, self.tau)
        return optimizer.step(server, self.average(server, replies))
