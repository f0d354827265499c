"""Storage of a client's side of secure aggregation between two calls, as tensors and texts of its state."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from confed.federation.state import ClientState
from confed.privacy.secure_sum.member import Keys, Member
from confed.privacy.secure_sum.plan import Plan

GROUP = "secure sum"
"""Of tensors in a client's state, and the scalar with the plan."""
FRESH = frozenset({"secure_keys", "secure_unmask"})
"""Actions after which nothing of an earlier sum, or of an earlier step, is needed any more."""


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor, uint8, shape (their number,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of :func:`as_tensor`."""
    return tensor.numpy().tobytes()


def stacked(texts: Sequence[bytes]) -> Tensor:
    """Bytes of equal length, uint8, shape (how many, length)."""
    return torch.stack([as_tensor(text) for text in texts])


def rows(tensor: Tensor) -> list[bytes]:
    """The bytes of :func:`stacked`."""
    return [as_bytes(row) for row in tensor]


def remember(state: ClientState, member: Member) -> None:
    """Write a client's side of secure aggregation into its state, in place of an earlier one."""
    tensors = {"own": stacked([member.seal_key, member.mask_key, *member.seeds.values()])}
    if member.keys:
        tensors["keys"] = stacked([key.seal + key.mask for key in member.keys.values()])
    if member.parcels:
        tensors["parcels"] = stacked(list(member.parcels.values()))
    state.tensors[GROUP] = tensors
    state.scalars[GROUP] = json.dumps(
        {
            "plan": member.plan.to_json(), "name": member.name, "seeds": list(member.seeds),
            "keys": list(member.keys), "parcels": list(member.parcels),
        }
    )  # fmt: skip


def recall(state: ClientState) -> Member:
    """The client's side of the secure aggregation in progress."""
    tensors = state.tensors.get(GROUP)
    if tensors is None:
        raise ValueError("this client is in the middle of no secure aggregation")
    names = json.loads(str(state.scalars[GROUP]))
    seal, mask, *seeds = rows(tensors["own"])
    pairs = _named(names["keys"], tensors.get("keys"))
    return Member(
        Plan.from_json(names["plan"]), names["name"], seal, mask, dict(zip(names["seeds"], seeds, strict=True)),
        {name: Keys(pair[:32], pair[32:]) for name, pair in pairs.items()},
        _named(names["parcels"], tensors.get("parcels")),
    )  # fmt: skip


def forget(state: ClientState) -> None:
    """Removal of a client's side of secure aggregation: the shares are given, or another sum begins."""
    state.tensors.pop(GROUP, None)
    state.scalars.pop(GROUP, None)


def _named(names: Sequence[str], tensor: Tensor | None) -> dict[str, bytes]:
    return {} if tensor is None else dict(zip(names, rows(tensor), strict=True))
