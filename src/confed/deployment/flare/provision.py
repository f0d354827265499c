"""Provisioning over FLARE: a startup kit of FLARE's for every party, restricted to the classes of confed.

FLARE's provisioning makes an authority, certificates for the server, the sites and the administrator who hands in jobs,
and a workspace for each. What it leaves open is closed here: at a site only
:data:`confed.engines.flare.transport.SITE_CLASSES` may be named by a job, no job may bring code, and logs stay where
they are written.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from confed.deployment.flare.job import SiteSettings, write_settings
from confed.deployment.manifest import public_half
from confed.deployment.provision import Federation, check_empty, hand_out
from confed.engines.flare.transport import LINE_SETTINGS, SERVER, SERVER_CLASSES, SITE_CLASSES
from confed.federation.checkpoint import write_atomically

ORGANISATION = "confed"
ADMIN = "admin@confed.org"  # FLARE's name of who hands in the job; its kit lies in the server's folder admin
ROLES = ("project_admin", "org_admin", "lead", "member")


def provision_flare(root: Path, federation: Federation) -> None:
    """Provisioning of the folders ``server``, ``sites/NAME`` and ``provision``."""
    check_empty(root)
    check_names(federation)
    root.mkdir(parents=True, exist_ok=True)
    _provision(root, federation)
    server = root / "server"
    close_kit(server, SERVER_CLASSES)
    close_kit(server / "admin", ())
    authority = json.loads((root / "provision" / "cert.json").read_text(encoding="utf-8"))
    certificates = {name: root / "sites" / name / "startup" / "client.crt" for name in federation.sites}
    keys = {name: public_half(path.read_bytes()) for name, path in certificates.items()}
    for name in federation.sites:
        folder = root / "sites" / name
        close_kit(folder, SITE_CLASSES)
        write_settings(SiteSettings(site=name), folder)
    names = {name: name for name in federation.sites}
    hand_out(root, federation, names, keys, str(authority["root_pri_key"]).encode(), "flare_")


def check_names(federation: Federation) -> None:
    """Check that FLARE accepts the names of all sites."""
    for name in federation.sites:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"with FLARE a site's name has letters, digits, - and _, got {name!r}")
        if name in (SERVER, federation.host):
            raise ValueError(f"with FLARE {name!r} is the server's name, and cannot be a site's")


def _provision(root: Path, federation: Federation) -> None:
    """FLARE's startup kits in the folders of the parties; its state, with the authority's key, in ``provision``."""
    port = {"fed_learn_port": federation.port, "admin_port": federation.port}
    server = Participant("server", federation.host, ORGANISATION, port)
    sites = [Participant("client", name, ORGANISATION) for name in federation.sites]
    admin = Participant("admin", ADMIN, ORGANISATION, {"role": "project_admin"})
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=federation.days),
    ]
    listener = _Listener()
    with tempfile.TemporaryDirectory(prefix="confed-provision-") as temporary:
        project = Project("confed", "a federation", [server, *sites, admin])
        context: Any = Provisioner(temporary, builders).provision(project, logger=listener)
        if context.get(CtxKey.BUILD_ERROR):
            raise RuntimeError(f"FLARE could not make the kits: {'; '.join(listener.errors)}")
        made = Path(context[CtxKey.CURRENT_PROD_DIR])
        shutil.move(made / federation.host, root / "server")
        shutil.move(made / ADMIN, root / "server" / "admin")
        for name in federation.sites:
            shutil.move(made / name, root / "sites" / name)
        shutil.move(Path(temporary) / "confed" / "state", root / "provision")
    for path in (*root.rglob("*.key"), root / "provision" / "cert.json"):
        path.chmod(0o600)


class _Listener:
    """Output of FLARE's provisioning; only errors are kept."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.error = self.errors.append

    def info(self, text: str) -> None:
        """Not kept."""

    debug = warning = info


def close_kit(kit: Path, classes: Sequence[str]) -> None:
    """Restriction of a party's FLARE workspace to some classes; for existing kits, too."""
    local = kit / "local"
    given = [path for path in (local / "resources.json", local / "resources.json.default") if path.is_file()]
    if not given:
        raise ValueError(f"{kit} is no workspace of FLARE's: there is no resources.json.default in its folder local")
    resources: dict[str, Any] = json.loads(given[0].read_text(encoding="utf-8"))
    resources["class_allow_list"] = list(classes)
    resources["class_list_enforcement_mode"] = "enforce"
    # What goes wrong at a site may quote its data.
    resources["allow_log_streaming"] = False
    components: list[dict[str, Any]] = resources.get("components", [])
    resources["components"] = [component for component in components if component.get("id") != "site_log_streamer"]
    write_atomically(local / "resources.json", json.dumps(resources, indent=1).encode())
    _log_little(local)
    allowed = dict.fromkeys(("submit_job", "manage_job", "view"), "any")
    denied = dict.fromkeys(("byoc", "shell_commands", "clone_job", "download_job", "operate"), "none")
    permissions = {role: denied | (allowed if role == "project_admin" else {}) for role in ROLES}
    rights = {"format_version": "1.0", "permissions": permissions}
    write_atomically(local / "authorization.json", json.dumps(rights, indent=1).encode())
    write_atomically(local / "comm_config.json", json.dumps(LINE_SETTINGS, indent=1).encode())


def _log_little(local: Path) -> None:
    """Logging settings of a FLARE workspace: one log file, and warnings only of the messages."""
    default = local / "log_config.json.default"
    if default.is_file():  # an administrator's kit has none
        logs: dict[str, Any] = json.loads(default.read_text(encoding="utf-8"))
        logs["handlers"]["consoleHandler"]["level"] = "WARNING"
        logs["handlers"]["logFileHandler"]["filename"] = "flare_log.txt"
        logs["loggers"]["root"]["handlers"] = ["consoleHandler", "logFileHandler"]
        logs["handlers"] = {name: logs["handlers"][name] for name in ("consoleHandler", "logFileHandler")}
        logs["loggers"]["nvflare.collab"] = {"level": "WARNING"}
        write_atomically(local / "log_config.json", json.dumps(logs, indent=1).encode())
