"""Monitoring of a running server or site: a read-only page, OpenMetrics, a health check, notices and JSON logs.

Everything is drawn from the progress events of the process and, at a site, from its own journals. The page and the
metrics need the token in the file ``page.token`` of the run folder or the private folder; a server's take a pass as
well, signed with the key of a lead or an auditor. ``/healthz`` needs none and says nothing but that the process
answers. No request changes anything.
"""

import hmac
import json
import os
import secrets
import smtplib
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from email.message import EmailMessage
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from confed.deployment.audit import audit
from confed.deployment.authority import public_text
from confed.deployment.manifest import signature_by, signed_by
from confed.deployment.roles import Action, check_role
from confed.deployment.roster import holder_of
from confed.federation.checkpoint import write_atomically
from confed.federation.reading import FAULTS
from confed.results.folder import PAGE_TOKEN
from confed.system import format as formats
from confed.system.events import Caution, Event, Note, Progress, RunProgress, SiteStates
from confed.system.private_keys import load_private

KEPT = 50  # news that a page shows
DOSSIER = Path("dossier", "dossier.html")  # in a run folder, where `confed dossier` has written it
_OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class RunStatus:
    """Status of a federation as one process, of a site or (without a name) of the server, sees it."""

    def __init__(self, title: str, site: str = "", private: Path | None = None) -> None:
        self.title, self.site = title, site
        self._departures = None if private is None else Departures(private)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._progress = RunProgress(0, 0, "starting", "")
        self._first: tuple[int, float] | None = None  # the first round that was seen to end, and when
        self._sites: dict[str, dict[str, Any]] = {}
        self._losses: dict[int, float] = {}
        self._epsilon: float | None = None
        self._news: deque[dict[str, str]] = deque(maxlen=KEPT)

    def __call__(self, event: Event) -> None:
        """Record of one event."""
        with self._lock:
            if isinstance(event, SiteStates):
                self._sites = {name: asdict(status) for name, status in event.sites.items()}
            elif isinstance(event, Note | Caution):
                self._news.appendleft({"time": _now(), "level": _level(event), "text": event.text})
            elif isinstance(event, RunProgress):
                self._progress = event
                self._epsilon = self._epsilon if event.epsilon is None else event.epsilon
                if event.loss is not None:
                    self._losses[event.round] = event.loss
                    self._first = self._first or (event.round, time.monotonic())

    def seconds_left(self) -> float | None:
        """Seconds to the last round at the pace so far; None before two rounds have ended."""
        if self._first is None or self._progress.round <= self._first[0]:
            return None
        pace = (time.monotonic() - self._first[1]) / (self._progress.round - self._first[0])
        return pace * (self._progress.rounds - self._progress.round)

    def content(self) -> dict[str, Any]:
        """All that the page shows, as JSON."""
        with self._lock:
            progress = self._progress
            shown: dict[str, Any] = {
                "title": self.title, "site": self.site, "time": _now(), "round": progress.round,
                "rounds": progress.rounds, "stage": progress.stage, "text": progress.text,
                "seconds": time.monotonic() - self._began, "seconds_left": self.seconds_left(),
                "losses": dict(self._losses), "epsilon": self._epsilon, "sites": dict(self._sites),
                "news": list(self._news),
            }  # fmt: skip
        if self._departures is not None:
            shown |= self._departures.content()
        return shown


class NewLines:
    """Lines of a journal that came since the last look; all of them where the file is another or shorter."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self._path, self._end, self._file = path, 0, 0
        if from_now:
            self.read()

    def read(self) -> list[dict[str, Any]]:
        """The lines, without one that is not written to its end."""
        if not self._path.is_file():
            return []
        status = self._path.stat()
        if status.st_ino != self._file or status.st_size < self._end:
            self._end, self._file = 0, status.st_ino
        with self._path.open("rb") as file:
            file.seek(self._end)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._end += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Departures:
    """What left a site today, in plain words, and what its updates have cost, from its journals as they grow."""

    def __init__(self, private: Path) -> None:
        self._messages, self._costs = NewLines(private / "audit.jsonl"), NewLines(private / "privacy.jsonl")
        self._lock = threading.Lock()
        self._asked: dict[str, str] = {}
        self._day, self._count, self._sizes = "", Counter[str](), Counter[str]()
        self._spent: float | None = None
        self._bare = False  # whether something left without noise

    def content(self) -> dict[str, Any]:
        """A sentence, the bytes of the day and the cost."""
        with self._lock:
            self._read(time.strftime("%Y-%m-%d"))
            kinds = sorted(self._count)
            left = [f"{formats.counted(self._count[kind], kind)} ({formats.size(self._sizes[kind])})" for kind in kinds]
            return {
                "left_today": f"Today left this site: {', '.join(left) if left else 'nothing'}.",
                "epsilon": None if self._bare else self._spent,
                "bytes_today": sum(self._sizes.values()),
            }

    def _read(self, day: str) -> None:
        if day != self._day:
            self._day, self._count, self._sizes = day, Counter(), Counter()
        for line in self._messages.read():
            if line.get("way") == "in":
                self._asked[str(line.get("id"))] = str(line.get("action"))
                continue
            action = self._asked.pop(str(line.get("id")), "")
            if time.strftime("%Y-%m-%d", time.localtime(line["time"])) == day:
                kind = "refusal" if line.get("error") else _KINDS.get(action, "other message")
                self._count[kind] += 1
                self._sizes[kind] += int(line["bytes"])
        for line in self._costs.read():
            self._bare = self._bare or not line.get("noise")
            self._spent = line["epsilon"] if line.get("noise") else self._spent


_KINDS = {"fit": "model update", "evaluate": "evaluation", "hello": "greeting", "goodbye": "farewell"}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _level(event: Event) -> str:
    return "warning" if isinstance(event, Caution) else "info"


# OpenMetrics ------------------------------------------------------------------------------------------------------


def openmetrics(content: Mapping[str, Any]) -> bytes:
    """A status in the text format of OpenMetrics; a ValueError without the library ``prometheus-client``."""
    try:
        from prometheus_client import CollectorRegistry, Gauge
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError as error:
        raise ValueError("metrics need the library prometheus-client: pip install '.[watch]'") from error
    registry = CollectorRegistry()

    def gauge(name: str, text: str, values: Mapping[tuple[str, ...], float | None], *labels: str) -> None:
        known = {key: value for key, value in values.items() if value is not None}
        if known:
            family = Gauge(f"confed_{name}", text, labels, registry=registry)
            for key, value in known.items():
                (family.labels(*key) if labels else family).set(value)

    losses, sites = content["losses"], content["sites"]
    gauge("round", "Last finished round", {(): content["round"]})
    gauge("rounds", "Rounds of the run", {(): content["rounds"]})
    gauge("loss", "Mean training loss of the last round", {(): losses[max(losses)] if losses else None})
    gauge("epsilon", "Largest privacy cost of updates so far", {(): content["epsilon"]})
    gauge("seconds_left", "Seconds to the last round at the pace so far", {(): content["seconds_left"]})
    gauge("bytes_today", "Bytes that left this site today", {(): content.get("bytes_today")})
    connected = {(name,): float(status["state"] != "away") for name, status in sites.items()}
    gauge("site_connected", "Whether a site is connected", connected, "site")
    for way, text in (("up", "received from"), ("down", "sent to")):
        sizes = {(name,): status[way] for name, status in sites.items()}
        gauge(f"site_{way}_bytes", f"Bytes {text} a site", sizes, "site")
    return generate_latest(registry)


# The page ---------------------------------------------------------------------------------------------------------


def page_token(folder: Path) -> str:
    """The token of a folder's page, made once, readable by its owner only."""
    path = folder / PAGE_TOKEN
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, secrets.token_urlsafe(24).encode(), sync=True, mode=0o600)
    return path.read_text(encoding="utf-8").strip()


_PASS = b"confed federation pass 1\n"


def make_pass(key: Path, hours: float) -> str:
    """A token by which the owner of a key reads the page of a server for some hours."""
    private = load_private(key.read_bytes(), str(key))
    text = json.dumps([public_text(private), time.time() + 3600 * hours]).encode()
    return f"{text.hex()}.{signature_by(private, _PASS + text).hex()}"


def check_pass(server: Path, token: str, action: Action) -> None:
    """Check that a pass is of somebody who is on a list of the server's folder now, and may read; else a ValueError."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        text, signature = map(bytes.fromhex, token.split("."))
        public, until = json.loads(text)
        over = float(until) < time.time()
    except FAULTS as error:
        raise ValueError("the token is no pass of `confed federation pass`") from error
    holder = holder_of(server, str(public))
    if holder is None:
        raise ValueError(f"this pass is of nobody in this federation, who may not {action}")
    if not signed_by(load_ssh_public_key(public.encode()), signature, _PASS + text) or over:
        raise ValueError("the time of this pass is over, or its owner did not sign it: `confed federation pass`")
    check_role(*holder, action)


_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Pages(BaseHTTPRequestHandler):
    """GET of the page, the status and the metrics, for who has the token."""

    timeout = 10
    server_version, sys_version = "confed", ""

    @property
    def _page(self) -> "_PageServer":
        return cast("_PageServer", self.server)

    def do_GET(self) -> None:
        """One answer; the token comes in the address once, then in a cookie or as a bearer."""
        address = urlsplit(self.path)
        action, kind, make = _PAGES.get(address.path, (Action.page, "", None))
        if address.path == "/healthz":
            self._send(200, b"ok\n", "text/plain")
        elif why := self._refusal(parse_qs(address.query), action):
            self._send(403, f"{why}\n".encode(), "text/plain")
        elif make is None:
            self._send(404, b"not found\n", "text/plain")
        else:
            try:
                self._send(200, make(self._page), kind)
            except ValueError as error:
                self._send(501, f"{error}\n".encode(), "text/plain")

    def _refusal(self, query: Mapping[str, list[str]], action: Action) -> str | None:
        """Why a request may not read; None where it may, and its token is kept for a cookie."""
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get("confed")
        given = [*query.get("token", []), self.headers.get("Authorization", "").removeprefix("Bearer ")]
        given += [] if cookie is None else [cookie.value]
        why = "the token is missing or wrong: it is in the file page.token"
        for self._token in given:
            if hmac.compare_digest(self._token.encode(), self._page.token.encode()):
                return None
            if "." in self._token and self._page.kit is not None:
                try:
                    return check_pass(self._page.kit, self._token, action)
                except ValueError as error:
                    why = str(error)
        return why

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status == 200 and "token=" in self.path:
            self.send_header("Set-Cookie", f"confed={self._token}; HttpOnly; SameSite=Strict")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses hold the token."""


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], status: RunStatus, folder: Path, kit: Path | None) -> None:
        self.status, self.token, self.folder, self.kit = status, page_token(folder), folder, kit
        super().__init__(address, _Pages)


def _html(page: _PageServer) -> bytes:
    return files("confed.deployment.templates").joinpath("monitor.html").read_bytes()


def _status(page: _PageServer) -> bytes:
    return json.dumps(page.status.content()).encode()


def _journals(page: _PageServer) -> bytes:
    return json.dumps([asdict(line) for line in audit(page.folder)]).encode()


def _dossier(page: _PageServer) -> bytes:
    if not (page.folder / DOSSIER).is_file():
        raise ValueError("no dossier was made of this run yet: `confed dossier` makes it")
    return (page.folder / DOSSIER).read_bytes()


_PAGES: Mapping[str, tuple[Action, str, Callable[[_PageServer], bytes]]] = {
    "/": (Action.page, "text/html", _html),
    "/status.json": (Action.page, "application/json", _status),
    "/metrics": (Action.page, _OPENMETRICS, lambda page: openmetrics(page.status.content())),
    "/audit.json": (Action.audit, "application/json", _journals),
    "/dossier": (Action.dossier, "text/html", _dossier),
}


@contextmanager
def page_served(
    status: RunStatus, folder: Path, port: int, host: str = "127.0.0.1", kit: Path | None = None
) -> Iterator[str]:
    """Address of a page that is served within the ``with`` block; a taken port is a ValueError."""
    try:
        server = _PageServer((host, port), status, folder, kit)
    except OSError as error:
        raise ValueError(f"--page: cannot listen on {host}:{port}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/?token={server.token}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


# Notices and logs -------------------------------------------------------------------------------------------------


class Notices:
    """Notices by webhook or e-mail when a site falls out or returns, and when a run ends.

    A webhook (``https://...``) gets ``{"text": ...}`` by POST; ``smtp://USER@HOST:PORT/RECIPIENT`` sends an e-mail,
    with the password of the environment variable CONFED_SMTP_PASSWORD over STARTTLS where there is a user.
    """

    def __init__(self, address: str, title: str, failed: Callable[[str], None]) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https", "smtp") or not parts.hostname:
            raise ValueError(f"--notify must be https://... or smtp://USER@HOST:PORT/RECIPIENT, got {address!r}")
        self._address, self._parts, self._title, self._failed = address, parts, title, failed
        self._connected: dict[str, bool] = {}
        self._threads: list[threading.Thread] = []

    def __call__(self, event: Event) -> None:
        """Notice about one event, sent in the background; what cannot be sent is reported and costs nothing."""
        if isinstance(event, SiteStates):
            for name, status in event.sites.items():
                connected, before = status.state != "away", self._connected.get(name)
                self._connected[name] = connected
                if before is not None and connected != before:
                    self._begin(f"site {name} " + ("is back" if connected else f"fell out {status.note}".strip()))
        elif isinstance(event, RunProgress) and event.stage == "done":
            self._begin(event.text)

    def close(self) -> None:
        """Wait of a few seconds for notices on their way."""
        for thread in self._threads:
            thread.join(10)

    def _begin(self, text: str) -> None:
        thread = threading.Thread(target=self._send, args=(f"{self._title}: {text}",), daemon=True)
        self._threads = [*(alive for alive in self._threads if alive.is_alive()), thread]
        thread.start()

    def _send(self, text: str) -> None:
        try:
            if self._parts.scheme == "smtp":
                self._mail(text)
            else:
                body = json.dumps({"text": text}).encode()
                request = urllib.request.Request(self._address, body, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=10).close()
        except (OSError, smtplib.SMTPException) as error:
            self._failed(f"a notice could not be sent: {type(error).__name__}")

    def _mail(self, text: str) -> None:
        message = EmailMessage()
        message["Subject"], message["To"] = text[:100], self._parts.path.lstrip("/")
        message["From"] = self._parts.username or message["To"]
        message.set_content(text)
        with smtplib.SMTP(self._parts.hostname or "", self._parts.port or 25, timeout=10) as server:
            if self._parts.username:
                server.starttls()
                server.login(self._parts.username, os.environ.get("CONFED_SMTP_PASSWORD", ""))
            server.send_message(message)


def log_line(event: Event) -> str | None:
    """An event as a line of JSON with time and level; None for what is no message."""
    if not isinstance(event, Note | Caution | RunProgress):
        return None
    entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "level": _level(event), "text": event.text}
    if isinstance(event, RunProgress):
        entry |= {"round": event.round, "rounds": event.rounds, "stage": event.stage, "loss": event.loss}
    return json.dumps(entry)


@contextmanager
def monitored(
    progress: Progress,
    folder: Path,
    title: str,
    *,
    site: str = "",
    kit: Path | None = None,
    page: int | None = None,
    notify: str | None = None,
    log: Path | None = None,
) -> Iterator[Progress]:
    """Progress callback with a page on a port, notices and a log of JSON lines, each where it is asked for."""
    listeners: list[Progress] = [progress]
    with ExitStack() as opened:
        if log is not None:
            lines = opened.enter_context(log.open("a", encoding="utf-8", buffering=1))
            listeners.append(lambda event: _write_line(lines, event))
        if notify is not None:
            notices = Notices(notify, title, lambda text: progress(Caution(text)))
            opened.callback(notices.close)
            listeners.append(notices)
        if page is not None:
            status = RunStatus(title, site, folder if site else None)
            listeners.append(status)
            address = opened.enter_context(page_served(status, folder, page, kit=kit))
            progress(Note(f"page: {address}"))

        def tell(event: Event) -> None:
            for listener in listeners:
                listener(event)

        yield tell


def _write_line(lines: Any, event: Event) -> None:
    if (text := log_line(event)) is not None:
        lines.write(f"{text}\n")
