"""PmcmFL: class prototypes in place of missing modalities, in training and in evaluation.

Bao et al., "Multimodal federated learning with missing modality via prototype mask and contrast", 2023 (arXiv
2312.13508). Written from the abstract and from what the authors' code does.

Notation: r_m the representation of an example's modality m, p_m[c] the mean of r_m over the examples of class c of all
clients, z the fused representation, y the class.

From the paper and its code: FedAvg; slots of all M modalities, each normalised, are put side by side and mapped to
z = tanh(W [norm r_1, ..., norm r_M] / M), which the answer head reads. In training, the slot of a missing modality
holds the prototype p_m[y] of the example's own class. The loss is the task's plus weight times the contrast of z (and,
with weights next to 0, of every r_m) with the prototypes. Clients send prototypes after local training; the server
averages them per class and hands them out.

Resolutions, ours:

- r_m are the features of the backbone when it is given that modality alone (the authors' BEiT-3 reads both at once), so
  that every model works which takes batches without some modalities.
- When an example of unknown class lacks a modality, its slot holds sum over c of q_c p_m[c]; q is the softmax,
  over a temperature, of the cosines between what is there and its own modality's prototypes.
- Prototypes count every example the same; the authors weigh clients by their numbers of examples. How many examples of
  each class a client has is sent with its prototypes.
- Contrasts are with all classes that have a prototype, not with those in the batch.
- In round 1, before there are prototypes, missing slots hold zeros (random numbers there), and there is no contrast.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, Protection, action
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.slots import FUSION, Slots, fused, head_name, insert
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.ownership import modalities_of
from confed.federation.params import Params, Scope, named_tensors
from confed.federation.protocols import Batch, Task, single_label
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.state import ServerState
from confed.federation.structure import feature_width, reads_absent
from confed.federation.train import Objective, train
from confed.federation.traits import Traits
from confed.losses.prototypes import class_sums, likeness, prototype_contrast

NEED = "PmcmFL has a prototype per class"

FUSED = "fused"  # the name of z among the representations
PROTOTYPES = f"{FUSION}.prototypes."
MEANS, COUNTS = "class_mean/", "class_count/"
"""What the names of a client's prototypes, and of its examples per class, begin with in a message."""


@dataclass(frozen=True)
class PmcmFL(Algorithm):
    """FedAvg with prototypes in place of missing modalities.

    Attributes:
        fusion_weight: of the contrast of the fused representation (0.01 in the authors' code).
        modality_weight: of the contrast of every single modality's (1e-8 there).
        temperature: of both, and of the weights q.
    """

    traits = Traits(
        label="PmcmFL",
        group="modalities",
        aggregates=(f"{PROTOTYPES}*",),
        sums=(f"{COUNTS}*",),
        updates_compressible=False,
        made_for="modalities",
        neutral="its fusion of modalities is another network than the backbone's",
        search={"fusion_weight": (0.001, 0.01, 0.1)},
    )
    fusion_weight: Annotated[float, NOT_NEGATIVE] = 0.01
    modality_weight: Annotated[float, NOT_NEGATIVE] = 0.0
    temperature: Annotated[float, POSITIVE] = 0.07

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Check that the model accepts missing modalities and that the task has one right answer."""
        reads_absent(model, "PmcmFL")
        feature_width(model, "PmcmFL")
        single_label(task, NEED)
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Insertion of the fusion, with the prototypes, between backbone and head."""
        head = model.get_submodule(head_name(model))
        answers = [p for p in head.parameters() if p.ndim == 2][-1].shape[0]
        slots = modalities_of(named_tensors(model))
        insert(model, _Fusion(slots, feature_width(model, "PmcmFL"), answers, self.temperature, rng))

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection of updates: prototypes would travel without it."""
        return "beside their updates clients send prototypes, which it does not cover"

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """FedAvg's round, with the clients' prototypes beside their weights."""
        calls: list[Call] = []
        for client in cohort:
            message = self.broadcast(server, client)
            expected = {n: t for n, t in message.tensors.items() if not n.startswith(PROTOTYPES)}
            for name in _reported(client, message.tensors):
                like = message.tensors[PROTOTYPES + name]
                expected |= {MEANS + name: like, COUNTS + name: like[:, 0]}
            calls.append(Call(client, "fit", message, expects=expected))
        return self.aggregate(server, (yield calls))

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean of the weights, and of every class's prototypes over the examples of all clients."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}

        def noted() -> Iterator[Reply]:
            for reply in replies:
                tensors = dict(reply.message.tensors)
                for name in [n.removeprefix(MEANS) for n in tensors if n.startswith(MEANS)]:
                    mean, count = tensors.pop(MEANS + name).double(), tensors.pop(COUNTS + name).double()
                    sums[name] = sums.get(name, 0) + count.unsqueeze(1) * mean
                    counts[name] = counts.get(name, 0) + count
                yield replace(reply, message=Message(tensors, reply.message.scalars))

        params = self.average(server, noted())
        for name, count in counts.items():
            before = params[PROTOTYPES + name]
            mean = (sums[name] / count.clamp(min=1).unsqueeze(1)).to(before.dtype)
            # a class that no client of this cohort has keeps its prototype.
            params[PROTOTYPES + name] = torch.where(count.unsqueeze(1) > 0, mean, before)
        return replace(server, round=server.round + 1, params=params)

    # Client ------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        """The task's loss, with own prototypes in missing slots, and the contrasts."""
        task = single_label(client.task, NEED)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            labels = task.labels(batch)
            seen, output = fused(model, batch, labels)
            loss = client.task.loss(output, batch)
            representations = {FUSED: (output.features, self.fusion_weight)}
            representations |= {name: (r, self.modality_weight) for name, r in seen.items()}
            for name, (representation, weight) in representations.items():
                if weight:
                    prototypes = model.get_parameter(PROTOTYPES + name)
                    loss = loss + weight * prototype_contrast(representation, prototypes, labels, self.temperature)
            yield loss

        return losses

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Local training; the reply has the weights and the prototypes of the client's examples."""
        client.load(message.tensors)
        loss = train(client, self.objective(client))
        client.remember()
        shared = {n: t for n, t in client.values(Scope.SHARED).items() if not n.startswith(PROTOTYPES)}
        return Message(shared | self._prototypes(client, message.tensors), {"loss": loss})

    def _prototypes(self, client: Client, received: Params) -> dict[str, Tensor]:
        """Class means and counts of every representation that the client reports; of classes it lacks, zeros."""
        task, device = single_label(client.task, NEED), next(client.model.parameters()).device
        names = _reported(client.info, received)
        likes = {name: received[PROTOTYPES + name] for name in names}
        sums = {name: torch.zeros_like(like, dtype=torch.float64) for name, like in likes.items()}
        counts = {name: torch.zeros(len(like), dtype=torch.float64) for name, like in likes.items()}
        client.model.eval()
        with torch.no_grad():
            for cpu_batch in client.data.train(client.local.eval_batch_size, client.rng("prototypes")):
                batch = to_device(cpu_batch, device)
                labels = task.labels(batch)
                seen, output = fused(client.model, batch, labels)
                for name, representation in {**seen, FUSED: output.features}.items():
                    total, count = class_sums(representation, labels, len(sums[name]))
                    sums[name] += total.cpu()
                    counts[name] += count.cpu()
        prototypes: dict[str, Tensor] = {}
        for name, like in likes.items():
            prototypes[MEANS + name] = (sums[name] / counts[name].clamp(min=1).unsqueeze(1)).to(like.dtype)
            prototypes[COUNTS + name] = counts[name].to(like.dtype)
        return prototypes


# The network ----------------------------------------------------------------------------------------------------


class _Fusion(Slots):
    """z of the representations of all modalities, and the prototypes of each and of z."""

    def __init__(
        self, slots: Sequence[str], width: int, classes: int, temperature: float, rng: torch.Generator
    ) -> None:
        super().__init__(slots, width, rng)
        self.temperature = temperature
        # Parameters, because models freeze their buffers; no gradient reaches them.
        self.prototypes = nn.ParameterDict({name: torch.zeros(classes, width) for name in (*slots, FUSED)})

    def stand_in(self, name: str, seen: Mapping[str, Tensor], labels: Tensor | None) -> Tensor:
        """Stand-in for a missing modality, (B, D)."""
        prototypes = self.prototypes[name].detach()
        if labels is not None:
            return prototypes[labels]
        q = [likeness(r, self.prototypes[other].detach(), self.temperature) for other, r in seen.items()]
        return (torch.stack(q).mean(dim=0) @ prototypes.float()).to(prototypes.dtype)


def _reported(client: ClientInfo, tensors: Iterable[str]) -> list[str]:
    """The representations of which a client makes prototypes: of its own modalities, and the fused one."""
    names = [n.removeprefix(PROTOTYPES) for n in tensors if n.startswith(PROTOTYPES)]
    return [n for n in names if n == FUSED or not client.modalities or n in client.modalities]
