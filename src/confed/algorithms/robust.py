"""Robust aggregation: FedAvg with an average that a few malicious clients cannot steer at will.

What the rules do, with their sources, is in :mod:`confed.privacy.robust`:

    clip      mean of the updates, each shortened to a norm of at most c      Sun et al. 2019
    median    median of the clients' values                                   Yin et al., ICML 2018
    trimmed   mean without the f smallest and largest values                  Yin et al., ICML 2018
    krum      the one client's model in the midst of the others               Blanchard et al., NeurIPS 2017

Only "clip" counts clients by their numbers of examples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from confed.federation.algorithm import Algorithm
from confed.federation.messages import Reply
from confed.federation.params import Mean
from confed.federation.state import ServerState
from confed.privacy.robust import Rule, clipped, krum, median, trimmed_mean

__all__ = ["Robust"]


@dataclass(frozen=True)
class Robust(Algorithm):
    """FedAvg with a robust average.

    Attributes:
        rule: how replies are put together.
        norm: for "clip", the largest norm c of an update; 0 does not clip, which is FedAvg.
        malicious: for "trimmed" and "krum", how many clients f may lie. They need 2 f + 1 and f + 3 replies (for
            the guarantee of Krum's authors 2 f + 3); a round with fewer leaves the model as it is.
    """

    label: ClassVar[str] = "Robust FedAvg"
    rule: Rule = "clip"
    norm: float = 1.0
    malicious: int = 1
    neutral: ClassVar[dict[str, Any]] = {"rule": "clip", "norm": 0.0}
    search: ClassVar[dict[str, Sequence[Any]]] = {"norm": (0.3, 1.0, 3.0, 10.0)}

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"algorithm.rule must be one of {', '.join(get_args(Rule))}, got {self.rule!r}")
        if not self.norm >= 0:
            raise ValueError(f"algorithm.norm must not be negative, got {self.norm}")
        if self.malicious < 0:
            raise ValueError(f"algorithm.malicious must not be negative, got {self.malicious}")

    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The robust average of the replies that are no errors; the server's own values if these are too few.

        Raises:
            ValueError: the federation has fewer clients than the rule needs.
        """
        if self.rule == "clip":
            return self._clipped(server, replies)
        needed = {"median": 1, "trimmed": 2 * self.malicious + 1, "krum": self.malicious + 3}[self.rule]
        if 0 < server.clients < needed:
            raise ValueError(
                f"algorithm.rule = {self.rule!r} with algorithm.malicious = {self.malicious} needs at least {needed} "
                f"clients, got {server.clients}"
            )
        updates = [reply.message.tensors for reply in replies if reply.error is None]
        if len(updates) < needed:
            return dict(server.params)
        if self.rule == "median":
            found = median(updates)
        elif self.rule == "trimmed":
            found = trimmed_mean(updates, self.malicious)
        else:
            found = dict(updates[krum(updates, self.malicious)])
        return {**server.params, **found}

    def _clipped(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The weighted mean of shortened updates, one reply in memory at a time."""
        if not self.norm:
            return super().average(server, replies)
        mean = Mean(getattr(torch, self.accumulator))
        for reply in replies:
            if reply.error is None:
                mean.add(clipped(reply.message.tensors, server.params, self.norm), self.weight(reply))
        return mean.result(server.params)
