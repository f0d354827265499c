"""What a coordinator signs, and what a site refuses: every change on the way, and what nobody signed."""

import base64
import json
import shutil
from pathlib import Path

import pytest

from confed.cli import main
from confed.deployment.doctor import check_signature
from confed.deployment.manifest import MANIFEST, SIGNATURE, check_site, digest_of, verified
from confed.deployment.provision import Federation, make_key, provision, read_sites, sign_again, write_sites
from confed.recipes.recipe import load_recipe

pytest.importorskip("cryptography")
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
    with pytest.raises(SystemExit) as ended:
        main([*command, "--ca", str(site / "ca.crt"), "--private", str(site / "private"), *more])
    assert ended.value.code == 2
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


def test_without_a_wheel_the_page_says_how_to_get_one_and_names_no_index(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="is not signed by the authority"):
        verified(site, (site / "ca.crt").read_bytes())
    (site / SIGNATURE).write_text("no base64")
    with pytest.raises(ValueError, match="must hold a signature in base64"):
        verified(site, (site / "ca.crt").read_bytes())
    (site / SIGNATURE).write_bytes(base64.b64encode(b"short"))
    with pytest.raises(ValueError, match="is not signed by the authority"):
        verified(site, (site / "ca.crt").read_bytes())


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
    assert sign_again(server, server.parent / "authority" / "ca.key") == [server, site.parent / "warm", site]
    manifest = verified(site, (site / "ca.crt").read_bytes())
    check_site(manifest, "cold", public, recipe=site / "recipe.toml", card=site / "card.json")
    with pytest.raises(ValueError, match="site 'third' is not among those"):
        check_site(manifest, "third")


def test_doctor_looks_at_the_signature(site: Path) -> None:
    given = (site / "ca.crt", site / "key", "cold", str(site / "recipe.toml"), None)
    (finding,) = check_signature(*given)
    assert (finding.mark, finding.text) == ("good", "the coordinator signed recipe, key and the list of 2 sites")
    (site / "recipe.toml").write_text("")
    (finding,) = check_signature(*given)
    assert finding.mark == "bad"
    assert "not the one that the coordinator signed" in finding.text


def test_kits_of_flare_are_signed_too(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from confed.cli.federation import check_signed
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
    with pytest.raises(ValueError, match="not the one that the coordinator signed"):
        check_signed(*given)


def test_names_of_sites_are_clients_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = ["federation", "new", str(tmp_path / "fed"), "--recipe", "fedvqa_scenes", *RECIPE, "--sites"]
    with pytest.raises(SystemExit) as ended:
        main([*new, "warm,mars"])
    assert ended.value.code == 2
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
