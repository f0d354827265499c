"""Pending calls to sites and their outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confed.engines.remote.protocol import Request
from confed.engines.remote.sites import Connection
from confed.federation.messages import Call, Reply

__all__ = ["CallBatch", "PendingCall"]


@dataclass
class PendingCall:
    """A call that is sent to a site.

    Attributes:
        call: the call with its message.
        request: its head.
        sent: what the reply will be known by; None while it is not sent.
        to: the connection it went over.
        late: when the deadline is over.
        lost: how often the request was lost on its way or with the process that was to answer it.
    """

    call: Call
    request: Request
    sent: str | None = None
    to: tuple[int, Connection] | None = None
    late: float = 0.0
    lost: int = 0


@dataclass
class CallBatch:
    """Calls that a flow asked for together.

    Attributes:
        calls: the calls in the order of their replies.
        round: number of finished rounds.
        spool: where replies wait until their turn comes.
        waiting: positions that are not sent for the first time yet, in order.
        running: position -> what is on its way.
        done: position -> a file with the reply, or what went wrong.
        lost: calls that were given up.
        useless: replies that were read and could not be used, or never came.
        optional: whether the run goes on without any of the replies.
    """

    calls: Sequence[Call]
    round: int
    spool: Path
    waiting: list[int]
    running: dict[int, PendingCall] = field(default_factory=dict[int, PendingCall])
    done: dict[int, tuple[PendingCall, Path | str]] = field(default_factory=dict[int, "tuple[PendingCall, Path | str]"])
    lost: int = 0
    useless: int = 0
    optional: bool = False

    def count_out(self, reply: Reply, minimum: int) -> None:
        """Check that enough replies of a round can still be used: a repeated request would give the same replies.

        A round without any usable reply is handled by the round itself.

        Args:
            reply: one that cannot be used.
            minimum: usable replies that a round needs.

        Raises:
            RuntimeError: too few usable replies are left; names the round and the last error.
        """
        self.useless += 1
        left, wanted = len(self.calls) - self.useless, min(minimum, len(self.calls))
        if left < wanted and wanted > 1:
            raise RuntimeError(
                f"round {self.round + 1} needs {wanted} usable replies and can have {left} at most; "
                f"{reply.client.id}: {reply.error}"
            )
