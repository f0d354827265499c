"""The contract of methods: all registered ones keep it, and broken ones are caught."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.crd import CRD
from confed.algorithms.creamfl import CreamFL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddat import FedDAT
from confed.algorithms.fedkd import FedKD
from confed.algorithms.fedlgt import FedLGT
from confed.algorithms.fedlora import FedLoRA
from confed.algorithms.fedmosaic import FedMosaic
from confed.algorithms.fedp3 import FedP3
from confed.algorithms.fedpeft import FedPEFT
from confed.algorithms.fedprox import FedProx
from confed.algorithms.fedyogi import FedYogi
from confed.algorithms.modality_fill import ModalityFill
from confed.algorithms.moon import MOON
from confed.algorithms.scaffold import Scaffold
from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Rules, Scope
from confed.federation.protocols import Batch
from confed.federation.robust_mean import RobustMean
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.federation.train import Objective, train
from confed.federation.traits import GlobalModel, Traits
from confed.federation.update_privacy import UpdatePrivacy
from confed.registry import algorithms
from confed.testing import CHECKS, ContractViolation, check_algorithm, checks, exemption
from lora_federation import RANKS, lora_toy
from method_contract import TRANSPORTS, keep_contract, with_and_without_transports

# Flower and FLARE carry the messages of every method alike. These six send what there is to send: means of weights,
# control variates, personal parts, scores of public examples, cuts for several servers, prototypes. The other methods'
# items are in the slow set.
REPRESENTATIVE = ("bicsl", "fedavg", "feddat", "fedmd", "pmcmfl", "scaffold")


PRESETS = ("flora", "fedex_lora", "flexlora", "rolora", "lora_fair", "flora_na", "hetlora")


def items() -> list[object]:
    """One item per method and check that applies to it."""
    return [
        pytest.param(
            name,
            check,
            marks=pytest.mark.slow if check in TRANSPORTS and name not in REPRESENTATIVE else (),
            id=f"{name}-{check.replace(' ', '_')}",
        )
        for name in algorithms.names()
        for check, _ in checks(algorithms[name]())
    ]


@pytest.mark.parametrize(("name", "check"), items())
def test_every_method_keeps_each_clause(name: str, check: str) -> None:
    CHECKS[check](algorithms[name]())


@pytest.mark.parametrize("name", algorithms.names())
def test_contract_exemptions_have_a_reason(name: str) -> None:
    method = algorithms[name]()
    applying = dict(checks(method))
    assert "resumes exactly" in applying
    assert all(exemption(method, check) for check in CHECKS.keys() - applying.keys())


VARIANTS: dict[str, Algorithm] = {
    "crd, few negatives": CRD(negatives=2, start_round=0, momentum=0.0),
    "crd, all others as negatives": CRD(negatives_from="others", width=4),
    "creamfl, clients of one modality": CreamFL(0.7, 0.4, pictures_only=("client-0",), texts_only=("client-1",)),
    "fedkd, whole models": FedKD(compress_download=False, detach=True),
    "fedkd, little energy": FedKD(energy_start=0.3, energy_end=0.6, reduction="batch"),
    "fedlgt, much is unsure": FedLGT(eps=0.3),
    "fedlgt, its code": FedLGT(preset="code", eps=0.3),
    **{f"fedlora, {preset}": FedLoRA(preset=preset) for preset in PRESETS},
    "fedlora, fisher": FedLoRA(aggregation="fisher", fisher_examples=3),
    "fedlora, alternating fisher": FedLoRA(train="alternate", aggregation="fisher", fisher_examples=3),
    "fedp3, random answers": FedP3(filter="random", top_n=2, start_round=0),
    "fedp3, all pairs of logits": FedP3(pairs="all", space="logit", reduction="mean", start_round=2),
    "fedp3, in double precision": FedP3(filter="diff", top_n=2, accumulator="float64"),
    "fedp3, sorted pairs": FedP3(pairs="sorted", start_round=0),
    "fedp3, sampled pairs": FedP3(pairs="sampled", samples=3, start_round=0),
    "modality_fill, mean": ModalityFill("mean"),
    "modality_fill, token": ModalityFill("token"),
    "moon, no projection": MOON(projection=False, mu=5.0),
}


@with_and_without_transports
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_methods_keep_the_contract(name: str, transports: bool) -> None:
    ran = keep_contract(VARIANTS[name], transports)
    assert transports or {"survives the wire", "resumes exactly"} <= ran


NOISE = UpdatePrivacy(clip=0.5)
FURTHER: dict[str, Algorithm] = {
    "feddat, simultaneous": FedDAT(updates="simultaneous", preset="code"),
    "feddat, frozen teacher": FedDAT(teacher="frozen", weighting="examples"),
    "feddat, last pass": FedDAT(head_epochs=1),
    "fedpeft, last pass": FedPEFT(head_epochs=1),
    "fedmosaic, dimensions": FedMosaic(dimensions=7, temperature=0.3),
    "hetlora, pruning": FedLoRA(preset="hetlora", prune_decay=0.5, prune_penalty=3.0, ranks=RANKS),
    "scaffold, noise at clients": Scaffold(update_privacy=NOISE),
    "fedavg, noise at the server": FedAvg(update_privacy=replace(NOISE, at="server", noise=1e-4)),
    "fedprox, momentum at the server": FedProx(server=ServerOptimizer("momentum", 0.05)),
    "fedprox, Yogi at the server": FedProx(server=ServerOptimizer("yogi", 0.05)),
    "fedyogi, trimmed mean": FedYogi(robust=RobustMean("trimmed")),
}
"""Variants in whose code the other checks run through nothing new."""


@pytest.mark.parametrize(
    "check", ["resumes exactly", "ignores the workspace", "sends only what is shared", "survives the wire"]
)
@pytest.mark.parametrize("name", FURTHER)
def test_further_variants_keep_some_clauses(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("fedmosaic, dimensions", "hetlora, pruning"):
        monkeypatch.setattr("confed.testing.toy.toy_model", lora_toy(4))
    CHECKS[check](FURTHER[name])


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
