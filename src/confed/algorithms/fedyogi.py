"""FedYogi: server-side Yogi on the mean of the clients' updates.

Reddi et al., "Adaptive federated optimization", ICLR 2021 (arXiv 2003.00295), Algorithm 2. With w the server's
weights, m the weighted mean of the clients' and d = m - w, and no correction of the moments' bias:

    v <- beta1 v + (1 - beta1) d,    s <- s - (1 - beta2) d^2 sign(s - d^2),    w <- w + eta v / (sqrt(s) + tau)

with s = tau^2 at first. The same step is an option of every method that aggregates as FedAvg does:
``algorithm.server.optimizer = "yogi"``.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from confed.algorithms.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAvg with Yogi on the server.

    Attributes:
        server_lr: the server's learning rate eta; about how far a weight moves per round.
        betas: beta1 and beta2.
        tau: adaptivity; a weight whose updates are small beside it moves in proportion to them.
    """

    rule: ClassVar[Literal["adam", "yogi"]] = "yogi"
