"""Training of several clients at once: their parameters stacked, one forward and backward pass per step for all.

Kernels of small models are too short to fill a core or a GPU, and most of a step is the time between them. Here the
k-th steps of several clients are computed together over stacked parameters (:mod:`confed.federation.stacked_passes`).
Every client keeps its own batches, in its own order, its own optimiser state and its own number of steps; results are
those of training one by one but for rounding, as the kernels for stacked matrices sum in another order.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from confed.federation.augment import training_batches
from confed.federation.batches import to_device
from confed.federation.protocols import Batch, LossPerExample, Output, Task
from confed.federation.stacked_passes import StackedPasses
from confed.federation.train import Objective, check_examples, needs_two, trained

if TYPE_CHECKING:
    from confed.federation.client import Client

__all__ = ["alike", "stack_unsupported", "train_stacked"]


def stack_unsupported(client: "Client") -> str:
    """Why a client's training cannot be stacked with others', as the end of a sentence; "" where it can."""
    local = client.local
    if local.optimizer not in ("sgd", "adam", "adamw"):
        return f"local.optimizer is {local.optimizer!r}; stacked are 'sgd', 'adam' and 'adamw'"
    if local.accumulate > 1:
        return "local.accumulate is more than 1"
    if local.precision != "fp32":
        return f"local.precision is {local.precision!r}"
    if local.schedule != "constant" or local.warmup > 0:
        return "the learning rate has a schedule"
    if needs_two(client):
        return "the model normalises over the examples of a batch, or the loss compares them"
    return ""


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

    Args:
        clients: with one model and one setting of local training; the model is in training mode.
        values: each client's initial values of all tensors that it does not share with the others for good.
        objective: of a client, with one loss per batch.
        passes: of the clients' model.
        task: the clients' task where its loss is the objective; None where the method has another one.

    Returns:
        Each client's values, as views of the stacks, and its mean loss.
    """
    for client in clients:
        check_examples(client)
    with warnings.catch_warnings():  # of operations that are computed one client after the other
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        stack = {name: torch.stack([own[name] for own in values]) for name in values[0]}
        losses = _Losses(clients, objective, _per_example(task))
        means = _train_stacked(clients, stack, losses, passes)
    apart = {name: tensor.unbind() for name, tensor in stack.items()}
    return [({name: parts[i] for name, parts in apart.items()}, mean) for i, mean in enumerate(means)]


def _train_stacked(
    clients: Sequence["Client"], stack: dict[str, Tensor], losses_of: "_Losses", passes: StackedPasses
) -> list[float]:
    first, everyone = clients[0], list(range(len(clients)))
    learning = [name for name in trained(first) if name in stack]
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
            own = stack if rows is None else {name: tensor[rows] for name, tensor in stack.items()}
            leaves = {name: own[name].detach().requires_grad_() for name in learning}
            tensors = {**own, **leaves}
            batch, output = passes(tensors, examples, first.task)
            losses = losses_of(group, tensors, output, batch, examples)
            reached = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
            pairs = zip(leaves, cast("tuple[Tensor | None, ...]", reached), strict=True)
            gradients = {name: gradient for name, gradient in pairs if gradient is not None}
            used = used or set(gradients)
            if used != gradients.keys():
                raise RuntimeError(f"only some batches train {sorted(used ^ gradients.keys())}")
            with torch.no_grad():
                steps.take(own, gradients, rows, number)
                if rows is None:
                    total += losses.detach()
                else:
                    total[rows] += losses.detach()
                    for name in learning:
                        stack[name][rows] = own[name]
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
    """Losses of several clients from the outputs of all their examples.

    Args:
        clients: all of them.
        objective: of a client, with one loss per batch.
        task: where the objective is the mean of its losses per example; None otherwise.
    """

    def __init__(
        self,
        clients: Sequence["Client"],
        objective: Callable[["Client"], Objective],
        task: LossPerExample | None,
    ) -> None:
        self._clients, self._objective, self._task = clients, objective, task
        self._common = clients[0].tensors

    def __call__(
        self,
        group: Sequence[int],
        tensors: Mapping[str, Tensor],
        output: Output,
        batch: Batch,
        each: Sequence[Batch],
    ) -> Tensor:
        """The losses of K clients, (K,).

        Args:
            group: which of the clients.
            tensors: their stacked tensors.
            output: of all their examples, end to end.
            batch: the same examples.
            each: the same, client by client.
        """
        known = None if self._task is None else self._task.example_losses(output, batch)
        if known is not None:
            return known.view(len(group), -1).mean(1)
        shares, found = _Shares(tensors, self._common), list[Tensor]()
        parts = zip(*(part.chunk(len(group)) for part in output), strict=True)
        for place, (i, own, examples) in enumerate(zip(group, parts, each, strict=True)):
            client = self._clients[i]
            client.tensors = shares.of(place)
            found.append(_one_loss(self._objective(client), Output(*own), examples))
        return torch.stack(found)


def _one_loss(objective: Objective, output: Output, batch: Batch) -> Tensor:
    """The loss of one client's batch, whose outputs have been computed with those of the others."""

    def model(asked: Batch) -> Output:
        if asked is not batch:
            raise RuntimeError("the method runs the model on other batches than the one it is given")
        return output

    losses = objective(cast(nn.Module, model), batch)
    loss = next(losses)
    if next(losses, None) is not None:
        raise RuntimeError("the method yields several losses per batch")
    return loss


class _Shares:
    """Each client's tensors out of the stacks, taken apart when a method first reads them.

    Args:
        stacks: name -> the stacked tensors of a group of clients.
        common: the tensors that the clients share.
    """

    def __init__(self, stacks: Mapping[str, Tensor], common: Mapping[str, Tensor]) -> None:
        self.stacks, self.common = stacks, common
        self._apart: dict[str, tuple[Tensor, ...]] = {}

    def of(self, place: int) -> "_Own":
        """Those of one client."""
        return _Own(self, place)

    def read(self, name: str, place: int) -> Tensor:
        """One tensor of one client."""
        if name not in self.stacks:
            return self.common[name]
        if name not in self._apart:
            self._apart[name] = self.stacks[name].unbind()
        return self._apart[name][place]


class _Own(Mapping[str, Tensor]):
    """One client's tensors; see :class:`_Shares`."""

    def __init__(self, shares: _Shares, place: int) -> None:
        self._shares, self._place = shares, place

    def __getitem__(self, name: str) -> Tensor:
        return self._shares.read(name, self._place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares.common)

    def __len__(self) -> int:
        return len(self._shares.common)


def _batches(client: "Client", device: torch.device) -> Iterator[Batch]:
    for epoch in range(client.local.epochs):
        for batch in training_batches(client, f"order/{epoch}"):
            yield to_device(batch, device)


def alike(batches: Mapping[int, Batch]) -> list[list[int]]:
    """Clients in groups whose batches have the same tensors and shapes, in the order of the clients."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, batch in batches.items():
        groups.setdefault(tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items()), []).append(i)
    return list(groups.values())


class _Steps:
    """Steps of the optimisers of several clients, as :func:`confed.federation.optimizer.make_optimizer` makes them.

    Args:
        client: any of them.
        stack: what they train.
    """

    def __init__(self, client: "Client", stack: Mapping[str, Tensor]) -> None:
        self.local = client.local
        self.clip = client.local.clip
        # Vectors are not decayed; a stack has one dimension more.
        matrices = [name for name, tensor in stack.items() if tensor.ndim > 2]
        vectors = [name for name, tensor in stack.items() if tensor.ndim <= 2]
        self.groups = [(matrices, self.local.weight_decay), (vectors, 0.0)]
        moments = 0 if self.local.optimizer == "sgd" and not self.local.momentum else 1
        moments += self.local.optimizer != "sgd"
        self.moments = [{name: torch.zeros_like(t) for name, t in stack.items()} for _ in range(moments)]

    def take(
        self, own: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rows: Tensor | None, number: int
    ) -> None:
        """One step of each client of a group, in place.

        Args:
            own: the group's stacked values.
            gradients: of what they train; what has none stays as it is.
            rows: which of all clients they are; None for all.
            number: of the step, from 1, the same for all of them.
        """
        if self.clip is not None:
            gradients = _clipped(gradients, self.clip)
        moments = self.moments
        if rows is not None:
            moments = [{name: tensor[rows] for name, tensor in moment.items()} for moment in moments]
        for group, decay in self.groups:
            if names := [name for name in group if name in gradients]:
                values, slopes = [own[name] for name in names], [gradients[name] for name in names]
                self._step(values, slopes, [[moment[name] for name in names] for moment in moments], decay, number)
        if rows is not None:
            for whole, part in zip(self.moments, moments, strict=True):
                for name, tensor in part.items():
                    whole[name][rows] = tensor

    def _step(
        self, values: list[Tensor], slopes: list[Tensor], moments: list[list[Tensor]], decay: float, number: int
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
                value.add_(slope, alpha=-local.lr)
            return
        slopes = [slope.contiguous() for slope in slopes]  # fused steps read memory as it lies
        taken = [torch.tensor(float(number - 1), device=values[0].device) for _ in values]
        step = adamw if local.optimizer == "adamw" else adam
        step(
            values, slopes, moments[0], moments[1], [], taken, fused=True, amsgrad=False, beta1=local.betas[0],
            beta2=local.betas[1], lr=local.lr, weight_decay=decay, eps=1e-8, maximize=False,
        )  # fmt: skip


def _clipped(gradients: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Each client's gradient scaled to a norm of at most ``most``, as ``torch.nn.utils.clip_grad_norm_`` scales it."""
    squares = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in gradients.values()])
    factors = (most / (squares.sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)
    return {name: g * factors.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}
