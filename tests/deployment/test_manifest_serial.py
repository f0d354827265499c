"""A site that has accepted a manifest refuses every older one, however well it is signed."""

import json
import shutil
from pathlib import Path

import pytest

from confed.cli import main
from confed.deployment.doctor import check_signature
from confed.deployment.manifest import ACCEPTED, MANIFEST, SIGNATURE, Manifest, accept, check_serial, sign, verified
from confed.deployment.provision import Federation, provision, read_sites, sign_again, write_sites
from confed.recipes.recipe import load_recipe

pytest.importorskip("cryptography")
RECIPE = ["data.name=toy_federation:squares", "data.train=8", "data.test=4", "model.name=vilt_tiny"]
SIGNED = (MANIFEST, SIGNATURE, "recipe.toml")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    recipe = load_recipe("fedvqa_scenes", RECIPE).method("fedavg").to_toml()
    provision(tmp_path / "fed", Federation(("warm", "cold"), "h.org", 8443, recipe))
    return tmp_path / "fed" / "sites" / "cold"


def newer(site: Path, serial: int | None = None) -> tuple[bytes, Manifest]:
    server = site.parents[1] / "server"
    sign_again(server, server.parent / "authority" / "ca.key", serial=serial)
    authority = (site / "ca.crt").read_bytes()
    return authority, verified(site, authority)


def test_an_older_signed_manifest_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (old := site / "old").mkdir()
    for name in SIGNED:
        shutil.copy(site / name, old / name)
    recipe = site.parents[1] / "server" / "recipe.toml"
    recipe.write_text(recipe.read_text() + "# another\n")
    authority, manifest = newer(site)
    assert manifest.serial == 2
    accept(site / "private", authority, manifest)
    assert (site / "private").stat().st_mode & 0o777 == 0o700
    accept(site / "private", authority, manifest)
    for name in SIGNED:  # somebody on the way hands out what the coordinator signed before
        shutil.copy(old / name, site / name)
    command = ["client", str(site / "recipe.toml"), "--site", "cold", "--server", "localhost:1", "--key"]
    with pytest.raises(SystemExit) as ended:
        main([*command, str(site / "key"), "--ca", str(site / "ca.crt"), "--private", str(site / "private")])
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"{MANIFEST} has the serial number 1, and this site has accepted 2" in said
    given = (site / "ca.crt", site / "key", "cold", str(site / "recipe.toml"), None)
    assert check_signature(*given)[0].mark == "good"
    assert check_signature(*given, private=site / "private")[0].mark == "bad"


def test_another_manifest_with_the_same_number_is_refused(site: Path) -> None:
    authority, manifest = newer(site)
    accept(site / "private", authority, manifest)
    other = Manifest(manifest.sites, "0" * 64, serial=manifest.serial)
    with pytest.raises(ValueError, match="differs from the one with the same serial number 2"):
        accept(site / "private", authority, other)
    check_serial(site / "private", b"another federation", other)
    accept(site / "private", authority, Manifest(manifest.sites, "0" * 64, serial=3))
    with pytest.raises(ValueError, match="the serial number 2, and this site has accepted 3"):
        check_serial(site / "private", authority, manifest)


def test_a_coordinator_chooses_numbers_upwards_only(site: Path) -> None:
    server = site.parents[1] / "server"
    assert newer(site, 7)[1].serial == 7
    assert newer(site)[1].serial == 8
    with pytest.raises(ValueError, match="--serial must be above 8, the number of the last manifest, got 8"):
        sign_again(server, server.parent / "authority" / "ca.key", serial=8)


def test_manifests_from_before_there_were_numbers_count_as_the_oldest(site: Path) -> None:
    server = site.parents[1] / "server"
    authority = (site / "ca.crt").read_bytes()
    content = json.loads((server / MANIFEST).read_text())
    del content["serial"]

    class First(Manifest):
        def to_bytes(self) -> bytes:
            return json.dumps({**content, "format": 1}).encode()

    sign(First({}, ""), (server.parent / "authority" / "ca.key").read_bytes(), [server, site])
    assert verified(site, authority).serial == 0
    assert newer(site)[1].serial == 1


@pytest.mark.parametrize("serial", ["1", True, -1, 1.5])
def test_a_serial_number_that_is_none_is_refused(site: Path, serial: object) -> None:
    server = site.parents[1] / "server"
    manifest = verified(server, (server / "ca.crt").read_bytes())
    key = (server.parent / "authority" / "ca.key").read_bytes()
    sign(Manifest(manifest.sites, manifest.recipe, serial=serial), key, [site])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a manifest of format 2"):
        verified(site, (site / "ca.crt").read_bytes())


@pytest.mark.parametrize(
    "content", ["", "[]", '{"a": 1}', '{"a": {"serial": "1", "digest": ""}}', '{"a": {"serial": 1}}']
)
def test_a_damaged_memory_is_named(site: Path, content: str) -> None:
    authority, manifest = newer(site)
    (site / "private").mkdir()
    (site / "private" / ACCEPTED).write_text(content)
    with pytest.raises(ValueError, match=r"manifests\.json must hold"):
        check_serial(site / "private", authority, manifest)


def test_a_new_list_of_sites_reaches_the_sites_folders(site: Path) -> None:
    server = site.parents[1] / "server"
    listed = read_sites(server / "sites.json")
    assert read_sites(site / "sites.json") == listed
    write_sites(server / "sites.json", {"cold": listed["cold"]})
    sign_again(server, server.parent / "authority" / "ca.key")
    assert read_sites(site / "sites.json") == {"cold": listed["cold"]} == dict(newer(site)[1].sites)
