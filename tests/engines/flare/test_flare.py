"""FLARE as the transport: the post, a site's end, what a job says, kits that are closed, and jobs handed in again."""

import importlib
import json
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.collab import CollabCallError
from nvflare.collab.api.exceptions import RunAborted
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.security.security import FLAuthorizer

from command_line import confed
from confed.algorithms.fedavg import FedAvg
from confed.deployment.flare import server as flare_server
from confed.deployment.flare import server as flare_serving
from confed.deployment.flare.job import (
    FlareSite,
    ServerSettings,
    SiteSettings,
    StatusFile,
    StatusReader,
    read_settings,
    write_settings,
)
from confed.deployment.flare.provision import close_kit, provision_flare
from confed.deployment.flare.server import JobSupervisor, SupervisedProcess, missing_class, supervised
from confed.deployment.provision import Federation, read_sites
from confed.engines.flare import transport as flare
from confed.engines.flare.loopback import callees_in, transport_in
from confed.engines.flare.transport import (
    EXECUTOR,
    LINE_SETTINGS,
    MEMBER,
    MEMBER_OF_0_1,
    SITE_CLASSES,
    FlareTransport,
    SiteEndpoint,
    write_job,
)
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.recipes.recipe import load_recipe
from confed.system.events import Event, Note, RunProgress, SiteStates, SiteStatus
from confed.testing.toy import toy_setup
from repository import ROOT

SITES = ("warm", "cold")


def soon(happens: Callable[[], bool], seconds: float = 20) -> None:
    began = time.monotonic()
    while not happens():
        assert time.monotonic() - began < seconds
        time.sleep(0.005)


# The post ---------------------------------------------------------------------------------------------------------


class Fake:
    """A site as FLARE shows it."""

    def __init__(self, name: str, answer: Callable[[bytes, bytes], Any]) -> None:
        self.name, self.answer = name, answer
        self.timeouts: list[float] = []

    def __call__(self, *, timeout: float) -> "Fake":
        self.timeouts.append(timeout)
        return self


def echo(head: bytes, body: bytes) -> list[bytes]:
    return [head, body]


def received(post: FlareTransport, sent: str | None) -> tuple[bytes, bytes] | str:
    assert sent is not None
    replies: list[Any] = []
    soon(lambda: replies.append(post.receive(sent)) or replies[-1] is not None)
    return replies[-1]


def test_replies_of_listed_sites_come_back_as_they_were_sent() -> None:
    here, stranger = Fake("site-b", echo), Fake("site-a", echo)
    post = FlareTransport([here, stranger], {"site-b": "cold"})
    assert {n: c.name for n, c in post.connections().items()} == {0: "cold"}
    assert received(post, post.send(0, "fit", b"head", b"\x00body", 5.0)) == (b"head", b"\x00body")
    assert here.timeouts == [5.0 + flare.GRACE]


@pytest.mark.parametrize("reply", [None, "head", [b"x"], [b"x", "y"], [b"x", b"y", b"z"], {"head": b"x"}])
def test_what_is_no_reply_is_refused_where_heads_are_read(reply: object) -> None:
    post = FlareTransport([Fake("a", lambda head, body: reply)], {"a": "a"})
    assert received(post, post.send(0, "fit", b"", b"", 5.0)) == (b"", b"")


def test_a_site_whose_call_failed_is_away_and_then_there_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(head: bytes, body: bytes) -> list[bytes]:
        raise CollabCallError("a", "answer", "gone")

    post = FlareTransport([Fake("a", fail)], {"a": "a"})
    before = post.connections()[0]
    assert "gone" in received(post, post.send(0, "fit", b"", b"", 5.0))
    assert post.connections() == {}
    monkeypatch.setattr(flare, "REST", 0.0)
    assert post.connections()[0].since != before.since


def test_nobody_hears_of_a_reply_that_was_forgotten() -> None:
    let, answered = threading.Event(), threading.Event()

    def late(head: bytes, body: bytes) -> list[bytes]:
        let.wait(20)
        answered.set()
        return [head, body]

    post = FlareTransport([Fake("a", late)], {"a": "a"})
    sent = post.send(0, "fit", b"", b"", 5.0)
    assert sent is not None
    assert post.receive(sent) is None
    post.forget(sent)
    let.set()
    answered.wait(20)
    time.sleep(0.05)
    assert post.receive(sent) is None


def test_when_flare_ends_the_job_everything_says_so() -> None:
    def aborted(head: bytes, body: bytes) -> list[bytes]:
        raise RunAborted("ended")

    post = FlareTransport([Fake("a", aborted)], {"a": "a"})
    post.send(0, "fit", b"", b"", 5.0)

    def says() -> bool:
        try:
            return not post.connections()
        except RunAborted:
            return True

    soon(says)
    with pytest.raises(RunAborted):
        post.send(0, "fit", b"", b"", 5.0)
    ended = FlareTransport([Fake("a", echo)], {"a": "a"}, lambda: True)
    for question in (ended.connections, lambda: ended.receive("0")):
        with pytest.raises(RunAborted):
            question()


# A site's end -----------------------------------------------------------------------------------------------------


def test_a_site_that_cannot_open_its_data_gives_no_details() -> None:
    said: list[str] = []

    def opened() -> Site:
        raise ValueError("no pictures in /home/somebody/pictures")

    [callee] = callees_in({"a": SiteEndpoint(opened, lambda event: said.append(event.text))})
    head, _ = callee(timeout=9.0).answer(b"", b"")
    answer = Answer.from_bytes(head, Limits())
    assert answer.error is not None
    assert "could not open" in answer.error
    assert "somebody" not in answer.error
    assert said == ["cannot take part: ValueError: no pictures in /home/somebody/pictures"]


def test_a_site_answers_nobody_but_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    remote = Remote(setup, transport_in(setup, tmp_path), timeouts=Timeouts(interval=1e-3))
    assert len(remote.sites.gather([f"client-{n}" for n in range(3)], wait=20)) == 3
    opened: list[str] = []
    [callee] = callees_in({"a": SiteEndpoint(lambda: opened.append("opened") or cast(Site, None))})
    monkeypatch.setattr(flare, "SERVER", "another")  # the caller of the loopback is called "server"
    head, _ = callee(timeout=9.0).answer(b"", b"")
    assert "a site answers its server only" in str(Answer.from_bytes(head, Limits()).error)
    assert not opened


def test_calls_at_once_are_answered_one_after_the_other(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    running, most = 0, 0

    class Slow(Site):
        def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.02)
            running -= 1
            return head, body

    site = Slow(setup, client_named(setup, "client-0"), tmp_path)
    end = SiteEndpoint(lambda: site)
    from nvflare.collab.api.app import ClientApp
    from nvflare.collab.api.context import Context, set_call_context

    app = ClientApp(end)

    def call(number: int) -> None:
        set_call_context(Context(app, "server", "a", cast(Any, None)))
        assert end.answer(str(number).encode(), b"") == [str(number).encode(), b""]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_site_that_works_for_long_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flare, "HOLD", 0.02)
    setup = toy_setup(FedAvg(), rounds=1)
    done, handled = threading.Event(), list[bytes]()

    class Slow(Site):
        def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
            handled.append(head)
            done.wait(20)
            return head, body

    site = Slow(setup, client_named(setup, "client-0"), tmp_path)
    [callee] = callees_in({"a": SiteEndpoint(lambda: site)})
    post = FlareTransport([callee], {"a": "a"})
    lost, sent = post.send(0, "fit", b"long", b"", 900.0), post.send(0, "fit", b"long", b"", 900.0)
    assert lost is not None
    post.forget(lost)
    time.sleep(0.2)
    assert sent is not None
    assert post.receive(sent) is None
    done.set()
    assert received(post, sent) == (b"long", b"")
    assert handled == [b"long"]  # a request that comes again, as its call was lost, is not done twice
    with pytest.raises(CollabCallError, match="has not had the request"):
        callee(timeout=9.0).result("0" * 32)


# Jobs and kits ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flare") / "made"
    provision_flare(root, Federation(SITES, "localhost", 8443, "name = 'toy'\n"))
    return root


def test_a_job_is_three_files_of_names(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "confed", SITES, 2)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == ["leader/config/config_fed_server.json", "member/config/config_fed_client.json", "meta.json"]
    valid, error, meta = JobMetaValidator().validate("confed", zip_directory_to_bytes("", str(folder)))
    assert (valid, error) == (True, "")
    assert meta.get("byoc") is None
    assert meta["deploy_map"] == {"leader": ["server"], "member": list(SITES)}
    assert meta["min_clients"] == 2


def classes_in(config: Any) -> set[str]:
    if isinstance(config, dict):
        items = cast(dict[str, Any], config)
        return {items["path"]} if "path" in items else set[str]().union(*map(classes_in, items.values()))
    return set[str]().union(*map(classes_in, cast(list[Any], config))) if isinstance(config, list) else set()


def test_job_names_classes_that_a_kit_of_0_1_allows(tmp_path: Path) -> None:
    config = json.loads((write_job(tmp_path / "confed", SITES, 2) / "member/config/config_fed_client.json").read_text())
    assert classes_in(config) == {"nvflare.collab.runtime.executor.CollabExecutor", "confed.flare_apps.Member"}
    assert importlib.import_module("confed.flare_apps").Member is FlareSite
    (tmp_path / "local").mkdir()
    resources = tmp_path / "local" / "resources.json"
    resources.write_text(json.dumps({"class_allow_list": [EXECUTOR, MEMBER_OF_0_1]}))
    assert f"add {MEMBER!r}" in (missing_class(tmp_path) or "")
    resources.write_text(json.dumps({"class_allow_list": list(SITE_CLASSES)}))
    assert missing_class(tmp_path) is None


def test_flower_app_of_0_1_still_imports() -> None:
    sys.modules.pop("confed.flower_apps", None)
    with pytest.warns(FutureWarning, match=r"confed\.deployment\.flower_app"):
        shim = importlib.import_module("confed.flower_apps")
    assert shim.apps is importlib.import_module("confed.deployment.flower_app").apps


def test_a_sites_kit_lets_a_job_name_our_classes_and_no_others(made: Path, tmp_path: Path) -> None:
    kit = Workspace(str(made / "sites" / "cold"), "cold")
    config = json.loads((write_job(tmp_path / "confed", SITES, 2) / "member/config/config_fed_client.json").read_text())
    named = classes_in(config)
    assert named == {EXECUTOR, MEMBER_OF_0_1} < set(SITE_CLASSES)
    context, authorizer = FLContext(), ComponentPathAuthorizer()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, kit, private=True, sticky=False)

    def build(path: str) -> None:
        context.set_prop(FLContextKey.COMPONENT_CONFIG, {"path": path, "args": {}}, private=True, sticky=False)
        authorizer.handle_event(EventType.BEFORE_BUILD_COMPONENT, context)

    for path in sorted(named):
        build(path)
    for path in (
        "os.system",
        "nvflare.app_common.np.np_trainer.NPTrainer",
        "confed.deployment.flare.job.FlareServer",
        "confed.cli.main",
    ):
        with pytest.raises(UnsafeComponentError, match="not in allow_list"):
            build(path)


def test_a_sites_kit_lets_no_job_bring_code(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rights = json.loads((made / "sites" / "cold" / "local" / "authorization.json").read_text())
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("confed", rights))
    monkeypatch.setattr(AppAuthzService, "app_validator", DefaultAppValidator("client"))
    app = write_job(tmp_path / "confed", SITES, 2) / "member"
    who = ("admin@confed.org", "confed", "project_admin")
    assert AppAuthzService.authorize(str(app), *who) == (True, "")
    (app / "custom").mkdir()
    (app / "custom" / "more.py").write_text("")
    assert AppAuthzService.authorize(str(app), *who) == (False, "BYOC not permitted")
    denied = ("byoc", "shell_commands", "clone_job", "download_job", "operate")
    assert rights["permissions"].keys() >= {"project_admin", "org_admin", "lead", "member"}
    assert all(rights["permissions"][role][right] == "none" for role in rights["permissions"] for right in denied)


def test_every_party_gets_its_folder_and_its_secrets_only(made: Path) -> None:
    for name in SITES:
        folder = made / "sites" / name
        assert stat.S_IMODE((folder / "startup" / "client.key").stat().st_mode) == 0o600
        assert read_settings(SiteSettings, folder).site == name
        assert "localhost:8443" in (folder / "README.md").read_text()
        resources = json.loads((folder / "local" / "resources.json").read_text())
        assert resources["allow_log_streaming"] is False
        assert not any(part["id"] == "site_log_streamer" for part in resources["components"])
    assert (made / "server" / "admin" / "startup" / "fed_admin.json").is_file()
    assert stat.S_IMODE((made / "provision" / "cert.json").stat().st_mode) == 0o600
    assert read_sites(made / "server" / "sites.json") == {name: name for name in SITES}
    assert not list((made / "sites").rglob("server.key"))
    with pytest.raises(ValueError, match="is not empty"):
        provision_flare(made, Federation(SITES, "localhost", 8443, ""))


@pytest.mark.parametrize(("name", "says"), [("a.b", "letters, digits, - and _"), ("localhost", "is the server's name")])
def test_names_that_flare_cannot_have_are_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        provision_flare(tmp_path / "new", Federation((name,), "localhost", 8443, ""))


def test_what_is_no_kit_is_not_closed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no workspace of FLARE's"):
        close_kit(tmp_path, SITE_CLASSES)


# Settings and the bulletin ----------------------------------------------------------------------------------------


def test_settings_come_back_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    for settings in (
        SiteSettings("r.toml", "/p", None, ("root=/x", "train=8"), "cpu"),
        ServerSettings("r", "s", "b", {"warm": "site-1"}, minimum=2, deadline=1.5, whole=True),
    ):
        write_settings(settings, tmp_path)
        assert read_settings(type(settings), tmp_path) == settings
    (tmp_path / "local" / "confed_site.toml").write_text("priavte = 'x'\n")
    with pytest.raises(ValueError, match=r"confed_site.priavte.*did you mean 'private'"):
        read_settings(SiteSettings, tmp_path)
    (tmp_path / "local" / "confed_site.toml").unlink()
    with pytest.raises(ValueError, match="settings as TOML"):
        read_settings(SiteSettings, tmp_path)


def test_a_bulletin_tells_another_process_what_is_new(tmp_path: Path) -> None:
    bulletin = StatusFile(tmp_path)
    bulletin(Note("old"))
    reader = StatusReader(tmp_path)
    bulletin(RunProgress(1, 3, "training", "loss 1"))
    bulletin(Note("two\nlines"))
    bulletin(SiteStates({"cold": SiteStatus("idle", "late", 3, 4)}))
    assert reader.news() == [RunProgress(1, 3, "training", "loss 1"), Note("two\nlines")]
    assert reader.news() == []
    assert reader.sites() == {"cold": SiteStatus("idle", "late", 3, 4)}
    assert reader.outcome() is None
    bulletin.failed(ValueError("no"))
    assert reader.outcome() == {"error": "ValueError: no", "faulty": True}
    reader.begin()
    assert reader.outcome() is None
    assert reader.sites() == {}


# Processes and jobs -----------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    import psutil

    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    with supervised([sys.executable, "-c", code + "time.sleep(60)"], tmp_path / "log", pause=0.01) as process:
        first = psutil.Process(int((tmp_path / "log.pid").read_text()))
        soon(lambda: len(first.children()) == 1)
        orphan = first.children()[0]
        first.kill()
        soon(lambda: process.starts == 2)
        second = psutil.Process(int((tmp_path / "log.pid").read_text()))
        soon(lambda: process.jobs() == 1)
        child = second.children()[0]
        process.check()
    orphan.kill()
    assert not second.is_running()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_a_killed_predecessor_left_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    left = SupervisedProcess(command, tmp_path / "log", 0.01)
    left._stop.set()  # its owner was killed and looks after it no more
    with supervised(command, tmp_path / "log", pause=0.01):
        soon(lambda: left._process.poll() is not None)


def test_a_process_that_never_lives_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flare_server, "HARDLY", 2)
    with supervised([sys.executable, "-c", "print('no such port')"], tmp_path / "log", pause=0.01) as process:
        soon(lambda: process._failed)
        with pytest.raises(RuntimeError, match="no such port"):
            process.check()


class Admin:
    """FLARE's administrator, with a script: what becomes of each job that is handed in."""

    def __init__(self, bulletin: StatusFile, *script: str) -> None:
        self.bulletin, self.script = bulletin, script
        self.jobs: list[str] = []
        self.aborted: list[str] = []
        self.asked = 0

    def get_connected_client_list(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in SITES]

    def submit_job(self, folder: str) -> str:
        assert (Path(folder) / "meta.json").is_file()
        self.jobs.append(f"job-{len(self.jobs)}")
        return self.jobs[-1]

    def get_job_status(self, job: str) -> str:
        does = self.script[min(int(job[4:]), len(self.script) - 1)]
        self.asked += 1
        if does in ("done", "unheard") or (does == "silent" and self.asked > 5):
            self.bulletin(RunProgress(3, 3, "done", "done"))
            self.bulletin.ended()
            return "RUNNING" if does == "unheard" else "FINISHED:COMPLETED"
        if does == "faulty":
            self.bulletin.failed(ValueError("no such data"))
        if does == "round":
            self.bulletin(RunProgress(int(job[4:]) + 1, 9, "training", "loss 1"))
        return "RUNNING" if does in ("stray", "silent") else "FINISHED:EXECUTION_EXCEPTION"

    def get_client_job_status(self) -> list[dict[str, Any]]:
        status = "no_reply" if "silent" in self.script else "no_jobs"
        cold = {"client_name": "cold", "job_id": "?", "status": status}
        return [{"client_name": "warm", "job_id": self.jobs[-1], "status": "running"}, cold]

    def abort_job(self, job: str) -> None:
        self.aborted.append(job)

    def close(self) -> None: ...


Scripted = Callable[..., tuple[Admin, JobSupervisor, list[str]]]


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setattr(flare_serving, "LOOK", 0.0)
    monkeypatch.setattr(flare_serving, "STRAY", 0.0)

    def with_script(*script: str) -> tuple[Admin, JobSupervisor, list[str]]:
        admin, said = Admin(StatusFile(tmp_path / "run"), *script), list[str]()
        monkeypatch.setattr(flare_serving, "new_secure_session", lambda *args, **kwargs: admin)

        def keep(event: Event) -> None:
            if isinstance(event, Note):
                said.append(event.text)

        server = cast(SupervisedProcess, SimpleNamespace(starts=1, check=lambda: None))
        settings = ServerSettings("run/recipe.toml", "state", "run", {name: name for name in SITES}, minimum=2)
        return admin, JobSupervisor(tmp_path, settings, server, keep), said

    return with_script


def test_a_job_that_flare_ends_is_handed_in_again(serving: Scripted) -> None:
    admin, serve, said = serving("dead", "dead", "done")
    serve.until_done()
    assert admin.jobs == ["job-0", "job-1", "job-2"]
    assert admin.aborted == []
    assert said.count("FLARE ended the job (execution exception); going on from the last checkpoint") == 2
    assert any("after the job's end was noticed" in text for text in said)


def test_a_job_that_a_site_does_not_have_is_handed_in_for_it(serving: Scripted) -> None:
    admin, serve, said = serving("stray", "done")
    serve.until_done()
    assert admin.aborted == ["job-0"]
    assert "site cold is there and does not run the job; going on from the last checkpoint" in said


def test_a_site_that_does_not_answer_may_run_the_job(serving: Scripted) -> None:
    admin, serve, _ = serving("silent")
    serve.until_done()
    assert admin.asked > 5
    assert admin.jobs == ["job-0"]


def test_a_run_is_over_where_flare_does_not_hear_of_it(serving: Scripted) -> None:
    admin, serve, _ = serving("unheard")
    serve.until_done()
    assert admin.jobs == admin.aborted == ["job-0"]


def test_a_faulty_run_is_not_handed_in_again(serving: Scripted) -> None:
    admin, serve, _ = serving("faulty")
    with pytest.raises(ValueError, match=r"^no such data$"):
        serve.until_done()
    assert admin.jobs == ["job-0"]


def test_a_run_that_ended_while_nobody_watched_is_not_led_again(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("fedvqa_scenes").method("fedavg")
    settings = ServerSettings("run/recipe.toml", str(tmp_path), "run", {name: name for name in SITES})
    led: list[str] = []
    monkeypatch.setattr(flare_serving, "flare_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(9)"])
    monkeypatch.setattr(JobSupervisor, "until_done", lambda self: led.append("led"))
    (tmp_path / "summary.json").write_text('{"rounds": 3}')
    kit = made / "server"
    assert flare_serving.serve(recipe, kit, settings) == {"rounds": 3}
    StatusFile(kit / "run").ended()
    assert flare_serving.serve(recipe, kit, settings) == {"rounds": 3}
    assert led == ["led"]
    flare_serving.serve(load_recipe("fedvqa_scenes").method("fedprox"), kit, settings)
    assert led == ["led", "led"]
    written = json.loads((kit / "local" / "resources.json").read_text())
    assert str(kit / "run") in json.dumps(written)
    assert "/tmp/nvflare" not in json.dumps(written)


def test_a_server_that_never_answers_is_given_up(serving: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise ConnectionError("certificate")

    _, serve, _ = serving("done")
    monkeypatch.setattr(flare_serving, "new_secure_session", refused)
    monkeypatch.setattr(flare_serving, "SILENT", 0.05)
    with pytest.raises(RuntimeError, match="does not answer: ConnectionError: certificate"):
        serve.until_done()


def test_jobs_that_end_without_a_round_are_given_up(serving: Scripted) -> None:
    admin, serve, _ = serving("round", "round", "dead")
    with pytest.raises(RuntimeError, match="5 jobs in a row ended without a new round"):
        serve.until_done()
    assert len(admin.jobs) == 2 + flare_serving.FRUITLESS


# The verbs --------------------------------------------------------------------------------------------------------


def test_faulty_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(load_recipe("fedvqa_scenes").method("fedavg").to_toml())
    new = ["federation", "new", str(tmp_path / "new"), "--engine", "flare", "data.name=vqa_v2", "data.root=nowhere"]
    for arguments, says in (
        (["server", str(recipe), "--engine", "flare"], "--tls must be the server's folder"),
        (["client", str(recipe), "--engine", "flare", "--kit", str(tmp_path)], "no FLARE workspace of a site"),
        ([*new, "--method", "fedavg", "--sites", "a.b"], "letters, digits"),
        (["server", str(recipe), "--engine", "flare", "--insecure"], "TLS is always on"),
        (["server", str(recipe), "--engine", "flare", "--port", "9"], "the kit sets address and port"),
        (["client", str(recipe), "--engine", "flare", "--insecure"], "TLS is always on"),
        (["server", str(recipe), "--engine", "pigeon"], "pigeon"),
    ):
        assert confed(*arguments) == 2
        assert says in " ".join(capsys.readouterr().err.split())


def test_a_job_is_tried_again_soon_and_never_given_up(tmp_path: Path) -> None:
    """FLARE's own scheduler waits up to ten minutes between two tries, and gives up after ten."""
    provision_flare(tmp_path, Federation(("a", "b"), "localhost", 8102, ""))
    kit = tmp_path / "server"
    close_kit(kit, flare.SERVER_CLASSES)
    flare_server._own_storage(kit, kit / "run")  # pyright: ignore[reportPrivateUsage]
    resources = json.loads((kit / "local" / "resources.json").read_text())
    scheduler = next(part for part in resources["components"] if part["id"] == "job_scheduler")
    job_scheduler = DefaultJobScheduler(**scheduler["args"])
    assert job_scheduler.max_schedule_interval <= 2.0
    assert job_scheduler.max_schedule_count > 100_000
    assert resources["servers"][0]["admin_timeout"] < 5.0  # seconds that a session waits for an answer


class AnswersWithNothing(grpc.GenericRpcHandler):
    """The server's end of a stream over which nothing goes; it notes when that is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        def answer(_: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            context.add_callback(self.closed.set)
            yield b"welcome"
            self.closed.wait(60)

        return grpc.stream_stream_rpc_method_handler(answer)


def test_a_connection_that_hangs_is_closed_at_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 45 s; here all times are a thirtieth of those in the kits."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    soak = importlib.import_module("soak")
    given = LINE_SETTINGS["grpc"]["options"]
    options = [(name, value // 30 if name.endswith("_ms") else value) for name, value in given]
    handler, stop = AnswersWithNothing(), threading.Event()
    with futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [handler], options=options)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        line = soak.BadLine(port, soak.Weather(life=1.0, hangs=1.0), seed=1)  # it hangs after two seconds
        with grpc.insecure_channel(f"127.0.0.1:{line.entrance}", options) as channel:
            stream = channel.stream_stream("/confed/nothing")(iter(stop.wait, True), timeout=20)
            assert next(stream) == b"welcome"
            with pytest.raises(grpc.RpcError) as lost:
                next(stream)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE  # and not that its time is over
            assert line.ended == 1
            assert handler.closed.wait(3)
            stop.set()
        server.stop(None).wait()
        line.close()
