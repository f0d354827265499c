"""Multimodal personalised Transformer: linear maps of modalities with a shared and a local part.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", Journal of University of Electronic
Science and Technology of China 54(2), 2025 (in Chinese; there is no official code).

Notation: M_m the linear map of modality m, v_m its vector, W the Transformer, C_j the clients that own modality j, w_i
client i's weight. An example's segments x become tokens Concat(v_m, x M_m) (Eq. 10), with

    M_m = lambda M_m^loc + (1 - lambda) M_m^up                                                     (Eq. 8)

M_m^loc never leaves its client; M_m^up, v_m and W are averaged, those of a modality over its owners:

    M_j^up <- sum over i in C_j of w_i M_j,i^up / sum over i in C_j of w_i                         (Eqs. 13 and 14)

After the last round every client fine-tunes all of it on its own examples.

Resolutions. Eq. 14 as printed does not divide by the owners' weights, though the w_i sum to 1 over all clients: the map
would shrink wherever a client lacks the modality; Eq. 13 divides. Section 2 sends "the linear maps", section 1.1 keeps
M^loc at home: so it does here. M^loc starts as M^up does, and w_i is the client's number of examples. Gradients are
autograd's: those of M^loc and M^up are as lambda to 1 - lambda. A place without maps of its own has M = M^up, and so
has the global model everywhere. That clients neither train nor send what reads a modality that they lack is
confed's rule for all methods (``federation/ownership.py``).
"""

from dataclasses import dataclass
from typing import Annotated, Protocol, Self, runtime_checkable

import torch
from torch import nn

from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import after_last_round
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Task
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE, SHARE
from confed.federation.traits import Traits

LOCAL, SHARED = ".local.", ".shared."  # what stands in the names of M^loc, and in its place in those of M^up


@runtime_checkable
class _PartlyLocal(Protocol):
    """A model whose maps ``embed.<m>.shared`` can get a local part ``embed.<m>.local``."""

    def personalise_maps(self, lam: float) -> None:
        """Addition of the local maps, with the values of the shared ones."""
        ...


@dataclass(frozen=True)
class ModalityTransformer(Algorithm):
    """FedAvg per modality, with partly local maps and fine-tuning after the last round.

    Attributes:
        lam: lambda in [0, 1], the local part of each map. The paper has 0 < lambda < 1 and its best at 0.3 on
            Non-IID data; 0 is FedAvg with fine-tuning, 1 keeps the maps at home.
        local_rate: factor on ``local.lr`` for M_loc. Adam and its kin normalise away the factor lambda of its
            gradients, so that under them this is what makes M_loc learn faster or slower than M_up.
        finetune_epochs: passes over the client's examples after the last round; 0 keeps the last local model.
    """

    lam: Annotated[float, SHARE] = 0.3
    finetune_epochs: Annotated[int, NOT_NEGATIVE] = 2
    local_rate: Annotated[float, POSITIVE] = 1.0

    traits = Traits(
        label="Multimodal Transformer",
        group="modalities",
        private_beside=True,
        made_for="modalities",
        neutral={"lam": 0.0, "finetune_epochs": 0},
        unbatchable_reason="clients of other modalities have tensors of their own",
        search={"lam": (0.1, 0.3, 0.5, 0.7, 0.9), "finetune_epochs": (1, 2, 4)},
    )

    def lr_factor(self, name: str) -> float:
        """``local_rate`` for M_loc, 1 for everything else."""
        return self.local_rate if ".embed." in f".{name}" and LOCAL in name else 1.0

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Check that the model's maps of modalities can be partly local."""
        if not isinstance(model, _PartlyLocal):
            raise ValueError(
                f"{self.title} needs a model whose maps of modalities can be partly local (personalise_maps), such as "
                f"modal_transformer_mini; {type(model).__name__} has none"
            )
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Addition of a local part to every map."""
        if not isinstance(model, _PartlyLocal):
            raise ValueError(
                f"{type(model).__name__} has no personalise_maps; call configure(model, task) before the run"
            )
        model.personalise_maps(self.lam)

    def rules(self, client: ClientInfo) -> Rules:
        """Local maps are private, everything else is shared."""
        return {f"*embed.*{LOCAL}*": Scope.PRIVATE, "*": Scope.SHARED}

    def initial_private(self, shared: Params) -> Params:
        """M^loc = M^up, so that M is the shared map."""
        maps = {name: t for name, t in shared.items() if ".embed." in f".{name}" and SHARED in name}
        return {name.replace(SHARED, LOCAL): t for name, t in maps.items()}

    finish = after_last_round(epochs="finetune_epochs", if_any=("finetune_epochs",))
