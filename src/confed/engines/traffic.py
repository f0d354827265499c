"""Communication of a round: calls and bytes, per client and per action."""

from dataclasses import dataclass, field
from typing import NamedTuple

from confed.federation.messages import Call, Reply
from confed.federation.wire import size

__all__ = ["Ledger", "Traffic"]


class Traffic(NamedTuple):
    """Calls of one action, and the bytes they took.

    Attributes:
        calls: how many.
        up: bytes from clients.
        down: bytes to clients.
    """

    calls: int = 0
    up: int = 0
    down: int = 0


@dataclass
class Ledger:
    """Bytes per client, counted from the serialised messages; the cost of a client's refused update is not counted."""

    up: dict[str, int] = field(default_factory=dict[str, int])
    down: dict[str, int] = field(default_factory=dict[str, int])

    actions: dict[str, Traffic] = field(default_factory=dict[str, "Traffic"])

    def copy(self) -> "Ledger":
        """The same, to which calls can be added."""
        return Ledger(dict(self.up), dict(self.down), dict(self.actions))

    def count(self, call: Call, reply: Reply) -> None:
        """Counts one call and its reply."""
        name, down = call.client.id, size(call.message)
        up = size(reply.message) if reply.error is None else 0
        self.down[name] = self.down.get(name, 0) + down
        if reply.error is None:
            self.up[name] = self.up.get(name, 0) + up
        before = self.actions.get(call.action, Traffic())
        self.actions[call.action] = Traffic(before.calls + 1, before.up + up, before.down + down)
