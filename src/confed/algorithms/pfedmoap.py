"""pFedMoAP: each client mixes text features of its own prompt and of other clients' prompts by an attention gate.

Luo, Chen and Wu, "Mixture of experts made personalized: federated prompt learning for vision-language models", ICLR
2025 (arXiv 2410.10114).

Notation: p the client's context (M, d), p_1 ... p_K those of the K clients whose latest prompts are nearest to its own;
g_c(.) text features of class c; P(.) every s-th feature of a vector, about ``width`` of them; tau the temperature.

    e_c = [P(g_c(p)), P(g_c(p_1)), ..., P(g_c(p_K))]                the experts, the others without gradient
    m_c(x) = MultiHead(query P(f(x)), keys and values e_c),         attention weights softmax(scaling * q k)
    score of c = (lam * f(x) g_c(p) + P(f(x)) m_c(x)) / tau

p is averaged and every round starts from the mean, which is the global model. The gate (four linear layers) never
leaves the client. A client that has sent no prompt yet has no experts.

**What clients learn of each other.** A client is sent single prompts of other clients as they were trained, not only
their mean: K of them, from the nearest on, without names. Who knows a prompt can test for the examples that it was
trained on. The server keeps the latest prompt of every client. Secure aggregation is therefore refused, and noise at
the server, which protects what all updates add up to; noise at the client (``update_privacy.at = "client"``) is on
every prompt before anybody sees it.

Deviations: gate and prompt have one optimiser and learning rate; the gate has as many heads as divide its width. From
the released code, as a public copy has it: ``lam``, ``scaling`` in place of 1 / sqrt(d_k), features chosen by a stride,
no dropout in the gate though one is named, no experts in a client's first round. Distances are Euclidean; that of the
copy was changed by its author.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from confed.federation.actions import action
from confed.federation.algorithm import Protection
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.last_head import Deploying
from confed.federation.families.prompts import CONTEXT, as_classifier, classes_of, learned_context, scores_of
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from confed.federation.state import ServerState
from confed.federation.train import train
from confed.federation.traits import Traits

GATE, EXPERTS = "gate", "experts"  # modules: the gate, and the other clients' prompts with how many of them there are
VECTORS, THERE = f"{EXPERTS}.vectors", f"{EXPERTS}.there"

POOL = "prompts"  # the server's slot with the latest prompt of every client


@dataclass(frozen=True)
class PFedMoAP(Deploying):
    """A mixture of the client's and other clients' prompts.

    Attributes:
        experts: K, prompts of other clients; fewer where there are fewer clients.
        lam: weight of the scores of the client's own prompt.
        width: features in the gate, about so many; at most those of the model.
        heads: of the gate's attention, at most.
        scaling: what products of queries and keys are multiplied by.
    """

    experts: Annotated[int, AT_LEAST_ONE] = 9
    lam: Annotated[float, NOT_NEGATIVE] = 0.5
    width: Annotated[int, AT_LEAST_ONE] = 128
    heads: Annotated[int, AT_LEAST_ONE] = 8
    scaling: Annotated[float, POSITIVE] = 10.0

    traits = Traits(
        steps_alone=True,
        label="pFedMoAP",
        group="prompts",
        private_beside=True,
        clients_may_leave=False,
        aggregates=(f"{EXPERTS}.*",),
        made_for="prompts",
        requires=(learned_context,),
        neutral="from the second round on scores are those of several prompts",
        search={"lam": (0.1, 0.5, 1.0)},
    )

    # Before anything runs ----------------------------------------------------------------------------------

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """The gate, and zeros where other clients' prompts go."""
        reads = as_classifier(model)
        features = reads.handwritten_features(torch.arange(1)).shape[1]
        model.add_module(GATE, Gate(features, self.width, self.heads, self.scaling, rng))
        others = nn.Module()
        # Parameters, as a model's buffers are constants; none gets a gradient.
        others.vectors = nn.Parameter(torch.zeros(self.experts, *reads.context_shape))
        others.there = nn.Parameter(torch.zeros(1))
        model.add_module(EXPERTS, others)

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The model with the mixture in place of its own scores."""
        return _Mixing(model, self.lam)

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection but noise at the client: single prompts are handed on."""
        if protection == "secure_sum":
            return "the server compares single prompts and hands them on, which a sum would hide"
        if protection == "robust":
            return "single prompts are handed on, whatever the mean is"
        if self.update_privacy is None or self.update_privacy.at == "server":
            return "clients are sent single prompts, which noise at the server does not cover; take at = 'client'"
        return super().unsupported_reason(protection)

    def rules(self, client: ClientInfo) -> Rules:
        """The gate is private, context and experts are shared."""
        return {f"{GATE}.*": Scope.PRIVATE, "*": Scope.SHARED}

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round of training: every client is sent the mean and its nearest prompts, and sends its own prompt."""
        expected = {CONTEXT: server.params[CONTEXT]}
        calls: list[Call] = []
        for client in cohort:
            message = self.broadcast(server, client)
            tensors = {**message.tensors, **self._experts(server, client)}
            calls.append(Call(client, "fit", Message(tensors, message.scalars), expects=expected))
        replies = yield calls
        return self.aggregate(server, replies)

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean, and the latest prompt of every client."""
        pool = dict(server.slots.get(POOL, {}))

        def seen() -> Iterator[Reply]:
            for reply in replies:
                if reply.error is None:
                    pool[reply.client.id] = reply.message.tensors[CONTEXT]
                yield reply

        params = self.average(server, seen())
        return replace(server, round=server.round + 1, params=params, slots={**server.slots, POOL: pool})

    def _experts(self, server: ServerState, client: ClientInfo) -> Params:
        """The prompts that a client is sent; none before it has sent its own."""
        pool, empty = server.slots.get(POOL, {}), server.params[VECTORS]
        if client.id not in pool:
            return {}
        others = [pool[name] for name in sorted(pool) if name != client.id]
        neighbours = nearest(pool[client.id], others, self.experts)
        if not neighbours:
            return {}
        vectors = torch.cat([torch.stack(neighbours), empty[len(neighbours) :]])
        return {VECTORS: vectors, THERE: torch.full_like(server.params[THERE], len(neighbours))}

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Training of prompt and gate; the prompt alone is sent."""
        client.load(message.tensors)
        loss = train(client, self.objective(client))
        client.remember()
        return Message({CONTEXT: client.values(Scope.SHARED)[CONTEXT]}, {"loss": loss})


def nearest(prompt: Tensor, others: Sequence[Tensor], count: int) -> list[Tensor]:
    """The ``count`` prompts with the smallest Euclidean distance from a client's own, the nearest first."""
    order = sorted(range(len(others)), key=lambda i: float((others[i].double() - prompt.double()).square().sum()))
    return [others[i] for i in order[:count]]


class Gate(nn.Module):
    """Attention of a picture over the experts of each class, on some of the features.

    Args:
        features: D of the model.
        width: about how many of them are read.
        heads: of the attention, at most; as many as divide the width.
        scaling: of the products.
        rng: where initial values come from.
    """

    def __init__(self, features: int, width: int, heads: int, scaling: float, rng: torch.Generator) -> None:
        super().__init__()
        self._stride = max(1, features // width)
        read = math.ceil(features / self._stride)
        self._heads, self._scaling = math.gcd(heads, read), scaling
        self.query, self.key, self.value, self.output = (_linear(read, rng) for _ in range(4))

    def forward(self, pictures: Tensor, experts: Tensor) -> Tensor:
        """P(f(x)) m_c(x), (B, K).

        Args:
            pictures: f(x), (B, D).
            experts: text features of each class's prompts, (K, E, D).
        """
        seen, texts = pictures[:, :: self._stride], experts[..., :: self._stride]
        queries = self._split(self.query(seen))
        keys, values = self._split(self.key(texts)), self._split(self.value(texts))
        weights = (self._scaling * torch.einsum("bhj,kehj->bkhe", queries, keys)).softmax(-1)
        mixed: Tensor = self.output(torch.einsum("bkhe,kehj->bkhj", weights, values).flatten(2))
        return (seen.unsqueeze(1) * mixed).sum(-1)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.reshape(*rows.shape[:-1], self._heads, -1)


def _linear(width: int, rng: torch.Generator) -> nn.Linear:
    """A layer as the library draws it, from the run's generator."""
    layer = nn.Linear(width, width)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5, generator=rng)
    return layer


class _Mixing(nn.Module):
    """The model with the scores of the mixture; text features of the experts are computed once."""

    def __init__(self, model: nn.Module, lam: float) -> None:
        super().__init__()
        self.model, self._lam = model, lam
        self._known: tuple[Tensor, Tensor] | None = None

    def forward(self, batch: Batch) -> Output:
        reads = as_classifier(self.model)
        features = reads.image_features(batch)
        classes = classes_of(batch, reads.class_count).to(features.device)
        texts = reads.class_features(self.model.get_parameter(CONTEXT), classes)
        similarities = features @ texts.T
        count = int(self.model.get_parameter(THERE).detach())
        if count:
            others = self._texts(self.model.get_parameter(VECTORS).detach()[:count])[:, classes]
            experts = torch.cat([texts.unsqueeze(0), others]).transpose(0, 1)
            similarities = self._lam * similarities + self.model.get_submodule(GATE)(features, experts)
        scores = reads.similarity_scores(similarities)
        return Output(scores_of(scores, classes, batch, reads.class_count), features)

    def _texts(self, prompts: Tensor) -> Tensor:
        """Text features of all classes behind each prompt, without gradient, (E, C, D)."""
        if self._known is None or not torch.equal(self._known[0], prompts):
            reads = as_classifier(self.model)
            every = torch.arange(reads.class_count, device=prompts.device)
            with torch.no_grad():
                made = torch.stack([reads.class_features(prompt, every) for prompt in prompts])
            self._known = (prompts.clone(), made)
        return self._known[1]
