"""Objects that FLARE makes in its job processes: the server's and the site's part of a recipe's run.

A job names these classes and gives them nothing. What to run, and where its files lie, each party has written into a
separate file in the folder ``local`` of its FLARE workspace, so that neither recipes nor paths travel.
"""

import fcntl
import json
import os
import time
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import torch
from nvflare.apis.workspace import Workspace
from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted

from confed.deployment.manifest import MANIFEST, accept, check_site, verified
from confed.deployment.monitor import NewLines
from confed.deployment.policy import SitePolicy, read_policy
from confed.deployment.server import run_server
from confed.deployment.site import open_site, signer_by_kit, site_recipe
from confed.engines.flare.transport import FlareTransport, SiteEndpoint
from confed.engines.remote.client import Site
from confed.engines.remote.sites import Timeouts
from confed.engines.remote.update_bounds import Bounds
from confed.federation.checkpoint import write_atomically
from confed.federation.step_checkpoints import EVERY
from confed.privacy.secure_sum.signatures import Authority
from confed.recipes.schema import plain, validate
from confed.system.events import Caution, Event, Note, Progress, RunProgress, SiteStates, SiteStatus, from_json, to_json
from confed.system.folder_lock import exclusive

ENDING = 30.0
"""Seconds that a site's job waits for the private folder: the process of the job before may not have ended yet."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server in a job: ``local/confed_server.toml``. Paths are relative to the workspace."""

    recipe: str
    state: str
    bulletin: str  # the folder for what the run says of itself, see StatusFile
    sites: dict[str, str]  # client -> FLARE's name of its site; others may not take part
    minimum: int = 1
    deadline: float = 3600.0
    away: float = 60.0
    wait: float = 600.0  # seconds to wait for the sites of the job to introduce themselves
    whole: bool = False
    update_bound: float = 10.0
    weight_bound: float = 10.0


@dataclass(frozen=True)
class SiteSettings:
    """Settings of a site in a job: ``local/confed_site.toml``. Paths are relative to the workspace."""

    recipe: str = "recipe.toml"
    private: str = "private"  # the folder for what must not leave this machine
    site: str | None = None  # the client that this is; None where FLARE calls it the same
    data: tuple[str, ...] = ()  # key=value for the recipe's section [data]
    device: str | None = None  # where to compute; None for what the recipe says
    policy: str | None = None  # file of the site's policy; what follows narrows it
    epsilon: float | None = None
    evaluations: str | None = None
    checkpoint: str | float = EVERY  # of training, from one checkpoint to the next; 0 for none, a number for seconds


_FILES: dict[type, str] = {ServerSettings: "confed_server.toml", SiteSettings: "confed_site.toml"}
_S = TypeVar("_S", ServerSettings, SiteSettings)


def read_settings(kind: type[_S], workspace: Path) -> _S:
    path = workspace / "local" / _FILES[kind]
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must hold this party's settings as TOML: {error}") from error
    return kind(**validate(kind, values, path.stem, set()))


def write_settings(settings: ServerSettings | SiteSettings, workspace: Path) -> None:
    """Write a party's settings to the file that :func:`read_settings` reads."""
    path = workspace / "local" / _FILES[type(settings)]
    write_atomically(path, tomli_w.dumps(plain(asdict(settings))).encode())


class FlareServer:
    """Server's part of a FLARE job: leads the run."""

    @collab.main
    def run_server(self) -> None:
        """Leads from the recipe's start, or from the run folder's newest checkpoint, to the end."""
        root = _root(collab.workspace)
        settings = read_settings(ServerSettings, root)
        bulletin = StatusFile(root / settings.bulletin)
        # The process of a job that was ended may not have ended yet; two must not write into one run folder.
        lock = os.open(root / settings.bulletin / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        context: Any = collab.context
        names = {flare: client for client, flare in settings.sites.items()}
        transport = FlareTransport(collab.clients, names, lambda: bool(context.is_aborted()))
        timeouts = Timeouts(settings.minimum, settings.deadline, settings.away)
        try:
            recipe = site_recipe(root / settings.recipe)
            torch.set_num_threads(recipe.run.threads)
            summed = recipe.construct("algorithm").secure_sum is not None
            run_server(
                recipe, root / settings.state, transport, names=list(settings.sites), wait=settings.wait,
                coming=[connection.name or "" for connection in transport.connections().values()],
                timeouts=timeouts, whole=settings.whole, progress=bulletin,
                bounds=Bounds(settings.update_bound, settings.weight_bound),
                signatures=Authority(root / "startup", settings.sites) if summed else None,
            )  # fmt: skip
        except RunAborted:
            raise
        except Exception as error:
            bulletin.failed(error)
            raise
        finally:
            os.close(lock)
        bulletin.ended()


class FlareSite(SiteEndpoint):
    """Site's part of a FLARE job: answers for one client."""

    def __init__(self) -> None:
        super().__init__(self._open, self._note)
        self._held = ExitStack()  # until this process ends

    @staticmethod
    def _note(event: Event) -> None:
        StatusFile(_root(collab.workspace) / "run")(event)  # the workspace is known once the job runs

    def _open(self) -> Site:
        root = _root(collab.workspace)
        settings = read_settings(SiteSettings, root)
        private = root / settings.private
        with ExitStack() as held:  # let go where the site cannot be opened: the next call tries again
            held.enter_context(exclusive(private, ENDING))
            opened = self._opened(root, settings, private)
            self._held = held.pop_all()
        return opened

    def _opened(self, root: Path, settings: SiteSettings, private: Path) -> Site:
        handed_out = settings.recipe == SiteSettings.recipe
        if (root / MANIFEST).is_file() and handed_out:
            # As it was handed out; what `confed client` wrote in its place it had checked before.
            authority = (root / "startup" / "rootCA.pem").read_bytes()
            signed = verified(root, authority)
            check_site(signed, str(collab.site_name), recipe=root / settings.recipe)
            accept(private, authority, signed)
        recipe = site_recipe(root / settings.recipe, settings.data, settings.device, handed_out=handed_out)
        bulletin, name = StatusFile(root / "run"), settings.site or str(collab.site_name)
        policy = SitePolicy() if settings.policy is None else read_policy(root / settings.policy)
        return open_site(
            recipe, name, private, bulletin, policy=policy.narrowed(settings.epsilon, settings.evaluations),
            signer=signer_by_kit(recipe, root), over=bulletin.ended, checkpoint=str(settings.checkpoint),
        )  # fmt: skip


def _root(workspace: Workspace) -> Path:
    return Path(workspace.get_root_dir()).resolve()


NEWS = "progress.jsonl"  # file with the events of a run, a line each
OFTEN = 0.5  # seconds between two versions of what the sites are doing


class StatusFile:
    """Status files as the leading process writes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shown = -float("inf")
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, event: Event) -> None:
        """Progress callback: the run's news as lines of a file, of the sites' states the newest only."""
        if isinstance(event, SiteStates):
            if time.monotonic() - self._shown >= OFTEN:
                self._shown = time.monotonic()
                states = {name: asdict(status) for name, status in event.sites.items()}
                write_atomically(self._folder / "sites.json", json.dumps(states).encode())
        elif isinstance(event, Note | RunProgress | Caution):
            with (self._folder / NEWS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_json(event)) + "\n")

    def failed(self, error: Exception) -> None:
        """The run cannot go on, and would not if it were started again."""
        self._outcome({"error": f"{type(error).__name__}: {error}", "faulty": isinstance(error, ValueError)})

    def ended(self) -> None:
        """The run is done."""
        self._outcome({"error": None, "faulty": False})

    def _outcome(self, outcome: Mapping[str, Any]) -> None:
        write_atomically(self._folder / "outcome.json", json.dumps(outcome).encode())


class StatusReader:
    """Status files as the watching process reads them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lines = folder, NewLines(folder / NEWS, from_now=True)

    def news(self) -> list[RunProgress | Caution | Note]:
        """What happened since the last call."""
        return [from_json(line) for line in self._lines.read()]

    def tell(self, progress: Progress) -> None:
        """Hands on the notes since the last call."""
        for event in self.news():
            if isinstance(event, Note):
                progress(event)

    def sites(self) -> dict[str, SiteStatus]:
        """What the sites were doing last."""
        path = self._folder / "sites.json"
        if not path.is_file():
            return {}
        return {name: SiteStatus(**status) for name, status in json.loads(path.read_bytes()).items()}

    def begin(self) -> None:
        """Forgets how an earlier run ended, and what its sites did."""
        for name in ("outcome.json", "sites.json"):
            (self._folder / name).unlink(missing_ok=True)

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended: ``error`` (None if it is done) and ``faulty`` (a fault of the input); None before."""
        path = self._folder / "outcome.json"
        return json.loads(path.read_bytes()) if path.is_file() else None
