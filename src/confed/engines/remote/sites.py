"""Registry of the sites that are connected to a server: who they are, and what they do."""

import errno
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar
from uuid import uuid4

from confed.engines.dispatch import Batch
from confed.engines.remote.journal_chains import Countersignatures, Statement
from confed.engines.remote.protocol import (
    GOODBYE,
    HELLO,
    LEFT_OUT,
    ROLES,
    Answer,
    Fingerprint,
    Limits,
    Refused,
    Request,
    digest,
    open_body,
    printable,
    seal,
)
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.ownership import MODALITIES
from confed.federation.params import Scalar
from confed.federation.protocols import ClientData
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, check_fields
from confed.system.events import Caution, Progress, SiteStates, SiteStatus
from confed.system.plain_text import visible

Result = TypeVar("Result")

WAIT = 0.2  # seconds between tries


def patiently(act: Callable[[], Result], most: float = 600.0) -> Result:
    """Result of a function that is called again while the process has too many files open."""
    began = time.monotonic()
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() - began > most:
                raise
        time.sleep(WAIT)


@dataclass(frozen=True)
class Connection:
    """A site's connection to the server."""

    since: str  # changes when the site connects anew
    name: str | None = None  # what the site is called, where its key proves it; None where it has to say so itself


class Transport(Protocol):
    """Carries requests to sites and their replies back."""

    def connections(self) -> Mapping[int, Connection]:
        """The sites that are connected now, by the transport's own number."""
        ...

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        """Sends a request; returns what its reply will be known by, or None if it could not be sent."""
        ...

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        """Head and body of the reply to a request; what went wrong on the way; or None if it has not come yet."""
        ...

    def forget(self, sent: str) -> None:
        """End of the wait for the reply to this request."""
        ...

    def wait(self, seconds: float) -> bool:
        """Waits until a reply has arrived since the last wait, at most so long; False, at once, if it cannot."""
        ...

    def set_max_reply_bytes(self, largest: int) -> None:
        """From now on a reply has at most so many bytes, where it can be refused before all of it is here."""
        ...


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a server: how long it waits for replies and absent sites."""

    # sites that must answer for a round to count: below that the server waits for those that are missing instead of
    # leaving them out
    minimum: Annotated[int, AT_LEAST_ONE] = 1
    # seconds from request to reply; a site that takes longer is left out of this round
    deadline: Annotated[float, POSITIVE] = 3600.0
    # seconds that a site may be disconnected before it is left out of this round
    away: Annotated[float, NOT_NEGATIVE] = 60.0
    # seconds between looks at what has arrived, at most; less after short waits, and where the transport tells what
    # arrives. Between looks at who is connected four times that.
    interval: Annotated[float, POSITIVE] = 0.25

    def __post_init__(self) -> None:
        check_fields(self, "")


class Registered:
    """Population whose examples are at the sites; see :class:`confed.engines.participation.Population`."""

    def __init__(self, clients: Sequence[ClientInfo]) -> None:
        self._clients = list(clients)

    def __len__(self) -> int:
        return len(self._clients)

    def info(self, number: int) -> ClientInfo:
        return self._clients[number]

    def data(self, client_id: str) -> ClientData:
        """Never returns: a server has no client's examples."""
        raise ValueError(f"the examples of client {client_id!r} are at its site")


class SiteRegistry:
    """Sites of a federation, as their server sees them."""

    def __init__(
        self,
        transport: Transport,
        fingerprint: Fingerprint,
        timeouts: Timeouts,
        limits: Limits,
        audit: Path | None,
        progress: Progress,
        heads: Countersignatures | None = None,
    ) -> None:
        self.heads = Countersignatures(None) if heads is None else heads
        self.transport, self.fingerprint, self.timeouts, self.limits = transport, fingerprint, timeouts, limits
        self.clients: dict[str, ClientInfo] = {}  # those that introduced themselves at some time
        # those of them whose own examples are not all used -> role -> examples whose pictures cannot be read
        self.left_out: dict[str, dict[str, int]] = {}
        self.lines: dict[str, tuple[int, Connection]] = {}  # those that are connected -> their number and connection
        self.missing: dict[str, float] = {}  # those that are not -> since when, of the clock monotonic
        self.status: dict[str, SiteStatus] = {}  # site -> what it does
        self.members: frozenset[str] | None = None  # who takes part; None before that is known
        self.run = uuid4().hex
        self._audit, self._progress = audit, progress
        self._greeted: dict[int, Connection] = {}
        self._greetings: dict[int, tuple[str, Connection]] = {}
        self._looked = -float("inf")

    def gather(self, names: Collection[str], wait: float) -> list[ClientInfo]:
        """Waits until the named clients have introduced themselves."""
        began = time.monotonic()
        while True:
            self.look(always=True)
            connected = [name for name in names if name in self.lines] if names else sorted(self.lines)
            enough = len(connected) >= self.timeouts.minimum and time.monotonic() - began >= wait
            if (names and len(connected) == len(names)) or enough:
                return [self.clients[name] for name in connected]
            time.sleep(self.timeouts.interval)

    def farewell(self, wait: float) -> None:
        """Tells the sites that are connected that the run is over."""
        told: set[str] = set()
        for name, (number, _) in self.lines.items():
            request = Request(f"{self.run}/goodbye", name, GOODBYE, 0, 1, 0, journals=self.heads.signed(name))
            head, body = request.to_bytes(), seal(Message())
            if (sent := self.transport.send(number, GOODBYE, head, body, wait)) is not None:
                told.add(sent)
                self.log("out", name, GOODBYE, head, body)
        began = time.monotonic()
        while told and time.monotonic() - began < wait:
            told = {sent for sent in told if self.transport.receive(sent) is None}
            time.sleep(self.timeouts.interval)
        for sent in told:
            self.transport.forget(sent)

    def look(self, always: bool = False) -> None:
        """Update of the connected sites; new ones are greeted."""
        if not always and time.monotonic() - self._looked < 4 * self.timeouts.interval:
            return
        self._looked = time.monotonic()
        connections = self.transport.connections()
        for name, (number, connection) in list(self.lines.items()):
            if connections.get(number) != connection:
                del self.lines[name]
                self._greeted.pop(number, None)  # one that was in quarantine comes back over the same connection
                self.missing[name] = time.monotonic()
                self.note(name, "away")
        for number, (sent, connection) in list(self._greetings.items()):
            reply = self.transport.receive(sent)
            if connections.get(number) != connection or isinstance(reply, str):
                self.transport.forget(sent)
                del self._greetings[number], self._greeted[number]
            elif reply is not None:
                del self._greetings[number]
                self._welcome(number, connection, *reply)
        for number, connection in connections.items():
            if self._greeted.get(number) != connection:
                self._greet(number, connection)

    def _greet(self, number: int, connection: Connection) -> None:
        name = connection.name or ""
        head = Request(f"{self.run}/hello/{number}", name, HELLO, 0, 1, 0, journals=self.heads.signed(name)).to_bytes()
        body = seal(Message({}, self.fingerprint.scalars()))
        sent = self.transport.send(number, HELLO, head, body, self.timeouts.deadline)
        if sent is not None:
            self._greeted[number], self._greetings[number] = connection, (sent, connection)
            self.log("out", connection.name or f"node {number}", HELLO, head, body)

    def _welcome(self, number: int, connection: Connection, head: bytes, body: bytes) -> None:
        """A site's introduction of itself; a site that cannot take part is noted and left out."""
        name = connection.name or f"node {number}"
        self.log("in", name, HELLO, head, body)
        try:
            answer = Answer.from_bytes(head, self.limits)
            if answer.error is not None:
                raise Refused(answer.error)
            told = open_body(body, self.limits, {}, frozenset(), {}).scalars
            claimed = str(told.get("client", ""))
            if connection.name is not None and claimed != connection.name:
                raise Refused(f"its key is that of {connection.name!r}, it says that it is {claimed!r}")
            if not (0 < len(claimed) <= 200 and claimed.isprintable()):
                raise Refused("it must say its name in up to 200 printable characters")
            name = claimed
            if claimed in self.lines:
                raise Refused(f"another site is connected as {claimed!r}")
            examples = told.get("examples")
            if type(examples) is not int or not 0 < examples < 2**48:
                raise Refused(f"it must have training examples, got {examples!r}")
            if (problem := self.fingerprint.differences(told, "the server", "the site")) is not None:
                raise Refused(problem)
            modalities = tuple(modality for modality in str(told.get("modalities", "")).split(",") if modality)
            if not set(modalities) <= set(MODALITIES) or len(set(modalities)) < len(modalities):
                raise Refused(f"modalities must be some of {', '.join(MODALITIES)}, got {str(modalities)[:80]}")
            answers = told.get("head", "")
            if not isinstance(answers, str) or len(answers) > 200 or not answers.isprintable():
                raise Refused(f"the name of its head must be up to 200 printable characters, got {str(answers)[:80]!r}")
            left_out = _left_out(told)
            if self.heads.was_put_back(claimed, str(told.get("countersigned", ""))):
                self._progress(
                    Caution(
                        f"this run folder was put back from an old copy: {claimed} keeps what was signed later; rounds "
                        "since then are done again, and what they cost in privacy is spent twice"
                    )
                )
            self.heads.note(claimed, answer.journals)
        except Exception as error:  # whatever a greeting may lead to is a fault of its site
            self.note(name, "away", f"cannot take part: {error if isinstance(error, ValueError) else repr(error)}")
            return
        self.clients[claimed] = ClientInfo(claimed, examples, modalities, answers)
        self.left_out[claimed] = left_out
        self.lines[claimed] = (number, connection)
        self.missing.pop(claimed, None)
        late = self.members is not None and claimed not in self.members
        self.note(claimed, "idle", "came after the run began: it takes part from the next round" * late)

    def note(self, name: str, state: str, note: str = "") -> None:
        """Record of what a site does, and of its error if there is one."""
        status = self.status.setdefault(name, SiteStatus())
        status.state = state
        status.note = printable(note, 500) or status.note
        self._progress(SiteStates(self.status))

    def log(self, way: str, site: str, action: str, head: bytes, body: bytes) -> None:
        """Entry in the audit log, added to the site's count of bytes."""
        status = self.status.setdefault(site, SiteStatus())
        if way == "in":
            status.up += len(head) + len(body)
        else:
            status.down += len(head) + len(body)
        if self._audit is not None:
            line: dict[str, Any] = {"time": time.time(), "way": way, "site": site, "action": action}
            line |= {"bytes": len(head) + len(body), "digest": digest(head, body)}
            audit = self._audit
            with patiently(lambda: audit.open("a", encoding="utf-8")) as file:
                file.write(visible(json.dumps(line)) + "\n")


def _left_out(told: Mapping[str, Scalar]) -> dict[str, int]:
    """Role -> a site's examples whose pictures cannot be read, as its introduction says; roles with some only."""
    counts: dict[str, int] = {}
    for role in ROLES:
        count = told.get(f"{LEFT_OUT}{role}", 0)
        if type(count) is not int or not 0 <= count < 2**48:
            raise Refused(
                f"the number of {role} examples that it leaves out must be a whole one, got {str(count)[:80]}"
            )
        if count:
            counts[role] = count
    return counts


@dataclass
class PendingCall:
    """A call that is sent to a site."""

    call: Call  # the call with its message
    request: Request
    sent: str | None = None  # what the reply will be known by; None while it is not sent
    to: tuple[int, Connection] | None = None  # the connection it went over
    began: float = 0.0  # when it was sent last
    late: float = 0.0  # when the deadline is over; 0 before it was sent
    lost: int = 0  # how often it was lost on its way or with the process that was to answer it; see TRIES
    # what its site had said of its journals when it was sent last: the site may say more before the reply is read
    journals: Statement | None = None
    moved: int = 0  # bytes that had arrived before, of its body and of the reply's


@dataclass
class Norms:
    """Norms of the updates of a round, which are compared with each other."""

    of: dict[str, float] = field(default_factory=dict[str, float])  # client -> norm
    failed: dict[int, Reply] = field(default_factory=dict[int, Reply])  # call -> its reply, which has an error
    bases: dict[str, int] = field(default_factory=dict[str, int])  # client -> version that counted before the round


@dataclass
class SiteBatch(Batch):
    """Calls that sites answer; an outcome is what was sent, with a file that holds the reply, or what went wrong."""

    spool: Path = field(kw_only=True)  # where replies wait until their turn comes
    optional: bool = field(default=False, kw_only=True)  # whether the run goes on without any of the replies
    running: dict[int, PendingCall] = field(default_factory=dict[int, PendingCall])
    done: dict[int, tuple[PendingCall, Path | str]] = field(default_factory=dict[int, "tuple[PendingCall, Path | str]"])
    compared: bool = field(default=False, kw_only=True)  # whether replies are compared with each other
    norms: Norms | None = None  # of those, once all have come
    lost: int = 0  # calls that were given up
    useless: int = 0  # replies that were read and could not be used, or never came

    def count_out(self, reply: Reply, minimum: int) -> None:
        """Check that enough replies of a round can still be used: a repeated request would give the same replies."""
        self.useless += 1
        left, wanted = len(self.calls) - self.useless, min(minimum, len(self.calls))
        if left < wanted and wanted > 1:
            raise RuntimeError(
                f"round {self.round + 1} needs {wanted} usable replies and can have {left} at most; "
                f"{reply.client.id}: {reply.error}"
            )
