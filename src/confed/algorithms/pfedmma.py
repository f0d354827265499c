"""pFedMMA: multi-modal adapters with a shared middle projection and private outer ones.

Ghiasvand, Alizadeh and Pedarsani, "pFedMMA: Personalized federated fine-tuning with multi-modal adapter for
vision-language models", ICLR 2026 (arXiv 2507.05394); the adapter is that of Yang et al., "MMA: Multi-modal adapter for
vision-language models", CVPR 2024. Written from the paper's abstract and the form of the adapter in the authors' code.

Notation: x the output of a block, d its width, r the bottleneck; D (r x d) and U (d x r) the down- and the
up-projection of that place, S (r x r) the projection that is shared, all three with biases, act the activation of the
adapters (relu in the authors' code):

    x + alpha * U act(S act(D x))

A client trains all three on its task's loss. The server averages S and nothing else; D and U never leave the client.

In CLIP, for which the method is made, blocks of the same depth in the picture tower and in the text tower have a D and
a U each and one S between them, which is what aligns the modalities. Here towers are found by the names of their
blocks: where a model has several (VAuLT's BERT and ViLT), their i-th places share one S; in a model with a single
stream of tokens (ViLT), where every block reads words and patches alike, each place has a D, a U and an S for both
modalities.

Deviations: the authors put adapters into the upper blocks and classify by CLIP's text embeddings; here adapters are
where the model has them (``model.trainable = "adapters"``), D and U start as those do, and every client has an answer
head of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from confed.federation.algorithm import weight_by_setting
from confed.federation.client_info import ClientInfo
from confed.federation.families.fisher import FisherWeighted
from confed.federation.params import Rules, Scope
from confed.federation.ranges import POSITIVE
from confed.federation.structure import adapters_of
from confed.federation.traits import Traits

MIDDLE = "shared_projection"


@dataclass(frozen=True)
class PFedMMA(FisherWeighted):
    """Federated averaging of the middle projections of adapters.

    Attributes:
        scale: alpha, the factor on what an adapter adds. MMA's is far below 1 because its adapters start with large
            values; confed's start with small ones.
        towers: "tied" for one projection S between the i-th places of all towers, "apart" for one per place.
        weighting: every client counts the same, or as its training examples.
    """

    traits = Traits(
        label="pFedMMA",
        group="finetuning",
        made_for="adapters",
        requires=(adapters_of,),
        neutral="the outer projections and the head are never shared",
    )
    scale: Annotated[float, POSITIVE] = 1.0
    towers: Literal["tied", "apart"] = "tied"
    weighting: Literal["uniform", "examples"] = "uniform"

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Insertion of the projections S between the two matrices of every adapter.

        Their initial values are those of the authors' code: N(0, 2 / r), biases 0.
        """
        projections = nn.ModuleDict()
        place: Any
        for name, place in _places(model, adapters_of(model, "pFedMMA").names, self.towers == "tied"):
            # One of another bottleneck cannot be shared with this place.
            key = f"{name}_{place.down.out_features}"
            if key not in projections:
                projections[key] = _projection(place.down, rng)
            # In a tuple it is no submodule: a shared projection has one name, that below ``shared_projection``.
            place.down.middle = (projections[key], place.act)
            place.down.register_forward_hook(_pass_through)
            if self.scale != 1:
                place.scale = self.scale
                place.register_forward_hook(_scale)
        model.add_module(MIDDLE, projections)

    def rules(self, client: ClientInfo) -> Rules:
        """The middle projections are shared, everything else that is trained is private."""
        return {f"{MIDDLE}.*": Scope.SHARED, "*": Scope.PRIVATE}

    weight = weight_by_setting


def _places(model: nn.Module, adapters: tuple[str, ...], tied: bool) -> list[tuple[str, nn.Module]]:
    """The adapters in the model's order, each with its number within its tower (the name before a block's number)."""
    counts: dict[str, int] = {}
    places: list[tuple[str, nn.Module]] = []
    for name, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules()):
        parts = name.split(".")
        last = parts.pop()
        children = dict(module.named_children())
        if last in adapters and all(isinstance(children.get(piece), nn.Linear) for piece in ("down", "up")):
            numbers = [position for position, piece in enumerate(parts) if piece.isdigit()]
            tower = ".".join(parts[: numbers[0]]) if tied and numbers else ""
            places.append((str(counts.setdefault(tower, 0)), module))
            counts[tower] += 1
    return places


def _projection(down: nn.Linear, rng: torch.Generator) -> nn.Linear:
    """S: r x r, with the precision of D."""
    rank = down.out_features
    skipped = nn.utils.skip_init(nn.Linear, rank, rank, dtype=down.weight.dtype)  # pyright: ignore[reportUnknownMemberType]
    middle = cast(nn.Linear, skipped)
    with torch.no_grad():
        middle.weight.normal_(0, (2 / rank) ** 0.5, generator=rng)
        middle.bias.zero_()
    return middle


def _pass_through(down: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """S act(D x) for D x; the adapter's own activation follows."""
    middle, act = down.middle
    return middle(act(output))


def _scale(place: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return place.scale * output
