"""Checks of a reply's scalars and counts against what the method and the task declare."""

from collections.abc import Mapping
from typing import Any

import torch

from confed.engines.remote.protocol import NAME, Refused
from confed.federation.algorithm import Algorithm
from confed.federation.messages import Message
from confed.federation.params import Params, Scalar
from confed.federation.reports import LOSS, Counted, Measured

__all__ = ["VIEWS", "check_content"]

VIEWS = ("global", "personal")
"""The models that a site evaluates."""

METRICS = 256
"""Names of metrics in a tally of a task that does not declare its own, at most."""

WEIGHT = 2.0**53
"""What an evaluation may weigh, at most: numbers of examples and of words are exact below."""

ROUNDING = 1e-6
"""What sums of single-precision values may lie outside of their range, relative to their weight."""


def check_content(algorithm: Algorithm, task: Any, action: str, message: Message) -> None:
    """Checks what a reply tells besides tensors of the model.

    Args:
        algorithm: the method, which declares the scalars of its actions (:meth:`Algorithm.reports`).
        task: the client's, which declares its metrics (:class:`confed.federation.reports.Measured`) and the shapes of
            its counts (:class:`confed.federation.reports.Counted`).
        action: what was asked for.
        message: the reply.

    Raises:
        Refused: a scalar, a metric or a count is not declared, has another type, or is out of its range.
    """
    if action == "evaluate":
        _check_tallies(task, message.scalars)
        _check_counts(task, message.tensors)
        return
    declared = algorithm.reports(action)
    for name, value in message.scalars.items():
        if name not in declared:
            raise Refused(
                f"the scalar {name[:80]!r} of {action!r} is not declared by the method (Algorithm.reports), which has "
                f"{', '.join(sorted(declared)) or 'none'}"
            )
        if problem := declared[name].problem(value):
            raise Refused(f"the scalar {name!r} of {action!r} {problem}")


def _check_tallies(task: Any, scalars: Mapping[str, Scalar]) -> None:
    declared = task.measures if isinstance(task, Measured) else None
    if declared is None and len(scalars) > 2 * len(VIEWS) * METRICS:
        raise Refused(f"an evaluation has at most {METRICS} metrics, got {len(scalars)} sums and weights")
    for key, value in scalars.items():
        view, _, rest = key.partition(":")
        name, _, part = rest.rpartition(":")
        if view not in VIEWS or not name or part not in ("sum", "weight"):
            raise Refused(f"{key[:80]!r} is no sum or weight of an evaluation")
        if not name.isprintable() or len(name) > NAME or (declared is not None and name not in declared):
            raise Refused(f"{name[:80]!r} is no metric of the task {type(task).__name__}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"the scalar {key[:80]!r} of 'evaluate' must be a number, got {str(value)[:80]!r}")
        if part == "weight":
            if f"{view}:{name}:sum" not in scalars:
                raise Refused(f"{key[:80]!r} came without its sum")
            continue
        weight = scalars.get(f"{view}:{name}:weight")
        if weight is None or isinstance(weight, bool | str):
            raise Refused(f"{key[:80]!r} came without its weight")
        if not 0 <= weight <= WEIGHT:
            raise Refused(f"the weight of {name[:80]!r} must be from 0 to 2^53, got {weight:g}")
        low, high = (LOSS.low, LOSS.high) if declared is None else declared[name]
        slack = ROUNDING * (1 + weight)
        if not low * weight - slack <= value <= high * weight + slack:
            raise Refused(f"{name[:80]!r} must be from {low:g} to {high:g}, got {value:g} over {weight:g}")


def _check_counts(task: Any, tensors: Params) -> None:
    if not isinstance(task, Counted):
        return
    shapes = task.count_shapes
    for key, count in tensors.items():
        view, _, name = key.partition(":")
        if view not in VIEWS or name not in shapes:
            raise Refused(f"{key[:80]!r} is no count of the task {type(task).__name__}")
        if count.dtype != torch.int64 or tuple(count.shape) != tuple(shapes[name]):
            raise Refused(
                f"the count {name!r} must be torch.int64 of shape {tuple(shapes[name])}, got {count.dtype} of shape "
                f"{tuple(count.shape)}"
            )
        if count.numel() and not 0 <= int(count.min()) <= int(count.max()) <= 2**48:
            raise Refused(f"the count {name!r} must be from 0 to 2^48")
