"""Robust aggregation: FedAvg with rules that bound the influence of malicious clients.

What the rules do, with their sources, is in :mod:`confed.federation.robust_mean`:

    clip        mean of the updates, each shortened to a norm of at most c    Sun et al. 2019
    median      median of the clients' values                                 Yin et al., ICML 2018
    trimmed     mean without the f smallest and largest values                Yin et al., ICML 2018
    krum        the one client's model in the midst of the others             Blanchard et al., NeurIPS 2017
    multi_krum  the mean of the K - f models most in the midst                Blanchard et al., NeurIPS 2017

Only "clip" counts clients by their numbers of examples. This is FedAvg with ``algorithm.robust``, which every method
has that takes means, as a method of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from confed.federation.algorithm import Algorithm, Protection, keeps_protections
from confed.federation.messages import Reply
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.robust_mean import RobustMean, Rule
from confed.federation.state import ServerState
from confed.federation.traits import Traits


@dataclass(frozen=True)
class Robust(Algorithm):
    """FedAvg with a robust average.

    Attributes:
        rule: how replies are put together.
        norm: for "clip", the largest norm c of an update; 0 does not clip, which is FedAvg.
        malicious: for "trimmed" and both Krums, how many clients f may lie. They need 2 f + 1 and f + 3 replies (for
            the guarantee of Krum's authors 2 f + 3); a round with fewer leaves the model as it is.
    """

    traits = Traits(
        label="Robust FedAvg",
        group="protection",
        neutral={"rule": "clip", "norm": 0.0},
        search={"norm": (0.3, 1.0, 3.0, 10.0)},
    )
    rule: Rule = "clip"
    norm: Annotated[float, NOT_NEGATIVE] = 1.0
    malicious: Annotated[int, NOT_NEGATIVE] = 1

    def unsupported_reason(self, protection: Protection) -> str:
        """Reason why a protection does not go with the rule."""
        if protection == "robust":
            return "the method has a rule of its own, algorithm.rule; or take fedavg"
        privacy = self.update_privacy
        at_client = protection == "update_privacy" and privacy is not None and privacy.at == "client"
        if at_client or self._mean is None:
            return super().unsupported_reason(protection)
        return f"its rule {self.rule!r} is no mean" if protection == "update_privacy" else "its rule needs every update"

    @keeps_protections("secure_sum", "update_privacy")
    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The robust average of the replies that are no errors; the server's own values if these are too few.

        Raises ``ValueError``: the federation has fewer clients than the rule needs.
        """
        return Algorithm.average(replace(self, robust=self._mean), server, replies)

    @property
    def _mean(self) -> RobustMean | None:
        """The rule, or the plain mean where nothing is clipped."""
        if self.rule == "clip" and not self.norm:
            return None
        return RobustMean(self.rule, self.norm or 1.0, self.malicious)
