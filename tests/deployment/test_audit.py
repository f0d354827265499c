"""Audit of a federation: what an audit of its folders proves, and what is left of a site that was erased."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import confed
from confed.algorithms.fedavg import FedAvg
from confed.deployment.audit import REMOVED, audit, erase, retain
from confed.deployment.server import run_server
from confed.engines.flower.transport import FlowerTransport
from confed.engines.local import InProcess, Simulation, simulate
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.journal_chains import KEY, KNOWN, SEEN, Countersignatures
from confed.engines.remote.server import Remote
from confed.federation.state import MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.results.folder import MEMBERS, read_jsonl
from confed.system.folder_lock import exclusive
from confed.testing.toy import toy_setup
from led_recipe import SITES_OF, grid_of, recipe_of
from memory_transport import CLIENTS, QUICK, Letters
from refusals import refuses


class Audited(Letters):
    def site(self, name: str) -> Site:
        root = self.root / name
        return Site(self.setup, client_named(self.setup, name), root, audit=root / "audit.jsonl")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a server and three sites after two rounds with noise."""
    root = tmp_path_factory.mktemp("played")
    setup = toy_setup(FedAvg(update_privacy=UpdatePrivacy(clip=0.5, noise=4.0)), rounds=2, noisy=False)
    letters = Audited(setup, root)
    remote = Remote(setup, letters, timeouts=QUICK, memory=root / "server")
    remote.sites.gather(CLIENTS, wait=5)
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True)
    servers = simulation.start(InProcess(setup).workspace)
    remote.begin(0, (0,))
    for record in simulate(simulation, servers):
        assert not record.errors
        remote.remember()
    return root


@pytest.fixture
def folders(played: Path, tmp_path: Path) -> Path:
    shutil.copytree(played, tmp_path / "copy")
    return tmp_path / "copy"


def test_folders_that_were_left_alone_are_sound(folders: Path) -> None:
    lines = audit(folders / "server", [folders / "client-1"])
    assert {line.site for line in lines} == set(CLIENTS)
    assert all(line.sound for line in lines)
    privacy = {line.site: line for line in lines if line.journal == "privacy"}
    assert (privacy["client-1"].signed, privacy["client-1"].here, privacy["client-1"].verdict) == (2, 2, "sound")
    assert (privacy["client-0"].here, privacy["client-0"].verdict) == (None, "not at hand")


def test_a_run_folder_put_back_from_a_backup_is_named(folders: Path) -> None:
    site, older = folders / "client-1", folders / "older"
    shutil.copytree(folders / "server", older)
    heads = Countersignatures(folders / "server")
    known = {name: length for name, (length, _) in heads.known("client-1").items()}
    heads.note("client-1", json.dumps({name: [length + 1, "a" * 32] for name, length in known.items()}))
    heads.sign()
    (site / SEEN).write_text(heads.signed("client-1"))
    wrong = [line for line in audit(older, [site]) if not line.sound]
    assert {line.journal for line in wrong} == set(known)
    told = {line.journal: line.verdict for line in wrong}
    assert f"put back from an old copy: {known['privacy'] + 1} entries were signed" in told["privacy"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n")


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"noise": 4.0', b'"noise": 9.0'))


@pytest.mark.parametrize("damage", [Path.unlink, cut, edit])
def test_a_journal_that_was_changed_is_named(folders: Path, damage: Callable[[Path], None]) -> None:
    damage(folders / "client-1" / "privacy.jsonl")
    before = sorted((path, path.read_bytes()) for path in folders.rglob("*") if path.is_file())
    wrong = [line for line in audit(folders / "server", [folders / "client-1"]) if not line.sound]
    assert [(line.site, line.journal) for line in wrong] == [("client-1", "privacy")]
    assert wrong[0].verdict == "removed, cut or put back from an old copy"
    assert sorted((path, path.read_bytes()) for path in folders.rglob("*") if path.is_file()) == before
    assert confed("federation", "audit", str(folders / "server"), str(folders / "client-1")) == 1


def test_signatures_of_another_key_and_changed_ones_are_named(folders: Path) -> None:
    known = folders / "server" / KNOWN
    signed = json.loads(known.read_text())
    told = json.loads(signed["client-0"])
    told["journals"]["privacy"][0] = 1
    known.write_text(json.dumps(signed | {"client-0": json.dumps(told)}))
    assert [line.site for line in audit(folders / "server") if not line.sound] == ["client-0"]
    known.write_text(json.dumps(signed))
    (folders / "server" / KEY).write_bytes(os.urandom(32))
    wrong = [line.verdict for line in audit(folders / "server") if not line.sound]
    assert len(wrong) == len(CLIENTS)
    assert "signed by another key than this server's" in wrong[0]


def test_a_folder_that_is_none_is_refused(folders: Path) -> None:
    refuses("is no server's run folder, or no round has ended", audit, folders / "client-0")
    with pytest.raises(ValueError, match="is no private folder of client-0, client-1, client-2"):
        audit(folders / "server", [folders / "server" / "x"])


def test_an_erased_site_is_in_no_list_and_what_is_left_is_said(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    state = tmp_path / "state"
    run_server(recipe, state, FlowerTransport(grid_of(tmp_path / "recipe.toml", tmp_path)), names=SITES_OF)
    summary = (state / "summary.json").read_bytes()
    (state / "summary.json").unlink()
    refuses("goes on: revoke the site", erase, state, "warm")
    (state / "summary.json").write_bytes(summary)
    left = erase(state, "warm")
    assert any("the global model holds what warm sent in rounds 1 to 1 (1 rounds): `confed forget`" in x for x in left)
    assert "warm" not in (state / "members.json").read_text()
    assert "warm" not in (state / "final.json").read_text()
    assert {line.site for line in audit(state)} == {"cold", "both"}
    refuses("has no site 'warm'; there are cold, both", erase, state, "warm")


def aged(path: Path, days: float) -> None:
    when = time.time() - days * 86400
    for file in (*path.rglob("*"), path):
        os.utime(file, (when, when))


def test_what_is_older_than_retention_goes_and_is_in_the_books(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = folders / "client-1"
    (old,) = (site / "state").iterdir()
    shutil.copytree(old, site / "state" / "newer")
    (site / "run-2" / "models").mkdir(parents=True)
    (site / "run-2" / "models" / "a").write_bytes(b"12345")
    (site / "run").mkdir()
    for path, days in ((old, 91), (site / "state" / "newer", 89), (site / "run-2", 91), (site / "run", 400)):
        aged(path, days)
    chains = {path.name: path.read_bytes() for path in site.glob("*.json*")}
    assert confed("federation", "retain", str(site), "--days", "90") == 0
    assert not old.exists()
    assert not (site / "run-2").exists()
    assert (site / "state" / "newer").is_dir()
    assert (site / "run").is_dir()
    assert {path.name: path.read_bytes() for path in site.glob("*.json*") if path.name != REMOVED} == chains
    entries = read_jsonl(site / REMOVED)
    assert [(entry["removed"], entry["days"]) for entry in entries] == [(f"state/{old.name}", 90), ("run-2", 90)]
    assert entries[1]["bytes"] == 5
    assert "run-2: 5 B, last changed " in capsys.readouterr().err
    assert retain(site, 90) == []
    assert all(line.sound for line in audit(folders / "server", [site]))


def test_retention_leaves_what_is_in_use(folders: Path) -> None:
    (folders / "server" / MEMBERS).write_text("[]")
    (folders / "server" / "checkpoint").mkdir()
    (folders / "server" / "checkpoint" / "000002.safetensors").write_bytes(b"12")
    aged(folders / "server" / "checkpoint", 3)
    refuses("goes on, and needs its checkpoints", retain, folders / "server", 1)
    (folders / "server" / "summary.json").write_text("{}")
    assert [line.partition(":")[0] for line in retain(folders / "server", 1)] == ["checkpoint/000002.safetensors"]
    refuses("--days must be at least 1, got 0", retain, folders / "client-1", 0)
    refuses("neither a server's run folder nor a site's", retain, folders, 1)
    with exclusive(folders / "client-1"), pytest.raises(ValueError, match="another process is working in"):
        retain(folders / "client-1", 1)
