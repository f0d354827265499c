"""Plan of a secure aggregation: announced by the server, and checked by every client before it takes part."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any

from confed.federation.secure_sum import COARSEST, LEAST, SecureSum


@dataclass(frozen=True)
class Block:
    """Tensors that the same clients send: one vector."""

    names: tuple[str, ...]  # of the tensors, in the order of the vector
    senders: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("a block of secure aggregation must have tensors, got none")


@dataclass(frozen=True)
class Plan:
    """Parameters of one secure aggregation."""

    label: str  # no two sums of a run have the same
    members: tuple[str, ...]  # all clients, each once; their order is the order of their numbers
    threshold: int
    bits: int  # k, 32 or 64
    fraction: int  # bits after the binary point
    reach: float  # largest absolute value of an update
    # each with at least three of the members; no tensor is in two of them, as the difference of two sums over other
    # senders is the update of those who are in one of them only
    blocks: tuple[Block, ...]
    least: int = LEAST  # members that must send a block: three, or two more than those that may collude

    def __post_init__(self) -> None:
        count = len(self.members)
        if len(set(self.members)) != count:
            raise ValueError(f"every client may be in secure aggregation once, got {', '.join(self.members)}")
        if not count // 2 < self.threshold <= count:
            raise ValueError(
                f"the threshold of secure aggregation of {count} must be more than half of them, got {self.threshold}"
            )
        if self.bits not in (32, 64) or not 0 <= self.fraction < self.bits:
            raise ValueError(
                f"an aggregation has 32 or 64 bits, some of them behind the point, got {self.bits} and {self.fraction}"
            )
        if not 0 < self.reach < math.inf:
            raise ValueError(f"the reach of secure aggregation must be positive and finite, got {self.reach}")
        times = Counter(chain.from_iterable(block.names for block in self.blocks))
        if twice := [name for name, count in times.items() if count > 1]:
            raise ValueError(f"an aggregation must name every tensor once, got {twice[0]!r} {times[twice[0]]} times")
        if self.least < LEAST:
            raise ValueError(f"a tensor of secure aggregation needs at least {LEAST} senders, got {self.least}")
        for block in self.blocks:
            if len(set(block.senders)) < self.least:
                raise ValueError(
                    f"an aggregation needs at least {self.least} clients that send a tensor, got {len(block.senders)} "
                    f"for {block.names[0]!r}: {', '.join(block.senders)}"
                )
            if not set(block.senders) <= set(self.members):
                raise ValueError(f"{block.names[0]!r} would be sent by clients that are not in secure aggregation")

    @property
    def partial(self) -> bool:
        """Whether a block has fewer senders than the sum has members; then members confirm who survived."""
        return any(set(block.senders) != set(self.members) for block in self.blocks)

    def of(self, member: str) -> list[int]:
        """The numbers of the blocks that a client sends."""
        return [number for number, block in enumerate(self.blocks) if member in block.senders]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's text; masks and seals are made with it, and fit equal plans only."""
        return sha256(self.to_json().encode()).hexdigest()

    def check(self, options: SecureSum, weight: int) -> None:
        """Checks that a server's plan is what a client's own recipe says.

        The number of bits after the binary point follows from all members' weights, of which a client knows one; it
        cannot be more than this one leaves room for.
        """
        here = {"bits": options.bits, "reach": float(options.reach), "threshold": options.needed(len(self.members))}
        here["least"] = options.least
        for key, expected in here.items():
            if (told := getattr(self, key)) != expected:
                clients = f" for {len(self.members)} clients" if key == "threshold" else ""
                raise ValueError(
                    f"algorithm.secure_sum.{key} is {expected}{clients} in this client's recipe, and the server's plan "
                    f"has {told}"
                )
        if not COARSEST <= self.fraction <= options.fraction(weight):
            raise ValueError(
                f"algorithm.secure_sum leaves from {COARSEST} to {options.fraction(weight)} bits behind the point by "
                f"this client's recipe and weight, and the server's plan has {self.fraction}"
            )

    def to_json(self) -> str:
        """The plan as text, the same for equal plans."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Plan":
        try:
            values = json.loads(text)
            blocks = tuple(Block(_texts(block["names"]), _texts(block["senders"])) for block in values.pop("blocks"))
            members = _texts(values.pop("members"))
            return Plan(members=members, blocks=blocks, **{key: _plain(values, key) for key in values})
        except (LookupError, TypeError, AttributeError, RecursionError, ArithmeticError, json.JSONDecodeError) as error:
            raise ValueError(f"not the plan of secure aggregation: {type(error).__name__}: {error}") from error


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


def _plain(values: Mapping[str, Any], key: str) -> Any:
    kinds: dict[str, type] = {"label": str, "threshold": int, "bits": int, "fraction": int, "reach": float}
    kinds["least"] = int
    if key not in kinds or type(values[key]) is not kinds[key]:
        raise TypeError(f"{key} = {values[key]!r}")
    return values[key]
