"""FedAvg with zeros, mean features or learned tokens for missing modalities: baselines.

What stands in goes where PmcmFL puts its prototypes, into the same network (:mod:`confed.federation.families.slots`),
so that the two differ in nothing but what it is. Notation: r_m the representation of an example's modality m; the slot
of a modality that the example lacks holds s_m, in training and when it is asked.

- "zero": s_m = 0.
- "mean": s_m = sum over owners k of N_k mean_k(r_m) / sum N_k, where mean_k is over the training examples of k that
  have m, after k has trained. Owners send it in every round, and of it nothing else; all clients get s_m. In round 1
  it is 0.
- "token": s_m learns wherever it is read. The server's is the mean weighted by how many examples a client read it for,
  so that clients with complete examples have no part in it.

Zeros and means are what practice fills gaps with; a learned embedding in their place is that of Lee, Tsai, Chiu and
Lee, "Multimodal prompting with missing modalities for visual recognition", CVPR 2023, in its simplest form (theirs are
prompts, one per set of missing modalities).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm, Protection, action, keeps_protections
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.slots import FUSION, Slots, insert, represented
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.ownership import modalities_of, owned
from confed.federation.params import Mean, Params, Scope, named_tensors
from confed.federation.protocols import Batch, Task
from confed.federation.specs import model_spec
from confed.federation.state import ServerState
from confed.federation.structure import feature_width, reads_absent
from confed.federation.train import Objective, train
from confed.federation.traits import Traits

Kind = Literal["zero", "mean", "token"]

MEANS, TOKENS = f"{FUSION}.means.", f"{FUSION}.tokens."
READ = "read/"  # what the names of the numbers of examples begin with for which a client read each token


@dataclass(frozen=True)
class ModalityFill(Algorithm):
    """FedAvg with stand-ins for missing modalities.

    Attributes:
        kind: what stands in.
    """

    traits = Traits(
        label="Fill-in",
        group="modalities",
        synchronous="its clients report statistics beside their updates, which no older model explains",
        aggregates=(f"{MEANS}*",),
        sums=(f"{READ}*",),
        made_for="modalities",
        neutral="its fusion of modalities is another network than the backbone's",
    )
    kind: Kind = "zero"

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Check that the model accepts missing modalities and does not write captions."""
        reads_absent(model, "Fill-in")
        feature_width(model, "Fill-in")
        if model_spec(model).writes == "captions":
            raise ValueError(
                "Fill-in puts its stand-ins among the features of a whole example, and a model that writes reads none"
            )
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Insertion of the fusion, with stand-ins, between backbone and head."""
        slots = modalities_of(named_tensors(model))
        insert(model, _Fusion(slots, feature_width(model, "Fill-in"), self.kind, rng))

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection of updates, unless zeros stand in: means would travel without it, tokens have weights."""
        if self.kind == "zero":
            return super().unsupported_reason(protection)
        return f"what stands in for missing modalities (kind {self.kind!r}) travels beside the updates, without it"

    # Server ------------------------------------------------------------------------------------------------

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """FedAvg's round; replies carry means of what a client owns, or how often it read each token."""
        calls: list[Call] = []
        for client in cohort:
            message = self.broadcast(server, client)
            expected = {n: t for n, t in message.tensors.items() if not n.startswith(MEANS) or _owns(client, n)}
            expected |= {READ + n.removeprefix(TOKENS): torch.zeros(1) for n in expected if n.startswith(TOKENS)}
            calls.append(Call(client, "fit", message, expects=expected))
        return self.aggregate(server, (yield calls))

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean of the replies: of means over the owners, of tokens over those who read them, so often."""
        tokens = Mean(self.accumulator_dtype)

        def noted() -> Iterator[Reply]:
            for reply in replies:
                rest = dict(reply.message.tensors)
                for name in [n for n in rest if n.startswith(READ)]:
                    count, token = float(rest.pop(name)), TOKENS + name.removeprefix(READ)
                    value = rest.pop(token)
                    if count > 0:
                        tokens.add({token: value}, count)
                yield replace(reply, message=Message(rest, reply.message.scalars))

        # Names that no client sent keep the server's values.
        mean = tokens.result(self.average(server, noted()))
        stepped = self.server.step(server, mean)
        # a mean is no weight: the server's optimiser has no part in it.
        modality_means = {name: value for name, value in mean.items() if name.startswith(MEANS)}
        return replace(stepped, params={**stepped.params, **modality_means})

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Local training; the reply has the weights and the statistics of stand-ins."""
        client.load(message.tensors)
        slots, read = modalities_of(client.tensors), Counter[str]()
        loss = train(client, _counting(client, slots, read))
        client.remember()
        shared = client.values(Scope.SHARED)
        reported = {n: t for n, t in shared.items() if not n.startswith(MEANS)}
        reported |= _means(client, {n: t for n, t in shared.items() if n.startswith(MEANS) and _owns(client.info, n)})
        for name in [n.removeprefix(TOKENS) for n in shared if n.startswith(TOKENS)]:
            reported[READ + name] = torch.tensor([float(read[name])])
        return Message(reported, {"loss": loss})


def _owns(client: ClientInfo, name: str) -> bool:
    """Whether a client has the modality whose mean has this name."""
    return not client.modalities or name.removeprefix(MEANS) in client.modalities


def _counting(client: Client, slots: Sequence[str], read: Counter[str]) -> Objective:
    """The task's loss; ``read`` counts the examples in which something stood in for a modality."""

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        output = model(batch)
        present = owned(batch)
        read.update({name: len(output.features) for name in slots if name not in present})
        yield client.task.loss(output, batch)

    return losses


def _means(client: Client, likes: Params) -> dict[str, Tensor]:
    """The mean representation of each modality over the client's training examples that have it."""
    sums = {name: torch.zeros_like(like, dtype=torch.float64) for name, like in likes.items()}
    counts = Counter[str]()
    device = next(client.model.parameters()).device
    client.model.eval()
    with torch.no_grad():
        for batch in client.data.train(client.local.eval_batch_size, client.rng("means")) if likes else ():
            for name, r in represented(client.model, to_device(batch, device), modalities_of(client.tensors)).items():
                if MEANS + name in sums:
                    sums[MEANS + name] += r.double().sum(dim=0).cpu()
                    counts[MEANS + name] += len(r)
    return {name: (total / max(counts[name], 1)).to(likes[name].dtype) for name, total in sums.items()}


# The network ----------------------------------------------------------------------------------------------------


class _Fusion(Slots):
    """z of the representations of all modalities, and what stands in for each."""

    def __init__(self, slots: Sequence[str], width: int, kind: Kind, rng: torch.Generator) -> None:
        super().__init__(slots, width, rng)
        # Means are parameters, because models freeze their buffers.
        self.means = nn.ParameterDict({name: torch.zeros(width) for name in (slots if kind == "mean" else ())})
        self.tokens = nn.ParameterDict(
            {name: torch.randn(width, generator=rng) for name in (slots if kind == "token" else ())}
        )

    def stand_in(self, name: str, seen: Mapping[str, Tensor], labels: Tensor | None) -> Tensor:
        """Stand-in for a missing modality, (B, D)."""
        like = next(iter(seen.values()))
        if name in self.tokens:
            return self.tokens[name].to(like.dtype).expand_as(like)
        return (
            self.means[name].detach().to(like.dtype).expand_as(like) if name in self.means else torch.zeros_like(like)
        )
