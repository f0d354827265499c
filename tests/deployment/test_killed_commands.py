"""A coordinator's command killed at every change of a file: nothing is lost, and the same command does the rest."""

import os
import shutil
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from confed.deployment.authority import settle_key
from confed.deployment.manifest import MANIFEST, verified
from confed.deployment.provision import SITES, Federation, provision, read_sites, sign_again
from confed.deployment.roles import Role
from confed.deployment.roster import (
    Roster,
    add_officer,
    add_site,
    quarantine_site,
    read_officers,
    read_quarantine,
    renew_server,
    revoke_site,
    rotate_authority,
)
from confed.engines.flower.supernode import read_public

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NAMES = ("north", "south")
AT = ("localhost", 8443)
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.copyfile"}

Command = Callable[[Path], Any]
COMMANDS: dict[str, Command] = {
    "add": lambda root: add_site(root / "server", "east", "", None, AT),
    "add again": lambda root: add_site(root / "server", "south", "", None, AT, again=True),
    "revoke": lambda root: revoke_site(root / "server", "south", None),
    "quarantine": lambda root: quarantine_site(root / "server", "south", release=False),
    "release": lambda root: quarantine_site(root / "server", "north", release=True),
    "renew": lambda root: renew_server(root / "server", None, "localhost", 10),
    "rotate": lambda root: rotate_authority(root / "server", root / "next", 10, encrypted=False),
    "add an auditor": lambda root: add_officer(root / "server", "bea", Role.auditor, "", None),
    "sign": lambda root: sign_again(root / "server", root / "authority" / "ca.key"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed") / "federation"
    provision(root, Federation(NAMES, *AT, "name = 'toy'\n"))
    quarantine_site(root / "server", "north", release=False)
    return root


def killed_at(step: int, command: Command, root: Path) -> bool:
    """Runs a command in a process that is gone, without any clean-up, before its change number ``step`` of a file."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = step

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writing or event in CHANGES:
            left -= 1
            if left < 0:
                os._exit(9)

    try:
        sys.addaudithook(count)
        command(root)
    except BaseException:
        os._exit(1)
    os._exit(0)


def copies(made: Path, command: Command, root: Path) -> Iterator[Path]:
    """A federation each for every step at which the command can be killed."""
    for step in range(200):
        folder = root / str(step)
        shutil.copytree(made, folder)
        if not killed_at(step, command, folder):
            assert step > 0, "the command changed no file"
            return
        yield folder
    raise AssertionError("the command never ended")


def state_of(root: Path) -> dict[str, Any]:
    """What server and sites read, and what a server needs to start."""
    server = root / "server"
    settle_key(server)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server / "server.crt", server / "server.key")
    trusted = (server / "ca.crt").read_bytes()
    ssl.create_default_context(cafile=str(server / "ca.crt"))
    listed = read_sites(server / SITES)
    roster = Roster(server / SITES, read_public, lambda text: None)
    assert set(roster.values()) == set(listed)
    folders = [server, *(folder for folder in (root / "sites").iterdir() if (folder / MANIFEST).exists())]
    manifests = {folder.name: verified(folder, trusted) for folder in folders}
    return {
        "listed": sorted(listed), "keys": listed, "quarantine": sorted(read_quarantine(server / SITES)),
        "signed": sorted(manifests["server"].sites), "serial": manifests["server"].serial,
        "authorities": trusted.count(b"BEGIN CERTIFICATE"), "officers": sorted(read_officers(server)),
        "sites": {name: sorted(manifest.sites) for name, manifest in manifests.items() if name in listed},
    }  # fmt: skip


WHAT = ("listed", "quarantine", "signed", "authorities", "sites", "officers")


# Revoking signs, too, and writes what adding does; a slow command has more steps of the same kinds.
SLOW = ("add", "add again", "rotate", "sign")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in COMMANDS])
def test_a_killed_command_loses_nothing_and_is_done_again(name: str, made: Path, tmp_path: Path) -> None:
    command = COMMANDS[name]
    before = state_of(made)
    shutil.copytree(made, tmp_path / "whole")
    command(tmp_path / "whole")
    after = state_of(tmp_path / "whole")
    for folder in copies(made, command, tmp_path):
        between = state_of(folder)
        for what in ("listed", "signed", "quarantine", "authorities", "officers"):
            assert between[what] in (before[what], after[what]), (folder.name, what)
        untouched = {site: key for site, key in before["keys"].items() if site != "south"}
        assert untouched.items() <= between["keys"].items()
        with suppress(ValueError):  # where all of it had been done
            command(folder)
        healed = state_of(folder)
        assert [healed[what] for what in WHAT] == [after[what] for what in WHAT], folder.name
        assert healed["serial"] >= after["serial"]
        for site in ("north", *(("east",) if name == "add" else ())):
            key = (folder / "sites" / site / "key").read_text()
            assert healed["keys"][site] == after["keys"][site] or "PRIVATE KEY" in key


def test_a_site_that_lost_its_key_gets_another(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "federation"
    shutil.copytree(made, root)
    roster = Roster(root / "server" / SITES, read_public, lambda text: None)
    before = {name: key for key, name in roster.items()}
    add_site(root / "server", "south", "", None, AT, again=True)
    now = {name: key for key, name in Roster(root / "server" / SITES, read_public, lambda text: None).items()}
    assert now["south"] != before["south"]
    assert {name: key for name, key in now.items() if name != "south"}.items() <= before.items()


def test_a_revoked_sites_key_does_not_come_back_unasked(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "federation"
    shutil.copytree(made, root)
    lost = read_sites(root / "server" / SITES)["south"]
    revoke_site(root / "server", "south", None)
    with pytest.raises(ValueError, match="has the key of an earlier site 'south': --again makes another one"):
        add_site(root / "server", "south", "", None, AT)
    add_site(root / "server", "south", "", None, AT, again=True)
    assert read_sites(root / "server" / SITES)["south"] != lost
