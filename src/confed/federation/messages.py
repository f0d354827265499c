"""Messages, calls and replies between servers and clients."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from confed.federation.client_info import ClientInfo
from confed.federation.params import Params, Scalar
from confed.federation.state import ServerState


@dataclass(frozen=True, slots=True)
class Message:
    """Named tensors and named scalars, the only content that is sent between server and client.

    The tensors are in the order of their names, whichever way a message was made: a reader of safetensors
    files lists them in another order in each process, and a sum over tensors would follow it.
    """

    tensors: Params = field(default_factory=dict[str, Tensor])
    scalars: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", dict(sorted(self.tensors.items())))

    def positive(self, scalar: str, *, zero: bool = False) -> float:
        """A scalar that the method's protocol needs and that must be a positive finite number.

        Raises:
            ValueError: it is missing, no number, or out of range.
        """
        if scalar not in self.scalars:
            raise ValueError(f"the message lacks the scalar {scalar!r}; it has {sorted(self.scalars) or 'none'}")
        value = self.scalars[scalar]
        if isinstance(value, bool | str) or not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            wanted = "a finite number that is not negative" if zero else "a positive finite number"
            raise ValueError(f"the message's scalar {scalar!r} must be {wanted}, got {value!r}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to one client: run this action with this message.

    Attributes:
        expects: where given, the reply must carry exactly these names, with these shapes and dtypes; the
            engine turns any other reply into an error.
        session: one of several calls in a row between which the client goes on where it stopped. Where an engine
            can, it lets the client keep a separate workspace in the meantime (:attr:`Client.session`). That every
            client of such a call failed does not end the run: the flow says whether it can go on.
        wire: what travels in place of the message, where that is compressed.
    """

    client: ClientInfo
    action: str
    message: Message
    expects: Params | None = None
    session: bool = False
    wire: Message | None = None

    @property
    def sent(self) -> Message:
        """What travels to the client."""
        return self.message if self.wire is None else self.wire


@dataclass(frozen=True, slots=True)
class Reply:
    """A client's answer; a failure is an answer with ``error`` (type and message), never an exception.

    Attributes:
        wire_bytes: what it took to travel, where that is not the size of the message.
    """

    client: ClientInfo
    message: Message
    error: str | None = None
    wire_bytes: int | None = None


Flow = Generator[Sequence[Call], Iterable[Reply], ServerState]
"""One server's part of one round: yields calls, receives their replies, returns its new state."""

Exchange = Callable[[Sequence[Call]], Iterator[Reply]]
"""What an engine provides: replies one by one, in the order of the calls, each computed or awaited on demand."""


def drive(flow: Flow, exchange: Exchange) -> ServerState:
    """Execution of a flow over an exchange to its end; the same for every engine."""
    try:
        calls = next(flow)
        while True:
            calls = flow.send(exchange(calls))
    except StopIteration as stop:
        return stop.value
    finally:
        flow.close()
