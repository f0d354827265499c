"""The contract notices broken methods: each breaks one promise and must be caught by that promise's check."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.bicsl import BiCSL
from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch
from confed.federation.state import ServerState
from confed.federation.train import Objective, train
from confed.federation.traits import GlobalModel, Traits
from confed.testing import ContractViolation, check_algorithm


@dataclass(frozen=True)
class UsesGlobalRandomness(Algorithm):
    traits = Traits(neutral="-")

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(model(batch), batch) * (1 + random.random())

        return losses


@dataclass(frozen=True)
class RemembersInTheObject(Algorithm):
    traits = Traits(neutral="-")
    rounds: ClassVar[dict[str, float]] = {}

    def objective(self, client: Client) -> Objective:
        # State that no checkpoint knows: a resumed process starts it anew, this one does not.
        self.rounds[client.info.id] = self.rounds.get(client.info.id, 0) + 1
        scale = 1 + self.rounds[client.info.id]

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield scale * client.task.loss(model(batch), batch)

        return losses


@dataclass(frozen=True)
class ForgetsToLoad(Algorithm):
    traits = Traits(neutral="-")

    @action
    def fit(self, client: Client, message: Message) -> Message:
        client.incoming = message.tensors
        train(client, self.objective(client))
        return client.upload()


@dataclass(frozen=True)
class SendsPrivate(Algorithm):
    traits = Traits(neutral="-")

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.PRIVATE, "*": Scope.SHARED}

    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        shared = dict(reply.tensors)
        shared["body.bias"] = client.tensors["head.weight"].detach().flatten()[:8].clone()
        private = client.state.tensors["private"]
        return Message({**shared, "stolen": private["head.weight"]}, reply.scalars)


@dataclass(frozen=True)
class TrainsFrozen(Algorithm):
    traits = Traits(neutral="-")

    @action
    def fit(self, client: Client, message: Message) -> Message:
        with torch.no_grad():
            client.tensors["stem.bias"].add_(1)
        return super().fit(client, message)


@dataclass(frozen=True)
class WrongNeutral(Algorithm):
    strength: float = 1.0
    traits = Traits(neutral={"strength": 0.0})

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield 2 * client.task.loss(model(batch), batch)

        return losses


@dataclass(frozen=True)
class PeeksAtOthers(Algorithm):
    traits = Traits(neutral="-")
    last: ClassVar[dict[str, Tensor]] = {}

    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        other = self.last.get("head.bias", torch.zeros(3)) if client.info.id != "client-0" else torch.zeros(3)
        if client.info.id == "client-0":
            self.last["head.bias"] = reply.tensors["head.bias"]
        return Message({**reply.tensors, "head.bias": reply.tensors["head.bias"] + other}, reply.scalars)


@dataclass(frozen=True)
class TellsMainWeights(BiCSL):
    """The trained backbone goes to the server that must not have it, under another name."""

    @action
    def step(self, client: Client, message: Message) -> Message:
        reply = super().step(client, message)
        if not reply.scalars["done"]:
            return reply
        return Message({"report": client.values(Scope.SHARED)["mha.body.weight"]}, reply.scalars)


@dataclass(frozen=True)
class KeepsTheHead(Algorithm):
    """It says that its global model answers alone, which has no trained head where there is no client."""

    traits = Traits(neutral="-", private_beside=True)

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.PRIVATE, "*": Scope.SHARED}


@dataclass(frozen=True)
class NeedsNothing(Algorithm):
    traits = Traits(neutral="-")

    @property
    def global_model(self) -> GlobalModel:
        return "with own parts"


def pick_known(message: Message, server: ServerState) -> Message:
    return Message({name: tensor for name, tensor in message.tensors.items() if name in server.params})


@dataclass(frozen=True)
class SendsScores(Algorithm):
    """Beside its values a client sends something that it has not received, of which there is no update."""

    traits = Traits(neutral="-")

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        message = self.broadcast(server, cohort[0])
        expects = {**message.tensors, "scores": torch.zeros(3)}
        replies = yield [Call(client, "fit", message, expects=expects) for client in cohort]
        return self.aggregate(server, (replace(r, message=pick_known(r.message, server)) for r in replies))

    @action
    def fit(self, client: Client, message: Message) -> Message:
        reply = super().fit(client, message)
        return Message({**reply.tensors, "scores": torch.ones(3)}, reply.scalars)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (UsesGlobalRandomness(), "finite and deterministic"),
        (RemembersInTheObject(), "finite and deterministic|resumes exactly"),
        (ForgetsToLoad(), "finite|ignores the workspace|resumes"),
        (SendsPrivate(), "private tensor|unexpected|failed"),
        (TrainsFrozen(), "keeps frozen tensors|resumes exactly"),
        (WrongNeutral(), "neutral coefficients give FedAvg"),
        (PeeksAtOthers(), "leaks|order|finite|resumes"),
        (
            KeepsTheHead(),
            "one global model: scores .* with other values for what clients keep .* must be 'with own parts'",
        ),
        (NeedsNothing(), "one global model: said to need parts of the clients' own, it answers the same"),
        (SendsScores(), "compressed updates arrive: .*'scores' has shape .* and nothing of that name was received"),
        (TellsMainWeights(), "aux sees mha.body.weight in send of client-0, which main sees as report in step"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_broken_methods_are_caught(method: Algorithm, complaint: str) -> None:
    with pytest.raises((ContractViolation, RuntimeError), match=complaint):
        check_algorithm(method)
