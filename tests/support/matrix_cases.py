"""Cases of the equivalence matrix: visible values of every field, visible overrides of every hook, what runs give."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from confed.data.examples import TableData
from confed.engines.buffered import Buffered
from confed.engines.executor import Executor, InProcess
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm, action
from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.compression import Compression
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local, Schedule
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Params, Rules, Scope
from confed.federation.protocols import Batch, Output
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.stages import Stage, run_stages
from confed.federation.state import MemoryStore, ServerState, Store
from confed.federation.train import LocalTraining, Objective, TaskLoss, Train, train
from confed.federation.traits import Traits
from confed.federation.update_privacy import UpdatePrivacy
from confed.tasks.vqa import VQA
from small_pictures import labelled_pictures

SIZES = (5, 13, 8, 3)
"""Training examples of the clients: several numbers of steps, and last batches that are not full."""


class Stem(nn.Module):
    """Every sixteenth pixel, scaled: arithmetic that rounds alike in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 48), requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        return image[:, :, ::4, ::4].flatten(1).float() / 255 * self.scale


class Chain(nn.Module):
    """A frozen and two trained layers with a normalisation, in two stages."""

    stage_variant = ""
    frozen_features = None

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.stem, self.norm, self.body, self.head = Stem(), nn.LayerNorm(48), nn.Linear(48, 8), nn.Linear(8, 4)
        self.frozen = {"stem.scale"}
        self.stages = (Stage("stem", ("image",), ("stem.",)), Stage("rest", (), ("",)))

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        if first == 0 and last > 0:
            state = self.stem(batch["image"])
        if last < 2:
            return state
        features = torch.tanh(self.body(self.norm(state)))
        return Output(self.head(features), features)

    def forward(self, batch: Batch) -> Output:
        return run_stages(self, batch, 2)


class Counted(VQA):
    """Right answers and losses, and the number of batches in which they were counted."""

    def tally(self, output: Output, batch: Batch) -> Any:
        tallies = super().tally(output, batch)
        return {"loss": tallies["loss"], "accuracy": tallies["accuracy"], "batches": (1.0, 1.0)}


# Methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(Algorithm):
    """FedAvg, which says that it can be stacked, and that other means are the clients' updates still."""

    traits = Traits(unbatchable_reason="")

    def unsupported_reason(self, protection: Any) -> str:
        return ""


class Silent(Algorithm):
    """FedAvg without a word on protections."""

    traits = Traits(unbatchable_reason="")


@dataclass(frozen=True)
class Tuned(Plain):
    """Fine-tuned after the last round."""

    def finish(self, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
        messages = [self.broadcast(server, client) for client in clients]
        calls = [
            Call(client, "personalise", replace(message, scalars={"epochs": 1}))
            for client, message in zip(clients, messages, strict=True)
        ]
        list((yield calls))
        return replace(server, round=server.round + 1)


@dataclass(frozen=True)
class OwnHead(Plain):
    """Every client keeps the head."""

    def rules(self, client: ClientInfo) -> Rules:
        return {"head.*": Scope.PRIVATE, "*": Scope.SHARED}


def scaled(params: Params, factor: float) -> dict[str, Tensor]:
    return {name: factor * tensor for name, tensor in params.items()}


def _configure(self: Algorithm, model: nn.Module, task: Any) -> Algorithm:
    return replace(self, server=ServerOptimizer(lr=0.5))


def _add_modules(self: Algorithm, model: nn.Module, rng: torch.Generator) -> None:
    extra = nn.Linear(8, 4)
    with torch.no_grad():
        for parameter in extra.parameters():
            parameter.normal_(generator=rng)
    model.add_module("extra", extra)

    def added(module: Any, given: Any, output: Output) -> Output:
        return Output(output.logits + module.extra(output.features), output.features)

    model.register_forward_hook(added)


def _initial_private(self: Algorithm, shared: Params) -> Params:
    return {"head.weight": 0.1 * shared["body.weight"][:4, :8]}


def _init(self: Algorithm, params: Params, scopes: Mapping[str, Scope]) -> dict[str, ServerState]:
    (name, server), *_ = Algorithm.init(self, params, scopes).items()
    return {name: replace(server, params=scaled(server.params, 0.5), slots={"begun": {"with": torch.ones(2)}})}


def _round(self: Algorithm, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
    after = yield from Algorithm.round(self, server, cohort)
    return replace(after, params=scaled(after.params, 0.8))


def _finish(self: Algorithm, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
    calls = [Call(client, "fit", self.broadcast(server, client)) for client in clients]
    return replace(self.aggregate(server, (yield calls)), round=server.round + 1)


def _broadcast(self: Algorithm, server: ServerState, client: ClientInfo) -> Message:
    return Message(scaled(Algorithm.broadcast(self, server, client).tensors, 0.9))


def _aggregate(self: Algorithm, server: ServerState, replies: Any) -> ServerState:
    after = Algorithm.aggregate(self, server, replies)
    return replace(after, params=scaled(after.params, 0.9), slots={"moment": scaled(after.params, 0.1)})


def _average(self: Algorithm, server: ServerState, replies: Any) -> dict[str, Tensor]:
    return scaled(Algorithm.average(self, server, replies), 0.9)


def _objective(self: Algorithm, client: Client) -> Objective:
    anchor, batches = dict(client.incoming), iter(range(1, 1000))

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        loss = client.task.loss(model(batch), batch)
        apart = sum((client.tensors[name] - value).square().sum() for name, value in anchor.items())
        yield loss / next(batches) + 0.5 * apart  # what the objective counts lasts for a round

    return losses


def _fit(self: Algorithm, client: Client, message: Message) -> Message:
    client.load(scaled(message.tensors, 0.9))
    loss = train(client, self.objective(client))
    client.remember()
    return client.upload(loss=2 * loss)


def _local_training(self: Algorithm, client: Client, message: Message) -> LocalTraining:
    client.load(scaled(message.tensors, 0.9))
    before = yield Train(self.objective(client), 1, order="first")
    client.state.tensors["halfway"] = client.values(Scope.SHARED)
    change = {name: client.tensors[name].detach().square().sum() for name in client.incoming}
    after = yield Train(TaskLoss(client.task, lambda loss: loss * (1 + 0.01 * sum(change.values()))))
    client.remember()
    return client.upload(loss=before + 2 * after)


def _personalise(self: Algorithm, client: Client, message: Message) -> Message:
    client.load(scaled(message.tensors, 0.5))
    client.remember()
    return Message({}, {"loss": 1.5})


def _actions(self: Algorithm) -> Any:
    return {**Algorithm.actions(self), "fit": lambda client, message: _fit(self, client, message)}


def _evaluate(self: Algorithm, client: Client, message: Message) -> Message:
    changed = Message(scaled(message.tensors, -0.5), message.scalars)
    return Algorithm.evaluate(self, client, changed)


def _examine(self: Algorithm, client: Client, message: Message) -> Message:
    changed = Message(scaled(message.tensors, -0.5), message.scalars)
    return Algorithm.examine(self, client, changed)


class Reversed(nn.Module):
    """A network whose scores have the other sign."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Output:
        output = self.network(batch)
        return output._replace(logits=-output.logits)


class Override(NamedTuple):
    """An override of a hook that can be seen in what a run gives; of one that is not asked, anything.

    Attributes:
        value: what is written in place of the hook.
        base: the method that shows its effect.
    """

    value: Any
    base: type[Algorithm] = Plain


OVERRIDES: dict[str, Override] = {
    "configure": Override(_configure),
    "add_modules": Override(_add_modules),
    "rules": Override(OwnHead.rules),
    "initial_private": Override(_initial_private, OwnHead),
    "lr_factor": Override(lambda self, name: 4.0 if name.startswith("head") else 0.5),
    "init": Override(_init),
    "phases": Override(lambda self: (("main", self.round), ("main", self.round))),
    "round": Override(_round),
    "finish": Override(_finish),
    "broadcast": Override(_broadcast),
    "aggregate": Override(_aggregate),
    "average": Override(_average),
    "weight": Override(lambda self, reply: 1.0),
    "accumulator_dtype": Override(property(lambda self: torch.bfloat16)),
    "objective": Override(_objective),
    "local_training": Override(_local_training),
    "fit": Override(action(_fit)),
    "personalise": Override(action(_personalise), Tuned),
    "actions": Override(_actions),
    "evaluate": Override(action(_evaluate)),
    "examine": Override(action(_examine)),
    "unsupported_reason": Override(lambda self, protection: "the server reads more than a mean", Silent),
    "global_model": Override(property(lambda self: "none")),
    "deployed_model": Override(lambda self, model: Reversed(model)),
    "title": Override(property(lambda self: "Another name")),
}


def _refused(self: Any, *given: Any) -> Any:
    raise AssertionError("a hook that is not asked in a round")


# Cases ------------------------------------------------------------------------------------------------------------

SGD = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd", weight_decay=0.0, eval_batch_size=4)
SCHEDULES = (
    Schedule("linear"), Schedule("cosine"), Schedule("step"), Schedule(warmup=0.5), Schedule(warmup=0.9, stairs=2),
    Schedule("step", milestones=(0.25,)), Schedule("step", decay=0.9), Schedule("linear", horizon=5),
)  # fmt: skip

FIELDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "epochs": ({}, (3,)),
    "batch_size": ({}, (3,)),
    "accumulate": ({}, (2,)),
    "lr": ({}, (0.1,)),
    "optimizer": ({}, ("adam", "adamw", "adamax")),
    "weight_decay": ({}, (0.5,)),
    "betas": ({"optimizer": "adam"}, ((0.5, 0.9),)),
    "momentum": ({}, (0.9,)),
    "clip": ({}, (0.1,)),
    "schedule": ({}, SCHEDULES),
    "augment": ({}, ("flip",)),
    "precision": ({}, ("bf16",)),
    "eval_batch_size": ({}, (2,)),
    "iterations": ({}, (5,)),
}
"""Field of local training -> what else its effect needs, and values with an effect."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "accumulator": ("float64",),
    "server": (ServerOptimizer("adam"), ServerOptimizer("momentum", lr=0.5)),
    "robust": (RobustMean("median"),),
    "update_privacy": (UpdatePrivacy(clip=0.05), UpdatePrivacy(clip=0.05, noise=0.5)),
    "record_privacy": (RecordPrivacy(clip=0.05),),
    "secure_sum": (SecureSum(),),
}
"""Field of every method -> values with an effect."""


RUN: dict[str, tuple[Any, ...]] = {
    "uplink": (Compression(8), Compression(4, 0.3), Compression(top=0.5)),
    "downlink": (Compression(8), Compression(4, 0.3), Compression(top=0.5)),
}
"""Compression of what travels -> values with an effect."""


@dataclass(frozen=True)
class Case:
    """A run and the same run without one setting.

    Attributes:
        table: "local", "algorithm", "run" or "hook".
        name: of the field or hook.
        value: of the field.
        algorithm: the method.
        local: how clients train.
        without: method and settings without it.
    """

    table: str
    name: str
    value: Any
    algorithm: Algorithm
    local: Local
    without: tuple[Algorithm, Local]
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def visible(self) -> bool:
        """Whether the effect is more than rounding."""
        return self.name not in ("accumulator", "secure_sum")


def field_case(name: str, value: Any) -> Case:
    """A case of a field of :class:`Local`."""
    local = replace(SGD, **FIELDS[name][0])
    return Case("local", name, value, Plain(), replace(local, **{name: value}), (Plain(), local))


def option_case(name: str, value: Any) -> Case:
    """A case of a field of every method."""
    return Case("algorithm", name, value, Plain(**{name: value}), SGD, (Plain(), SGD))


def run_case(name: str, value: Any) -> Case:
    """A case of a setting of what travels."""
    return Case("run", name, value, Plain(), SGD, (Plain(), SGD), {name: value})


def hook_case(name: str) -> Case:
    """A case of a hook; one that is not asked raises."""
    given = OVERRIDES.get(name, Override(_refused))
    method = dataclass(frozen=True)(type(f"With_{name}", (given.base,), {name: given.value, "traits": Plain.traits}))
    return Case("hook", name, None, method(), SGD, (given.base(), SGD))


UNASKED = (
    "reports",
    "search_space",
    "effective_value",
    "updates_compressible",
    "steps_alone",
    "own_hooks",
    "told",
)
"""Hooks that are not asked in a round."""

CASES = {f"local.{name} = {value!r}": field_case(name, value) for name in FIELDS for value in FIELDS[name][1]}
CASES |= {f"algorithm.{n} {i}": option_case(n, value) for n, own in OPTIONS.items() for i, value in enumerate(own)}
CASES |= {f"run.{n} {i}": run_case(n, value) for n, own in RUN.items() for i, value in enumerate(own)}
CASES |= {f"hook {name}": hook_case(name) for name in (*OVERRIDES, *UNASKED)}


def pictures(count: int, seed: int) -> Any:
    return labelled_pictures(count, torch.Generator().manual_seed(seed))


def setup(name: str) -> Setup:
    """The run of a case, by its name; for processes that make their own."""
    case = CASES[name]
    return setup_of(case.algorithm, case.local, **case.run)


def setup_of(algorithm: Algorithm, local: Local, **options: Any) -> Setup:
    data = {f"c{i}": TableData(pictures(n, i), pictures(5, 10 + i), pictures(6, 20 + i)) for i, n in enumerate(SIZES)}
    task = Counted(4)
    return Setup(algorithm.configure(Chain(), task), Members(data), task, local, Chain, rounds=2, **options)


# Runs -------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a run gives.

    Attributes:
        tensors: of servers, of clients' states, and of examined examples.
        numbers: losses and tallies.
        executor: who computed them.
        errors: of all rounds.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, float]
    executor: Any
    errors: dict[str, str]


def outcome(
    given: Setup, executor: Executor | None = None, buffered: Buffered | None = None, folder: Path | None = None
) -> Outcome:
    """A run's rounds and evaluations; with a folder, it is stopped after the first round and goes on from there."""
    tensors, numbers, errors = dict[str, Tensor](), dict[str, float](), dict[str, str]()
    checkpoints = None if folder is None else Checkpoints(folder)
    store: Store = MemoryStore() if checkpoints is None else checkpoints.store
    who = InProcess(given) if executor is None else executor
    begin, servers = 0, None
    while True:
        with Simulation(given, store, who, buffered=buffered) as simulation:
            servers = simulation.start(InProcess(given).workspace) if servers is None else servers
            for record in simulate(simulation, servers, begin):
                servers, begin = record.servers, record.round
                assert not any(record.staleness.values())
                errors |= {f"{begin}/{client}": why for client, why in record.errors.items()}
                numbers |= {f"{begin}/{client}": loss for client, loss in record.losses.items()}
                for view, places in simulation.evaluate(servers, begin, split="validation").items():
                    for place, tallies in places.items():
                        numbers |= {f"{begin}/{view}/{place}/{n}": total for n, (total, _) in tallies.items()}
                if checkpoints is not None:
                    break
            if checkpoints is not None:
                checkpoints.save(Checkpoint(begin, servers, 0))
                checkpoints, resumed = None, Checkpoints(folder)  # type: ignore[arg-type]
                store, servers = resumed.store, resumed.load(begin).servers
                who = InProcess(given)
                continue
            for place in range(len(SIZES)):
                shared = simulation.shared(servers, given.population.info(place))
                (message,) = simulation.examine([(f"c{place}", shared, {})], begin)
                tensors |= {f"examined/{place}/{name}": tensor for name, tensor in message.tensors.items()}
        break
    for name, server in servers.items():
        for group, own in {"params": server.params, **server.slots}.items():
            tensors |= {f"{name}/{group}/{n}": tensor for n, tensor in own.items()}
    for number in range(len(SIZES)):
        for group, own in store.load(f"c{number}").tensors.items():
            tensors |= {f"c{number}/{group}/{n}": tensor for n, tensor in own.items()}
    return Outcome(tensors, numbers, who, errors)


def stacked(given: Setup) -> Outcome:
    return outcome(replace(given, batch_clients=3))


def workers(given: Setup) -> Outcome:
    return outcome(given, Workers(given, 2, start="fork"))


def buffered(given: Setup) -> Outcome:
    return outcome(given, buffered=Buffered(len(SIZES), delays="equal"))


def kept(given: Setup) -> Outcome:
    return outcome(replace(given, features=FeatureSettings(10**7)))


def apart(one: Outcome, other: Outcome) -> float:
    """Largest difference between two outcomes; infinite where they have other entries."""
    if one.tensors.keys() != other.tensors.keys() or one.numbers.keys() != other.numbers.keys():
        return float("inf")
    worst = max(abs(value - other.numbers[name]) for name, value in one.numbers.items())
    for name, tensor in one.tensors.items():
        if not torch.equal(tensor, other.tensors[name]):
            worst = max(worst, float((tensor.double() - other.tensors[name].double()).abs().max()))
    return worst
