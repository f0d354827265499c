"""What stacked training relies on is checked while it trains; where it is not so, clients are trained one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import matrix_cases
from confed.engines.executor import InProcess
from confed.engines.local import Setup, Simulation
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.messages import Message
from confed.federation.protocols import Batch
from confed.federation.state import MemoryStore
from confed.federation.train import Objective, global_logits
from matrix_cases import SGD, Chain, Outcome, Plain, apart, outcome, setup_of


def same_bits(given: Setup, reason: str) -> None:
    """Trained one by one, for a reason, with the bits of the reference."""
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert reason in found.executor.unbatchable_reason
    assert all(torch.equal(t, found.tensors[n]) for n, t in expected.tensors.items() if n.startswith("main"))


def close(given: Setup) -> None:
    """Trained at once, as one by one."""
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert found.executor.unbatchable_reason == ""
    assert apart(expected, found) < 1e-5


class Within(Plain):
    """A proximal term that is read from the tensors while the loss is computed."""

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            loss = client.task.loss(model(batch), batch)
            yield loss + sum(client.tensors[name].square().sum() for name in client.incoming)

        return losses


class Before(Plain):
    """The same, with tensors that are read when the objective is made."""

    def objective(self, client: Client) -> Objective:
        learning = [client.tensors[name] for name in client.incoming]

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            loss = client.task.loss(model(batch), batch)
            yield loss + sum(tensor.square().sum() for tensor in learning)

        return losses


class After(Plain):
    """A loss that is scaled by what the last step made of a tensor."""

    def objective(self, client: Client) -> Objective:
        scale = [1.0]

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield scale[0] * client.task.loss(model(batch), batch)
            scale[0] = 1 + float(client.tensors["head.bias"].detach().square().sum())

        return losses


class Teaching(Plain):
    """Distillation from the model that was received."""

    def objective(self, client: Client) -> Objective:
        logits = global_logits(client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            output = model(batch)
            yield client.task.loss(output, batch) + (output.logits - logits(batch)).square().mean()

        return losses


class Peeking(Plain):
    """A penalty on weights that are read from the model itself."""

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(model(batch), batch) + client.model.get_parameter("head.weight").square().sum()

        return losses


class Drawing(Plain):
    """A loss with random weights."""

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield torch.rand(()) * client.task.loss(model(batch), batch)

        return losses


class Faster(Plain):
    """Two rates."""

    def lr_factor(self, name: str) -> float:
        return 3.0 if name.startswith("head") else 0.5


ADAMW = replace(SGD, optimizer="adamw", lr=3e-3, weight_decay=0.1)


def test_values_read_while_a_loss_is_computed():
    close(setup_of(Within(), SGD))


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (Before(), "reads 'norm.weight' before or after the loss of a batch"),
        (After(), "reads 'head.bias' before or after the loss of a batch"),
        (Teaching(), "reads 'parameters' of the client's model"),
        (Peeking(), "reads 'get_parameter' of the client's model"),
        (Drawing(), "torch's global generators are drawn from"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Algorithm) else "",
)
def test_a_broken_promise_is_trained_one_by_one(algorithm: Algorithm, reason: str):
    same_bits(setup_of(algorithm, SGD), reason)


@pytest.mark.parametrize(
    "local",
    [
        ADAMW,
        replace(ADAMW, clip=0.1, iterations=7),
        replace(SGD, momentum=0.9, weight_decay=0.3, iterations=5),
        replace(SGD, iterations=1),
    ],
    ids=["adamw", "adamw, clip, iterations", "sgd with all", "one step"],
)
def test_rates_by_tensor_and_numbers_of_steps(local: Local):
    # With 7 steps each of 4 clients is in another epoch, and last batches have other sizes.
    close(setup_of(Faster(), local))
    assert apart(outcome(setup_of(Faster(), local)), outcome(setup_of(Plain(), local))) > 1e-3


class Counting(Chain):
    """A model whose running mean of what it sees is a shared buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        output = super().forward_stages(state, first, last, batch)
        if self.training and last == 2:
            self.get_buffer("seen").mul_(0.9).add_(output.features.detach().mean(0), alpha=0.1)
        return output


def test_a_buffer_that_passes_change_is_every_clients_own():
    given = replace(setup_of(Plain(), SGD), build=Counting)
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert float(expected.tensors["main/params/seen"].abs().max()) > 1e-3
    assert found.executor.unbatchable_reason == ""
    assert apart(expected, found) < 1e-5


class Noisy(Chain):
    """A model that is evaluated with noise."""

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        output = super().forward_stages(state, first, last, batch)
        if self.training or last < 2:
            return output
        return output._replace(logits=output.logits + torch.rand_like(output.logits))


def test_models_with_noise_are_evaluated_one_by_one():
    given = replace(setup_of(Plain(), SGD), build=Noisy)
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert found.executor.unbatchable_reason == ""
    assert found.executor.unbatchable_evaluation_reason
    assert {n: v for n, v in found.numbers.items() if "global" in n} == pytest.approx(
        {n: v for n, v in expected.numbers.items() if "global" in n}, abs=1e-5
    )


class Shifting(Plain):
    """Own models are shown what the server sent, by an action that takes the place of the plain one."""

    def actions(self) -> Any:
        def shown(client: Client, message: Message) -> Message:
            reply = Algorithm.evaluate(self, client, message)
            total = float(sum(tensor.double().sum() for tensor in message.tensors.values()))
            own = {"personal:loss:sum": total, "personal:loss:weight": 1.0}
            return replace(reply, scalars={**reply.scalars, **own})

        return {**super().actions(), "evaluate": shown}


def test_own_ways_of_evaluation_are_asked_each_time():
    # Scores of own models whose clients were asked for nothing since are known otherwise.
    given = setup_of(Shifting(), SGD)
    executor = InProcess(given)
    with Simulation(given, MemoryStore(), executor) as simulation:
        servers = simulation.start(executor.workspace)
        (server,) = servers.values()
        halved = {"main": replace(server, params={n: t / 2 for n, t in server.params.items()})}
        first, second = (
            simulation.evaluate(each, 0, split="validation")["personal"]["c0"]["loss"][0] for each in (servers, halved)
        )
    assert second == pytest.approx(first / 2)


def _scaled_stem(self: Algorithm, model: nn.Module, rng: torch.Generator) -> None:
    model.register_parameter("gain", nn.Parameter(torch.ones(())))
    model.get_submodule("stem").register_forward_hook(
        lambda module, given, output: output * model.get_parameter("gain")
    )


@dataclass(frozen=True)
class Gained(Plain):
    """A trained scale that a hook puts into a frozen layer."""

    add_modules = _scaled_stem


def kept_of(given: Setup) -> tuple[Outcome, Mapping[str, Any]]:
    found = outcome(replace(given, features=FeatureSettings(10**7)))
    return found, vars(found.executor.features)


def test_a_frozen_layer_in_which_something_learns_is_not_kept():
    given = setup_of(Gained(), SGD)
    found, counts = kept_of(given)
    assert counts["reason"] == "what the frozen layers give depends on a tensor that is trained"
    assert apart(outcome(given), found) == 0.0
    assert not torch.equal(found.tensors["main/params/gain"], torch.ones(()))
