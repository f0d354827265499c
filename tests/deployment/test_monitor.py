"""Page, metrics, notices and logs of a running server or site."""

import json
import shutil
import socketserver
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from confed.deployment.monitor import Departures, RunStatus, log_line, monitored, openmetrics, page_served, page_token
from confed.results.folder import PAGE_TOKEN, RunFolder
from confed.system.events import Caution, Event, Note, RunProgress, SiteStates, SiteStatus, StepProgress
from refusals import refuses

SITES = SiteStates({"north": SiteStatus("fit", "", 7, 9), "south <b>": SiteStatus("away", "timed out", 1, 2)})


def course() -> list[Event]:
    """Events of three rounds."""
    rounds = [RunProgress(n, 10, "training", f"loss {4 / n}", loss=4 / n, epsilon=n / 2) for n in (1, 2, 3)]
    return [SITES, Note("listening"), *rounds, Caution("client 'south' left out of round 3")]


def get(address: str, **headers: str) -> tuple[int, str, str]:
    """Status, content and cookie of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(), str(answer.headers["Set-Cookie"] or "")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), ""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    status = RunStatus("clinics, fedp3")
    for event in course():
        status(event)
    with page_served(status, tmp_path, 0) as address:
        yield address


def test_a_page_shows_who_is_here_and_how_far_the_run_is(page: str, tmp_path: Path) -> None:
    base = f"http://{urlsplit(page).netloc}"
    status, text, cookie = get(page)
    assert status == 200
    assert "<table>" in text
    assert "HttpOnly" in cookie
    _, told, _ = get(f"{base}/status.json", Cookie=cookie.partition(";")[0])
    shown = json.loads(told)
    assert (shown["round"], shown["rounds"], shown["epsilon"]) == (3, 10, 1.5)
    assert shown["losses"] == {"1": 4.0, "2": 2.0, "3": 4 / 3}
    assert shown["sites"]["south <b>"] == {"state": "away", "note": "timed out", "up": 1, "down": 2}
    assert [line["level"] for line in shown["news"]] == ["warning", "info"]
    assert shown["seconds_left"] >= 0
    assert (tmp_path / PAGE_TOKEN).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("path", ["", "status.json", "metrics", "status.json?token=wrong"])
def test_nothing_is_shown_without_the_token(page: str, path: str) -> None:
    base = f"http://{urlsplit(page).netloc}/"
    assert get(base + path)[0] == 403
    assert get(f"{base}healthz")[:2] == (200, "ok\n")
    request = urllib.request.Request(base, b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=10)


def test_metrics_are_openmetrics_with_figures_that_are_known(page: str) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    token = page.partition("token=")[2]
    status, text, _ = get(f"http://{urlsplit(page).netloc}/metrics", Authorization=f"Bearer {token}")
    assert status == 200
    families = parser.text_string_to_metric_families(text)
    values = {(s.name, s.labels.get("site", "")): s.value for family in families for s in family.samples}
    assert values[("confed_round", "")] == 3
    assert values[("confed_loss", "")] == pytest.approx(4 / 3)
    assert values[("confed_site_connected", "north")] == 1
    assert values[("confed_site_connected", "south <b>")] == 0
    assert values[("confed_site_down_bytes", "north")] == 9
    assert ("confed_bytes_today", "") not in values
    assert b"confed_loss" not in openmetrics(RunStatus("before the first round").content())


def test_a_site_is_told_what_left_it_today(tmp_path: Path) -> None:
    now = time.time()
    rows: list[dict[str, object]] = []
    for number, (action, size, when) in enumerate([("fit", 10**6, 0), ("fit", 10**6, 0), ("fit", 5, 2 * 86400)]):
        rows.append({"time": now - when, "way": "in", "id": str(number), "action": action, "bytes": 3})
        rows.append({"time": now - when, "way": "out", "id": str(number), "error": None, "bytes": size})
    rows.append({"time": now, "way": "out", "id": "9", "error": "Refused: hours", "bytes": 60})
    (tmp_path / "audit.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    looked = Departures(tmp_path)
    told = looked.content()
    assert told["left_today"] == "Today left this site: 2 model updates (2.00 MB), 1 refusal (60 B)."
    assert told["bytes_today"] == 2 * 10**6 + 60
    assert Departures(tmp_path / "new").content()["left_today"] == "Today left this site: nothing."
    (tmp_path / "privacy.jsonl").write_text('{"noise": 1.0, "epsilon": 3.5}\n')
    assert looked.content()["epsilon"] == 3.5
    (tmp_path / "privacy.jsonl").write_text('{"noise": 1.0, "epsilon": 3.5}\n{"noise": 0.0, "epsilon": null}\n')
    assert looked.content()["epsilon"] is None


def test_a_look_reads_what_is_new_in_the_journals_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, read = tmp_path / "audit.jsonl", list[str]()

    def sent(number: int) -> str:
        asked = {"time": time.time(), "way": "in", "id": str(number), "action": "fit", "bytes": 3}
        return f"{json.dumps(asked)}\n{json.dumps({**asked, 'way': 'out', 'error': None, 'bytes': 10})}\n"

    log.write_text("".join(map(sent, range(1000))))
    looked = Departures(tmp_path)
    assert looked.content()["left_today"] == "Today left this site: 1000 model updates (10.0 kB)."
    loads = json.loads
    monkeypatch.setattr("confed.deployment.monitor.json.loads", lambda text: (read.append(text), loads(text))[1])
    with log.open("a") as file:
        file.write(sent(1000) + '{"time"')  # a line that is being written
    assert looked.content()["bytes_today"] == 10_010
    assert looked.content()["bytes_today"] == 10_010
    assert len(read) == 2
    monkeypatch.setattr(time, "strftime", lambda *given: "2099-01-01" if len(given) == 1 else "2026-01-01")
    assert looked.content()["left_today"] == "Today left this site: nothing."
    monkeypatch.undo()
    log.write_text(sent(0))  # another file under the name
    assert Departures(tmp_path).content()["bytes_today"] == 10


class _Hook(BaseHTTPRequestHandler):
    received: list[str]

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[tuple[str, list[str]]]:
    received: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Hook", (_Hook,), {"received": received}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", received
    server.shutdown()
    server.server_close()


def test_a_notice_is_sent_when_a_site_falls_out(hook: tuple[str, list[str]], tmp_path: Path) -> None:
    address, received = hook
    events: list[Event] = []
    with monitored(events.append, tmp_path, "clinics", notify=address, log=tmp_path / "log.jsonl") as progress:
        for state in ("idle", "fit", "away", "away", "idle"):
            progress(SiteStates({"north": SiteStatus(state)}))
        progress(RunProgress(2, 2, "done", "done"))
    assert sorted(received) == ["clinics: done", "clinics: site north fell out", "clinics: site north is back"]
    assert len(events) == 6
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"level": "info", "text": "done", "round": 2}.items()


class _Mailbox(socketserver.StreamRequestHandler):
    letters: list[str]

    def handle(self) -> None:
        self.wfile.write(b"220 mailbox\r\n")
        answers = {"DATA": b"354 go on\r\n", "QUIT": b"221 bye\r\n"}
        while command := self.rfile.readline().decode().strip().upper():
            self.wfile.write(answers.get(command, b"250 ok\r\n"))
            if command == "DATA":
                self.letters.append("".join(iter(lambda: self.rfile.readline().decode(), ".\r\n")))
                self.wfile.write(b"250 ok\r\n")


def test_a_notice_goes_by_mail(tmp_path: Path) -> None:
    letters: list[str] = []
    kind = type("Mailbox", (_Mailbox,), {"letters": letters})
    with socketserver.TCPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        address = f"smtp://127.0.0.1:{server.server_address[1]}/weber@example.org"
        with monitored(lambda event: None, tmp_path, "clinics", notify=address) as progress:
            for state in ("idle", "away"):
                progress(SiteStates({"north": SiteStatus(state, "timed out" if state == "away" else "")}))
        thread.join(10)
    (letter,) = letters
    assert "Subject: clinics: site north fell out timed out\r\n" in letter
    assert "To: weber@example.org\r\n" in letter


BROWSER = shutil.which("chromium")


@pytest.mark.skipif(BROWSER is None, reason="needs the browser chromium")
@pytest.mark.parametrize("size", ["1280,900", "390,844"], ids=["desktop", "phone"])
def test_a_browser_shows_sites_rounds_and_news(page: str, size: str, tmp_path: Path) -> None:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
        f"--window-size={size}", "--virtual-time-budget=3000", "--dump-dom", page,
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert "<dt>rounds</dt><dd>3 of 10</dd>" in shown
    assert "<dt>ε spent</dt><dd>1.50</dd>" in shown
    assert '<td class="">south &lt;b&gt;</td><td class="bad">away</td>' in shown
    assert "client 'south' left out of round 3" in shown
    assert shown.count('<a href="') == 2  # what an auditor reads beside the page


def test_a_notice_that_cannot_be_sent_costs_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    with monitored(events.append, tmp_path, "x", notify="http://127.0.0.1:9/") as progress:
        progress(RunProgress(2, 2, "done", "done"))
    assert events[-1] == Caution("a notice could not be sent: URLError")


def test_a_servers_page_is_there_before_its_run_begins(tmp_path: Path) -> None:
    """The token is in the run folder, which is otherwise new; whatever else is in it is somebody's."""
    state = tmp_path / "state"
    page_token(state)
    assert RunFolder.create(state, "[run]").recipe.is_file()
    page_token(tmp_path / "other")
    (tmp_path / "other" / "notes.txt").touch()
    refuses("exists already", RunFolder.create, tmp_path / "other", "[run]")


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    status = RunStatus("x")
    with page_served(status, tmp_path, 0) as address:
        port = urlsplit(address).port
        second = page_served(status, tmp_path, port or 0)
        with pytest.raises(ValueError, match=rf"--page: cannot listen on 127.0.0.1:{port}"), second:
            pass
    with pytest.raises(ValueError, match="--notify must be https"), monitored(print, tmp_path, "x", notify="mail me"):
        pass


@pytest.mark.parametrize(
    ("event", "level"), [(Note("a"), "info"), (Caution("b"), "warning"), (RunProgress(1, 2, "training", "c"), "info")]
)
def test_a_message_is_a_line_of_json_with_time_and_level(event: Event, level: str) -> None:
    line = json.loads(log_line(event) or "")
    assert line["level"] == level
    assert time.strptime(line["time"], "%Y-%m-%dT%H:%M:%S%z")


def test_what_is_no_message_is_no_line() -> None:
    assert log_line(SITES) is None
    assert log_line(StepProgress("x", 1, 2)) is None
