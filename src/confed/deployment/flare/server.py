"""Supervision of a federation over FLARE: starts the server, submits the job, and submits it again when FLARE ends it.

FLARE ends a whole job when one process of it dies, and never gives a running job back to a site that lost it. A run of
confed survives that, for its checkpoint and its sites' states do: a new job goes on from there. The run itself is led
in a process that FLARE starts (:class:`confed.deployment.flare.job.FlareServer`); this one watches it.
"""

import io
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from confed.deployment.flare.job import ServerSettings, write_settings
from confed.deployment.flare.processes import SupervisedProcess, server_command, supervised
from confed.deployment.flare.provision import ADMIN, close_kit
from confed.deployment.flare.status import StatusReader
from confed.engines.flare.transport import SERVER_CLASSES, write_job
from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe
from confed.results.folder import MEMBERS
from confed.system.events import Note, Progress, RunProgress, SiteStates, ignore

LOOK = 1.0
"""Seconds between questions to FLARE's server."""

STRAY = 15.0
"""Seconds that a connected site may be without the job before it is handed in again for it."""

FRUITLESS = 5
"""Jobs in a row that may end without a new round before the server gives up."""

SILENT = 120.0
"""Seconds after which a server of FLARE's that does not answer is one that cannot."""

_RUNNING, _OVER = "RUNNING", "FINISHED:"


@dataclass
class _Job:
    """A submitted job."""

    id: str
    starts: int
    since: float | None = None
    without: dict[str, float] = field(default_factory=dict[str, float])
    over: bool = False


def serve(
    recipe: Recipe,
    kit: Path,
    settings: ServerSettings,
    *,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Run of a recipe over FLARE, begun or continued where its run folder stopped.

    A faulty recipe, faulty data and a folder that is no kit are a ValueError; a FLARE server that does not start, and a
    run that fails again and again, a RuntimeError.
    """
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
    with supervised(server_command(kit), run / "flare.log") as server:
        # A job goes on where the process that watches it is killed, and may have ended since.
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
    # A site that is gone is no site to hand a job to.
    resources["servers"][0]["heart_beat_timeout"] = 60
    write_atomically(path, json.dumps(resources, indent=1).encode())


class JobSupervisor:
    """Supervisor of the jobs of one run."""

    def __init__(
        self,
        kit: Path,
        settings: ServerSettings,
        server: SupervisedProcess,
        progress: Progress,
    ) -> None:
        self._kit, self._settings, self._server = kit, settings, server
        self._progress = progress
        self._bulletin = StatusReader(kit / settings.bulletin)
        self._admin: Session | None = None
        self._heard = time.monotonic()
        self._clients = {flare: client for client, flare in settings.sites.items()}
        self._fell: float | None = None
        self._rounds = 0

    def until_done(self) -> None:
        """Submission of the job, repeated until the run is done.

        Faulty input of the run is a ValueError.
        """
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
            connected = self._connected()
            for name in sorted(connected - announced):
                self._progress(Note(f"site {self._clients[name]}: connected"))
            announced |= connected
            enough = len(connected) >= self._settings.minimum and time.monotonic() - began >= wait
            if len(connected) == len(self._clients) or enough:
                return sorted(connected)
            time.sleep(LOOK)

    def _connected(self) -> set[str]:
        infos = self._ask(lambda admin: admin.get_connected_client_list(), [])
        return {info.name for info in infos} & self._clients.keys()

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
        """Supervision of a job to its end; the reason why the run is not done, None if it is.

        Faulty input of the run is a ValueError, its failure a RuntimeError.
        """
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
            if job.over:
                self._report()
            if job.over and (outcome := self._bulletin.outcome()) is not None:
                if outcome["error"] is None:
                    return None
                raise (ValueError if outcome["faulty"] else RuntimeError)(outcome["error"].partition(": ")[2])
            if self._server.starts != job.starts:
                return "FLARE's server died and was started again"
            if job.over:
                return f"FLARE ended the job ({state.removeprefix(_OVER).lower().replace('_', ' ')})"
            if (stray := self._stray(job)) is not None:
                return f"site {self._clients[stray]} is there and does not run the job"

    def _report(self) -> None:
        for event in self._bulletin.steps():
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
        names = {str(entry.get("client_name")) for entry in running}
        busy = {str(entry.get("client_name")) for entry in running if entry.get("job_id") == job.id}
        now, idle = time.monotonic(), names & self._clients.keys() - busy
        job.without = {name: job.without.get(name, now) for name in idle}
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
