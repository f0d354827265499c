"""Checks of a client's message before it is used: finite values of plausible scale in the declared tensors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params

__all__ = ["ValueBound", "check_reply", "first_non_finite"]

LARGEST = 1e6
"""How many times the largest value of the initial model, or 1, a value that travels may be."""

SUMMED = 2.0**32
"""How many times that a sum over examples may be."""


def first_non_finite(params: Params) -> str | None:
    """The name of a tensor that holds a NaN or an infinity, or None.

    A sum is non-finite if any element is; that costs one read of the data and no memory.
    """
    for name, tensor in params.items():
        if tensor.is_floating_point():
            wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
            if not math.isfinite(tensor.sum(dtype=wide).item()):
                return name
    return None


@dataclass(frozen=True)
class ValueBound:
    """Absolute bound on values that travel, the same at sites and server: adding larger ones would lose all others.

    Attributes:
        most: the largest absolute value.
        sums: see :attr:`confed.federation.traits.Traits.sums`.
    """

    most: float
    sums: tuple[str, ...] = ()

    @classmethod
    def of(cls, initial: Iterable[torch.Tensor], sums: tuple[str, ...]) -> "ValueBound":
        """The bound of a run, from the values that every party starts from."""
        floating = [tensor.detach() for tensor in initial if tensor.is_floating_point() and tensor.numel()]
        return cls(LARGEST * max([1.0, *(float(tensor.abs().max()) for tensor in floating)]), sums)

    def check(self, params: Params) -> None:
        """Check of a message.

        Raises:
            ValueError: a value is beyond the bound; names the tensor.
        """
        if (problem := self.problem(params)) is not None:
            raise ValueError(problem)

    def problem(self, params: Params) -> str | None:
        """The first tensor with a value beyond the bound, a NaN or an infinity, in words; None where there is none."""
        for name, tensor in params.items():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            most = self.most * (SUMMED if any(fnmatchcase(name, glob) for glob in self.sums) else 1.0)
            low, high = (float(end) for end in tensor.detach().aminmax())
            if not (-most <= low and high <= most):  # a NaN is in no range
                return f"{name!r} holds values from {low:.3g} to {high:.3g}, and {most:.3g} is the most in this run"
        return None


def check_reply(call: Call, reply: Reply) -> Reply:
    """The reply, or an error of the same client where its tensors are not what the call expects.

    Every tensor must be finite. Where the call says what it expects, names, shapes and dtypes must match.
    """
    if reply.error is not None:
        return reply
    problem = _problem(call, reply.message)
    return reply if problem is None else replace(reply, message=Message(), error=problem)


def _problem(call: Call, message: Message) -> str | None:
    if call.expects is not None:
        missing, extra = (
            call.expects.keys() - message.tensors.keys(),
            message.tensors.keys() - call.expects.keys(),
        )
        if missing or extra:
            return f"ValueError: update refused: missing {sorted(missing)}, unexpected {sorted(extra)}"
        for name, wanted in call.expects.items():
            got = message.tensors[name]
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                return (
                    f"ValueError: update refused: {name!r} must be {wanted.dtype} of shape {tuple(wanted.shape)}, "
                    f"got {got.dtype} of shape {tuple(got.shape)}"
                )
    name = first_non_finite(message.tensors)
    return None if name is None else f"ValueError: update refused: {name!r} holds a NaN or an infinity"
