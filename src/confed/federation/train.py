"""Local learning: a visible loop over generators of losses."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from confed.federation.augment import MIRRORED, training_batches, versions
from confed.federation.local import Local
from confed.federation.params import Params, Scope
from confed.federation.protocols import Batch, Counting, Output, Task
from confed.federation.specs import Contrasting

if TYPE_CHECKING:
    from confed.federation.client import Client

__all__ = [
    "Objective",
    "Tallies",
    "epoch_steps",
    "evaluate",
    "global_features",
    "global_logits",
    "make_optimizer",
    "needs_two",
    "once_per_round",
    "scheduled_step",
    "teacher",
    "to_device",
    "train",
    "trained",
    "travelled",
]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Objective = Callable[[nn.Module, Batch], Iterator[Tensor]]
"""Yields the losses of one batch; :func:`train` steps after each before the next is computed."""


def epoch_steps(client: "Client") -> int:
    """Number of batches that :func:`train`, which has put the model into its mode, takes in one epoch."""
    size = client.local.batch_size
    # Data whose batches are of one kind each, out of several kinds, have more of them than their number says.
    counted = getattr(client.data, "steps", None)
    if counted is not None:
        return int(counted(size, 1 + needs_two(client)))
    return math.ceil(len(client.data) / size) - (needs_two(client) and len(client.data) % size == 1)


def travelled(client: "Client") -> float:
    """The sum of the learning rates of one round's steps: S eta for S steps of a constant rate eta.

    Plain SGD moves a client by this sum times its mean gradient.
    """
    return client.local.travelled(client.round, client.rounds, client.local.epochs * epoch_steps(client))


def train(client: "Client", objective: Objective, epochs: int | None = None, *, order: str = "order") -> float:
    """Trains the workspace on the client's examples.

    A last batch of a single example is left out where the model has batch normalisation in training mode, which has
    no variance of one value, or where the loss has no negatives without other examples; as examples are shuffled anew
    in every epoch, it is another one each time.

    Args:
        client: a client whose workspace :meth:`Client.load` has filled.
        objective: the losses of a batch, in the order of their steps.
        epochs: instead of ``client.local.epochs``.
        order: names the random stream that shuffles the examples; for a method that trains twice in a round.

    Returns:
        The mean of all yielded losses.

    Raises:
        ValueError: the client has no training examples, or no two for a batch where the model needs two.
    """
    local, model = client.local, client.model
    if len(client.data) == 0:
        raise ValueError(f"client {client.info.id!r} has no training examples; it needs at least one")
    epochs = local.epochs if epochs is None else epochs
    parameters = list(trained(client).values())
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
    optimizer = make_optimizer(parameters, local)
    scheduled = local.schedule != "constant" or local.warmup > 0
    steps = epochs * epoch_steps(client)
    total, count, step = torch.zeros((), device=device), 0, 0
    for epoch in range(epochs):
        for cpu_batch in training_batches(client, f"{order}/{epoch}"):
            if pairs and _rows(cpu_batch) == 1:
                continue
            batch = to_device(cpu_batch, device)
            if scheduled:
                # Fine-tuning after the last round has a separate schedule.
                during = client.round < client.rounds
                factor = local.factor((client.round + step / steps) / client.rounds if during else step / steps)
                for group in optimizer.param_groups:
                    group["lr"] = local.lr * factor
            for loss in _losses(objective, model, batch, local, device):
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # pyright: ignore[reportUnknownMemberType]
                if local.clip is not None:
                    nn.utils.clip_grad_norm_(parameters, local.clip)
                optimizer.step()
                total += loss.detach()
                count += 1
            step += 1
    optimizer.zero_grad(set_to_none=True)
    return float(total) / max(count, 1)


def scheduled_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], local: Local, progress: float
) -> None:
    """One step with the gradients there are, clipped, at the rate after a share ``progress`` of the run's steps."""
    for group in optimizer.param_groups:
        group["lr"] = local.lr * local.factor(progress)
    if local.clip is not None:
        nn.utils.clip_grad_norm_(list(parameters), local.clip)
    optimizer.step()


def trained(client: "Client") -> dict[str, Tensor]:
    """The client's parameters that learn, by name."""
    return {
        name: p
        for name, p in client.tensors.items()
        if client.scopes[name] in (Scope.SHARED, Scope.PRIVATE) and p.requires_grad
    }


def needs_two(client: "Client") -> bool:
    """Whether the model normalises over the examples of a batch while it trains, or the loss compares them."""
    if isinstance(client.task, Contrasting):
        return True
    return any(isinstance(module, BATCH_NORMS) and module.training for module in client.model.modules())


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


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


def make_optimizer(parameters: Sequence[Tensor], local: Local) -> torch.optim.Optimizer:
    """The optimiser that ``local`` describes; vectors are not decayed."""
    # Biases and norms are vectors; decaying them is not what any of the papers mean by weight decay.
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, local.weight_decay), (vectors, 0.0))
        if group
    ]
    if local.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=local.lr, momentum=local.momentum)
    if local.optimizer == "adamax":
        return torch.optim.Adamax(groups, lr=local.lr, betas=local.betas)
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=local.lr, betas=local.betas, fused=True)


Tallies = dict[str, tuple[float, float]]


def evaluate(
    model: nn.Module,
    task: Task,
    batches: Iterable[Batch],
    *,
    limit: int | None = None,
    precision: str = "fp32",
    scores: list[tuple[Tensor, Tensor]] | None = None,
    counts: dict[str, Tensor] | None = None,
    records: list[Mapping[str, Tensor]] | None = None,
) -> Tallies:
    """Sums and weights of the task's metrics over batches, in eval mode and without gradients.

    Args:
        model: the model to evaluate.
        task: what to count.
        batches: examples; moved to the model's device.
        limit: stop after at least this many examples.
        precision: "fp32" or "bf16".
        scores: where given, receives per batch the examples' correctness and predictions, both (B,); predictions
            (B, L) where a model writes texts of tokens.
        counts: where given, receives the added counts of a task that has them
            (:class:`confed.federation.protocols.Counting`).
        records: where given, receives per batch what such a task keeps of each example.
    """
    model.eval()
    device = next(model.parameters()).device
    counting = task if isinstance(task, Counting) else None
    tallies: Tallies = {}
    seen = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        for cpu_batch in batches:
            batch = to_device(cpu_batch, device)
            output = model(batch)
            if scores is not None:
                # Whole numbers are a text that was written, token by token.
                chosen = output.logits.argmax(-1) if output.logits.is_floating_point() else output.logits
                scores.append((task.predictions(output, batch), chosen))
            if counting is not None and counts is not None:
                for name, value in counting.counts(output, batch).items():
                    counts[name] = counts[name] + value if name in counts else value
            if counting is not None and records is not None:
                records.append(counting.records(output, batch))
            for name, (total, weight) in task.tally(output, batch).items():
                before = tallies.get(name, (0.0, 0.0))
                tallies[name] = (before[0] + total, before[1] + weight)
            seen += _rows(batch)
            if limit is not None and seen >= limit:
                break
    return tallies


def teacher(model: nn.Module, params: Params) -> Callable[[Batch], Output]:
    """A frozen network without a second copy of it: other values run through the same modules.

    Args:
        model: the workspace.
        params: the teacher's values of the tensors in which it differs from the workspace.

    Returns:
        A function of a batch, in eval mode and without gradients.
    """
    device = next(model.parameters()).device
    frozen = {name: value.to(device) for name, value in params.items()}

    def predict(batch: Batch) -> Output:
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return torch.func.functional_call(model, frozen, (batch,))  # pyright: ignore
        finally:
            model.train(training)

    return predict


def global_logits(client: "Client") -> Callable[[Batch], Tensor]:
    """Logits of the frozen global model of this round, as received.

    Where the client's data are deterministic each example is run through the teacher once per round, not once per
    epoch: the logits are kept in a table of N x C values, keyed by ``batch["index"]``; with mirrored pictures
    (``local.augment``) in one of 2 N rows, as either side has its own.

    Args:
        client: a client whose workspace :meth:`Client.load` has just filled.

    Returns:
        A function of a training batch, (B, C), without gradients.
    """
    predict = teacher(client.model, client.incoming)
    return once_per_round(client, lambda batch: predict(batch).logits)


def global_features(client: "Client") -> Callable[[Batch], Tensor]:
    """Features of the frozen global model of this round, (B, D); otherwise as :func:`global_logits`."""
    predict = teacher(client.model, client.incoming)
    return once_per_round(client, lambda batch: predict(batch).features)


def once_per_round(client: "Client", compute: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """What frozen networks make of a training batch, (B, ...), computed once per example and round.

    A batch with something that is drawn anew in every epoch, such as the states of labels in label-mask training, is
    computed every time. A method whose networks are not to see it takes it out of the batch before.

    Args:
        client: whose examples; where its data are not deterministic, or seen once only, nothing is kept. Its data may
            have an attribute ``drawn``, the names of what is drawn anew.
        compute: a function of a batch whose rows depend on their own example alone, without gradients.
    """
    if not client.data.deterministic or client.local.epochs == 1:
        return compute
    table: list[Tensor] = []
    known = torch.zeros(versions(client) * len(client.data), dtype=torch.bool)
    drawn: tuple[str, ...] = getattr(client.data, "drawn", ())

    def lookup(batch: Batch) -> Tensor:
        if any(name in batch for name in drawn):
            return compute(batch)
        rows = batch["index"].cpu()
        if MIRRORED in batch:
            rows = rows + len(client.data) * batch[MIRRORED].cpu()
        if table and bool(known[rows].all()):
            return table[0][rows.to(table[0].device)]
        values = compute(batch)
        if not table:
            table.append(values.new_zeros(len(known), *values.shape[1:]))
        table[0][rows.to(values.device)] = values
        known[rows] = True
        return values

    return lookup


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on that device; itself where it is there already."""
    if device.type == "cpu":
        return batch
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
