"""Checks of a client's message before it is used: finite values of plausible scale in the declared tensors."""

import math
from dataclasses import replace

import torch

from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params

__all__ = ["check_reply", "check_scale", "first_non_finite"]


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


def check_scale(params: Params, most: float) -> None:
    """Check that no value is so large that adding it would lose all others to rounding.

    Args:
        params: what was received.
        most: the largest absolute value.

    Raises:
        ValueError: a floating-point tensor holds a larger one; names it.
    """
    for name, tensor in params.items():
        if tensor.is_floating_point() and tensor.numel() and (found := float(tensor.abs().max())) > most:
            raise ValueError(f"{name!r} holds values up to {found:.3g}, and this site takes {most:.3g} at most")


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
