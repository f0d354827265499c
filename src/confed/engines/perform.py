"""One action on one client: the same function in every engine.

What a run is made of (:class:`Setup`), the model its clients take turns in (:class:`Workspace`), and
:func:`perform`, which the simulator, the worker processes and real federations all call.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from confed.engines.participation import Population
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client, Journal, NoiseSource, Session, SignatureCheck, Signer
from confed.federation.client_info import ClientInfo
from confed.federation.compression import ACTION, UPLINK, Compression, Uplink, check_compression, received
from confed.federation.device_tables import DeviceTables, on_device
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.measure import Measure
from confed.federation.messages import Call, Message, Reply
from confed.federation.ownership import unowned
from confed.federation.params import Scope, layout, matches_any, named_tensors, tied_names
from confed.federation.protocols import ClientData, Task
from confed.federation.randomness import derive, generator, isolated
from confed.federation.specs import PlacesItself, TaskAware, frozen_names, model_spec
from confed.federation.state import ClientState, Store
from confed.federation.step_checkpoints import StepCheckpoints
from confed.privacy import protections
from confed.privacy.protections import check_reply, first_non_finite


class Workspace:
    """One model that all clients of a process take turns in.

    Between the calls of a session a client has a separate workspace (:meth:`session`): a second model that shares
    its frozen tensors with the first, so that several clients can be in the middle of a round at once.

    Attributes:
        examples: where clients' examples are kept on the device, and None where they are not.
    """

    def __init__(self, model: nn.Module, device: str = "cpu", *, lasting: bool = True) -> None:
        self.model, self.device = model, device
        self.examples: DeviceTables | None = None
        if isinstance(model, PlacesItself):
            model.place(device)
        else:
            model.to(device)
        self._task_aware = model if isinstance(model, TaskAware) else None
        self.tensors, self.tied = named_tensors(self.model), tied_names(self.model)
        self.frozen = frozen_names(model)
        self.heads: Mapping[str, str] = model_spec(model).heads_of_tasks
        self.initial = {n: t.detach().clone() for n, t in self.tensors.items() if n not in self.frozen}
        self.lasting, self.live = lasting, Session()
        self._scopes: dict[tuple[object, ...], Mapping[str, Scope]] = {}
        self._open: dict[str, tuple[int, Workspace]] = {}
        self._spare: list[Workspace] = []

    def session(self, client_id: str, round: int) -> "Workspace":
        """The client's own workspace in a round, a new session where it has none; itself if it does not last."""
        if not self.lasting:
            return self
        for name in [name for name, (opened, _) in self._open.items() if opened != round]:
            self.close(name)  # its round ended without it
        if client_id not in self._open:
            self._open[client_id] = (round, self._spare.pop() if self._spare else self._twin())
        return self._open[client_id][1]

    def close(self, client_id: str) -> None:
        """Ends a client's session, if it has one; its workspace is for the next that needs one."""
        if client_id in self._open:
            workspace = self._open.pop(client_id)[1]
            workspace.live = Session()
            self._spare.append(workspace)

    def idle(self, client_id: str) -> bool:
        """Whether nothing is kept for a client between its calls."""
        return client_id not in self._open or not self._open[client_id][1].live

    def _twin(self) -> "Workspace":
        """A second model beside this one; frozen tensors are the same objects."""
        # A model may also name buffers that are no part of its state.
        shared = {id(self.tensors[name]): self.tensors[name] for name in self.frozen & self.tensors.keys()}
        twin = Workspace(copy.deepcopy(self.model, shared), str(next(self.model.parameters()).device))
        twin.initial, twin.examples = self.initial, self.examples
        return twin

    def scopes(self, algorithm: Algorithm, client: ClientInfo) -> Mapping[str, Scope]:
        """Where each tensor lives for this client (worked out once per set of rules, head and modalities)."""
        rules = algorithm.rules(client)
        key = (client.head, client.modalities, *rules.items())
        if key not in self._scopes:
            foreign = tuple(
                f"{head_module}." for head, head_module in self.heads.items() if client.head and head != client.head
            )
            names = [*self.tensors, *self.tied]
            frozen = self.frozen | {n for n in names if foreign and n.startswith(foreign)}
            scopes = layout(names, rules, frozen=frozen | unowned(names, client.modalities))
            for later, first in self.tied.items():
                if scopes.pop(later) is not scopes[first] and self.tensors[first].requires_grad:
                    raise ValueError(
                        f"{first!r} and {later!r} are one tensor (tied weights), and {algorithm.title} takes them "
                        "apart: untie them, or choose parts (algorithm.head) that have both or neither"
                    )
            self._scopes[key] = scopes
        return self._scopes[key]

    def set_task(self, task: Task) -> None:
        """Switch of a model with several heads, or with client-specific answers, to the task that comes next."""
        if self._task_aware is not None:
            self._task_aware.begin(task)


@dataclass(frozen=True)
class Setup:
    """Everything that is the same for every call of a run.

    Attributes:
        task: loss and tally of every client and place without an entry in ``tasks``.
        build: makes the model with its initial values; called once per process.
        rounds: rounds of the run.
        keep_personal: whether clients keep their own version of the shared tensors.
        observers: name -> test examples of places that take no part (unseen scenes).
        tasks: client or observer -> its own task.
        public: examples that every client holds besides its own, for methods that need some.
        features: how features of frozen layers are kept in the simulator; None where they are not.
        batch_clients: how many clients are trained at once in this process (:mod:`confed.engines.executor`).
        compile: whether models are compiled when they first compute.
        device_data: bytes of a GPU's memory for clients' examples, in all processes of the simulator together.
        signatures: at the server of a federation across machines: check of the signatures of members of secure
            aggregation; None where sites do not sign, or the server does not know their keys.
        measures: numbers by which final models are judged beside the tasks' own.
        uplink: what is left out of clients' updates.
        downlink: what is left out of what servers send to clients that train.
        checkpoints: where a site's training writes how far it has come; None in the simulator.
    """

    algorithm: Algorithm
    population: Population
    task: Task
    local: Local
    build: Callable[[], nn.Module]
    rounds: int
    seed: int = 0
    keep_personal: bool = True
    observers: Mapping[str, ClientData] = field(default_factory=dict[str, ClientData])
    device: str = "cpu"
    tasks: Mapping[str, Task] = field(default_factory=dict[str, Task])
    public: ClientData | None = None
    journal: Journal | None = None
    signer: Signer | None = None
    secret: NoiseSource | None = None
    features: FeatureSettings | None = None
    batch_clients: int = 1
    compile: bool = False
    device_data: int = 0
    signatures: SignatureCheck | None = None
    measures: tuple[Measure, ...] = ()
    uplink: Compression = field(default=Compression())
    downlink: Compression = field(default=Compression())
    checkpoints: StepCheckpoints | None = None

    def __post_init__(self) -> None:
        protections.check(self.algorithm)
        check_compression(self.algorithm, self.uplink, self.downlink)
        kind = type(self.algorithm)
        if not self.algorithm.server.plain and kind.aggregate is not Algorithm.aggregate:
            raise ValueError(
                f"{kind.__name__} aggregates in its own way, so algorithm.server.optimizer must be 'none' and "
                f"algorithm.server.lr 1, got {self.algorithm.server.optimizer!r} and {self.algorithm.server.lr}"
            )

    def model(self) -> nn.Module:
        """A new model with its initial values, and with what the method adds to it."""
        model = self.build()
        self.algorithm.add_modules(model, generator(self.seed, 0, "", "extend"))
        if self.compile:
            model.compile()  # in place: names of tensors stay
        return model

    def uplink_of(self, call: Call) -> Uplink | None:
        """How the reply to a call is compressed; None where it is not."""
        if self.uplink.plain or call.action != ACTION:
            return None
        return Uplink(self.uplink, self.algorithm.traits.changes, self.algorithm.traits.sums)

    def task_of(self, client_id: str) -> Task:
        """What is asked of the model at a client or an observer."""
        return self.tasks.get(client_id, self.task)

    def data(self, client_id: str) -> ClientData:
        """The examples of a client or an observer."""
        return self.observers[client_id] if client_id in self.observers else self.population.data(client_id)


def perform(
    setup: Setup, workspace: Workspace, call: Call, state: ClientState, round: int
) -> tuple[Message, ClientState]:
    """Runs one action on one client; the same function in every engine."""
    actions = protections.actions(setup.algorithm)
    if call.action not in actions:
        raise ValueError(f"{type(setup.algorithm).__name__} has no action {call.action!r}; it has {sorted(actions)}")
    live: Session | None = Session()
    if call.session:
        workspace, lasting = workspace.session(call.client.id, round), workspace.lasting
        live = workspace.live if lasting else None
    workspace.set_task(setup.task_of(call.client.id))
    client = client_of(setup, workspace, call, state, round, live)
    with isolated(derive(setup.seed, round, call.client.id, call.action)):
        message = actions[call.action](client, call.message)
    check_secrets(client, message)
    return message, client.state


def client_of(
    setup: Setup, workspace: Workspace, call: Call, state: ClientState, round: int, live: Session | None = None
) -> Client:
    """The client that a call is for, in a workspace whose model has been told its task."""
    return Client(
        info=call.client,
        data=on_device(setup.data(call.client.id), workspace.examples),
        model=workspace.model,
        tensors=workspace.tensors,
        task=setup.task_of(call.client.id),
        local=setup.local,
        state=state,
        scopes=workspace.scopes(setup.algorithm, call.client),
        initial=workspace.initial,
        round=round,
        rounds=setup.rounds,
        seed=setup.seed,
        keep_personal=setup.keep_personal,
        session=live,
        initial_private=setup.algorithm.initial_private,
        lr_factor=setup.algorithm.lr_factor,
        public=setup.public,
        journal=setup.journal,
        signer=setup.signer,
        secret=setup.secret,
        measures=setup.measures,
        record_privacy=setup.algorithm.record_privacy,
        checkpoints=setup.checkpoints,
    )


def check_secrets(client: Client, message: Message) -> None:
    """Check of a reply before it leaves its client."""
    leaked = [n for n in message.tensors if client.scopes.get(n, Scope.SHARED) is not Scope.SHARED]
    if leaked:
        raise ValueError(f"client {client.info.id!r} must not send {leaked}: private or frozen for it")


def answer(setup: Setup, workspace: Workspace, call: Call, store: Store, round: int) -> Reply:
    """One reply; an error on the client becomes the reply's error and leaves its state as it was."""
    reply = _answer(setup, workspace, call, store, round)
    if call.session and (reply.error is not None or workspace.idle(call.client.id)):
        workspace.close(call.client.id)  # the round is over for this client
    return reply


def _answer(setup: Setup, workspace: Workspace, call: Call, store: Store, round: int) -> Reply:
    before = store.load(call.client.id)
    state = before.copy()
    try:
        call = replace(call, message=received(call.sent, state, setup.downlink), wire=None)
        message, after = perform(setup, workspace, call, state, round)
    except Exception as error:
        return Reply(call.client, Message(), f"{type(error).__name__}: {error}")
    return accepted(setup, call, message, before, after, store, round)


def accepted(
    setup: Setup, call: Call, message: Message, before: ClientState, after: ClientState, store: Store, round: int
) -> Reply:
    """The reply to a call as it travels, and the client's state saved; or an error where a value is not finite."""
    reply = check_reply(call, Reply(call.client, message))
    if reply.error is not None:
        return reply
    # The personal version of the shared tensors is what the update carried, which was checked above.
    new_groups = (t for group, t in after.tensors.items() if group != "personal" and t is not before.tensors.get(group))
    lost = next((name for name in map(first_non_finite, new_groups) if name is not None), None)
    loss = message.scalars.get("loss", 0.0)
    if lost is not None or not math.isfinite(float(loss)):
        what = f"private tensor {lost!r} holds" if lost is not None else f"training loss is {loss}, it has met"
        why = f"training diverged at local.lr = {setup.local.lr:g}: {what} a NaN or an infinity; a smaller rate may do"
        return Reply(call.client, Message(), f"ValueError: {why}")
    if (uplink := setup.uplink_of(call)) is not None:
        try:
            sent = uplink.send(
                message, call.message.tensors, after, generator(setup.seed, round, call.client.id, UPLINK)
            )
        except ValueError as error:
            return Reply(call.client, Message(), f"ValueError: {error}")
        reply = replace(reply, message=sent)
    # Evaluation changes nothing; most methods' clients keep nothing: no write without need.
    if changed(before, after):
        store.save(call.client.id, after)
    return reply


def opened(setup: Setup, call: Call, reply: Reply) -> Reply:
    """A reply as the method expects it, of what has travelled; its error where that is nothing that clients send."""
    uplink = setup.uplink_of(call)
    if uplink is None or reply.error is not None or reply.wire_bytes is not None:
        return reply
    try:
        return replace(reply, message=uplink.opened(call, reply.message))
    except ValueError as error:
        return Reply(call.client, Message(), f"ValueError: update refused: {error}")


def changed(before: ClientState, after: ClientState) -> bool:
    """Whether an action replaced anything in the client's state."""
    if before.scalars != after.scalars or before.tensors.keys() != after.tensors.keys():
        return True
    for name, group in before.tensors.items():
        after_group = after.tensors[name]
        if group.keys() != after_group.keys() or any(t is not after_group[n] for n, t in group.items()):
            return True
    return False


def count_parameters(workspace: Workspace, scopes: Mapping[str, Scope], carried: Sequence[str] = ()) -> dict[str, int]:
    """Numbers of values trained, sent and stored (kept on disk per client) for one client."""
    counts, passive, trained = dict.fromkeys(Scope, 0), 0, 0
    for name, tensor in workspace.tensors.items():
        scope, is_carried = scopes[name], matches_any(name, carried)
        counts[scope] += tensor.numel()
        if scope is Scope.SHARED and is_carried:
            passive += tensor.numel()
        elif tensor.requires_grad and scope in (Scope.SHARED, Scope.PRIVATE) and not is_carried:
            trained += tensor.numel()
    return {
        "total": sum(t.numel() for t in workspace.tensors.values()),
        "trained": trained,
        "sent": counts[Scope.SHARED] - passive,
        "stored": counts[Scope.SHARED] + counts[Scope.PRIVATE],
    }
