"""Training of several clients at once: their parameters stacked, one forward and backward pass per step for all.

Kernels of small models are too short to fill a core or a GPU, and most of a step is the time between them. Here the
k-th steps of several clients are computed together over stacked parameters (:mod:`confed.federation.stacked_passes`).
Every client keeps its own batches, in its own order, its own optimiser state and its own number of steps; results are
those of training one by one but for rounding, as the kernels for stacked matrices sum in another order.

Evaluation of several clients' own models at once: their tensors stacked, one forward pass per step for all.

Results are those of one model after the other but for rounding (:mod:`confed.federation.stacked`).
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from confed.federation.batches import to_device
from confed.federation.evaluate import Tallies, Tally
from confed.federation.local import moments_of
from confed.federation.params import combined
from confed.federation.protocols import Batch, LossPerExample, Output, Task
from confed.federation.stacked_passes import StackedPasses
from confed.federation.train import Objective, check_examples, step_batches, trained

if TYPE_CHECKING:
    from confed.federation.client import Client


def train_stacked(
    clients: Sequence["Client"],
    values: Sequence[Mapping[str, Tensor]],
    objective: Callable[["Client"], Objective],
    passes: StackedPasses,
    task: Task | None = None,
) -> list[tuple[dict[str, Tensor], float]]:
    """Trains clients at once, each on its own examples.

    The model's outputs are computed for all clients in one pass, the losses of each client from its outputs, or all of
    them at once where the task gives the loss of each example. What torch cannot map over clients (it draws random
    numbers, which would be others than one by one, or decides by values) is a ``RuntimeError``, and so is a tensor that
    only some batches train. A client without training examples is a ``ValueError``.
    """
    for client in clients:
        check_examples(client)
    with warnings.catch_warnings():  # of operations that are computed one client after the other
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        stack = combined(torch.stack, values)
        learning = [name for name in trained(clients[0]) if name in stack]
        losses = _Losses(clients, objective, _per_example(task), stack)
        means = _train_stacked(clients, stack, learning, losses, passes)
    apart = {name: tensor.unbind() for name, tensor in stack.items()}
    results: list[tuple[dict[str, Tensor], float]] = []
    for client, mean in enumerate(means):
        results.append(({name: parts[client] for name, parts in apart.items()}, mean))
    return results


def _train_stacked(
    clients: Sequence["Client"],
    stack: dict[str, Tensor],
    learning: Sequence[str],
    losses_of: "_Losses",
    passes: StackedPasses,
) -> list[float]:
    first, everyone = clients[0], list(range(len(clients)))
    steps = _Steps(first, {name: stack[name] for name in learning})
    device = stack[learning[0]].device
    total, count = torch.zeros(len(clients), device=device), [0] * len(clients)

    streams = [_batches(client, device) for client in clients]
    number, used = 0, set[str]()
    while batches := {i: batch for i in everyone if (batch := next(streams[i], None)) is not None}:
        number += 1
        for group in alike(batches):
            examples = [batches[i] for i in group]
            rows = None if group == everyone else torch.tensor(group, device=device)
            group_stack = stack if rows is None else {name: tensor[rows] for name, tensor in stack.items()}
            leaves = {name: group_stack[name].detach().requires_grad_() for name in learning}
            tensors = {**group_stack, **leaves}
            batch, output = passes(tensors, examples, first.task)
            losses = losses_of(group, tensors, output, batch, examples)
            reached = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
            pairs = zip(leaves, cast("tuple[Tensor | None, ...]", reached), strict=True)
            gradients = {name: gradient for name, gradient in pairs if gradient is not None}
            used = used or set(gradients)
            if used != gradients.keys():
                raise RuntimeError(f"only some batches train {sorted(used ^ gradients.keys())}")
            with torch.no_grad():
                steps.take(group_stack, gradients, rows, number)
                if rows is None:
                    total += losses.detach()
                else:
                    total[rows] += losses.detach()
                    for name, tensor in group_stack.items():  # what is counted in a pass, too
                        stack[name][rows] = tensor
            for i in group:
                count[i] += 1
    sums: list[float] = cast("Any", total).tolist()
    return [of_all / max(steps, 1) for of_all, steps in zip(sums, count, strict=True)]


def _per_example(task: Task | None) -> LossPerExample | None:
    """The task where it gives the loss of each example, and no subclass has replaced the loss alone."""
    if not isinstance(task, LossPerExample):
        return None
    defined = next(vars(kind).keys() & {"loss", "example_losses"} for kind in type(task).mro() if "loss" in vars(kind))
    return task if "example_losses" in defined else None


class _Losses:
    """Losses of clients from the outputs of all their examples; the clients' tensors are what the losses read."""

    def __init__(
        self,
        clients: Sequence["Client"],
        objective: Callable[["Client"], Objective],
        task: LossPerExample | None,
        names: Collection[str],
    ) -> None:
        self._clients, self._objective, self._task = clients, objective, task
        self._own = [_Own(clients[0].tensors, names) for _ in clients]
        self._objectives = list[Objective]()
        for client, client_values in zip(clients, self._own, strict=True):
            client.tensors, client.model = client_values, cast(nn.Module, _NoModel())

    def __call__(
        self, group: Sequence[int], tensors: Mapping[str, Tensor], output: Output, batch: Batch, each: Sequence[Batch]
    ) -> Tensor:
        """The losses of a group of K clients, (K,), from outputs and examples end to end, and client by client."""
        example_losses = None if self._task is None else self._task.example_losses(output, batch)
        if example_losses is not None:
            return example_losses.view(len(group), -1).mean(1)
        if not self._objectives:  # once a round, as one by one: an objective may count its batches
            self._objectives = [self._objective(client) for client in self._clients]
        shares, losses = _Shares(tensors), list[Tensor]()
        parts = zip(*(tensor.chunk(len(group)) for tensor in output), strict=True)
        for place, (i, client_output, examples) in enumerate(zip(group, parts, each, strict=True)):
            self._own[i].begin(shares, place)
            losses.append(_one_loss(self._objectives[i], self._own[i], Output(*client_output), examples))
        return torch.stack(losses)


def _one_loss(objective: Objective, client_values: "_Own", output: Output, batch: Batch) -> Tensor:
    """The loss of one client's batch, whose outputs have been computed with those of the others."""

    def model(given: Batch) -> Output:
        if given is not batch:
            raise RuntimeError("the method runs the model on other batches than the one it is given")
        return output

    losses = iter(objective(cast(nn.Module, model), batch))
    loss = next(losses)
    client_values.end()  # what follows the loss would see the values after the step
    if next(losses, None) is not None:
        raise RuntimeError("the method yields several losses per batch")
    return loss


class _NoModel:
    """In place of a client's model, which holds nobody's values: it may not be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the method reads {name!r} of the client's model beside the pass of a batch")


class _Shares:
    """Each client's tensors out of the stacks, taken apart when a method first reads them."""

    def __init__(self, stacks: Mapping[str, Tensor]) -> None:
        self._stacks = stacks
        self._apart: dict[str, tuple[Tensor, ...]] = {}

    def read(self, name: str, place: int) -> Tensor:
        """One tensor of one client."""
        if name not in self._apart:
            self._apart[name] = self._stacks[name].unbind()
        return self._apart[name][place]


class _Own(Mapping[str, Tensor]):
    """One client's tensors; those of its own, ``names``, can be read while the loss of a batch is computed."""

    def __init__(self, common: Mapping[str, Tensor], names: Collection[str]) -> None:
        self._common, self._names = common, names
        self._read: Callable[[str], Tensor] | None = None

    def begin(self, shares: _Shares, place: int) -> None:
        """The values of a step, for the time of its loss."""
        self._read = partial(shares.read, place=place)

    def end(self) -> None:
        """The loss is computed."""
        self._read = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            return self._common[name]
        if self._read is None:
            raise RuntimeError(f"the method reads {name!r} before or after the loss of a batch")
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._common)

    def __len__(self) -> int:
        return len(self._common)


def _batches(client: "Client", device: torch.device) -> Iterator[Batch]:
    for (batch,) in step_batches(client):
        yield to_device(batch, device)


def alike(batches: Mapping[int, Batch]) -> list[list[int]]:
    """Clients in groups whose batches have the same tensors and shapes, in the order of the clients."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, batch in batches.items():
        groups.setdefault(tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items()), []).append(i)
    return list(groups.values())


class _Steps:
    """Steps of the optimisers of several clients, as :func:`confed.federation.local.make_optimizer` makes them."""

    def __init__(self, client: "Client", stack: Mapping[str, Tensor]) -> None:
        self.local = client.local
        self.clip = client.local.clip
        # Names, weight decay and rate; vectors are not decayed, and a stack has one dimension more.
        self.groups = list[tuple[list[str], float, float]]()
        scales = {name: client.lr_factor(name) for name in stack}
        for scale in dict.fromkeys(scales.values()):
            of_scale = [name for name in stack if scales[name] == scale]
            matrices = [name for name in of_scale if stack[name].ndim > 2]
            vectors = [name for name in of_scale if stack[name].ndim <= 2]
            rate = self.local.lr * scale
            self.groups += [(matrices, self.local.weight_decay, rate), (vectors, 0.0, rate)]
        self.moments: list[dict[str, Tensor]] = []
        for _ in range(moments_of(self.local)):
            self.moments.append({name: torch.zeros_like(tensor) for name, tensor in stack.items()})

    def take(
        self, client_values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rows: Tensor | None, number: int
    ) -> None:
        """Step number ``number``, from 1, of each client of a group (None: of all), in place of its values."""
        if self.clip is not None:
            gradients = _clipped(gradients, self.clip)
        moments = self.moments
        if rows is not None:
            selected: list[dict[str, Tensor]] = []
            for moment in self.moments:
                selected.append({name: tensor[rows] for name, tensor in moment.items()})
            moments = selected
        for group, decay, rate in self.groups:
            if names := [name for name in group if name in gradients]:
                values, slopes = [client_values[name] for name in names], [gradients[name] for name in names]
                own_moments = [list(map(moment.__getitem__, names)) for moment in moments]
                self._step(values, slopes, own_moments, decay, rate, number)
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
    values: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Iterable[Batch]],
    task: Task,
    passes: StackedPasses,
    limit: int | None = None,
) -> list[tuple[Tallies, dict[str, Tensor]]]:
    """Sums and weights of the task's metrics of each client's model on that client's batches.

    What torch cannot map over clients is a ``RuntimeError``.
    """
    stack = combined(torch.stack, values)
    device = next(iter(stack.values())).device
    everyone, streams = list(range(len(values))), [iter(examples) for examples in batches]
    counts = [dict[str, Tensor]() for _ in everyone]
    tallies = [Tally(task, limit, counts=of_client) for of_client in counts]
    with torch.no_grad():
        while pending := {
            i: to_device(batch, device)
            for i in everyone
            if not tallies[i].full and (batch := next(streams[i], None)) is not None
        }:
            for group in alike(pending):
                examples = [pending[i] for i in group]
                group_values = stack if group == everyone else {name: tensor[group] for name, tensor in stack.items()}
                output = passes(group_values, examples, task)[1]
                parts = zip(*(client_output.chunk(len(group)) for client_output in output), strict=True)
                for i, client_output, batch in zip(group, parts, examples, strict=True):
                    tallies[i].add(Output(*client_output), batch)
    return [(tally.tallies, of_client) for tally, of_client in zip(tallies, counts, strict=True)]
