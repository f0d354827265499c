"""FedMD: distillation between heterogeneous models through scores on public examples.

Li and Wang, "FedMD: heterogenous federated learning via model distillation", 2019 (arXiv 1910.03581), Algorithm 1;
details (the loss, uniform mean) follow the authors' code.

Notation: D_0 the public examples, f_k(x) client k's scores before the softmax. Before its first exchange a client
trains on D_0 and then on its own examples (transfer learning). In a round every client scores a part of D_0, drawn
anew; the server takes the plain mean; every client moves towards it, and then trains on its own examples again:

    f(x) = (1 / K) sum over k of f_k(x)        communicate, aggregate, distribute
    min over f_k of mean |f_k(x) - f(x)|       digest
    L_task on the client's own examples        revisit

No value of a model ever travels, so there is no global model. The public examples are those of an unseen place that the
recipe names: every client holds them, with the parts that it has modalities for, and the place is tried no more.

Deviations: all clients have the recipe's model here; the paper's early stopping of the first trainings is a number of
passes; numbers of passes are options and ``local.epochs``, the optimiser is ``local``'s (the authors have Adam with
0.001, 5000 public examples a round, one pass over these and four over the client's own).
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.algorithm import Algorithm, Protection, action
from confed.federation.batches import to_device
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message
from confed.federation.ownership import owned, restricted
from confed.federation.params import Mean, Params, Rules, Scope
from confed.federation.protocols import Batch, ClientData
from confed.federation.randomness import generator
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.state import ServerState
from confed.federation.train import train
from confed.federation.traits import Traits

SCORES = "logits"  # the name of f_k(x), and of their mean, in messages and batches


@dataclass(frozen=True)
class FedMD(Algorithm):
    """Federated distillation through scores on public examples; models stay at their clients.

    Attributes:
        public: the unseen place whose examples are public.
        items: public examples per round; 0 for all.
        public_epochs: passes over the public examples, with their answers, before the first exchange.
        digest_epochs: passes over a round's public examples towards the mean of the scores.
        scored: number of public examples, and of scores of each (:meth:`with_public_data`): replies of any other shape
            are refused. Where it is None, the first reply says what shape scores have.
    """

    traits = Traits(
        label="FedMD",
        group="distillation",
        has_global=False,
        updates_compressible=False,
        neutral="scores are shared and no values of models, so it never becomes FedAvg",
        search={"digest_epochs": (1, 2, 4)},
    )
    public: str = ""
    items: Annotated[int, NOT_NEGATIVE] = 0
    public_epochs: Annotated[int, NOT_NEGATIVE] = 1
    digest_epochs: Annotated[int, NOT_NEGATIVE] = 1
    scored: tuple[int, int] | None = field(default=None, init=False)

    def public_place(self) -> str:
        """The place that the recipe names."""
        return self.public

    def with_public_data(self, examples: int, answers: int) -> "FedMD":
        """Setup of the shape of scores on public examples."""
        return self.told(scored=(examples, answers))

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection of updates: there are none."""
        return "clients send scores of public examples, and no updates of a model"

    def rules(self, client: ClientInfo) -> Rules:
        """Every trained tensor is private."""
        return {"*": Scope.PRIVATE}

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round: collection of scores, averaging, and distillation from the mean at the clients that sent some."""
        expects = None
        if self.scored is not None:
            examples, answers = self.scored
            expects = {SCORES: torch.empty(min(self.items or examples, examples), answers, device="meta")}
        replies = yield [Call(client, "predict", Message(), expects=expects) for client in cohort]
        mean, heard = Mean(self.accumulator_dtype), list[ClientInfo]()
        like: Params = {}
        for reply in replies:
            if reply.error is not None:
                continue
            if not _alike(reply.message.tensors, like):
                warnings.warn(
                    f"FedMD leaves out a reply of {reply.client.id!r}: no scores like the others'", stacklevel=2
                )
                continue
            like = reply.message.tensors
            mean.add(like, 1.0)
            heard.append(reply.client)
        consensus = Message(mean.result(like))
        for _ in (yield [Call(client, "fit", consensus) for client in heard]):
            pass
        return replace(server, round=server.round + 1)

    # Client ------------------------------------------------------------------------------------------------

    @action
    def predict(self, client: Client, message: Message) -> Message:
        """Scores of this round's public examples; a client without a model trains one before."""
        client.load({})
        if "private" not in client.state.tensors:
            public = _Public(client, torch.arange(len(_held(client))))
            train(replace(client, data=public), _answered(client), self.public_epochs, order="public")
            train(client, self.objective(client), order="first")
            client.remember()
        public = _Public(client, self._chosen(client))
        predictions: list[tuple[Tensor, Tensor]] = []
        client.model.eval()
        device = next(client.model.parameters()).device
        with torch.no_grad():
            for batch in public.train(client.local.eval_batch_size, client.rng("scores")):
                scores = client.model(to_device(batch, device)).logits
                predictions.append((public.position[batch["index"]], scores.float().cpu()))
        positions, scores = (torch.cat(column) for column in zip(*predictions, strict=True))
        return Message({SCORES: scores[positions.argsort()]})

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Distillation from the mean of the scores, then training on the client's own examples."""
        client.load({})
        public = _Public(client, self._chosen(client), message.tensors[SCORES])
        train(replace(client, data=public), _digest, self.digest_epochs, order="digest")
        loss = train(client, self.objective(client))
        client.remember()
        return Message({}, {"loss": loss})

    def _chosen(self, client: Client) -> Tensor:
        """The numbers of this round's public examples, the same for every client, ascending."""
        count = len(_held(client))
        order = torch.randperm(count, generator=generator(client.seed, client.round, "", "public examples"))
        return order[: self.items or count].sort().values


class _Public:
    """Some of the public examples, as a client sees them."""

    deterministic = True
    fixed = True  # scores are those of the pictures as they are

    def __init__(self, client: Client, chosen: Tensor, scores: Tensor | None = None) -> None:
        self.data, self.client, self.chosen, self.scores = _held(client), client.info, chosen, scores
        self.position = torch.full((len(self.data),), -1)
        self.position[chosen] = torch.arange(len(chosen))

    def __len__(self) -> int:
        return len(self.chosen)

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        """One shuffled epoch; batches have about the size that is wanted."""
        for whole in self.data.train(max(1, batch_size * len(self.data) // max(len(self), 1)), rng):
            rows = self.position[whole["index"]]
            batch = {name: tensor[rows >= 0] for name, tensor in whole.items()}
            if self.scores is not None:
                batch[SCORES] = self.scores[rows[rows >= 0]]
            if self.client.modalities and owned(batch):
                batch = restricted(batch, self.client.modalities)
                if not owned(batch):
                    raise ValueError(
                        f"every public example must have something that client {self.client.id!r} has "
                        f"({', '.join(self.client.modalities)}), got one with {', '.join(owned(whole))} only"
                    )
            if len(batch["index"]):
                yield batch

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """No validation data."""
        yield from ()

    test = validation


def _alike(scores: Params, like: Params) -> bool:
    """Whether a reply holds scores and nothing else, of the shape and type of others where there are any."""
    if set(scores) != {SCORES} or scores[SCORES].ndim != 2:
        return False
    return not like or (scores[SCORES].shape, scores[SCORES].dtype) == (like[SCORES].shape, like[SCORES].dtype)


def _held(client: Client) -> ClientData:
    """The public examples."""
    if client.public is None or not len(client.public):
        raise ValueError(f"FedMD needs public examples at every client, and client {client.info.id!r} has none")
    return client.public


def _answered(client: Client) -> Any:
    """The task's loss on public examples whose answer is in the vocabulary."""

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        answerable = batch.get("answerable")
        if answerable is not None:
            batch = {name: tensor[answerable] for name, tensor in batch.items()}
        if len(batch["index"]):
            yield client.task.loss(model(batch), batch)

    return losses


def _digest(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    """The mean absolute distance from the mean of all clients' scores."""
    yield functional.l1_loss(model(batch).logits, batch[SCORES])
