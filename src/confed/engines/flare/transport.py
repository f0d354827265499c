"""Transport over NVIDIA FLARE: requests and replies are calls of FLARE's Collab API.

FLARE starts a process at every site for as long as a job lasts, so a message costs milliseconds. A call that is lost
with its connection is known when its time is over, so no call takes long: a site that works for longer says so, and is
asked for the result with another call. What travels in a call
is our own bytes (:mod:`confed.engines.remote.protocol`), a head and a body; FLARE's own ways for tensors, one of which
is slow for small ones, are not used. A job of FLARE's names classes and sends none: the folder that :func:`write_job`
makes has three small JSON files, and a site that allows :data:`SITE_CLASSES` and no code of a job's own runs nothing
else.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.context import Context, get_call_context, set_call_context
from nvflare.collab.api.exceptions import RunAborted

from confed.engines.remote.client import Site
from confed.engines.remote.protocol import Answer, digest, seal
from confed.engines.remote.sites import Connection
from confed.federation.messages import Message
from confed.system.events import Note, Progress, ignore

HOLD = 20.0  # seconds after which a site that is still at work says so
GRACE = 60.0  # seconds more after which a call is lost
REST = 5.0  # seconds for which a site counts as away after a call to it that failed
START = 600  # seconds in which the processes of a job's sites must have started; FLARE's own default is a tenth of that
SERVER = "server"  # what FLARE calls the server of a job; it knows callers by their certificates
CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
LEADER = "confed.deployment.flare.job.FlareServer"
MEMBER = "confed.deployment.flare.job.FlareSite"
MEMBER_OF_0_1 = "confed.flare_apps.Member"
"""The same class by the name that kits of confed 0.1 allow; jobs of this release name it."""

SERVER_CLASSES = (CONTROLLER, LEADER)  # what a job may name at the server
SITE_CLASSES = (EXECUTOR, MEMBER, MEMBER_OF_0_1)  # what a job may name at a site

LINE_SETTINGS: Mapping[str, Any] = {
    # What a broken connection swallowed is sent again, for as long as a call lasts. So long FLARE keeps a thread for
    # everything that has come: with 600 s a server had 1,159 of them after 20 rounds with eight sites.
    "streaming_reliable": True,
    "streaming_retry_wait": 5.0,
    "streaming_retry_timeout": HOLD + GRACE,
    # A thin line carries what is on its way, a window, in less time than passes until it is sent again.
    "streaming_chunk_size": 2**18,
    "streaming_window_size": 2**20,
    "streaming_ack_interval": 2**18,
    "grpc": {
        "options": [
            ["grpc.max_send_message_length", -1],
            ["grpc.max_receive_message_length", -1],
            # Either end closes a connection over which nothing comes within 45 s: a question after 15, and 30 for its
            # answer, in which a line of 300 kbit/s carries the window before it. Without these gRPC waits for 60.
            ["grpc.keepalive_time_ms", 15_000],
            ["grpc.http2.ping_timeout_ms", 30_000],
            ["grpc.http2.max_pings_without_data", 0],
            ["grpc.http2.min_recv_ping_interval_without_data_ms", 5_000],
        ]
    },
}
"""How FLARE's processes use a line that breaks: ``local/comm_config.json`` of every kit."""


class Callee(Protocol):
    """A site as FLARE's Collab API shows it to the server."""

    @property
    def name(self) -> str:
        """FLARE's name of the site, which its certificate proves."""
        ...

    def __call__(self, *, timeout: float) -> Any:
        """The object whose methods are the site's, answered within so many seconds."""
        ...


class FlareTransport:
    """A :class:`confed.engines.remote.sites.Transport` over the sites of a FLARE job."""

    def __init__(
        self, callees: Iterable[Callee], names: Mapping[str, str], aborted: Callable[[], bool] = lambda: False
    ) -> None:
        # Sorted, so that a number means the same site in every process.
        connected = sorted((callee for callee in callees if callee.name in names), key=lambda callee: callee.name)
        self._callees = dict(enumerate(connected))
        self._names = {number: names[callee.name] for number, callee in self._callees.items()}
        self._broken: dict[int, list[float]] = {number: [] for number in self._callees}
        self._aborted = aborted
        self._numbers = count()
        self._replies: dict[str, tuple[bytes, bytes] | str] = {}
        self._waited: set[str] = set()
        self._turn = threading.Lock()
        self._ended, self._arrived = threading.Event(), threading.Event()

    def connections(self) -> Mapping[int, Connection]:
        """Sites of the job, as in :class:`confed.engines.remote.sites.Transport`, but for those that do not answer."""
        self._check()
        with self._turn:
            times = {number: list(broken) for number, broken in self._broken.items()}
        now = time.monotonic()
        return {
            number: Connection(f"job, {len(broken)} calls failed", self._names[number])
            for number, broken in times.items()
            if not broken or now - broken[-1] >= REST
        }

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        self._check()
        sent = str(next(self._numbers))
        with self._turn:
            self._waited.add(sent)
        # FLARE's call waits for its reply. One thread each: a site that is late must not hold up the others.
        threading.Thread(target=self._call, args=(sent, to, head, body, lasts), daemon=True).start()
        return sent

    def _call(self, sent: str, to: int, head: bytes, body: bytes, lasts: float) -> None:
        try:
            callee, timeout = self._callees[to], min(lasts, HOLD) + GRACE
            answer = callee(timeout=timeout).answer(head, body)
            while answer == AT_WORK and sent in self._waited:
                answer = callee(timeout=timeout).result(digest(head, body))
            reply = _bytes_of(answer)
        except RunAborted:
            self._ended.set()
            self._arrived.set()
            return
        except CollabCallError as error:
            reply = f"ConnectionError: {error}"
        with self._turn:
            if isinstance(reply, str):
                self._broken[to].append(time.monotonic())
            if sent in self._waited:  # it may be forgotten by now
                self._replies[sent] = reply
        self._arrived.set()

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        self._check()
        with self._turn:
            reply = self._replies.pop(sent, None)
            if reply is not None:
                self._waited.discard(sent)
        return reply

    def wait(self, seconds: float) -> bool:
        if self._arrived.wait(seconds):
            self._arrived.clear()
        return True

    def set_max_reply_bytes(self, largest: int) -> None:
        """FLARE hands on what has come whole."""

    def forget(self, sent: str) -> None:
        with self._turn:
            self._waited.discard(sent)
            self._replies.pop(sent, None)

    def _check(self) -> None:
        if self._ended.is_set() or self._aborted():
            raise RunAborted("FLARE ended the job")


def _bytes_of(reply: object) -> tuple[bytes, bytes]:
    """Head and body of what a site returned; a head that is none is refused where heads are read."""
    match reply:
        case [bytes() as head, bytes() as body]:
            return head, body
        case _:
            return b"", b""


AT_WORK: list[bytes] = []  # what a site returns that has no reply yet


class SiteEndpoint:
    """A site's end of a FLARE job."""

    def __init__(self, site: Callable[[], Site], progress: Progress = ignore) -> None:
        self._opener, self._progress = site, progress
        self._site: Site | None = None
        self._worker = ThreadPoolExecutor(1)  # FLARE may call from several threads; a client does one thing at a time
        self._calls: dict[str, Future[list[bytes]]] = {}  # those whose reply was not returned yet, by their digest

    @collab.publish
    def answer(self, head: bytes, body: bytes) -> list[bytes]:
        """Head and body of the reply to a request; see :meth:`confed.engines.remote.client.Site.handle`."""
        # FLARE lets the sites of a job call each other, too.
        if (caller := str(collab.caller)) != SERVER:
            self._progress(Note(f"refused: {caller!r} is not the server"))
            return _error("ValueError: a site answers its server only")
        number = digest(head, body)
        if number not in self._calls:  # else its call was lost, and it is at work
            self._calls[number] = self._worker.submit(self._handle, head, body, get_call_context())
        return self._reply(number)

    @collab.publish
    def result(self, number: str) -> list[bytes]:
        """The reply to a request that took longer than a call, by the request's digest."""
        if str(collab.caller) != SERVER:
            return _error("ValueError: a site answers its server only")
        return self._reply(number)

    def _reply(self, number: str) -> list[bytes]:
        if (call := self._calls.get(number)) is None:
            raise LookupError("this process has not had the request: it is to be sent again")
        try:
            reply = call.result(timeout=HOLD)
        except TimeoutError:
            return AT_WORK
        self._calls.pop(number, None)
        return reply

    def _handle(self, head: bytes, body: bytes, context: Context | None) -> list[bytes]:
        set_call_context(context)  # the opener asks FLARE where this site's files are
        try:
            if self._site is None:
                self._site = self._opener()
        except Exception as error:
            self._progress(Note(f"cannot take part: {type(error).__name__}: {error}"))
            return _error(f"{type(error).__name__}: the site could not open its recipe or data; its log says why")
        return list(self._site.handle(head, body))


def _error(text: str) -> list[bytes]:
    """A reply with an error from before the site could answer."""
    return [Answer("", text, False, 0.0).to_bytes(), seal(Message())]


def write_job(folder: Path, sites: Iterable[str], minimum: int) -> Path:
    """FLARE's job files: the classes at the server and at the sites, all of them installed there."""
    led = {"server_obj_id": "leader", "sync_task_timeout": START}
    leader: dict[str, Any] = {
        "format_version": 2,
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": led}],
        "components": [{"id": "leader", "path": LEADER, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    # One call at a time: FLARE would go on with the next while the one before, already given up, still computes.
    once = {"client_obj_id": "member", "max_inbound_call_threads": 1}
    member: dict[str, Any] = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": EXECUTOR, "args": once}}],
        "components": [{"id": "member", "path": MEMBER_OF_0_1, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    meta: dict[str, Any] = {
        "name": folder.name,
        "min_clients": minimum,
        "mandatory_clients": [],
        "resource_spec": {},
        "deploy_map": {"leader": [SERVER], "member": list(sites)},
    }
    for path, content in (
        ("meta.json", meta),
        ("leader/config/config_fed_server.json", leader),
        ("member/config/config_fed_client.json", member),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder
