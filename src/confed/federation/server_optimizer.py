"""Server optimisers (FedOpt): the step of a server along the mean update.

Reddi et al., "Adaptive federated optimization", ICLR 2021 (arXiv 2003.00295), Algorithm 2; Hsu, Qi and Brown,
"Measuring the effects of non-identical data distribution for federated visual classification", 2019 (FedAvgM).

Notation: w the server's model, m the mean of the clients' models, d = m - w the pseudo-gradient (it points
downhill). FedAvg is w + d.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from confed.federation.params import Params
from confed.federation.ranges import BELOW_ONE, POSITIVE, check_fields
from confed.federation.state import ServerState

FIRST, SECOND = "server/momentum", "server/second"  # the slots in which the moments are kept
STATISTICS = ("running_mean", "running_var")  # how torch names the running statistics of normalisation layers


@dataclass(frozen=True)
class ServerOptimizer:
    """A step of the server along the mean update.

    Attributes:
        optimizer: "none" (w + lr d), "momentum" (FedAvgM: v = beta1 v + d, w + lr v), or "adagrad", "adam" and
            "yogi" (FedOpt: v = beta1 v + (1 - beta1) d, s a second moment, w + lr v / (sqrt(s) + tau)). None of them
            corrects the bias of its moments, as in the paper.
        lr: the server's learning rate. None becomes 1 for "none" and "momentum", and 0.01 for the adaptive ones,
            whose steps are about ``lr`` long in every weight.
        betas: decay of the first and of the second moment.
        tau: adaptivity; the smaller, the more adaptive. Second moments start at tau squared.
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    optimizer: Literal["none", "momentum", "adagrad", "adam", "yogi"] = "none"
    lr: Annotated[float | None, POSITIVE] = None
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.99)
    tau: Annotated[float, POSITIVE] = 1e-3

    def __post_init__(self) -> None:
        # Recipes are written out with the number itself.
        object.__setattr__(self, "lr", self.rate)
        check_fields(self, "algorithm.server")

    @property
    def rate(self) -> float:
        """The learning rate, given or default."""
        if self.lr is not None:
            return self.lr
        return 1.0 if self.optimizer in ("none", "momentum") else 0.01

    @property
    def plain(self) -> bool:
        """Whether the step is FedAvg's: the mean itself."""
        return self.optimizer == "none" and self.rate == 1

    def step(self, server: ServerState, mean: Params) -> ServerState:
        """The server after a round in which its clients' models had this mean.

        Integer tensors (batch counters) and running statistics of normalisation layers are taken from the mean:
        they are no parameters, and a step past the mean could make a variance negative.

        Args:
            server: the state before; its slots hold the moments.
            mean: name -> the clients' mean, for every name of the server.
        """
        if self.plain:
            return replace(server, round=server.round + 1, params=dict(mean))
        params = dict(mean)
        first, second = dict(server.slots.get(FIRST, {})), dict(server.slots.get(SECOND, {}))
        for name, value in server.params.items():
            if value.is_floating_point() and not name.endswith(STATISTICS):
                params[name] = value + self.rate * self._direction(name, mean[name] - value, first, second)
        slots: dict[str, Params] = dict(server.slots)
        slots |= {slot: tensors for slot, tensors in ((FIRST, first), (SECOND, second)) if tensors}
        return replace(server, round=server.round + 1, params=params, slots=slots)

    def _direction(self, name: str, d: Tensor, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
        """The step of one tensor before the learning rate; the moments are replaced by their new values."""
        beta1, beta2 = self.betas
        if self.optimizer == "none" or (self.optimizer == "momentum" and beta1 == 0):
            return d  # nothing to remember
        before = first.get(name, torch.zeros_like(d))
        if self.optimizer == "momentum":
            first[name] = beta1 * before + d
            return first[name]
        first[name] = beta1 * before + (1 - beta1) * d
        s = second.get(name, torch.full_like(d, self.tau**2))
        square = d.square()
        second[name] = {
            "adagrad": lambda: s + square,
            "adam": lambda: beta2 * s + (1 - beta2) * square,
            "yogi": lambda: s - (1 - beta2) * square * torch.sign(s - square),
        }[self.optimizer]()
        return first[name] / (second[name].sqrt() + self.tau)
