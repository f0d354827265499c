"""Executors: replies to calls, computed in this process, in worker processes or on other machines."""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
from inspect import isroutine
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from confed.engines.dispatch import Batch, Dispatcher
from confed.engines.perform import Setup, Workspace, accepted, answer, check_secrets, client_of
from confed.engines.ray.speed import fingerprint
from confed.engines.usage import Timeline
from confed.federation.client import Client, Session
from confed.federation.device_tables import DeviceCounts, DeviceTables
from confed.federation.equivalence import unbatchable_evaluation, unbatchable_training, unstacked_run, unstacked_setting
from confed.federation.evaluation import asked_examples, evaluated
from confed.federation.feature_store import FeatureFiles, FeatureStore
from confed.federation.frozen_features import FeatureCounts, FrozenFeatures, tensors_before
from confed.federation.messages import Call, Message, Reply
from confed.federation.protocols import Task
from confed.federation.randomness import derive, isolated, refuse_random_numbers
from confed.federation.stacked import DROPOUTS, evaluate_stacked, replies_together, stacked_tensors
from confed.federation.stacked_passes import StackedPasses
from confed.federation.stages import frozen_stages, staged_part
from confed.federation.state import ClientState, Store
from confed.federation.train import compares_examples
from confed.system.packages import version

WRITTEN_AFTER = 1.0  # seconds of computing after which features are written to files; what takes less is computed again


def keep_features(setup: Setup, workspace: Workspace, processes: int = 1) -> FrozenFeatures | FeatureCounts:
    """Keeps features of the frozen layers of a process's model from now on."""
    settings = setup.features
    if settings is None:
        return FeatureCounts(reason="run.features.keep is 'off'")
    if setup.compile:
        return FeatureCounts(reason="run.compile is true: a compiled pass has no stages")
    features = attach(workspace.model, workspace.frozen, settings.memory // processes, settings.tolerance)
    if isinstance(features, str):
        return FeatureCounts(reason=features)
    if settings.folder is not None:
        if address := _address(workspace.model, features.cut):
            folder = settings.folder / address
            features.store.keep_in(FeatureFiles(folder, settings.disk, features.note, features.number_of))
        else:
            features.note("a part of the model has no source file, so that features are kept for this run alone")
    return features


def attach(model: nn.Module, frozen: frozenset[str], memory: int, tolerance: float = 0.0) -> FrozenFeatures | str:
    """Keeps what a model's frozen stages make from now on, or says why that is not done."""
    stages_and_cut = frozen_part(model, frozen)
    if stages_and_cut is None:
        return f"{type(model).__name__} does not say which stages its pass has"
    stages, cut = stages_and_cut
    if not cut:
        return f"the first stage ({stages.stages[0].name}) is trained"
    held = [tensor for _, _, tensor in tensors_before(stages, cut)]
    if not held:
        return "no layer is frozen before what is trained"
    if any(tensor.device.type != "cpu" for tensor in held):
        return "only on a processor are features kept"
    stages.frozen_features = FrozenFeatures(stages, cut, FeatureStore(memory), tolerance=tolerance)
    return stages.frozen_features


def frozen_part(model: nn.Module, frozen: Collection[str]) -> tuple[Any, int] | None:
    """The module of a model that is staged, and how many of them are frozen; None without such a part."""
    staged = staged_part(model)
    if staged is None:
        return None
    start, stages = staged
    assert isinstance(stages, nn.Module)
    names = [name for name in stages.state_dict(keep_vars=True) if f"{start}{name}" not in frozen]
    return stages, min(frozen_stages(stages, names), len(stages.stages) - 1)


def added(counts: Iterable[FeatureCounts]) -> FeatureCounts:
    """Counts of all processes of a run."""
    total = FeatureCounts()
    for each in counts:
        total.stage = total.stage or each.stage
        total.reason = total.reason or each.reason
        total.computed += each.computed
        total.reused += each.reused
        total.held += each.held
        total.exact &= each.exact
        total.difference = max(total.difference, each.difference)
        total.notes += [note for note in each.notes if note not in total.notes]
    return total


def check_compiler(device: str) -> None:
    """Compilation of a small function, called once."""
    doubled = torch.compile(lambda x: 2 * x)
    try:
        doubled(torch.ones(2, device=device))
    except Exception as error:  # whatever a compiler meets
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"run.compile = true needs a compiler that works on {device!r}; set it to false: {type(error).__name__}: "
            f"{text}"
        ) from error


@runtime_checkable
class _Configuration(Protocol):
    """A model's configuration, as the library ``transformers`` has it."""

    def to_dict(self) -> dict[str, Any]: ...


def _address(whole: nn.Module, cut: int) -> str:
    """Digest of all that decides what the first stages of a model make of an example; "" where that is not known."""
    staged = staged_part(whole)
    assert staged is not None
    model: Any = staged[1]
    files = {getattr(sys.modules.get(type(module).__module__), "__file__", None) for module in model.modules()}
    sources = [file for file in files if file is not None]
    if len(sources) < len(files):
        return ""  # a class of a notebook, say, which may have another pass next time
    arithmetic = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    arithmetic += [torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic]
    made_by = [fingerprint(torch.get_num_threads()), version("pillow"), arithmetic]
    stages = [stage.name for stage in model.stages[:cut]]
    # What a processor makes of pictures is decided by its settings, which the variant stands for.
    hasher = sha256(json.dumps([made_by, stages, model.stage_variant]).encode())
    for file in sorted(sources):
        hasher.update(Path(file).read_bytes())
    described = [f"{name} {type(module).__name__} {_settings(module)}" for name, module in model.named_modules()]
    hasher.update("\n".join(described).encode())
    for _, key, tensor in tensors_before(model, cut):
        hasher.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        hasher.update(array)
    return hasher.hexdigest()[:32]


def _settings(module: nn.Module) -> str:
    """The plain values among a module's attributes, which are no part of its tensors, and its configuration."""
    of_torch = {"training", "frozen_features", *vars(nn.Module())}
    return json.dumps({name: _plain(value) for name, value in vars(module).items() if name not in of_torch})


def _plain(value: object) -> object:
    """A value as JSON; of what is no value its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, _Configuration):  # which leaves out how attention is computed
        attention = vars(value).get("_attn_implementation_internal")
        return {"attention": str(attention), **cast("dict[str, object]", _plain(value.to_dict()))}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        return {str(key): _plain(entry) for key, entry in sorted(entries.items(), key=lambda pair: str(pair[0]))}
    return value.__qualname__ if isinstance(value, type) or isroutine(value) else type(value).__qualname__


def keep_data(setup: Setup, workspace: Workspace, processes: int = 1) -> None:
    """Has a process's clients read their examples from the device from now on, where there is another than the CPU."""
    device = torch.device(workspace.device)
    if setup.device_data and device.type != "cpu":
        workspace.examples = DeviceTables(device, setup.device_data // processes)


def counts_of(setup: Setup, workspace: Workspace) -> DeviceCounts:
    """What lies on a process's device, or why nothing does."""
    if workspace.examples is not None:
        return workspace.examples.counts
    return DeviceCounts(reason="run.device is 'cpu'" if setup.device_data else "run.device_data is 0")


def added_up(counts: Iterable[DeviceCounts]) -> DeviceCounts:
    each = list(counts)
    reasons = [process.reason for process in each if process.reason]
    return DeviceCounts(
        sum(process.held for process in each), sum(process.left for process in each), reasons[0] if reasons else ""
    )


FEW = "fewer than two have a model of their own"  # no reason for a note: there is nothing to stack


def unstacked_model(model: nn.Module, task: Task) -> str:
    """Why a model, which is in training mode from now on, cannot be stacked; "" where it can."""
    model.train()
    if any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules()):
        return "the model has dropout, whose random numbers would be others"
    if compares_examples(model, task):
        return "the model normalises over the examples of a batch, or the loss compares them"
    return ""


class Executor(Protocol):
    """Computes replies to calls, in their order; processes or machines may do it ahead of time."""

    timeline: Timeline  # where it writes down when clients were at work

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the store holds the clients' states."""
        ...


@dataclass
class LocalBatch(Batch):
    """Calls that this process answers; an outcome is the reply."""

    store: Store = field(kw_only=True)
    at_once: int = field(kw_only=True)  # how many of the calls are answered at once
    one_by_one: int = 0  # the call before which clients are not answered at once


class InProcess(Dispatcher):
    """Answers calls in this process, when they are asked for: one by one, or those of several clients at once."""

    def __init__(self, setup: Setup, workspace: Workspace | None = None) -> None:
        self._setup = setup
        self.workspace = Workspace(setup.model(), setup.device) if workspace is None else workspace
        self.timeline = Timeline(0)
        # with batch_clients, why clients were trained one by one, the first reason; "" where none were
        unfollowed = unbatchable_training(setup.algorithm) or unstacked_run(setup)
        self.unbatchable_reason = unfollowed if setup.batch_clients > 1 else ""
        # the same of the evaluation of own models
        self.unbatchable_evaluation_reason = unbatchable_evaluation(setup.algorithm) if setup.batch_clients > 1 else ""
        self._together = 1 if self.unbatchable_reason else setup.batch_clients
        self._evaluated_together = 1 if self.unbatchable_evaluation_reason else setup.batch_clients
        self._features: FrozenFeatures | FeatureCounts | None = None
        self._passes = StackedPasses(self.workspace.model)

    @contextmanager
    def _opened(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[LocalBatch]:
        if self._features is None:
            self._features = keep_features(self._setup, self.workspace)
            keep_data(self._setup, self.workspace)
        yield LocalBatch(calls, round, store=store, at_once=self._at_once(calls))

    def _at_once(self, calls: Sequence[Call]) -> int:
        """How many of the calls are answered at once."""
        if all(call.action == "fit" and not call.session for call in calls):
            return self._together
        at_once = all(call.action == "evaluate" and call.message.scalars.get("at_once", False) for call in calls)
        return self._evaluated_together if at_once else 1

    def _feed(self, batch: LocalBatch) -> None:
        """Nothing is computed ahead of time."""

    def _await(self, batch: LocalBatch, position: int) -> None:
        if position in batch.done:
            return
        calls = batch.calls[position : position + batch.at_once]
        if position >= batch.one_by_one and len(calls) > 1:
            replies = self._answer_together(calls, batch.store, batch.round)
            if not isinstance(replies, str):
                self._save()
                batch.done.update(enumerate(replies, position))
                return
            self._note_reason(calls[0].action, replies)
            batch.one_by_one = position + len(calls)
        call = calls[0]
        with self.timeline.span(call.client.id, call.action):
            batch.done[position] = answer(self._setup, self.workspace, call, batch.store, batch.round)
        self._save()

    def _answer_together(self, calls: Sequence[Call], store: Store, round: int) -> list[Reply] | str:
        """Replies of several clients that are trained, or whose own models are evaluated, at once; or why not."""
        action = calls[0].action
        together = self._fit if action == "fit" else self._evaluate
        before = [store.load(call.client.id) for call in calls]
        after = [state.copy() for state in before]
        try:
            with isolated(derive(self._setup.seed, round, calls[0].client.id, action)):
                messages = together(calls, after, round)
        except Exception as error:  # what torch.func cannot map, or one client's own failure, which is found one by one
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(messages, str):
            return messages
        return [
            accepted(self._setup, call, message, old, new, store, round)
            for call, message, old, new in zip(calls, messages, before, after, strict=True)
        ]

    def _clients(self, calls: Sequence[Call], states: Sequence[ClientState], round: int) -> list[Client] | str:
        """Clients that a stacked pass can answer for, or why there is none."""
        setup, workspace = self._setup, self.workspace
        task = setup.task_of(calls[0].client.id)
        if any(setup.task_of(call.client.id) is not task for call in calls):
            return "clients have tasks of their own"
        workspace.set_task(task)
        clients: list[Client] = []
        for call, state in zip(calls, states, strict=True):
            clients.append(client_of(setup, workspace, call, state, round, Session() if call.action == "fit" else None))
        if any(client.scopes is not clients[0].scopes for client in clients):
            return "clients have tensors of their own"
        return clients

    def _evaluate(self, calls: Sequence[Call], states: Sequence[ClientState], round: int) -> list[Message] | str:
        """The global model is evaluated client by client: it is one model, and its batches are large already."""
        setup, workspace = self._setup, self.workspace
        if reason := unstacked_setting(setup.local, only=("precision", "eval_batch_size")):
            return reason
        wants_personal = [call.message.scalars.get("personal", True) for call in calls]
        with_personal = [i for i, state in enumerate(states) if wants_personal[i] and "personal" in state.tensors]
        if len(with_personal) < 2:
            return FEW
        clients = self._clients([calls[i] for i in with_personal], [states[i] for i in with_personal], round)
        if isinstance(clients, str):
            return clients
        task = clients[0].task
        batches, limit = zip(
            *(asked_examples(c, calls[i].message) for c, i in zip(clients, with_personal, strict=True)), strict=True
        )
        stack = stacked_tensors(clients, workspace.model)
        for client in clients:
            client.load_personal()
        workspace.model.eval()
        examples = [of_client(setup.local.eval_batch_size) for of_client in batches]
        with refuse_random_numbers():
            scores = evaluate_stacked(stack, examples, task, self._passes, limit[0])
        personal = dict(zip(with_personal, scores, strict=True))
        replies: list[Message] = []
        for i, (call, state) in enumerate(zip(calls, states, strict=True)):
            workspace.set_task(setup.task_of(call.client.id))
            alone = Message(call.message.tensors, {**call.message.scalars, "personal": False})
            shared = setup.algorithm.evaluate(client_of(setup, workspace, call, state, round), alone)
            mine = evaluated({"personal": personal[i]} if i in personal else {})
            replies.append(Message({**shared.tensors, **mine.tensors}, {**shared.scalars, **mine.scalars}))
        return replies

    def _fit(self, calls: Sequence[Call], states: Sequence[ClientState], round: int) -> list[Message] | str:
        setup, model = self._setup, self.workspace.model
        if reason := unstacked_setting(setup.local):
            return reason
        clients = self._clients(calls, states, round)
        if isinstance(clients, str):
            return clients
        if reason := unstacked_model(model, clients[0].task):
            return reason
        messages = [call.message for call in calls]
        with refuse_random_numbers():
            replies = replies_together(clients, setup.algorithm.local_training, messages, self._passes)
        for client, reply in zip(clients, replies, strict=True):
            check_secrets(client, reply)
        return replies

    def _note_reason(self, action: str, reason: str) -> None:
        """Why clients were not answered at once, the first reason."""
        if action == "fit":
            self.unbatchable_reason = self.unbatchable_reason or reason
        elif reason != FEW:
            self.unbatchable_evaluation_reason = self.unbatchable_evaluation_reason or reason

    def _reply(self, batch: LocalBatch, position: int) -> Reply:
        return batch.done.pop(position)

    def _save(self) -> None:
        if isinstance(self._features, FrozenFeatures):
            self._features.save(WRITTEN_AFTER)

    @property
    def notes(self) -> list[str]:
        """What was done one by one although ``batch_clients`` asks for several at once, a sentence each."""
        written = {
            "clients were trained": self.unbatchable_reason,
            "own models were evaluated": self.unbatchable_evaluation_reason,
        }
        stacks = self._setup.batch_clients > 1
        return [f"run.batch_clients: {what} one by one: {why}" for what, why in written.items() if stacks and why]

    @property
    def features(self) -> FeatureCounts:
        """What keeping features of frozen layers has saved."""
        features = self._features
        return features.counts if isinstance(features, FrozenFeatures) else features or FeatureCounts()

    @property
    def device_data(self) -> DeviceCounts:
        """What of the clients' examples lies on the device."""
        return counts_of(self._setup, self.workspace)

    def release(self) -> None:
        """Frees kept features, which refer to each other and would be in memory until garbage is collected."""
        if isinstance(self._features, FrozenFeatures):
            self._features.store.clear()
            self._features.store.files = None

    def close(self) -> None:
        """Nothing to close."""
