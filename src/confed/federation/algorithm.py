"""Base class of all federated methods: FedAvg with hooks for what methods change."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from confed.federation.actions import Action, action, actions_of
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import Evaluation
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.ownership import unowned
from confed.federation.params import Mean, Params, Rules, Scope, layout, pick
from confed.federation.protection import (
    HOOKS,
    HOOKS_AT_CLIENT,
    HOOKS_IN_TRAINING,
    Protection,
    is_declared,
    keeps_protections,
)
from confed.federation.protocols import Task
from confed.federation.ranges import check_fields
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.reports import LOSS, Report
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.federation.train import LocalTraining, Objective, TaskLoss, Train, train, trained_alone
from confed.federation.traits import GlobalModel, Traits, check_names
from confed.federation.update_privacy import UpdatePrivacy

__all__ = ["Algorithm", "Protection", "action", "keeps_protections"]


@dataclass(frozen=True)
class Algorithm(Evaluation):
    """A federated method; every default is FedAvg.

    A method is a frozen dataclass in one file. Its fields are its hyper-parameters, :class:`Traits` says what others
    need to know of it, and it overrides one to three of the hooks below. The same object runs in the simulator and in
    federations across machines. Two further actions, ``evaluate`` and ``examine``, are in :class:`Evaluation`.

    Attributes:
        accumulator: precision of the server's mean; float64 takes about twice the time and memory.
        server: what the server does with the mean: takes it, or a step along it (FedOpt).
        update_privacy: clipping and noise on the updates, at the client or at the server.
        robust: a mean that a few clients cannot steer, in place of the weighted one.
        secure_sum: secure aggregation: the server learns the sum of the updates only.
        record_privacy: clipping and noise on the gradient of every record in local training (DP-SGD).
    """

    accumulator: Literal["float32", "float64"] = field(default="float32", kw_only=True)
    server: ServerOptimizer = field(default=ServerOptimizer(), kw_only=True)
    update_privacy: UpdatePrivacy | None = field(default=None, kw_only=True)
    robust: RobustMean | None = field(default=None, kw_only=True)
    secure_sum: SecureSum | None = field(default=None, kw_only=True)
    record_privacy: RecordPrivacy | None = field(default=None, kw_only=True)

    traits: ClassVar[Traits] = Traits()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_names(cls)

    def __post_init__(self) -> None:
        check_fields(self, "algorithm")

    @property
    def title(self) -> str:
        """The method's name in tables and messages."""
        return self.traits.label or type(self).__name__

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """The method, adapted to the initial model and the task; a ``ValueError`` says why they do not fit it."""
        for check in self.traits.requires:
            check(model, self.title)
        return self

    def told(self, **values: Any) -> Self:
        """A copy with values of fields that no recipe sets (``init=False``), such as what ``configure`` reads."""
        method = replace(self)
        for name, value in values.items():
            object.__setattr__(method, name, value)
        return method

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Adds modules that are trained beside the backbone; :meth:`rules` place their tensors as all others.

        Args:
            model: every new model of every process; changed in place.
            rng: for initial values; the same stream at every party of a run.
        """

    @property
    def global_model(self) -> GlobalModel:
        """What is global, of the method as :meth:`configure` has adapted it to a model.

        ``"alone"`` promises that the shared values, with :meth:`initial_private` and initial values for all else that
        is private, are one model that answers anywhere: at clients, in unseen places, exported. So it is where
        :meth:`rules` keep nothing private, or the trait ``private_beside`` says that answers do without; else it is
        ``"with own parts"``. The contract checks it (:mod:`confed.testing`).
        """
        if not self.traits.has_global:
            return "none"
        private = Scope.PRIVATE in self.rules(ClientInfo("", 0)).values()
        return "with own parts" if private and not self.traits.private_beside else "alone"

    def own_hooks(self, protection: Protection) -> dict[str, bool]:
        """The method's own hooks that may go round a protection -> whether each is declared to keep it."""
        at_client = self.update_privacy is not None and self.update_privacy.at == "client"
        names = HOOKS_AT_CLIENT if protection == "update_privacy" and at_client else HOOKS
        names = HOOKS_IN_TRAINING if protection == "record_privacy" else names
        hooks = {name: getattr(type(self), name) for name in names}
        return {n: is_declared(hook, protection) for n, hook in hooks.items() if hook is not getattr(Algorithm, n)}

    def unsupported_reason(self, protection: Protection) -> str:
        """Reason why the method cannot have a protection, as the end of a sentence; "" where it can.

        By default it has none where a hook of its own is not declared with :func:`keeps_protections`. An override of
        this hook names settings with which there is none, and asks ``super()`` for the others.
        """
        if self.traits.centralised:
            return "all data are in one place"
        if protection == "record_privacy" and self.traits.made_for == "contrastive":
            return "its loss compares the examples of a batch"
        undeclared = [name for name, declared in self.own_hooks(protection).items() if not declared]
        if not undeclared:
            return ""
        return (
            f"{type(self).__name__} has its own {' and '.join(undeclared)}, which may go round it; if not, write "
            f"@keeps_protections({protection!r}) above, and check_algorithm proves it"
        )

    @property
    def steps_alone(self) -> bool:
        """Whether training can go on from a checkpoint in the middle of ``fit``."""
        return self.traits.steps_alone

    @property
    def updates_compressible(self) -> bool:
        """Whether replies to ``fit`` are new values of what was received, or changes, so that they may be rounded."""
        return self.traits.updates_compressible

    def reports(self, action: str) -> Report:
        """Scalars that replies to an action may carry, with their ranges: servers refuse other replies."""
        return {"loss": LOSS}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Hyper-parameter -> values that ``confed tune`` may try with this setting of the others."""
        return self.traits.search

    def effective_value(self, name: str) -> Any:
        """The value that a hyper-parameter has in effect, where None stands for another one."""
        return getattr(self, name)

    # Where tensors live ------------------------------------------------------------------------------------

    def rules(self, client: ClientInfo) -> Rules:
        """Scopes of tensors for a client: ordered globs, first match wins."""
        return {"*": Scope.SHARED}

    def initial_private(self, shared: Params) -> Params:
        """Private values that follow from the shared ones, for unseen places, new clients and the global model."""
        return {}

    def lr_factor(self, name: str) -> float:
        """Factor on ``local.lr`` for a tensor that clients train; 1 by default."""
        return 1.0

    # Server ------------------------------------------------------------------------------------------------

    def init(self, params: Params, scopes: Mapping[str, Scope]) -> dict[str, ServerState]:
        """Every server's state before the first round, from the initial model and the widest scope of each name."""
        return {"main": ServerState(0, pick(params, scopes, Scope.SHARED))}

    def phases(self) -> Sequence[tuple[str, Callable[[ServerState, Sequence[ClientInfo]], Flow]]]:
        """The parts of a round in order: which server acts, and its flow."""
        return (("main", self.round),)

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """One server's part of a round: ask every client of the cohort to ``fit``, then average."""
        messages = [self.broadcast(server, client) for client in cohort]
        replies = yield [Call(c, "fit", m, expects=m.tensors) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    def finish(self, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
        """Actions with all clients after the last round; none by default."""
        yield from ()
        return server

    def broadcast(self, server: ServerState, client: ClientInfo) -> Message:
        """Message to a client: the shared tensors that it takes part in."""
        foreign = unowned(server.params, client.modalities)
        scopes = layout(server.params, self.rules(client), frozen=foreign, partial=True)
        return Message(pick(server.params, scopes, Scope.SHARED))

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The server after a round: the mean of the replies (FedAvg, Eq. 8.3), or a step along it."""
        return self.server.step(server, self.average(server, replies))

    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The weighted mean of the replies, or the robust one, in client order; failed clients are left out."""
        # With noise at the server no update may count more than it was clipped to.
        alike = self.update_privacy is not None and self.update_privacy.at == "server"
        updates = ((r.message.tensors, 1.0 if alike else self.weight(r)) for r in replies if r.error is None)
        if self.robust is not None:
            return self.robust.of(updates, server.params, precision=self.accumulator_dtype, clients=server.clients)
        mean = Mean(self.accumulator_dtype)
        for tensors, weight in updates:
            mean.add(tensors, weight)
        return mean.result(server.params)

    def weight(self, reply: Reply) -> float:
        """A reply's weight in the mean: the client's number of training examples, N_k."""
        return float(reply.client.num_examples)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """The type of ``accumulator``."""
        return torch.float64 if self.accumulator == "float64" else torch.float32

    # Client ------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        """The losses of one batch; the task's own by default."""
        return TaskLoss(client.task)

    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """Trains from the shared values received; keeps what is private; sends what is shared."""
        client.load(message.tensors)
        loss = yield Train(self.objective(client))
        client.remember()
        return client.upload(loss=loss)

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """The reply to a round's call: :meth:`local_training` of one client."""
        return trained_alone(client, self.local_training(client, message))

    @action
    def personalise(self, client: Client, message: Message) -> Message:
        """Fine-tunes the shared values for ``epochs`` epochs and keeps the result; only the loss is sent."""
        client.load(message.tensors)
        loss = train(client, Algorithm.objective(self, client), int(message.scalars.get("epochs", 1)))
        client.keep_personal = True
        client.remember()
        return Message({}, {"loss": loss})

    def actions(self) -> dict[str, Action]:
        """The named actions that a client offers."""
        return actions_of(self)


@keeps_protections("robust", "secure_sum", "update_privacy")
def weight_by_setting(self: Any, reply: Reply) -> float:
    """The hook ``weight`` of a method with a setting ``weighting``: 1, or the client's number of training examples."""
    return 1.0 if self.weighting == "uniform" else float(reply.client.num_examples)


@keeps_protections("robust", "secure_sum", "update_privacy")
def uniform_weight(self: Any, reply: Reply) -> float:
    """The hook ``weight`` of a method in whose means every client counts the same."""
    return 1.0
