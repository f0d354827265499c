"""What authority and coordinator sign, and what a site refuses: changes on the way, and bad signatures."""

import base64
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from safetensors.torch import load_file

from command_line import confed
from confed.cli import main
from confed.deployment.authority import make_authority
from confed.deployment.doctor import check_signature
from confed.deployment.flower_app import apps
from confed.deployment.manifest import (
    ACCEPTED,
    MANIFEST,
    SIGNATURE,
    Manifest,
    accept,
    check_serial,
    check_signed,
    check_site,
    digest_of,
    sign,
    verified,
)
from confed.deployment.provision import (
    SITES,
    Federation,
    key_of_authority,
    make_key,
    provision,
    read_sites,
    sign_again,
    write_sites,
)
from confed.deployment.server import run_server
from confed.deployment.site import signatures_by_list
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.sites import Timeouts
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import run
from led_recipe import recipe_of
from refusals import refuses

RECIPE = ["data.name=toy_federation:squares", "data.train=8", "data.test=4", "model.name=vilt_tiny"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signed") / "made"
    (card := root.parent / "terms.json").write_text("{}")
    (wheel := root.parent / "confed_vl-0.1.0-py3-none-any.whl").write_bytes(b"a wheel")
    recipe = load_recipe("fedvqa_scenes", RECIPE).method("fedavg").to_toml()
    provision(root, Federation(("warm", "cold"), "h.org", 8443, recipe, card=card, wheel=wheel))
    return root


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "fed")
    return tmp_path / "fed" / "sites" / "cold"


def refused(site: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    command = [
        "client",
        str(site / "recipe.toml"),
        "--site",
        "cold",
        "--server",
        "localhost:1",
        "--key",
        str(site / "key"),
    ]
    assert confed(*command, "--ca", str(site / "ca.crt"), "--private", str(site / "private"), *more) == 2
    assert not (site / "private").exists()
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    return said


def test_a_site_has_everybody_s_keys_and_the_digests(site: Path) -> None:
    manifest = verified(site, (site / "ca.crt").read_bytes())
    assert manifest.sites == read_sites(site.parents[1] / "server" / "sites.json")
    assert manifest.recipe == digest_of(site / "recipe.toml")
    assert manifest.card == digest_of(site / "card.json")
    wheel = site / "confed_vl-0.1.0-py3-none-any.whl"
    assert manifest.wheel == {wheel.name: digest_of(wheel)}
    page = (site / "README.md").read_text()
    assert f"sha256sum {wheel.name}" in page
    assert digest_of(wheel) in page
    assert "pip install './confed_vl-0.1.0-py3-none-any.whl[flower]'" in page
    check_site(manifest, "cold", manifest.sites["cold"], recipe=site / "recipe.toml", card=site / "card.json")


def test_without_a_wheel_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    provision(tmp_path / "fed", Federation(("a",), "h.org", 8443, ""))
    for page in (tmp_path / "fed").rglob("README.md"):
        text = " ".join(page.read_text().split())
        assert "pip install 'FILE.whl[flower]'" in text
        assert "'confed[" not in text
    (tmp_path / "other.whl").touch()
    with pytest.raises(ValueError, match="--wheel must be a wheel file of confed"):
        Federation(("a",), "h.org", 8443, "", wheel=tmp_path / "other.whl")


def test_a_changed_recipe_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (site / "recipe.toml").open("a") as file:
        file.write("# harmless\n")
    assert "recipe.toml is not the one that the coordinator signed" in refused(site, capsys)


@pytest.mark.parametrize("name", [MANIFEST, SIGNATURE])
def test_a_missing_part_of_the_signature_is_refused(site: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (site / name).unlink()
    assert "the coordinator's signature is missing" in refused(site, capsys)


def test_another_list_of_sites_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((site / MANIFEST).read_text())
    content["sites"]["warm"] = make_key(site / "other")
    (site / MANIFEST).write_text(json.dumps(content))
    assert "is not signed by the authority that this site trusts" in refused(site, capsys)


def test_another_federation_s_signature_is_refused(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provision(tmp_path / "other", Federation(("cold",), "h.org", 8443, (site / "recipe.toml").read_text()))
    for name in (MANIFEST, SIGNATURE):
        shutil.copy(tmp_path / "other" / "sites" / "cold" / name, site / name)
    assert "is not signed by the authority that this site trusts" in refused(site, capsys)


def test_the_server_s_own_key_is_no_authority(site: Path) -> None:
    from confed.deployment.manifest import sign

    server = site.parents[1] / "server"
    sign(verified(site, (site / "ca.crt").read_bytes()), (server / "server.key").read_bytes(), [site])
    refuses("is not signed by the authority", verified, site, (site / "ca.crt").read_bytes())
    (site / SIGNATURE).write_text("no base64")
    refuses("must hold a signature in base64", verified, site, (site / "ca.crt").read_bytes())
    (site / SIGNATURE).write_bytes(base64.b64encode(b"short"))
    refuses("is not signed by the authority", verified, site, (site / "ca.crt").read_bytes())


def test_a_card_that_nobody_signed_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "card.json").write_text('{"other": 1}')
    assert "card.json is not the one" in refused(site, capsys, "--card", str(site / "card.json"))


def test_a_site_that_made_its_own_key_is_signed_again(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = site.parents[1] / "server"
    (site / "key").unlink()
    public = make_key(site / "key")
    assert "the key of this site is not the one" in refused(site, capsys)
    write_sites(server / "sites.json", read_sites(server / "sites.json") | {"cold": public})
    (server / "recipe.toml").write_text((server / "recipe.toml").read_text().replace("name =", "name  =", 1))
    assert sign_again(server, server.parent / "authority" / "ca.key") == [site.parent / "warm", site, server]
    manifest = verified(site, (site / "ca.crt").read_bytes())
    check_site(manifest, "cold", public, recipe=site / "recipe.toml", card=site / "card.json")
    refuses("site 'third' is not among those", check_site, manifest, "third")


def test_doctor_looks_at_the_signature(site: Path) -> None:
    given = (site / "ca.crt", site / "key", "cold", str(site / "recipe.toml"), None)
    (finding,) = check_signature(*given)
    assert (finding.mark, finding.text) == ("good", "the coordinator signed recipe, key and the list of 2 sites")
    (site / "recipe.toml").write_text("")
    (finding,) = check_signature(*given)
    assert finding.mark == "bad"
    assert "not the one that the coordinator signed" in finding.text


def test_kits_of_flare_are_signed_too(tmp_path: Path) -> None:
    from confed.deployment.flare.provision import provision_flare

    provision_flare(root := tmp_path / "fed", Federation(("a", "b"), "localhost", 8443, "x = 1\n"))
    kit = root / "sites" / "b"
    given = (kit, kit / "startup" / "rootCA.pem", str(kit / "recipe.toml"), None, "")
    check_signed(*given)
    assert len(set(verified(kit, given[1].read_bytes()).sites.values())) == 2
    (root / "server" / "recipe.toml").write_text("x = 2\n")
    sign_again(root / "server", root / "provision" / "cert.json")
    check_signed(*given)
    (kit / "recipe.toml").write_text("x = 3\n")
    refuses("not the one that the coordinator signed", check_signed, *given)


def test_names_of_sites_are_clients_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = ["federation", "new", str(tmp_path / "fed"), "--recipe", "fedvqa_scenes", *RECIPE, "--sites"]
    assert confed(*new, "warm,mars") == 2
    assert "--sites: the recipe's data have no client 'mars'; there are warm, cold, both" in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()
    elsewhere = ["data.name=vqa_v2", "data.root=nowhere", "~data.train", "~data.test", "--method", "fedavg"]
    with pytest.raises(SystemExit) as ended:
        main([*new, "a,b", *elsewhere])
    assert "names of sites were not checked" in " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 0


def test_a_signature_does_not_allow_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = f'[algorithm]\nname = "os:system"\ncommand = "touch {tmp_path / "proof"}"\n'
    provision(tmp_path / "fed", Federation(("cold",), "h.org", 8443, recipe))
    assert "code of the module 'os', which you have not allowed" in refused(tmp_path / "fed" / "sites" / "cold", capsys)
    assert not (tmp_path / "proof").exists()


# Serial numbers of manifests --------------------------------------------------------------------------------------

SIGNED = (MANIFEST, SIGNATURE, "recipe.toml")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    recipe = load_recipe("fedvqa_scenes", RECIPE).method("fedavg").to_toml()
    provision(tmp_path / "fed", Federation(("warm", "cold"), "h.org", 8443, recipe))
    return tmp_path / "fed" / "sites" / "cold"


def newer(home: Path, serial: int | None = None) -> tuple[bytes, Manifest]:
    server = home.parents[1] / "server"
    sign_again(server, server.parent / "authority" / "ca.key", serial=serial)
    authority = (home / "ca.crt").read_bytes()
    return authority, verified(home, authority)


def test_an_older_signed_manifest_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (old := home / "old").mkdir()
    for name in SIGNED:
        shutil.copy(home / name, old / name)
    recipe = home.parents[1] / "server" / "recipe.toml"
    recipe.write_text(recipe.read_text() + "# another\n")
    authority, manifest = newer(home)
    assert manifest.serial == 2
    accept(home / "private", authority, manifest)
    assert (home / "private").stat().st_mode & 0o777 == 0o700
    accept(home / "private", authority, manifest)
    for name in SIGNED:  # somebody on the way hands out what the coordinator signed before
        shutil.copy(old / name, home / name)
    command = ["client", str(home / "recipe.toml"), "--site", "cold", "--server", "localhost:1", "--key"]
    assert confed(*command, str(home / "key"), "--ca", str(home / "ca.crt"), "--private", str(home / "private")) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"{MANIFEST} has the serial number 1, and this site has accepted 2" in said
    given = (home / "ca.crt", home / "key", "cold", str(home / "recipe.toml"), None)
    assert check_signature(*given)[0].mark == "good"
    assert check_signature(*given, private=home / "private")[0].mark == "bad"


def test_another_manifest_with_the_same_number_is_refused(home: Path) -> None:
    authority, manifest = newer(home)
    accept(home / "private", authority, manifest)
    other = Manifest(manifest.sites, "0" * 64, serial=manifest.serial)
    refuses("differs from the one with the same serial number 2", accept, home / "private", authority, other)
    another = make_authority(home / "another", 10)
    check_serial(home / "private", another, other)
    accept(home / "private", authority, Manifest(manifest.sites, "0" * 64, serial=3))
    refuses("the serial number 2, and this site has accepted 3", check_serial, home / "private", authority, manifest)


def test_a_coordinator_chooses_numbers_upwards_only(home: Path) -> None:
    server = home.parents[1] / "server"
    assert newer(home, 7)[1].serial == 7
    assert newer(home)[1].serial == 8
    with pytest.raises(ValueError, match="--serial must be above 8, the number of the last manifest, got 8"):
        sign_again(server, server.parent / "authority" / "ca.key", serial=8)


def test_manifests_without_numbers_count_as_the_oldest(home: Path) -> None:
    server = home.parents[1] / "server"
    authority = (home / "ca.crt").read_bytes()
    content = json.loads((server / MANIFEST).read_text())
    del content["serial"]

    class First(Manifest):
        def to_bytes(self) -> bytes:
            return json.dumps({**content, "format": 1}).encode()

    folders = [server, *home.parent.iterdir()]
    sign(First({}, ""), (server.parent / "authority" / "ca.key").read_bytes(), folders)
    assert verified(home, authority).serial == 0
    assert newer(home)[1].serial == 1


@pytest.mark.parametrize("serial", ["1", True, -1, 1.5])
def test_a_serial_number_that_is_none_is_refused(home: Path, serial: object) -> None:
    server = home.parents[1] / "server"
    manifest = verified(server, (server / "ca.crt").read_bytes())
    key = (server.parent / "authority" / "ca.key").read_bytes()
    sign(Manifest(manifest.sites, manifest.recipe, serial=serial), key, [home])  # type: ignore[arg-type]
    refuses("must be a manifest of format 2", verified, home, (home / "ca.crt").read_bytes())


@pytest.mark.parametrize(
    "content", ["", "[]", '{"a": 1}', '{"a": {"serial": "1", "digest": ""}}', '{"a": {"serial": 1}}']
)
def test_a_damaged_memory_is_named(home: Path, content: str) -> None:
    authority, manifest = newer(home)
    (home / "private").mkdir()
    (home / "private" / ACCEPTED).write_text(content)
    refuses(r"manifests\.json must hold", check_serial, home / "private", authority, manifest)


def test_a_new_list_of_sites_reaches_the_sites_folders(home: Path) -> None:
    server = home.parents[1] / "server"
    listed = read_sites(server / "sites.json")
    assert read_sites(home / "sites.json") == listed
    write_sites(server / "sites.json", {"cold": listed["cold"]})
    sign_again(server, server.parent / "authority" / "ca.key")
    assert read_sites(home / "sites.json") == {"cold": listed["cold"]} == dict(newer(home)[1].sites)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    provision(tmp_path / "fed", Federation(("a", "b"), "localhost", 8443, "", days=30))
    return tmp_path / "fed"


def test_the_authoritys_key_is_in_no_folder_of_a_party(root: Path) -> None:
    assert [path.relative_to(root).as_posix() for path in root.rglob("ca.key")] == ["authority/ca.key"]
    assert (root / "authority").stat().st_mode & 0o777 == 0o700 & ~_umask()
    assert (root / "authority" / "ca.key").stat().st_mode & 0o777 == 0o600
    secret = (root / "authority" / "ca.key").read_bytes()
    assert [path for path in root.rglob("*") if path.is_file() and secret in path.read_bytes()] == [
        root / "authority" / "ca.key"
    ]


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before & 0o077


def test_the_authority_outlives_the_certificate_of_the_server(root: Path) -> None:
    authority, server = (
        x509.load_pem_x509_certificate((root / "server" / f"{name}.crt").read_bytes()) for name in ("ca", "server")
    )
    assert authority.not_valid_after_utc - server.not_valid_after_utc == timedelta(days=30)
    server.verify_directly_issued_by(authority)


def test_the_authoritys_key_is_found_where_any_version_made_it(root: Path) -> None:
    server = root / "server"
    assert key_of_authority(server) == root / "authority" / "ca.key"
    sign_again(server, key_of_authority(server))
    (root / "authority" / "ca.key").rename(server / "ca.key")
    assert key_of_authority(server) == server / "ca.key"
    sign_again(server, key_of_authority(server))
    assert verified(server, (server / "ca.crt").read_bytes()).serial == 3
    (server / "ca.key").unlink()
    refuses(r"authority/ca\.key must hold the authority's private key", sign_again, server, key_of_authority(server))


FOUR = ("warm", "cold", "both", "late")


def signing_grid(recipe: Path, root: Path, liar: str) -> LoopbackGrid:
    """Four sites with keys; the list of one of them has another key for it than everybody else's."""
    keys = {name: make_key(root / f"{name}.key") for name in FOUR}
    write_sites(root / SITES, keys)
    (root / f"{liar}.key").unlink()
    write_sites(root / "liars.json", keys | {liar: make_key(root / f"{liar}.key")})
    _, client = apps(recipe)
    configs: dict[int, dict[str, bool | float | int | str]] = {
        number: {
            "site": name, "private": str(root / name), "key": str(root / f"{name}.key"),
            "members": str(root / ("liars.json" if name == liar else SITES)),
        }
        for number, name in enumerate(FOUR)
    }  # fmt: skip
    return LoopbackGrid(dict.fromkeys(configs, client), configs)


def led(recipe: Recipe, root: Path, checked: bool) -> dict[str, Any]:
    """A run of the server with the four sites, with and without its check of signatures."""
    root.mkdir()
    (file := root / "recipe.toml").write_text(recipe.to_toml())
    grid = signing_grid(file, root, "late")
    signatures = signatures_by_list(recipe, read_sites(root / SITES)) if checked else None
    timeouts = Timeouts(minimum=3, interval=1e-3)
    return run_server(recipe, root / "state", FlowerTransport(grid), timeouts=timeouts, signatures=signatures)


def test_a_bad_signature_is_its_sites_error_alone(tmp_path: Path) -> None:
    of_four = ("data.name=toy_federation:squares_of_four", "run.evaluate_every=0", "run.controls=none")
    summed = recipe_of("fedavg", *of_four, "algorithm.secure_sum.colluders=1")
    with pytest.warns(UserWarning, match="'late' is left out of secure aggregation: the keys of 'late' are not"):
        summary = led(summed, tmp_path / "checked", checked=True)
    said = "ValueError: update refused: the keys of 'late' are not signed by the key in the list of members"
    assert summary["errors"] == [{"round": r, "client": "late", "error": said} for r in (1, 2)]
    found = load_file(tmp_path / "checked" / "state" / "models" / "global" / "trained.safetensors")
    run(recipe_of("fedavg", *of_four, 'run.without=["late"]'), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "models" / "global" / "trained.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.allclose(tensor, plain[name], atol=1e-4) for name, tensor in found.items())
    # The other sites check it too: where the server does not, no site goes on.
    with pytest.raises(RuntimeError, match="needs 3 clients, and 1 are left after 'secure_shares'"):
        led(summed, tmp_path / "unchecked", checked=False)
