"""The one base class of all methods. Every default is FedAvg."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.ownership import narrowed, unowned
from confed.federation.params import Mean, Params, Rules, Scalar, Scope, copy_into, layout, pick
from confed.federation.protocols import Batch, Controllable, Task
from confed.federation.randomness import generator
from confed.federation.ranges import check_fields
from confed.federation.reports import LOSS, Report
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.federation.train import Objective, evaluate, train
from confed.federation.update_privacy import UpdatePrivacy

__all__ = ["Algorithm", "Protection", "action", "read_counts", "read_tallies"]

Protection = Literal["update_privacy", "robust", "secure_sum"]
"""What protects clients' updates from the server, or the server from them: fields of every method."""

Method = TypeVar("Method", bound=Callable[..., Message])

_RENAMED: Mapping[str, str] = {
    "suit": "configure",
    "extend": "add_modules",
    "newcomer": "initial_private",
    "published": "with_public_data",
    "refuses": "unsupported_reason",
    "worth_trying": "search_space",
    "in_effect": "effective_value",
    "answering": "deployed_model",
}
"""Old name of a hook -> its name now. A method that overrides an old one would run, but as FedAvg."""


def action(method: Method) -> Method:
    """Marks a method that a server may ask a client to run."""
    method.__dict__["is_action"] = True
    return method


@dataclass(frozen=True)
class Algorithm:
    """A federated method: what servers ask for, what clients do, and where each tensor lives.

    A method is a frozen dataclass whose fields are its hyper-parameters, in one file, overriding one to three of
    the methods below. Nothing here knows a transport: the simulator and real federations run the same object.

    Attributes:
        label: how tables write the method's name; the class's name by default.
        pooled: the method is trained on everybody's data in one place (the centralised bound).
        has_global: the method produces a global model.
        has_personal: clients keep a model of their own; where they do not, the global one is everybody's.
        own_heads: what is global answers with a head of each client's own, so that there is no model for places
            without one.
        carried: globs of shared tensors that carry what the server has aggregated and nobody trains or sends; they
            are not counted as trained or sent.
        leavers: clients may leave before the end (``run.leaves``); not where a server's state holds a part of
            every client's that it cannot take out again.
        partial: clients may lack modalities that others have, and so take no part in some of the shared tensors; not
            where a server's sums are those of all clients.
        counts_examples: the server needs the number of training examples of all registered clients together
            (:attr:`ServerState.examples`), which costs a look at every client.
        in_sessions: clients train in sessions of many calls, as many as follow from their numbers of examples.
        finetuning: the kind of model the method is made for ("adapters", "lora", "modalities" for one that takes
            examples without some modality, ...); "" for any. The contract picks its toy model by it.
        neutral: hyper-parameters at which the method is FedAvg (checked by the contract), or a sentence that
            says why there are none.
        search: hyper-parameter -> the values that ``confed tune`` may try.
        accumulator: precision of the server's mean; float64 takes about twice the time and memory.
        server: what the server does with the mean of the updates: takes it (the default), or treats its distance
            from the current model as a gradient (FedOpt). Only for methods that aggregate as FedAvg does.
        update_privacy: clipping and noise on the updates, at the client or at the server; None for neither.
        robust: what takes the place of the mean, so that a few clients cannot steer it; None for the mean.
        secure_sum: clients mask their updates so that the server learns their sum only; None for no masks.
        changes: globs of tensors in replies to ``fit`` that are changes, and no new values of what was received.
    """

    accumulator: Literal["float32", "float64"] = field(default="float32", kw_only=True)
    server: ServerOptimizer = field(default=ServerOptimizer(), kw_only=True)
    update_privacy: UpdatePrivacy | None = field(default=None, kw_only=True)
    robust: RobustMean | None = field(default=None, kw_only=True)
    secure_sum: SecureSum | None = field(default=None, kw_only=True)

    label: ClassVar[str] = ""
    pooled: ClassVar[bool] = False
    has_global: ClassVar[bool] = True
    has_personal: ClassVar[bool] = True
    own_heads: ClassVar[bool] = False
    leavers: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    counts_examples: ClassVar[bool] = False
    in_sessions: ClassVar[bool] = False
    carried: ClassVar[tuple[str, ...]] = ()
    changes: ClassVar[tuple[str, ...]] = ()
    finetuning: ClassVar[str] = ""
    neutral: ClassVar[Mapping[str, Any] | str] = {}
    search: ClassVar[Mapping[str, Sequence[Any]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses methods that override a hook under an old name."""
        super().__init_subclass__(**options)
        for old, new in _RENAMED.items():
            if callable(cls.__dict__.get(old)):
                raise ValueError(f"{cls.__qualname__}.{old} is now called {new}: rename it")

    def __post_init__(self) -> None:
        # What depends on several fields is a method's own __post_init__, which calls this one first.
        check_fields(self, "algorithm")

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """The method, adapted to a model and a task; itself by default.

        Called once per run, with the model as it was created, before any training.

        Raises:
            ValueError: the method cannot work with them; the message says what it needs.
        """
        del model, task
        return self

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Adds modules that the method trains beside the backbone (a projection, a second network).

        Called on every new model, in every process. Names of the added tensors obey :meth:`rules` as all others.

        Args:
            model: the model; changed in place.
            rng: for initial values; the same stream at every party of a run.
        """

    def public_place(self) -> str | None:
        """Where examples come from that every client holds besides its own (:attr:`Client.public`).

        The name of an unseen place, which then counts as public and as unseen no longer; None, the default, where the
        method needs none.
        """
        return None

    def with_public_data(self, examples: int, answers: int) -> Self:
        """The method, told what every client holds besides its own; itself by default.

        Called once per run, before any training, where :meth:`public_place` names a place.

        Args:
            examples: how many there are.
            answers: scores that a model gives each.
        """
        del examples, answers
        return self

    def unsupported_reason(self, protection: Protection) -> str:
        """Why a protection of updates has no meaning for this method, as the end of a sentence; "" where it has.

        It has where clients answer ``fit`` with new values of what they received, and where the server uses nothing
        of the replies but what :meth:`average` makes of them.
        """
        del protection
        return "all data are in one place" if self.pooled else ""

    def deployed_model(self, model: nn.Module) -> nn.Module:
        """The network that answers for a finished model: the model itself, or adapters switched on, or a wrapper."""
        return model

    def reports(self, action: str) -> Report:
        """The scalars that replies to an action may carry, with their ranges; of any action the loss by default.

        Across machines a reply with another scalar, or with one out of its range, is refused. None need come. What
        ``evaluate`` tells is the task's (:class:`confed.federation.reports.Measured`).
        """
        del action
        return {"loss": LOSS}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Hyper-parameter -> values that a search may try with this setting of the others; ``search`` by default."""
        return self.search

    def effective_value(self, name: str) -> Any:
        """The value of a hyper-parameter that counts: the field's own, by default.

        A method with fields whose None stands for another value says here which, so that a search does not take
        both for different settings.

        Args:
            name: a field of the method.
        """
        return getattr(self, name)

    # Where tensors live ------------------------------------------------------------------------------------

    def rules(self, client: ClientInfo) -> Rules:
        """Where each tensor lives for this client: ordered globs, first match wins."""
        return {"*": Scope.SHARED}

    def initial_private(self, shared: Params) -> Params:
        """Values of private tensors that no client has trained; nothing by default, which means initial values.

        They are those of a place without private values of its own, such as an unseen one, of a client before its
        first round, and of the global model everywhere.

        Args:
            shared: the shared values that go with them.
        """
        del shared
        return {}

    # Server ------------------------------------------------------------------------------------------------

    def init(self, params: Params, scopes: Mapping[str, Scope]) -> dict[str, ServerState]:
        """The state of every server before the first round.

        Args:
            params: the initial model.
            scopes: for each of its names, the widest scope it has for any client.
        """
        return {"main": ServerState(0, pick(params, scopes, Scope.SHARED))}

    def phases(self) -> Sequence[tuple[str, Callable[[ServerState, Sequence[ClientInfo]], Flow]]]:
        """The parts of a round in order: which server acts, and its flow."""
        return (("main", self.round),)

    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """One server's part of one round: ask every client of the cohort to ``fit``, then average."""
        messages = [self.broadcast(server, client) for client in cohort]
        replies = yield [Call(c, "fit", m, expects=m.tensors) for c, m in zip(cohort, messages, strict=True)]
        return self.aggregate(server, replies)

    def finish(self, server: ServerState, clients: Sequence[ClientInfo]) -> Flow:
        """What happens once, after the last round, with all clients; nothing by default."""
        yield from ()
        return server

    def broadcast(self, server: ServerState, client: ClientInfo) -> Message:
        """What a client receives: the shared tensors it takes part in."""
        foreign = unowned(server.params, client.modalities)
        scopes = layout(server.params, self.rules(client), frozen=foreign, partial=True)
        return Message(pick(server.params, scopes, Scope.SHARED))

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The server after a round: the mean of the replies (FedAvg, Eq. 8.3), or a step along it."""
        return self.server.step(server, self.average(server, replies))

    def average(self, server: ServerState, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The weighted mean of the replies, or the robust one, in client order; failed clients are left out."""
        # With noise at the server nobody's update may count more than it was clipped to.
        alike = self.update_privacy is not None and self.update_privacy.at == "server"
        updates = ((r.message.tensors, 1.0 if alike else self.weight(r)) for r in replies if r.error is None)
        precision: torch.dtype = getattr(torch, self.accumulator)
        if self.robust is not None:
            return self.robust.of(updates, server.params, precision=precision, clients=server.clients)
        mean = Mean(precision)
        for tensors, weight in updates:
            mean.add(tensors, weight)
        return mean.result(server.params)

    def weight(self, reply: Reply) -> float:
        """A reply's weight in the mean: the client's number of training examples, N_k."""
        return float(reply.client.num_examples)

    # Client ------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        """The losses of one batch; the task's own by default."""

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(model(batch), batch)

        return losses

    @action
    def fit(self, client: Client, message: Message) -> Message:
        """Trains from the shared values received; keeps what is private; sends what is shared."""
        client.load(message.tensors)
        loss = train(client, self.objective(client))
        client.remember()
        return client.upload(loss=loss)

    @action
    def personalise(self, client: Client, message: Message) -> Message:
        """Fine-tunes the shared values received on the client's own data and keeps the result as its own.

        The number of epochs is the scalar ``epochs``; nothing but the loss is sent.
        """
        client.load(message.tensors)
        loss = train(client, Algorithm.objective(self, client), int(message.scalars.get("epochs", 1)))
        client.keep_personal = True
        client.remember()
        return Message({}, {"loss": loss})

    @action
    def evaluate(self, client: Client, message: Message) -> Message:
        """Counts of the global and of the personal model on the client's own examples.

        Scalars of the message: ``split`` ("validation" or "test") and ``limit`` (number of examples, 0 = all).
        Scalars of the reply: ``<global or personal>:<metric>:<sum or weight>``. Tensors of the reply, where the task
        counts (:class:`confed.federation.protocols.Counting`): ``<global or personal>:<name of the count>``.
        """
        batches = client.data.test if message.scalars.get("split") == "test" else client.data.validation
        limit = int(message.scalars.get("limit", 0)) or None
        scalars: dict[str, Scalar] = {}
        tensors: dict[str, Tensor] = {}
        for view in ("global", "personal"):
            if view == "global" and self.has_global:
                client.load(message.tensors, common=True)
            elif view == "global" or not client.load_personal():
                continue
            examples = batches(client.local.eval_batch_size)
            counts: dict[str, Tensor] = {}
            precision = client.local.precision
            tallies = evaluate(client.model, client.task, examples, limit=limit, precision=precision, counts=counts)
            tensors.update({f"{view}:{name}": value for name, value in counts.items()})
            for metric, (total, weight) in tallies.items():
                scalars[f"{view}:{metric}:sum"] = total
                scalars[f"{view}:{metric}:weight"] = weight
        return Message(tensors, scalars)

    @action
    def examine(self, client: Client, message: Message) -> Message:
        """For analysis in the simulator only: a given model, example by example, on this client's test data.

        The message carries the values of the model's trained tensors, private ones included, so no engine that
        crosses a machine's border offers this action. The reply holds tallies as ``evaluate`` under
        "examined", and two tensors of shape (N,): ``correct`` (float32) and ``prediction`` (int64), and the records of
        a task that keeps some (:class:`confed.federation.protocols.Counting`).

        Scalars of the message: ``modalities``, such as "image+text": examples are shown with nothing but these, and
        those that have none of them are left out; with ``complete`` also those that have some of them only.
        ``control``, such as "permuted_image": examples are shown with the inputs of that control condition
        (:class:`confed.federation.protocols.Controllable`), the same ones for every model of a run.
        """
        names = list(message.tensors)
        copy_into([client.tensors[n] for n in client.initial], list(client.initial.values()))
        copy_into([client.tensors[n] for n in names], [message.tensors[n] for n in names])
        scores: list[tuple[Tensor, Tensor]] = []
        records: list[Mapping[str, Tensor]] = []
        batches = _test_batches(client, str(message.scalars.get("control", "")))
        shown = str(message.scalars.get("modalities", ""))
        if shown:
            batches = narrowed(batches, shown.split("+"), complete=bool(message.scalars.get("complete", False)))
        tallies = evaluate(
            client.model,
            client.task,
            batches,
            precision=client.local.precision,
            scores=scores,
            records=records,
        )
        scalars: dict[str, Scalar] = {}
        for metric, (total, weight) in tallies.items():
            scalars[f"examined:{metric}:sum"] = total
            scalars[f"examined:{metric}:weight"] = weight
        if not scores:  # a client may have no test examples
            scores.append((torch.zeros(0), torch.zeros(0, dtype=torch.int64)))
        correct, prediction = (torch.cat(column) for column in zip(*scores, strict=True))
        kept = {name: torch.cat([batch[name] for batch in records]) for name in (records[0] if records else ())}
        return Message({"correct": correct.float().cpu(), "prediction": prediction.cpu(), **kept}, scalars)

    def actions(self) -> dict[str, Callable[[Client, Message], Message]]:
        """The named actions that a client offers."""
        return {
            name: getattr(self, name)
            for name in dir(type(self))
            if getattr(getattr(type(self), name), "is_action", False)
        }


def _test_batches(client: Client, control: str) -> Iterable[Batch]:
    """Test examples as they are, or with the inputs of a control condition."""
    if not control:
        return client.data.test(client.local.eval_batch_size)
    if not isinstance(client.data, Controllable):
        raise ValueError(f"the data of client {client.info.id!r} offer no controls, asked for {control!r}")
    # Neither the round nor the method: all models of a run are shown the same.
    rng = generator(client.seed, 0, client.info.id, control)
    return client.data.controlled_test(client.local.eval_batch_size, control, rng)


def read_tallies(scalars: Mapping[str, Scalar], view: str) -> dict[str, tuple[float, float]]:
    """The tallies of one view out of the scalars of an ``evaluate`` reply."""
    prefix, ending = f"{view}:", ":sum"
    return {
        name[len(prefix) : -len(ending)]: (
            float(value),
            float(scalars[f"{name[: -len(ending)]}:weight"]),
        )
        for name, value in scalars.items()
        if name.startswith(prefix) and name.endswith(ending)
    }


def read_counts(tensors: Params, view: str) -> dict[str, Tensor]:
    """The counts of one view out of the tensors of an ``evaluate`` reply."""
    return {name.removeprefix(f"{view}:"): value for name, value in tensors.items() if name.startswith(f"{view}:")}
