"""Supervision of a federation over FLARE: starts the server, submits the job, and submits it again when FLARE ends it.

FLARE ends a whole job when one process of it dies, and never gives a running job back to a site that lost it. A run of
confed survives that, for its checkpoint and its sites' states do: a new job goes on from there. The run itself is led
in a process that FLARE starts (:class:`confed.deployment.flare.job.FlareServer`); this one watches it.
"""

import io
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from confed.deployment.flare.job import ENDING, ServerSettings, SiteSettings, StatusReader, write_settings
from confed.deployment.flare.provision import ADMIN, ORGANISATION, close_kit, provision_flare
from confed.deployment.manifest import accept, check_signed
from confed.deployment.provision import SITES, Federation, read_sites
from confed.deployment.transports import HOST, PORT, FederationTransport, Joining, Leading, Signature
from confed.engines.flare.transport import MEMBER, SERVER_CLASSES, write_job
from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe
from confed.results.folder import MEMBERS
from confed.system.events import Note, Progress, RunProgress, SiteStates, ignore
from confed.system.folder_lock import exclusive

SHORT = 30.0  # seconds below which a process has hardly lived
HARDLY = 5  # such lives in a row after which it is not started again


def flare_command(kit: Path, party: Literal["server", "client"], *options: str) -> list[str]:
    """Command line of FLARE's server or client."""
    module, config = f"nvflare.private.fed.app.{party}.{party}_train", f"fed_{party}.json"
    given = ["secure_train=true", *options, f"org={ORGANISATION}", "config_folder=config"]
    return [sys.executable, "-u", "-m", module, "-m", str(kit.resolve()), "-s", config, "--set", *given]


class SupervisedProcess:
    """A process that is started again when it dies."""

    def __init__(self, command: Sequence[str], log: Path, pause: float) -> None:
        self._command, self._log, self._pause = command, log, pause
        self._stop = threading.Event()
        self._failed = False
        self.starts = 0  # how often it was started
        with suppress(OSError, ValueError, psutil.Error):  # what a killed predecessor of this process left
            process = psutil.Process(int(self._note.read_text(encoding="utf-8")))
            if process.cmdline() == list(self._command):
                _end(process)
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that the process does not die as soon as it is started."""
        if self._failed:
            log_end = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"FLARE's process does not start; the end of {self._log}: {log_end}")

    def jobs(self) -> int:
        """Number of processes that it has started and that still run."""
        with suppress(psutil.NoSuchProcess):
            return len(psutil.Process(self._process.pid).children())
        return 0

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(psutil.NoSuchProcess):
            _end(psutil.Process(self._process.pid))
        self._process.wait()
        self._note.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            # In a separate session: Ctrl-C is handled by the process that started it.
            process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._note.write_text(str(process.pid), encoding="utf-8")
        self.starts += 1
        return process

    @property
    def _note(self) -> Path:
        return self._log.with_suffix(".pid")

    def _watch(self) -> None:
        short, began = 0, time.monotonic()
        while not self._stop.wait(0.2):
            if self._process.poll() is None:
                continue
            short = short + 1 if time.monotonic() - began < SHORT else 0
            if short >= HARDLY:
                self._failed = True
                return
            if not self._stop.wait(self._pause):
                began = time.monotonic()
                self._process = self._start()


def _end(process: psutil.Process) -> None:
    # FLARE's jobs are in separate sessions, so that a signal to ours would miss them.
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for member in alive:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=10)


@contextmanager
def supervised(command: Sequence[str], log: Path, pause: float = 2.0) -> Iterator[SupervisedProcess]:
    """Supervised process for as long as the ``with`` block lasts; see :class:`SupervisedProcess`."""
    process = SupervisedProcess(command, log, pause)
    try:
        yield process
    finally:
        process.end()


LOOK = 1.0  # seconds between questions to FLARE's server
STRAY = 15.0  # seconds that a connected site may be without the job before it is handed in again for it
FRUITLESS = 5  # jobs in a row that may end without a new round before the server gives up
SILENT = 120.0  # seconds after which a server of FLARE's that does not answer is one that cannot
_RUNNING, _OVER, _NO_ANSWER = "RUNNING", "FINISHED:", ("no_reply", "error")
SCHEDULER_SETTINGS = {"min_schedule_interval": LOOK, "max_schedule_interval": LOOK, "max_schedule_count": 10**9}
"""FLARE starts a job when all its sites answer at one moment: on a bad line it tries again at once, and for ever.

By default it waits twice as long after every try, up to ten minutes, and gives the job up after ten.
"""


@dataclass
class _Job:
    id: str
    starts: int
    since: float | None = None
    without: dict[str, float] = field(default_factory=dict[str, float])
    told: float | None = None  # when its run said how it ended
    over: bool = False


def serve(recipe: Recipe, kit: Path, settings: ServerSettings, *, progress: Progress = ignore) -> dict[str, Any]:
    """Run of a recipe over FLARE, begun or continued where its run folder stopped."""
    run, text = kit / "run", recipe.to_toml().encode()
    run.mkdir(exist_ok=True)
    (kit / settings.bulletin).mkdir(parents=True, exist_ok=True)
    summary, stored_recipe = kit / settings.state / "summary.json", run / "recipe.toml"
    same = stored_recipe.is_file() and stored_recipe.read_bytes() == text
    write_atomically(stored_recipe, text)
    write_settings(settings, kit)
    close_kit(kit, SERVER_CLASSES)
    _own_storage(kit, run)
    # Its administrator's side runs in this process, and would talk in the middle of what is shown.
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    with supervised(flare_command(kit, "server"), run / "flare.log") as server:
        # a job goes on where the process that watches it is killed, and may have ended since.
        outcome = StatusReader(kit / settings.bulletin).outcome()
        if same and summary.is_file() and outcome is not None and outcome["error"] is None:
            progress(Note("the run is over; nothing is left to do"))
        else:
            JobSupervisor(kit, settings, server, progress).until_done()
    return json.loads(summary.read_text(encoding="utf-8"))


def _own_storage(kit: Path, run: Path) -> None:
    """Where FLARE keeps jobs: by default all servers of a machine share a folder. What is left there is of no use."""
    storage = run / "flare-storage"
    shutil.rmtree(storage, ignore_errors=True)
    path = kit / "local" / "resources.json"
    resources: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(storage / "jobs")
        if component["id"] == "job_scheduler":
            component["args"] |= SCHEDULER_SETTINGS
    # a site that is gone is no site to hand a job to, and one whose line hangs keeps no answer about others back
    resources["servers"][0] |= {"heart_beat_timeout": 60, "admin_timeout": 3.0}  # less than a session's 5 s
    write_atomically(path, json.dumps(resources, indent=1).encode())


class JobSupervisor:
    """Supervisor of the jobs of one run."""

    def __init__(self, kit: Path, settings: ServerSettings, server: SupervisedProcess, progress: Progress) -> None:
        self._kit, self._settings, self._server = kit, settings, server
        self._progress = progress
        self._bulletin = StatusReader(kit / settings.bulletin)
        self._admin: Session | None = None
        self._heard = time.monotonic()
        self._clients = {flare: client for client, flare in settings.sites.items()}
        self._fell: float | None = None
        self._rounds = 0

    def until_done(self) -> None:
        """Submission of the job, repeated until the run is done."""
        fruitless = 0
        try:
            while True:
                before = self._rounds
                job = self._hand_in(self._gather())
                try:
                    why = self._follow(job)
                finally:
                    if not job.over:
                        self._ask(lambda admin, job=job: admin.abort_job(job.id), None)
                if why is None:
                    return
                fruitless = 0 if self._rounds > before else fruitless + 1
                if fruitless >= FRUITLESS:
                    raise RuntimeError(f"{fruitless} jobs in a row ended without a new round; the last: {why}")
                self._fell = time.monotonic()
                self._progress(Note(f"{why}; going on from the last checkpoint"))
        finally:
            self._close()

    def _gather(self) -> list[str]:
        """FLARE's names of the sites that get the job: all, or after a while those that are connected."""
        self._progress(Note(f"waiting for {len(self._clients)} sites"))
        began, announced = time.monotonic(), set[str]()
        # Sites that took part before come back soon, or are away.
        has_members = (self._kit / self._settings.state / MEMBERS).is_file()
        wait = self._settings.away if has_members else self._settings.wait
        while True:
            infos = self._ask(lambda admin: admin.get_connected_client_list(), [])
            connected = {info.name for info in infos} & self._clients.keys()
            for name in sorted(connected - announced):
                self._progress(Note(f"site {self._clients[name]}: connected"))
            announced |= connected
            enough = len(connected) >= self._settings.minimum and time.monotonic() - began >= wait
            if len(connected) == len(self._clients) or enough:
                return sorted(connected)
            time.sleep(LOOK)

    def _hand_in(self, sites: Sequence[str]) -> _Job:
        folder = write_job(self._kit / "run" / "job" / "confed", sites, min(self._settings.minimum, len(sites)))
        self._bulletin.begin()
        while True:
            job = self._ask(lambda admin: admin.submit_job(str(folder)), "")
            if job:
                self._progress(Note(f"handed in job {job} for {len(sites)} sites"))
                return _Job(job, self._server.starts)
            time.sleep(LOOK)

    def _follow(self, job: _Job) -> str | None:
        """Supervision of a job to its end; the reason why the run is not done, None if it is."""
        looked = 0.0
        while True:
            self._report()
            if time.monotonic() - looked < LOOK:
                time.sleep(0.1)
                continue
            looked = time.monotonic()
            state = self._ask(lambda admin: admin.get_job_status(job.id) or "", "")
            job.over = state.startswith(_OVER)
            if state == _RUNNING and job.since is None:
                job.since = looked
            outcome = self._bulletin.outcome()
            if outcome is not None and job.told is None:
                job.told = looked
            if job.over:
                self._report()
            # Over a bad line FLARE may never hear that a site's part of the job has ended.
            if outcome is not None and (job.over or looked - (job.told or looked) >= STRAY):
                if outcome["error"] is None:
                    return None
                raise (ValueError if outcome["faulty"] else RuntimeError)(outcome["error"].partition(": ")[2])
            if self._server.starts != job.starts:
                return "FLARE's server died and was started again"
            if job.over:
                return f"FLARE ended the job ({state.removeprefix(_OVER).lower().replace('_', ' ')})"
            if outcome is None and (stray := self._stray(job)) is not None:
                return f"site {self._clients[stray]} is there and does not run the job"

    def _report(self) -> None:
        for event in self._bulletin.news():
            if self._fell is not None:
                self._progress(Note(f"going on {time.monotonic() - self._fell:.1f} s after the job's end was noticed"))
                self._fell = None
            if isinstance(event, RunProgress):
                self._rounds = max(self._rounds, event.round)
            self._progress(event)
        self._progress(SiteStates(self._bulletin.sites()))

    def _stray(self, job: _Job) -> str | None:
        """A site that is connected and has not had the job for a while: it came later, or was started again."""
        if job.since is None or time.monotonic() - job.since < STRAY:
            return None
        running: list[dict[str, Any]] = self._ask(lambda admin: admin.get_client_job_status() or [], [])
        names = {str(entry.get("client_name")) for entry in running if entry.get("status") not in _NO_ANSWER}
        busy = {str(entry.get("client_name")) for entry in running if entry.get("job_id") == job.id}
        now = time.monotonic()
        idle = dict.fromkeys(names & self._clients.keys() - busy, now)
        # A site on a bad line does not answer every time.
        job.without = {name: since for name, since in (idle | job.without).items() if name not in busy}
        return next((name for name, since in job.without.items() if now - since >= STRAY), None)

    # FLARE's administrator -----------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Session], Any], otherwise: Any) -> Any:
        """The answer of FLARE's server to a question, or something else where it does not answer."""
        self._server.check()
        try:
            if self._admin is None:
                with redirect_stdout(io.StringIO()):  # it says that it connects
                    self._admin = new_secure_session(ADMIN, str(self._kit / "admin"), timeout=5.0)
            answer = question(self._admin)
        except Exception as error:  # FLARE has some fifteen kinds of it for this; the next question is on a new line
            self._close()
            if time.monotonic() - self._heard >= SILENT:
                raise RuntimeError(f"FLARE's server does not answer: {type(error).__name__}: {error}") from error
            return otherwise
        self._heard = time.monotonic()
        return answer

    def _close(self) -> None:
        if self._admin is not None:
            with suppress(Exception):
                self._admin.close()
        self._admin = None


class FlareFederation:
    """FLARE's server and clients, in processes that ours watch."""

    def provision(self, root: Path, federation: Federation) -> None:
        provision_flare(root, federation)

    def lead(self, recipe: Recipe, leading: Leading, progress: Progress) -> dict[str, Any]:
        kit, timeouts, bounds = leading.kit, leading.timeouts, leading.bounds
        if leading.insecure or (leading.host, leading.port) != (HOST, PORT):
            raise ValueError("with --engine flare the kit sets address and port, and TLS is always on")
        if leading.deliver:
            raise ValueError("--deliver is for Flower; with --engine flare the same command hands out the final models")
        if kit is None or not (kit / "startup" / "fed_server.json").is_file():
            raise ValueError(
                "with --engine flare, --tls must be the server's folder, with startup/fed_server.json in it"
            )
        kit = kit.resolve()
        settings = ServerSettings(
            recipe="run/recipe.toml", state=str(leading.state.resolve()), bulletin="run",
            sites=read_sites(leading.sites or kit / SITES), minimum=timeouts.minimum, deadline=timeouts.deadline,
            away=timeouts.away, wait=leading.wait, whole=leading.whole, update_bound=bounds.update,
            weight_bound=bounds.weight,
        )  # fmt: skip
        return serve(recipe, kit, settings, progress=progress)

    def signature(self, joining: Joining, recipe: str, card: Path | None, unsigned: bool) -> Signature | None:
        if joining.insecure or joining.ca is not None:
            raise ValueError("with --engine flare the kit sets the server and its certificate, and TLS is always on")
        if unsigned or not (joining.kit / "startup" / "fed_client.json").is_file():  # no kit, which join says
            return None
        return check_signed(joining.kit, joining.kit / "startup" / "rootCA.pem", recipe, card, joining.site)

    def join(
        self,
        recipe: Recipe,
        joining: Joining,
        signature: Signature | None,
        stop: threading.Event,
        progress: Progress = ignore,
    ) -> bool:
        """The kit's folder ``run`` is locked meanwhile, and a job's process locks the private folder."""
        kit, private = joining.kit.resolve(), joining.private
        name, server = _client_and_server(kit)
        run = kit / "run"
        with ExitStack() as held:
            held.enter_context(exclusive(run))
            with exclusive(private, ENDING):
                # A job's process locks it; who works there already is said before FLARE starts.
                if signature is not None:
                    accept(private, *signature)
            policy = joining.policy
            policy.check_recipe(recipe)  # here, and not in the process that FLARE starts
            private.mkdir(parents=True, exist_ok=True)
            private.chmod(0o700)
            if (missing := missing_class(kit)) is not None:
                progress(Note(missing))
            run.mkdir(exist_ok=True)
            write_atomically(run / "recipe.toml", recipe.to_toml().encode())
            settings = SiteSettings(
                "run/recipe.toml", str(private.resolve()), joining.site or None, policy=policy.file or None,
                epsilon=policy.client_epsilon, evaluations=policy.evaluations, checkpoint=joining.checkpoint,
            )  # fmt: skip
            write_settings(settings, kit)
            log, news = run / "flare.log", StatusReader(run)
            news.begin()
            client = held.enter_context(supervised(flare_command(kit, "client", f"uid={name}"), log))
            busy = time.monotonic()
            progress(Note(f"FLARE's client {name!r} dials {server}; what it says is in {log}"))
            # The end of a job's process before its job's would be a failure of the job.
            while not stop.wait(0.5) and not (joining.once and news.outcome() and not client.jobs()):
                client.check()
                busy = time.monotonic() if not joining.once or client.jobs() else busy
                if time.monotonic() - busy >= joining.patience:
                    raise RuntimeError(f"no run at {server} for {joining.patience:g} s: it may be over")
                news.tell(progress)
            news.tell(progress)
        return True

    def commands(self, port: int) -> tuple[str, str]:
        """The kits know the port."""
        return "--engine flare --state state --tls .", "--engine flare --kit . --once"


def _client_and_server(kit: Path) -> tuple[str, str]:
    """FLARE's name of a site, and the server's address, from the site's workspace."""
    try:
        config = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))
        return str(config["client"]["fqsn"]), str(config["servers"][0]["service"]["target"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{kit} is no FLARE workspace of a site: startup/fed_client.json: {error!r}") from error


def missing_class(kit: Path) -> str | None:
    """Deprecation line for a workspace that does not allow the class which jobs of the next release name."""
    path = kit / "local" / "resources.json"
    try:
        resources = json.loads(path.read_text(encoding="utf-8"))
        allowed = resources["class_allow_list"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(allowed, list) or MEMBER in allowed:
        return None
    return (
        f"deprecated: class_allow_list in {path} has names of confed 0.1 only, which jobs of the next release do not "
        f"use; add {MEMBER!r} to it"
    )


TRANSPORT: FederationTransport = FlareFederation()
