"""FedBN: federated averaging with private normalisation layers.

Li et al., "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021: FedAvg of all
tensors but those of the normalisation layers, running statistics included.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import nn

from confed.federation.algorithm import Algorithm, Protection
from confed.federation.client_info import ClientInfo
from confed.federation.params import Rules, Scope, named_tensors
from confed.federation.protocols import Task
from confed.federation.specs import frozen_names
from confed.federation.traits import Traits

BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ALL = (*BATCH, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class FedBN(Algorithm):
    """FedAvg with private normalisation layers.

    A place without layers of its own would have their untrained initial values, so there is no global model: unseen
    places stay empty.

    Attributes:
        layers: "batch" (the paper's) or "all": layer, group and instance normalisation too, for transformers.
        norms: names of those layers; read off the model.
    """

    layers: Literal["batch", "all"] = "batch"
    norms: tuple[str, ...] = ()
    traits = Traits(
        group="personalisation",
        has_global=False,
        neutral="normalisation layers are never shared",
        unbatchable_reason="batch normalisation is over one client's examples",
    )

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the normalisation layers that the model trains."""
        kinds = BATCH if self.layers == "batch" else ALL
        frozen = frozen_names(model)
        trained = set(named_tensors(model)) - frozen
        modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
        norm_layers = [name for name, module in modules.items() if isinstance(module, kinds)]
        items: list[str] = []
        for name in norm_layers:
            if any(n.startswith(f"{name}.") for n in trained):
                items.append(name)
        norms = tuple(items)
        if norms:
            return replace(self, norms=norms)
        what = "batch-normalisation" if self.layers == "batch" else "normalisation"
        state = "they are all frozen in this model" if norm_layers else "this model has none"
        hint = "; algorithm.layers = 'all' takes layer and group normalisation too" if self.layers == "batch" else ""
        raise ValueError(f"FedBN keeps {what} layers private, and {state}{hint}")

    def unsupported_reason(self, protection: Protection) -> str:
        """All but privacy of records with batch normalisation."""
        if protection == "record_privacy" and self.layers == "batch":
            return "batch normalisation reads all examples of a batch; set algorithm.layers to 'all'"
        return super().unsupported_reason(protection)

    def rules(self, client: ClientInfo) -> Rules:
        """Normalisation layers are private, the rest is shared."""
        if not self.norms:
            raise ValueError("FedBN does not know this model's layers; call configure(model, task) before the run")
        return {**{f"{name}.*": Scope.PRIVATE for name in self.norms}, "*": Scope.SHARED}
