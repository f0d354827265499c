"""CreamFL: representations of public pairs travel, weighed by a contrast and distilled into the server's model.

Yu, Liu, Wang, Xu and Liu, "Multimodal federated learning via contrastive representation ensemble", ICLR 2023 (arXiv
2302.08888). No value of a model travels in training: server and clients have models of their own. (Evaluations of the
server's model on clients' examples send it to them, as every global model.) Of the paper its abstract, a part of its
introduction and a reader's notes on sections 3.1 to 3.3 could be read; the equations below are those that its released
code computes (github.com/FLAIR-THU/CreamFL, without a licence, so nothing of it is here).

Notation: (x_k, y_k), k = 1 ... P, the public pairs of a picture and a text; i_k and t_k a client's representations of
them, of unit length; I_k and T_k the server's (the global ones); i'_k and t'_k those of the client's own model before
the round; tau = 0.5. In a round the server trains on the public pairs by the task's loss (with the task "retrieval"
CLIP's contrast) and sends I and T. Every client trains on its own examples, with a batch of public pairs beside each
batch of its own (LCR, local training by contrastive regularisation):

    L       = L_task + gamma (L_inter + L_intra)
    L_inter = mean_k -log softmax_j(i_k . T_j / tau)[k]  +  mean_k -log softmax_j(t_k . I_j / tau)[k],   j = 1 ... P
    L_intra = mean_k -log( e^(i_k . I_k / tau) / (e^(i_k . I_k / tau) + e^(i_k . i'_k / tau)) ), mean of both modalities

and sends its i and t of all pairs. The server weighs client c's representation of picture k by how well it finds its
text among the global ones (GCA, global-local contrastive aggregation), texts likewise, and distils:

    s_k^c = log softmax_j(i_k^c . T_j)[k]      w_k^c = softmax over c of s_k^c      i*_k = sum_c w_k^c i_k^c
    min over the server's model of mean_k ||I_k - i*_k||^2 + ||T_k - t*_k||^2

A text that several pairs share travels once, and stands in the sums as often as it has pairs. The public pairs are an
unseen place that the recipe names: server and clients hold it, texts included, and the place is tried no more.

Clients of one modality (``pictures_only``, ``texts_only``): of the equations they keep the terms of their modality, so
that i_k meets the server's texts T though the client has no text of its own. L_task classifies their own examples by
class number, W the client's own linear layer and s the model's scaling of similarities:

    L_task = mean_b -log softmax_c(s(W i_b))[c_b]      with t_b in place of i_b for texts

They send i or t alone; both sums over c are over the clients that sent the modality, and a modality that nobody sent
is not distilled.

What the server learns of a client: its representations of the public pairs, each round, and so what its model tells
apart; of its examples nothing else. Clients learn the server's representations.

Deviations: server and clients have the recipe's model (the paper's is larger at the server, and differs between
clients); the code alternates passes over a client's own examples and over the public ones, each with the optimiser as
it was left; the code's classification has a margin of 4 on the right score and half the cross-entropy of the layer's
rows against each other beside it, which are not here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.actions import among_offered
from confed.federation.algorithm import Algorithm, Protection, action
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.prompts import CONTEXT, ClassifiesByTexts, as_classifier
from confed.federation.families.public_data import SERVER, ServerSide
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, ClientData, Task
from confed.federation.randomness import derive, isolated
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE
from confed.federation.state import ServerState
from confed.federation.train import Objective, train
from confed.federation.traits import Traits
from confed.losses.info_nce import inter_modal, match_scores, model_contrastive

PICTURES, TEXTS = "public.pictures", "public.texts"
"""Names of representations in messages: (P, D), and of distinct texts (T, D)."""

BOTH = (PICTURES, TEXTS)
OTHER = {PICTURES: TEXTS, TEXTS: PICTURES}

CLASSIFIER = "own_classes"  # the module with W, where there are clients of one modality


class Views(NamedTuple):
    """A model's representations of the public pairs, none of a modality that it does not read."""

    pictures: Tensor  # (P, D)
    texts: Tensor  # of the distinct texts, (T, D)
    text_of: Tensor  # each pair's text, int64 (P,)

    @property
    def paired(self) -> Tensor:
        """Representations of each pair's text, (P, D)."""
        return self.texts[self.text_of]

    def of(self, modality: str) -> Tensor:
        """Representations of every pair in a modality, (P, D)."""
        return self.pictures if modality == PICTURES else self.paired

    def message(self, modalities: Sequence[str]) -> dict[str, Tensor]:
        """What travels of these modalities."""
        views = {PICTURES: self.pictures, TEXTS: self.texts}
        return {name: views[name] for name in modalities}


@dataclass(frozen=True)
class CreamFL(Algorithm):
    """Representations of public pairs as the only exchange, with a server model that learns from them.

    Attributes:
        public: the unseen place whose pairs are public.
        contrast: weight gamma of both contrasts at clients.
        temperature: tau of both.
        aggregation: "contrastive" weights, or the plain "mean" of the clients' representations.
        server_epochs: passes of the server over the public pairs by the task's loss, per round.
        distill_epochs: passes of the server towards the aggregated representations, per round; with 0 the server
            learns nothing from clients.
        server_lr: the server's learning rate; ``local.lr`` by default.
        pictures_only: clients whose training examples are pictures with class numbers, and no texts.
        texts_only: clients whose training examples are texts with class numbers, and no pictures.
    """

    public: str = ""
    contrast: Annotated[float, NOT_NEGATIVE] = 0.5
    temperature: Annotated[float, POSITIVE] = 0.5
    aggregation: Literal["contrastive", "mean"] = "contrastive"
    server_epochs: Annotated[int, NOT_NEGATIVE] = 1
    distill_epochs: Annotated[int, NOT_NEGATIVE] = 1
    server_lr: Annotated[float | None, POSITIVE] = None
    pictures_only: tuple[str, ...] = ()
    texts_only: tuple[str, ...] = ()
    side: ServerSide | None = field(default=None, init=False, repr=False, compare=False)

    traits = Traits(
        label="CreamFL",
        group="distillation",
        private_beside=True,
        made_for="prompts",
        sends_values=False,
        clients_may_lack_modalities=False,
        synchronous="representations of a round are weighed against those of one state of the server's model",
        neutral="representations are shared and no values of models, so it never becomes FedAvg",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := [client for client in self.pictures_only if client in self.texts_only]:
            raise ValueError(
                f"algorithm.pictures_only and algorithm.texts_only must name different clients, got {twice[0]!r} twice"
            )

    # Before anything runs ----------------------------------------------------------------------------------

    def named_clients(self) -> Mapping[str, Sequence[str]]:
        """Clients of one modality."""
        return {"pictures_only": self.pictures_only, "texts_only": self.texts_only}

    def modalities(self, client: str) -> tuple[str, ...]:
        """What a client reads, by the names in messages."""
        if client in self.pictures_only:
            return (PICTURES,)
        return (TEXTS,) if client in self.texts_only else BOTH

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """W of zeros, where there are clients of one modality; nothing is drawn."""
        if self.pictures_only or self.texts_only:
            reads = as_classifier(model)
            like = reads.handwritten_features(torch.arange(1))
            layer = nn.Linear(like.shape[1], reads.class_count, bias=False)
            nn.init.zeros_(layer.weight)
            model.add_module(CLASSIFIER, layer.to(like))

    def rules(self, client: ClientInfo) -> Rules:
        """W is private to clients of one modality; all else is the model that a client keeps."""
        if not (self.pictures_only or self.texts_only):
            return super().rules(client)
        alone = self.modalities(client.id) != BOTH
        return {f"{CLASSIFIER}.*": Scope.PRIVATE if alone else Scope.FROZEN, "*": Scope.SHARED}

    def public_place(self) -> str:
        """The place that the recipe names."""
        return self.public

    def with_public_data(self, examples: int, answers: int) -> Self:
        """The method as it is: what travels has the shape of the server's own representations."""
        return self

    def with_server_side(self, side: ServerSide) -> Self:
        """Setup of the server's model and public pairs."""
        return self.told(side=side)

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Check of the model."""
        if not isinstance(model, ClassifiesByTexts):
            raise ValueError(
                "CreamFL sends representations of pictures and texts, and "
                f"{type(model).__name__} has none of texts: set model.name to 'clip'"
            )
        if not self.server.plain:
            raise ValueError("CreamFL averages no updates, so algorithm.server must be left as it is")
        return self

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection of updates: there are none, and the server must see each client's representations."""
        if protection == "secure_sum":
            return "the server weighs every client's representations by how well they match, so it must see each alone"
        return "clients send representations of public pairs, and no updates of a model"

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round: training on public pairs, representations to and from clients, aggregation, distillation."""
        if self.side is None or not len(self.side.data):
            raise ValueError(
                "CreamFL's server trains on the public pairs, and has none: it needs the data of the place "
                f"{self.public!r} itself, of which a data card says the number alone"
            )
        side = self.side
        learner = side.learner(server, self.server_lr)
        with isolated(derive(side.seed, server.round, SERVER, "pairs")):
            train(learner, Algorithm.objective(self, learner), self.server_epochs, order="pairs")
        server_views = _views(learner, side.data)
        sent = Message(server_views.message(BOTH))
        wanted = {client.id: server_views.message(self.modalities(client.id)) for client in cohort}
        replies = yield [Call(client, "fit", sent, expects=wanted[client.id]) for client in cohort]
        heard = [reply.message.tensors for reply in replies if reply.error is None]
        if heard and self.distill_epochs:
            towards = aggregated(heard, server_views, contrastive=self.aggregation == "contrastive")
            with isolated(derive(side.seed, server.round, SERVER, "distil")):
                train(learner, _distillation(learner, *towards), self.distill_epochs, order="distil")
        return replace(server, round=server.round + 1, params=learner.values(Scope.SHARED))

    # Client ------------------------------------------------------------------------------------------------

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Training of the client's own model beside the global representations; its representations are sent."""
        if client.public is None or not len(client.public):
            raise ValueError(f"CreamFL needs public pairs at every client, and {client.info.id!r} has none")
        personal, shown = client.state.tensors.get("personal", client.initial), self.modalities(client.info.id)
        client.load({name: personal[name] for name in client.names(Scope.SHARED)})
        before = _views(client, client.public, shown)
        received = Views(message.tensors[PICTURES], message.tensors[TEXTS], before.text_of)
        pairs, texts = len(before.text_of), int(before.text_of.max()) + 1
        if (len(received.pictures), len(received.texts)) != (pairs, texts):
            raise ValueError(
                f"the public pairs of {client.info.id!r} are not the server's: {pairs} pictures and {texts} texts, the "
                f"server's {len(received.pictures)} and {len(received.texts)}"
            )
        loss = train(client, self._regularised(client, received, before))
        client.keep_personal = True  # there is no other model that it could go on from
        client.remember()
        return Message(_views(client, client.public, shown).message(shown), {"loss": loss})

    def _regularised(self, client: Client, received: Views, before: Views) -> Objective:
        """The client's own loss plus both contrasts on a batch of public pairs (LCR)."""
        shown = self.modalities(client.info.id)
        objective = Algorithm.objective(self, client) if shown == BOTH else _own_classes(client, shown[0])
        if not self.contrast:
            return objective
        device = next(client.model.parameters()).device
        stream = _public_batches(client)
        theirs = {name: received.of(name).to(device) for name in BOTH}
        old = {name: before.of(name).to(device) for name in shown}

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            for loss in objective(model, batch):
                public = to_device(next(stream), device)
                k = public["index"]
                ours = {name: _represented(client, public, name) for name in shown}
                inter = [inter_modal(z, theirs[OTHER[name]], k, self.temperature) for name, z in ours.items()]
                intra = model_contrastive(
                    torch.cat(list(ours.values())),
                    torch.cat([theirs[name][k] for name in shown]),
                    torch.cat([old[name][k] for name in shown]),
                    self.temperature,
                )
                yield loss + self.contrast * (torch.stack(inter).sum() + intra)

        return losses


def _own_classes(client: Client, modality: str) -> Objective:
    """Classification of the client's examples of one modality by class number (L_task)."""

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        logits = model.get_submodule(CLASSIFIER)(_represented(client, batch, modality))
        scores = among_offered(as_classifier(model).similarity_scores(logits), batch)
        yield functional.cross_entropy(scores, batch["label"])

    return losses


# Equations ------------------------------------------------------------------------------------------------------


def aggregated(
    heard: Sequence[Params], server_views: Views, *, contrastive: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Aggregated representations i* and t* of all pairs, (P, D) each (GCA); None where nobody sent the modality.

    Args:
        heard: the clients' replies.
        server_views: the server's representations.
        contrastive: with weights by :func:`match_scores`, (clients, P); otherwise all weights are the same.
    """

    def weighed(views: Sequence[Tensor], others: Tensor) -> Tensor | None:
        if not views:
            return None
        scores = torch.stack([match_scores(v, others) if contrastive else v.new_zeros(len(v)) for v in views])
        return sum((w.unsqueeze(1) * v for w, v in zip(scores.softmax(0), views, strict=True)), torch.zeros(()))

    pictures = [reply[PICTURES] for reply in heard if PICTURES in reply]
    texts = [reply[TEXTS][server_views.text_of] for reply in heard if TEXTS in reply]
    return weighed(pictures, server_views.paired), weighed(texts, server_views.pictures)


def _distillation(learner: Client, pictures: Tensor | None, texts: Tensor | None) -> Objective:
    """The squared distance from the aggregated representations, (P, D) each, of the modalities that there are."""
    device = next(learner.model.parameters()).device
    goals = {n: goal.to(device) for n, goal in ((PICTURES, pictures), (TEXTS, texts)) if goal is not None}

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        k = batch["index"]
        gaps = [(_represented(learner, batch, name) - goal[k]).square() for name, goal in goals.items()]
        if any(gap.requires_grad for gap in gaps):  # pictures alone teach a frozen picture tower nothing
            yield torch.stack(gaps).sum(0).sum(1).mean()

    return losses


# Representations ------------------------------------------------------------------------------------------------


def _represented(client: Client, batch: Batch, modality: str) -> Tensor:
    """Representations i or t of a batch of pairs, (B, D)."""
    if modality == PICTURES:
        return as_classifier(client.model).image_features(batch)
    classes, text_of = _distinct(batch["label"])
    return _texts(client, classes)[text_of]


def _distinct(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct labels, (T,), and which of them each pair has, (B,)."""
    return cast("tuple[Tensor, Tensor]", torch.unique(labels, return_inverse=True))  # pyright: ignore


def _texts(client: Client, classes: Tensor) -> Tensor:
    """Representations of the texts of some answers, by learned context where the model has some, (T, D)."""
    reads = as_classifier(client.model)
    if reads.context_shape[0]:
        return reads.class_features(client.tensors[CONTEXT], classes)
    return reads.handwritten_features(classes)


def _views(client: Client, data: ClientData, shown: Sequence[str] = BOTH) -> Views:
    """The model's representations of all public pairs in the modalities that it reads, in main memory."""
    client.model.eval()
    device = next(client.model.parameters()).device
    none = torch.zeros(0, 0)
    representations: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in data.train(client.local.eval_batch_size, client.rng("representations")):
            device_batch = (
                _represented(client, to_device(batch, device), PICTURES).float().cpu() if PICTURES in shown else none
            )
            representations.append((batch["index"], batch["label"], device_batch))
        index, labels, pictures = (torch.cat(column) for column in zip(*representations, strict=True))
        order = index.argsort()
        classes, text_of = _distinct(labels[order])
        texts = _texts(client, classes.to(device)).float().cpu() if TEXTS in shown else none
    return Views(pictures[order] if PICTURES in shown else none, texts, text_of)


def _public_batches(client: Client) -> Iterator[Mapping[str, Tensor]]:
    """Batches of public pairs without end, shuffled anew in every pass."""
    if client.public is not None:
        for number in count():
            yield from client.public.train(client.local.batch_size, client.rng(f"public/{number}"))
