"""A client's side of secure aggregation: four steps, and all that it keeps between them in one object.

Notation as in :mod:`confed.privacy.secure_sum`. Nothing here knows of messages, rounds or models.
"""

import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Self

import torch
from torch import Tensor

from confed.federation.state import ClientState
from confed.privacy.secure_sum.masks import (
    SEAL,
    SHARE,
    Integers,
    add_mask,
    derived,
    new_key,
    opened,
    pair_secret,
    public_key,
    sealed,
    split_secret,
)
from confed.privacy.secure_sum.plan import Plan


@dataclass(frozen=True)
class Keys:
    seal: bytes  # for secrets that others send to it
    mask: bytes  # for the masks that it shares with others


@dataclass
class Member:
    """State of a client in secure aggregation; never sent."""

    plan: Plan
    name: str
    seal_key: bytes  # private, and never given to other parties
    mask_key: bytes  # private; shared out, as it must be known to others should this client drop out
    seeds: dict[int, bytes]  # block -> b_u, for the blocks that this client sends
    keys: dict[str, Keys] = field(default_factory=dict[str, Keys])  # U_1 and their public keys
    # sender -> sealed shares for this client, of U_2
    parcels: dict[str, bytes] = field(default_factory=dict[str, bytes])
    done: bool = False  # the shares have been given: a second answer could betray what the first one hid

    @classmethod
    def begin(cls, plan: Plan, name: str) -> Self:
        """Step 0: new keys and seeds."""
        if name not in plan.members or not plan.of(name):
            raise ValueError(f"{name!r} has no part in secure aggregation {plan.label!r}")
        return cls(plan, name, new_key(), new_key(), {block: new_key() for block in plan.of(name)})

    @property
    def public(self) -> Keys:
        return Keys(public_key(self.seal_key), public_key(self.mask_key))

    def share(self, keys: Mapping[str, Keys]) -> dict[str, bytes]:
        """Step 1: shares of this client's secrets, sealed for each of the others.

        A repeated request with the same keys gets the same shares: the polynomials follow from the seal key, which is
        never shared, and from what is asked. With new ones, a second answer would hold further points of other
        polynomials through the same secrets.
        """
        self._check(keys, self.plan.members, "sent keys")
        if keys[self.name] != self.public:
            raise ValueError(f"the keys of {self.name!r} were changed on their way")
        self.keys = dict(keys)
        holders = [name for name in self.plan.members if name in self.keys]  # U_1, by the numbers of the shares
        threshold, count = self.plan.threshold, len(holders)
        secrets = [split_secret(self.mask_key, threshold, count, self._polynomial(-1))]
        nothing = [bytes(SHARE)] * count
        for block in range(len(self.plan.blocks)):
            seed = self.seeds.get(block)
            secrets.append(nothing if seed is None else split_secret(seed, threshold, count, self._polynomial(block)))
        parcels: dict[str, bytes] = {}
        for position, holder in enumerate(holders):
            text = b"".join(shares[position] for shares in secrets)
            key = pair_secret(self.seal_key, keys[holder].seal, seal_purpose(self.plan, self.name, holder))
            parcels[holder] = sealed(key, text)
        return parcels

    def mask(self, parcels: Mapping[str, bytes], vectors: Mapping[int, Integers]) -> dict[int, Integers]:
        """Step 2: the vectors behind their masks."""
        self._check(parcels, tuple(self.keys), "sent shares")
        if set(vectors) != set(self.seeds):
            raise ValueError(f"{self.name!r} must mask the blocks {sorted(self.seeds)}, got {sorted(vectors)}")
        self.parcels = dict(parcels)
        for block, vector in vectors.items():
            add_mask(vector, self.seeds[block], 1)
            for other in self.plan.blocks[block].senders:
                if other in parcels and other != self.name:
                    purpose = mask_purpose(self.plan, block, self.name, other)
                    seed = pair_secret(self.mask_key, self.keys[other].mask, purpose)
                    add_mask(vector, seed, 1 if other > self.name else -1)
        return dict(vectors)

    def confirm(self, survivors: Sequence[str]) -> dict[str, bytes]:
        """Confirmation between steps 2 and 3, where blocks have different senders: the survivors this client was told.

        The survivors are checked as in :meth:`unmask`, with the same ValueError.
        """
        self._check(dict.fromkeys(survivors, b""), tuple(self.parcels), "sent a masked vector")
        return {name: self._confirmed(self.name, name, survivors) for name in survivors if name != self.name}

    def _confirmed(self, by: str, to: str, survivors: Sequence[str]) -> bytes:
        other = to if by == self.name else by
        purpose = ["survivors", self.plan.digest, by, to, json.dumps([sorted(self.parcels), sorted(survivors)])]
        return pair_secret(self.seal_key, self.keys[other].seal, "\x1f".join(purpose))

    def unmask(
        self, survivors: Sequence[str], confirmed: Mapping[str, bytes] | None = None
    ) -> dict[str, dict[int, bytes]]:
        """Step 3: this client's shares of what takes the masks off."""
        if self.done:
            raise ValueError(f"{self.name!r} has given its shares for secure aggregation {self.plan.label!r} before")
        self._check(dict.fromkeys(survivors, b""), tuple(self.parcels), "sent a masked vector")
        if self.plan.partial:
            heard = [name for name in survivors if name != self.name and name in (confirmed or {})]
            words = {name: self._confirmed(name, self.name, survivors) for name in heard}
            agreed = sum(hmac.compare_digest((confirmed or {})[name], word) for name, word in words.items())
            if agreed + 1 < self.plan.threshold:
                raise ValueError(
                    f"only {agreed + 1} clients were told the same survivors of the aggregation {self.plan.label!r}, "
                    f"{self.plan.threshold} must"
                )
        self.done = True
        given: dict[str, dict[int, bytes]] = {name: {} for name in self.parcels}
        wanted = list(needed(self.plan, self.parcels, survivors))
        for owner, parcel in self.parcels.items():
            purpose = seal_purpose(self.plan, owner, self.name)
            text = opened(pair_secret(self.seal_key, self.keys[owner].seal, purpose), parcel)
            shares = [text[i : i + SHARE] for i in range(0, len(text), SHARE)]
            if len(shares) != 1 + len(self.plan.blocks):
                raise ValueError(f"{owner!r} shared {len(shares)} secrets, expected {1 + len(self.plan.blocks)}")
            given[owner] = {block: shares[1 + block] for name, block in wanted if name == owner}
        return given

    def _polynomial(self, block: int) -> Callable[[int], int]:
        """The coefficients of a block's polynomial, of which each number has its own; -1 for that of the mask key."""
        public_keys = json.dumps([[name, key.seal.hex(), key.mask.hex()] for name, key in sorted(self.keys.items())])
        purpose = ["polynomial", self.plan.digest, sha256(public_keys.encode()).hexdigest(), str(block)]
        # 384 bits modulo a prime of 257: as good as uniformly distributed, up to 2^-127.
        return lambda number: int.from_bytes(derived(self.seal_key, "\x1f".join([*purpose, str(number)]), 48), "big")

    def _check(self, heard: Mapping[str, object], expected: Sequence[str], what: str) -> None:
        if self.name not in heard or not set(heard) <= set(expected):
            raise ValueError(f"secure aggregation {self.plan.label!r} of {self.name!r} names wrong clients that {what}")
        if len(heard) < self.plan.threshold:
            raise ValueError(
                f"only {len(heard)} clients {what} for the aggregation {self.plan.label!r}, {self.plan.threshold} must"
            )


def needed(plan: Plan, sharers: Iterable[str], survivors: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Shares that take the masks off the sums: client of U_2 and block, or -1 for a dropped client's mask key."""
    stayed = set(survivors)
    open_blocks = [b for b, block in enumerate(plan.blocks) if len(stayed & set(block.senders)) >= plan.least]
    for owner in sharers:
        neighbours = set(plan.of(owner))
        for block in [b for b in open_blocks if b in neighbours] if owner in stayed else [-1]:
            yield owner, block


def mask_purpose(plan: Plan, block: int, one: str, other: str) -> str:
    """Purpose of two clients' secret for their masks of a block of this plan, the same from both sides."""
    return "\x1f".join(["mask", plan.digest, str(block), *sorted((one, other))])


def seal_purpose(plan: Plan, owner: str, holder: str) -> str:
    """Purpose of the secret of two clients for the seal of one's shares for the other, under the same plan."""
    return "\x1f".join(["seal", plan.digest, owner, holder])


def parcel_size(plan: Plan) -> int:
    """Bytes of the sealed shares that one client sends to another."""
    return SHARE * (1 + len(plan.blocks)) + SEAL


GROUP = "secure sum"  # of tensors in a client's state, and the scalar with the plan
FRESH = frozenset({"secure_keys", "secure_unmask"})
"""Actions after which nothing of an earlier sum, or of an earlier step, is needed any more."""


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor, uint8, shape (their number,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def stacked(texts: Sequence[bytes]) -> Tensor:
    """Bytes of equal length, uint8, shape (how many, length)."""
    return torch.stack([as_tensor(text) for text in texts])


def rows(tensor: Tensor) -> list[bytes]:
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
