"""Local training of a client in one round: optimiser, learning-rate schedule, batches, precision."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, check_fields

Augment = Literal["none", "flip"]  # what happens to training pictures


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate over the steps of the whole federation, or of a round.

    Attributes:
        kind: "constant", "linear" or "cosine" (from 1 to 0), or "step".
        horizon: where positive, the schedule begins anew in every round and would end after so many epochs, of which
            the round runs the first; every update counts, so that a method with two per batch comes twice as far. With
            1 epoch per round, "linear", a warm-up of 0.1 and a horizon of 15 it is that of FedDAT's released code.
        warmup: share of the steps in which the factor rises linearly from 0.
        stairs: where positive, the warm-up rises in so many equal stairs instead (openvqa's has four).
        milestones: of the schedule "step": shares of the steps after which the factor is multiplied by ``decay``.
        decay: see ``milestones``.
    """

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup: Annotated[float, SHARE] = 0.0
    stairs: Annotated[int, NOT_NEGATIVE] = 0
    milestones: Annotated[tuple[float, ...], SHARE] = (0.5, 0.75)
    decay: Annotated[float, Range(0, 1, above=True)] = 0.2
    horizon: Annotated[int, NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        check_fields(self, "local.schedule")
        if self.horizon and not self.changes:
            raise ValueError(
                "local.schedule.horizon needs a local.schedule.kind other than 'constant', or a local.schedule.warmup"
            )

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in vars(self).items() if value != getattr(Schedule, key)) or (
            "constant"
        )

    @property
    def changes(self) -> bool:
        """Whether the factor is not 1 throughout."""
        return self.kind != "constant" or self.warmup > 0

    def factor(self, progress: float) -> float:
        """The factor on ``lr`` after a share ``progress`` of all steps; 1 and more mean the end."""
        progress = min(progress, 1.0)
        if progress < self.warmup:
            share = progress / self.warmup
            return (math.floor(share * self.stairs) + 1) / self.stairs if self.stairs else share
        if self.kind == "step":
            return self.decay ** sum(progress >= milestone for milestone in self.milestones)
        left = 1 - (progress - self.warmup) / max(1 - self.warmup, 1e-12)
        if self.kind == "linear":
            return left
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return 1.0


@dataclass(frozen=True)
class Local:
    """Options of local training in one round, common to all compared methods.

    Attributes:
        epochs: passes over the client's examples per round.
        iterations: where positive, so many steps per round in place of ``epochs`` (T in FedDAT's Algorithm 1): through
            the shuffled examples, and through them again in another order when they are used up.
        batch_size: examples per batch, and per step unless gradients are accumulated.
        accumulate: batches per step, whose gradients are averaged as in one large batch, in the memory of a small one.
        lr: peak learning rate.
        optimizer: "adamw", "adam", "adamax", "sgd", or "adamw8bit" (AdamW with moments of 8 bits, by bitsandbytes);
            created afresh every round.
        weight_decay: decoupled for AdamW, L2 otherwise; not applied to vectors (biases, norms).
        betas: decay rates of AdamW, Adam and Adamax.
        momentum: SGD's.
        clip: largest gradient norm, or none.
        schedule: factor on ``lr`` over the steps.
        augment: "flip" mirrors training pictures left to right with probability 1/2 (:mod:`confed.federation.batches`),
            which is wrong where answers tell left from right; "none".
        precision: "fp32", or "bf16" for autocast (losses stay fp32).
        eval_batch_size: examples per evaluation batch.
    """

    epochs: Annotated[int, AT_LEAST_ONE] = 2
    batch_size: Annotated[int, AT_LEAST_ONE] = 32
    accumulate: Annotated[int, AT_LEAST_ONE] = 1
    lr: Annotated[float, POSITIVE] = 1e-3
    optimizer: Literal["adamw", "adam", "adamax", "sgd", "adamw8bit"] = "adamw"
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.999)
    momentum: Annotated[float, BELOW_ONE] = 0.0
    clip: Annotated[float | None, POSITIVE] = None
    schedule: Schedule = Schedule()
    augment: Augment = "none"
    precision: Literal["fp32", "bf16"] = "fp32"
    eval_batch_size: Annotated[int, AT_LEAST_ONE] = 250
    iterations: Annotated[int, NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        check_fields(self, "local")
        if self.schedule.horizon and self.iterations:
            raise ValueError(
                f"local.schedule.horizon counts epochs, so local.iterations must be 0 with it, got {self.iterations}"
            )

    def steps(self, batches: int) -> int:
        """Optimiser steps of an epoch with so many batches."""
        return math.ceil(batches / self.accumulate)

    def round_steps(self, epoch: int) -> int:
        """Batches with a step in a round, where an epoch has so many."""
        return self.iterations or self.epochs * epoch

    def progress(self, round: float, rounds: int, epoch: int, taken: int) -> float:
        """Share of the schedule that is over."""
        return taken / (self.schedule.horizon * epoch) if self.schedule.horizon else round / rounds

    def travelled(self, round: int, rounds: int, steps: int) -> float:
        """The sum of the learning rates of a round's steps."""
        epoch = max(1, steps // self.epochs)
        done = (self.progress(round + step / steps, rounds, epoch, step) for step in range(steps))
        return self.lr * sum(map(self.schedule.factor, done))


SCALE = "scale"  # key of a parameter group: the factor on local.lr of its tensors


def make_optimizer(
    parameters: Sequence[Tensor], local: Local, scales: Sequence[float] | None = None
) -> torch.optim.Optimizer:
    """The optimiser that ``local`` describes; vectors are not decayed.

    "adamw8bit" keeps moments of tensors with fewer than 4,096 values in 32 bits, and needs the library bitsandbytes.
    """
    # Else the first optimiser of a process imports torch's compiler, in 1.5 s: this says that it need not be told.
    add_group: Any = unwrap(torch.optim.Optimizer.add_param_group)
    add_group.__dict__.setdefault("__dynamo_disable", add_group)
    each = [1.0] * len(parameters) if scales is None else scales
    groups: list[dict[str, Any]] = []
    for scale in dict.fromkeys(each):
        scaled = [p for p, factor in zip(parameters, each, strict=True) if factor == scale]
        # Biases and norms are vectors; decaying them is not what any of the papers mean by weight decay.
        matrices, vectors = [p for p in scaled if p.ndim > 1], [p for p in scaled if p.ndim <= 1]
        decayed = [(matrices, local.weight_decay), (vectors, 0.0)]
        if not local.weight_decay:  # one group is one step
            decayed = [([*matrices, *vectors], 0.0)]
        groups += [
            {"params": group, "weight_decay": decay, "lr": local.lr * scale, SCALE: scale}
            for group, decay in decayed
            if group
        ]
    if local.optimizer == "sgd":
        # On a processor the default comes to the same, after looking at all tensors at every step.
        foreach = False if all(p.device.type == "cpu" for p in parameters) else None
        return torch.optim.SGD(groups, lr=local.lr, momentum=local.momentum, foreach=foreach)
    if local.optimizer == "adamax":
        return torch.optim.Adamax(groups, lr=local.lr, betas=local.betas)
    if local.optimizer == "adamw8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit(groups, lr=local.lr, betas=local.betas)
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=local.lr, betas=local.betas, fused=True)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """An optimiser's step without a profiler's record, half of a small model's step; for use without gradients."""
    return partial(unwrap(type(optimizer).step), optimizer)


def moments_of(local: Local) -> int:
    """Number of moments that the optimiser keeps of each value."""
    if local.optimizer == "sgd":
        return int(local.momentum > 0)
    return 2


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Learning rate of every group: this one, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[SCALE]


def scheduled_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], local: Local, progress: float
) -> None:
    """One step with the gradients there are, clipped, at the rate after a share ``progress`` of the run's steps."""
    set_rates(optimizer, local.lr * local.schedule.factor(progress))
    if local.clip is not None:
        nn.utils.clip_grad_norm_(list(parameters), local.clip)
    optimizer.step()
