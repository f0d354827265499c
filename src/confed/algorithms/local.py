"""Local-only training without federation ("DT" in FedVQA), with the same number of epochs."""

from dataclasses import dataclass

from confed.federation.algorithm import Algorithm, Protection
from confed.federation.client_info import ClientInfo
from confed.federation.params import Rules, Scope
from confed.federation.traits import Traits


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """Local-only training, the lower bound of personal models."""

    traits = Traits(
        label="Local only",
        group="references",
        has_global=False,
        communicates=False,
        neutral="nothing is shared, so it never becomes FedAvg",
    )

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection: there is nothing to protect."""
        return "nothing is sent"

    def rules(self, client: ClientInfo) -> Rules:
        """Every trained tensor is private."""
        return {"*": Scope.PRIVATE}
