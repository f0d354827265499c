"""Local training loop over generators of losses."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from confed.federation.batches import rows, to_device, training_batches
from confed.federation.local import Local, bare_step, make_optimizer, set_rates
from confed.federation.messages import Message
from confed.federation.params import Scope
from confed.federation.protocols import Batch, StepsByKind, Task
from confed.federation.record_gradients import BATCH_NORMS, private_steps
from confed.federation.specs import Contrasting, WeighsBatches
from confed.federation.step_checkpoints import Position, TrainingCheckpoint

if TYPE_CHECKING:
    from confed.federation.client import Client

Objective = Callable[[nn.Module, Batch], Iterator[Tensor]]
"""Yields the losses of one batch; :func:`train` steps after each before the next is computed.

No context may be open at a ``yield``: where gradients of several batches are accumulated, the losses of these batches
are computed in turn.
"""


@dataclass(frozen=True)
class TaskLoss:
    """The objective of a task's own loss, and what a method makes of it; stacked training computes it for all at once.

    Attributes:
        task: whose loss of the model's output.
        change: the loss of a batch -> the loss that is minimised, such as with a penalty on ``client.tensors`` added.
    """

    task: Task
    change: Callable[[Tensor], Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        """See :data:`Objective`."""
        loss = self.task.loss(model(batch), batch)
        yield loss if self.change is None else self.change(loss)


def with_task(objective: Objective, task: Task) -> Objective:
    """A task's own loss with another task; any other objective as it is."""
    return replace(objective, task=task) if isinstance(objective, TaskLoss) else objective


@dataclass(frozen=True)
class Train:
    """A request for :func:`train`, with its arguments, by a method's ``local_training``."""

    objective: Objective
    epochs: int | None = None
    order: str = "order"


LocalTraining = Generator[Train, float, Message]
"""A client's part of a round: yields :class:`Train`, receives the mean loss, and returns the reply."""


def trained_alone(client: "Client", training: LocalTraining) -> Message:
    """The reply of a client that is trained by itself."""
    mean_loss: float | None = None
    with closing(training):  # what it holds still is free again, also where training fails
        while True:
            try:
                wanted = next(training) if mean_loss is None else training.send(mean_loss)
            except StopIteration as finished:
                return finished.value
            mean_loss = train(client, wanted.objective, wanted.epochs, order=wanted.order)


def epoch_steps(client: "Client") -> int:
    """Number of steps that :func:`train`, which has put the model into its mode, takes in one epoch."""
    local = client.local
    size = local.batch_size
    if isinstance(client.data, StepsByKind):
        return local.steps(client.data.steps(size, 1 + needs_two(client)))
    return local.steps(math.ceil(len(client.data) / size) - (needs_two(client) and len(client.data) % size == 1))


def travelled(client: "Client") -> float:
    """The sum of the learning rates of one round's steps: S eta for S steps of a constant rate eta.

    Plain SGD moves a client by this sum times its mean gradient.
    """
    return client.local.travelled(client.round, client.rounds, client.local.round_steps(epoch_steps(client)))


def check_examples(client: "Client") -> None:
    """Check that a client has training examples."""
    if len(client.data) == 0:
        raise ValueError(f"client {client.info.id!r} has no training examples; it needs at least one")


def train(client: "Client", objective: Objective, epochs: int | None = None, *, order: str = "order") -> float:
    """Trains the workspace on the client's examples.

    With ``local.accumulate`` = k each step follows the mean gradient of k batches, weighted by their examples, or as
    the task says (:class:`confed.federation.specs.WeighsBatches`): the gradient of the task's loss of one batch k times
    as large, with the memory of one. What a method adds to the loss is weighted alike.

    A last batch of a single example is left out where the model has batch normalisation in training mode, which has
    no variance of one value, or where the loss has no negatives without other examples; as examples are shuffled anew
    in every epoch, it is another one each time.

    Args:
        client: a client whose workspace :meth:`Client.load` has filled.
        objective: the losses of a batch, in the order of their steps.
        epochs: instead of ``client.local.epochs`` or ``client.local.iterations``.
        order: names the random stream that shuffles the examples; for a method that trains twice in a round.

    Raises:
        ValueError: the client has no training examples, or no two for a batch where the model needs two.
    """
    local, model = client.local, client.model
    check_examples(client)
    learning = trained(client)
    parameters = list(learning.values())
    if not parameters or epochs == 0:
        return 0.0
    model.train()
    pairs = needs_two(client)
    if pairs and min(local.batch_size, len(client.data)) == 1:
        raise ValueError(
            f"batch normalisation or the loss needs at least two examples per batch, client {client.info.id!r} has "
            f"{len(client.data)} training examples and local.batch_size is {local.batch_size}"
        )
    device = parameters[0].device
    optimizer = make_optimizer(parameters, local, [client.lr_factor(name) for name in learning])
    take_step = bare_step(optimizer)
    factor = rate_factor(client, epochs) if local.schedule.changes else None
    checkpoint, begin = _checkpoint(client), 0
    total, taken = torch.zeros((), device=device), 0
    if checkpoint is not None:
        position = checkpoint.position(optimizer, device)
        begin, total, taken = position.step, position.total, position.updates
    for step, losses in enumerate(_steps(client, objective, learning, order, epochs, pairs)):
        if step < begin:  # done before this process was started
            continue
        if checkpoint is not None:
            checkpoint.resume_random_numbers()
        for loss in losses:
            if factor is not None:
                set_rates(optimizer, local.lr * factor(step, taken))
            if local.clip is not None:
                nn.utils.clip_grad_norm_(parameters, local.clip)
            with torch.no_grad():
                take_step()
                total += loss
            taken += 1
        if checkpoint is not None:
            checkpoint.save_if_due(Position(step + 1, taken, total), optimizer)
    if checkpoint is not None:
        checkpoint.resume_random_numbers()  # where no step was left
    _clear(parameters)
    return float(total) / max(taken, 1)


def rate_factor(client: "Client", epochs: int | None = None) -> Callable[[int, int], float]:
    """The schedule's factor on the learning rate after so many batches and updates of the round."""
    local, epoch = client.local, epoch_steps(client)
    steps = local.round_steps(epoch) if epochs is None else epochs * epoch
    # Fine-tuning after the last round has a separate schedule.
    begun, rounds = (client.round, client.rounds) if client.round < client.rounds else (0, 1)

    def factor(step: int, taken: int) -> float:
        return local.schedule.factor(local.progress(begun + step / steps, rounds, epoch, taken))

    return factor


def _checkpoint(client: "Client") -> TrainingCheckpoint | None:
    """Where this training writes how far it has come, at a site."""
    if client.checkpoints is None:
        return None
    own = (Scope.SHARED, Scope.PRIVATE)
    return client.checkpoints.next_training({n: t for n, t in client.tensors.items() if client.scopes[n] in own})


def _steps(
    client: "Client", objective: Objective, learning: Mapping[str, Tensor], order: str, epochs: int | None, pairs: bool
) -> Iterator[Iterator[Tensor]]:
    """Losses of each step of a round; their gradients are in place when they are given."""
    parameters = list(learning.values())
    if client.record_privacy is not None:
        epoch = epoch_steps(client)
        steps = client.local.round_steps(epoch) if epochs is None else epochs * epoch
        yield from private_steps(client, client.record_privacy, partial(with_task, objective), learning, steps, order)
        return
    for batches in step_batches(client, order, epochs, pairs):
        yield _gradients(objective, client, [to_device(batch, parameters[0].device) for batch in batches], parameters)


def step_batches(
    client: "Client", order: str = "order", epochs: int | None = None, pairs: bool = False, at_once: int = 1
) -> Iterator[list[Batch]]:
    """Batches of each step of a round, those whose gradients are accumulated together; or of several steps in one."""
    local = client.local

    def of_epoch(epoch: int) -> Iterator[list[Batch]]:
        batches = (b for b in training_batches(client, f"{order}/{epoch}", at_once) if not (pairs and rows(b) == 1))
        while group := list(islice(batches, local.accumulate)):
            yield group

    if epochs is None and local.iterations:
        return islice(chain.from_iterable(map(of_epoch, count())), local.iterations)
    return chain.from_iterable(map(of_epoch, range(local.epochs if epochs is None else epochs)))


def trained(client: "Client") -> dict[str, Tensor]:
    """The client's parameters that learn, by name."""
    learning: dict[str, Tensor] = {}
    for name, parameter in client.tensors.items():
        if parameter.requires_grad and client.scopes[name] in (Scope.SHARED, Scope.PRIVATE):
            learning[name] = parameter
    return learning


def needs_two(client: "Client") -> bool:
    """Whether a client's batches need two examples."""
    return not client.at_once and compares_examples(client.model, client.task)


def compares_examples(model: nn.Module, task: Task) -> bool:
    """Whether a model in training mode normalises over the examples of a batch, or the loss compares them."""
    if isinstance(task, Contrasting):
        return True
    return any(isinstance(module, BATCH_NORMS) and module.training for module in model.modules())


def _gradients(
    objective: Objective, client: "Client", batches: Sequence[Batch], parameters: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Mean losses over batches, the gradient of each in place when it is given."""
    local, device = client.local, next(iter(batches[0].values())).device
    shares = _shares(client, batches) if len(batches) > 1 else [1.0]
    streams = [_losses(objective, client.model, batch, local, device) for batch in batches]
    while True:
        mean: Tensor | None = None
        for stream, share in zip(streams, shares, strict=True):
            loss = next(stream, None)
            if loss is None:
                continue
            if mean is None:  # what follows a loss in the objective may read the gradient of its step
                _clear(parameters)
            weighted_loss = loss if len(batches) == 1 else loss * share
            weighted_loss.backward()  # pyright: ignore[reportUnknownMemberType]
            mean = weighted_loss.detach() if mean is None else mean + weighted_loss.detach()
        if mean is None:
            return
        yield mean


def _clear(parameters: Sequence[Tensor]) -> None:
    """Gradients to None; an optimiser's ``zero_grad`` does the same in a tenth of a small model's step."""
    for parameter in parameters:
        parameter.grad = None


def _shares(client: "Client", batches: Sequence[Batch]) -> list[float]:
    """Weight of each batch in the mean of their losses."""
    task = client.task
    weights = [task.batch_weight(b) for b in batches] if isinstance(task, WeighsBatches) else list(map(rows, batches))
    total = sum(weights)
    return [weight / total for weight in weights] if total else [1 / len(batches)] * len(batches)


def _losses(
    objective: Objective, model: nn.Module, batch: Batch, local: Local, device: torch.device
) -> Iterator[Tensor]:
    # Autocast covers the computation of each loss but not its step: the generator is resumed inside.
    if local.precision == "fp32":
        yield from objective(model, batch)
        return
    losses = iter(objective(model, batch))
    while True:
        with torch.autocast(device.type, torch.bfloat16):
            loss = next(losses, None)
        if loss is None:
            return
        yield loss
