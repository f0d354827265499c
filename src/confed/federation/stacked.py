"""Training of several clients at once: their parameters stacked, one forward and backward pass per step for all.

Kernels of small models are too short to fill a core or a GPU, and most of a step is the time between them. Here the
k-th steps of several clients are computed together over stacked parameters (:mod:`confed.federation.stacked_passes`).
Every client keeps its own batches, in its own order, its own optimiser state and its own number of steps; results are
those of training one by one but for rounding, as the kernels for stacked matrices sum in another order.

Own models of several clients are evaluated at once in the same way.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from confed.federation.batches import to_device
from confed.federation.evaluate import Tallies, Tally
from confed.federation.local import moments_of
from confed.federation.messages import Message
from confed.federation.params import Scope
from confed.federation.protocols import Batch, LossPerExample, Output, RandomAccess, Task
from confed.federation.stacked_passes import JointBatch, StackedPasses
from confed.federation.train import (
    LocalTraining,
    Objective,
    TaskLoss,
    Train,
    check_examples,
    rate_factor,
    step_batches,
    trained,
)

if TYPE_CHECKING:
    from confed.federation.client import Client

BLOCK_BYTES = 2**25  # of all clients' examples, gathered for several steps at once
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def replies_together(
    clients: Sequence["Client"],
    local_training: Callable[["Client", Message], LocalTraining],
    messages: Sequence[Message],
    passes: StackedPasses,
) -> list[Message]:
    """Replies of clients that are trained at once, each on its own examples.

    From here on a client's tensors are its part of the stacks.

    Raises:
        RuntimeError: torch cannot map something over clients (it draws random numbers, which would be others than one
            by one, or decides by values), or clients do not train equally often, or the same tensors.
    """
    stack = stacked_tensors(clients, passes.model)
    trainings = [local_training(client, message) for client, message in zip(clients, messages, strict=True)]
    with ExitStack() as held, warnings.catch_warnings():
        # Of operations that are computed one client after the other.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        for training in trainings:
            held.enter_context(closing(training))
        replies, means = list[Message](), list[float | None]([None] * len(clients))
        while not replies:
            wanted = list[Train]()
            for training, mean in zip(trainings, means, strict=True):
                try:
                    wanted.append(next(training) if mean is None else training.send(mean))
                except StopIteration as finished:
                    replies.append(finished.value)
            if wanted and replies:
                raise RuntimeError("some clients train more often than others")
            if wanted:
                means = list[float | None](train_stacked(clients, stack, wanted, passes))
    return replies


def stacked_tensors(clients: Sequence["Client"], model: nn.Module) -> dict[str, Tensor]:
    """Stacks of what clients have their own of, of which each client's ``tensors`` are a part from now on."""
    first, stack = clients[0], dict[str, Tensor]()
    for name in first.names(Scope.SHARED, Scope.PRIVATE):
        tensor = first.tensors[name]
        stack[name] = torch.empty(len(clients), *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    learning = [name for name in stack if first.tensors[name].requires_grad]
    common = first.tensors
    for place, client in enumerate(clients):
        client_tensors = {name: tensor[place].detach() for name, tensor in stack.items()}
        for name in learning:
            client_tensors[name].requires_grad_()
        client.tensors = {**common, **client_tensors}
        client.model, client.at_once = cast(nn.Module, _ClientModel(model, client_tensors)), True
    return stack


class _ClientModel:
    """In place of a client's model, which holds nobody's values: its passes, and nothing else."""

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        self._model, self._values = model, values

    def __call__(self, batch: Batch) -> Output:
        return functional_call(self._model, dict(self._values), (batch,))

    def eval(self) -> None:
        self._model.eval()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the method reads {name!r} of the client's model beside the pass of a batch")


def train_stacked(
    clients: Sequence["Client"], stack: Mapping[str, Tensor], wanted: Sequence[Train], passes: StackedPasses
) -> list[float]:
    """Trains clients at once, whose tensors are parts of the stack; the mean loss of each.

    The model's outputs are computed for all clients in one pass, the losses of each client from its outputs, or all of
    them at once where the task gives the loss of each example.

    Raises:
        RuntimeError: clients train different tensors, or none, or only some batches train a tensor.
    """
    for client in clients:
        check_examples(client)
    passes.model.train()
    for module in passes.model.modules():
        if isinstance(module, DROPOUTS) and not module.p:  # drops nothing, but draws numbers, which torch.func refuses
            module.train(False)
    first, learning = clients[0], list(trained(clients[0]))
    if not learning or any(list(trained(client)) != learning for client in clients):
        raise RuntimeError("clients train different tensors, or none")
    factors = list[Callable[[int, int], float]]()
    if first.local.schedule.changes:
        factors = [rate_factor(client, train.epochs) for client, train in zip(clients, wanted, strict=True)]
    steps = _Steps(first, {name: stack[name] for name in learning})
    device = stack[learning[0]].device
    total, count = torch.zeros(len(clients), device=device), [0] * len(clients)
    all_leaves = {name: stack[name].detach().requires_grad_() for name in learning}

    losses_of, used = _Losses([train.objective for train in wanted]), set[str]()
    at_once = 1 if passes.keeps_features else _batches_at_once(clients)
    for number, group, factor, joint in _joint_batches(clients, wanted, factors, device, at_once):
        rows = None if len(group) == len(clients) else torch.tensor(group, device=device)
        group_stack, leaves = stack, all_leaves
        if rows is not None:
            group_stack = {name: tensor[rows] for name, tensor in stack.items()}
            leaves = {name: group_stack[name].detach().requires_grad_() for name in learning}
        losses = losses_of(group, passes({**group_stack, **leaves}, joint, first.task), joint)
        read_by_methods = [] if losses_of.of_task_alone else [clients[i].tensors for i in group]
        gradients = _gradients(losses, leaves, read_by_methods)
        used = used or set(gradients)
        if used != gradients.keys():
            raise RuntimeError(f"only some batches train {sorted(used ^ gradients.keys())}")
        with torch.no_grad():
            steps.take(group_stack, gradients, rows, number, factor)
            if rows is None:
                total += losses.detach()
            else:
                total[rows] += losses.detach()
                for name, tensor in group_stack.items():  # what is counted in a pass, too
                    stack[name][rows] = tensor
        losses_of.end()
        for i in group:
            count[i] += 1
    sums: list[float] = cast("Any", total).tolist()
    return [of_all / max(steps, 1) for of_all, steps in zip(sums, count, strict=True)]


def _gradients(
    losses: Tensor, leaves: Mapping[str, Tensor], tensors_of_clients: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Gradients of stacks: of the common pass, and of what losses read of each client's own tensors."""
    inputs = list(leaves.values())
    for tensors in tensors_of_clients:
        inputs += [tensors[name] for name in leaves]
    ones = torch.ones_like(losses)
    reached = cast("tuple[Tensor | None, ...]", torch.autograd.grad(losses, inputs, ones, allow_unused=True))
    gradients = dict[str, Tensor]()
    for place, name in enumerate(leaves):
        gradient, *of_clients = reached[place :: len(leaves)]
        used = [part for part in of_clients if part is not None]
        if used and len(used) < len(of_clients):
            raise RuntimeError(f"only some clients' losses read {name!r}")
        if used:
            gradient = torch.stack(used) if gradient is None else gradient + torch.stack(used)
        if gradient is not None:
            gradients[name] = gradient
    return gradients


def _per_example(task: Task) -> LossPerExample | None:
    """The task where it gives the loss of each example, and no subclass has replaced the loss alone."""
    if not isinstance(task, LossPerExample):
        return None
    defined = next(vars(kind).keys() & {"loss", "example_losses"} for kind in type(task).mro() if "loss" in vars(kind))
    return task if "example_losses" in defined else None


class _Losses:
    """Losses of clients from the outputs of all their examples; methods' own terms read the clients' tensors."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = objectives
        self._changes: list[Callable[[Tensor], Tensor] | None] = []
        self._task: LossPerExample | None = None
        of_tasks = [objective for objective in objectives if isinstance(objective, TaskLoss)]
        if len(of_tasks) == len(objectives):
            self._task = _per_example(of_tasks[0].task)
            self._changes = [objective.change for objective in of_tasks]
        self.of_task_alone = self._task is not None and not any(self._changes)
        self._open = list[Iterator[Tensor]]()

    def __call__(self, group: Sequence[int], output: Output, joint: JointBatch) -> Tensor:
        """The losses of a group of K clients, (K,), from outputs of all their examples."""
        example_losses = None if self._task is None else self._task.example_losses(output, joint.batch)
        if example_losses is None:
            return self._one_by_one(group, output, joint.each)
        losses = example_losses.view(len(group), -1).mean(1)
        if self.of_task_alone:
            return losses
        changed = list[Tensor]()
        for i, loss in zip(group, losses.unbind(), strict=True):
            change = self._changes[i]
            changed.append(loss if change is None else change(loss))
        return torch.stack(changed)

    def _one_by_one(self, group: Sequence[int], output: Output, each: Sequence[Batch]) -> Tensor:
        self.of_task_alone = False
        parts = zip(*(tensor.chunk(len(group)) for tensor in output), strict=True)
        self._open = [
            iter(self._objectives[i](cast(nn.Module, _Computed(batch, Output(*client_output))), batch))
            for i, client_output, batch in zip(group, parts, each, strict=True)
        ]
        return torch.stack([next(losses) for losses in self._open])

    def end(self) -> None:
        """What objectives do after the step; another loss is a ``RuntimeError``."""
        if any(next(losses, None) is not None for losses in self._open):
            raise RuntimeError("the method yields several losses per batch")
        self._open = []


@dataclass(frozen=True)
class _Computed:
    """In place of the model a batch whose outputs have been computed with those of other clients."""

    batch: Batch
    output: Output

    def __call__(self, given: Batch) -> Output:
        if given is not self.batch:
            raise RuntimeError("the method runs the model on other batches than the one it is given")
        return self.output

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the method reads {name!r} of the model beside the pass of a batch")


def _batches_at_once(clients: Sequence["Client"]) -> int:
    """How many of a client's batches are gathered at once: an epoch's, where they are alike and fit into memory."""
    local, data = clients[0].local, [client.data for client in clients]
    if local.iterations or len({(type(of_client), len(of_client)) for of_client in data}) > 1:
        return 1
    row_bytes = [0]
    if isinstance(data[0], RandomAccess):
        row_bytes = [cast(RandomAccess, of_client).row_bytes for of_client in data]
    if 0 in row_bytes or len(data[0]) * sum(row_bytes) > BLOCK_BYTES:
        return 1
    return math.ceil(len(data[0]) / local.batch_size)


def _joint_batches(
    clients: Sequence["Client"],
    wanted: Sequence[Train],
    factors: Sequence[Callable[[int, int], float]],
    device: torch.device,
    at_once: int,
) -> Iterator[tuple[int, list[int], float, JointBatch]]:
    """Number, clients, factor on the rate and examples of each step; the numbers are from 1."""
    streams = [_batches(client, train, device, at_once) for client, train in zip(clients, wanted, strict=True)]
    number, size = 0, clients[0].local.batch_size
    while blocks := {i: block for i, stream in enumerate(streams) if (block := next(stream, None)) is not None}:
        rates = [factor(number, number) for factor in factors]
        for group in alike(blocks, rates):
            each = [blocks[i] for i in group]
            if at_once == 1:
                yield number + 1, group, rates[group[0]] if rates else 1.0, JointBatch.of(each)
                continue
            steps = dict[str, Iterator[tuple[Tensor, ...]]]()
            for name in each[0]:
                steps[name] = zip(*(cast("Any", block[name]).split(size) for block in each), strict=True)
            for place in range(number, number + at_once):
                batch = {name: torch.cat(next(rows)) for name, rows in steps.items()}
                factor = factors[group[0]](place, place) if factors else 1.0
                yield place + 1, group, factor, JointBatch(batch, len(group))
        number += at_once


def _batches(client: "Client", train: Train, device: torch.device, at_once: int) -> Iterator[Batch]:
    for (batch,) in step_batches(client, train.order, train.epochs, at_once=at_once):
        yield to_device(batch, device)


def alike(batches: Mapping[int, Batch], rates: Sequence[float] = ()) -> list[list[int]]:
    """Clients in groups whose batches have the same tensors, shapes and rates, in the order of the clients."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, batch in batches.items():
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in batch.items()]
        groups.setdefault((*shapes, rates[i] if rates else 1.0), []).append(i)
    return list(groups.values())


class _Steps:
    """Steps of the optimisers of several clients, as :func:`confed.federation.local.make_optimizer` makes them."""

    def __init__(self, client: "Client", stack: Mapping[str, Tensor]) -> None:
        self.local = client.local
        self.clip = client.local.clip
        self.groups: dict[tuple[float, float], list[str]] = {}  # weight decay and rate -> names
        for name, tensor in stack.items():
            # Vectors are not decayed, and a stack has one dimension more.
            decay = self.local.weight_decay if tensor.ndim > 2 else 0.0
            self.groups.setdefault((decay, self.local.lr * client.lr_factor(name)), []).append(name)
        self.moments: list[dict[str, Tensor]] = []
        for _ in range(moments_of(self.local)):
            self.moments.append({name: torch.zeros_like(tensor) for name, tensor in stack.items()})

    def take(
        self,
        client_values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rows: Tensor | None,
        number: int,
        factor: float,
    ) -> None:
        """Step number ``number``, from 1, of each client of a group (None: of all), in place of its values.

        ``factor`` is the schedule's, on the learning rate.
        """
        if self.clip is not None:
            gradients = _clipped(gradients, self.clip)
        moments = self.moments
        if rows is not None:
            selected: list[dict[str, Tensor]] = []
            for moment in self.moments:
                selected.append({name: tensor[rows] for name, tensor in moment.items()})
            moments = selected
        for (decay, rate), group in self.groups.items():
            if names := [name for name in group if name in gradients]:
                values, slopes = [client_values[name] for name in names], [gradients[name] for name in names]
                own_moments = [list(map(moment.__getitem__, names)) for moment in moments]
                self._step(values, slopes, own_moments, decay, rate * factor, number)
        if rows is not None:
            for whole, moment in zip(self.moments, moments, strict=True):
                for name, tensor in moment.items():
                    whole[name][rows] = tensor

    def _step(
        self,
        values: list[Tensor],
        slopes: list[Tensor],
        moments: list[list[Tensor]],
        decay: float,
        rate: float,
        number: int,
    ) -> None:
        local = self.local
        if local.optimizer == "sgd":
            if decay:
                slopes = [slope.add(value, alpha=decay) for value, slope in zip(values, slopes, strict=True)]
            if moments:
                for moment, slope in zip(moments[0], slopes, strict=True):
                    moment.mul_(local.momentum).add_(slope)  # the first one is the gradient itself
                slopes = moments[0]
            for value, slope in zip(values, slopes, strict=True):
                value.add_(slope, alpha=-rate)
            return
        slopes = [slope.contiguous() for slope in slopes]  # fused steps read memory as it lies
        taken = [torch.tensor(float(number - 1), device=values[0].device) for _ in values]
        step = adamw if local.optimizer == "adamw" else adam
        step(
            values, slopes, moments[0], moments[1], [], taken, fused=True, amsgrad=False, beta1=local.betas[0],
            beta2=local.betas[1], lr=rate, weight_decay=decay, eps=1e-8, maximize=False,
        )  # fmt: skip


def _clipped(gradients: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Each client's gradient scaled to a norm of at most ``most``, as ``torch.nn.utils.clip_grad_norm_`` scales it."""
    squares = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in gradients.values()])
    factors = (most / (squares.sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)
    return {name: g * factors.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}


def evaluate_stacked(
    stack: Mapping[str, Tensor],
    batches: Sequence[Iterable[Batch]],
    task: Task,
    passes: StackedPasses,
    limit: int | None = None,
) -> list[tuple[Tallies, dict[str, Tensor]]]:
    """Sums and weights of the task's metrics of each client's model on that client's batches.

    What torch cannot map over clients is a ``RuntimeError``.
    """
    device = next(iter(stack.values())).device
    everyone, streams = list(range(len(batches))), [iter(examples) for examples in batches]
    tallies = [Tally(task, limit) for _ in everyone]
    with torch.no_grad():
        while pending := {
            i: to_device(batch, device)
            for i in everyone
            if not tallies[i].full and (batch := next(streams[i], None)) is not None
        }:
            for group in alike(pending):
                examples = [pending[i] for i in group]
                group_values = stack if group == everyone else {name: tensor[group] for name, tensor in stack.items()}
                output = passes(group_values, JointBatch.of(examples), task)
                parts = zip(*(client_output.chunk(len(group)) for client_output in output), strict=True)
                for i, client_output, batch in zip(group, parts, examples, strict=True):
                    tallies[i].add(Output(*client_output), batch)
    return [(tally.tallies, tally.counts) for tally in tallies]
