"""Consent of a site in its card: signed with the site's key, kept by merged cards, bound to the policy."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import confed
from confed.datasets.card import Card, CardClient, merged, read_card
from confed.deployment.authority import make_key
from confed.deployment.policy import check_consents, check_policy, give_consent
from confed.deployment.provision import Federation, provision, read_sites, sign_again
from refusals import refuses

WHO = "Dr. A. Weber, data protection officer"


def card_of_site(name: str) -> Card:
    client = {name: CardClient(("yes",))}
    return Card("toy", labels=False, answers=("yes", "no"), types=("all",), words=("is",), clients=client, places={})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "federation"
    provision(root, Federation(("north", "south"), "localhost", 8443, "name = 'toy'\n"))
    for name in ("north", "south"):
        site = root / "sites" / name
        (site / "policy.toml").write_text("rounds = 20\n")
        (site / "own.json").write_text(card_of_site(name).to_json())
        give_consent(site / "own.json", name, WHO, site / "key", site / "policy.toml")
    return root


def united(root: Path) -> Path:
    cards = [read_card(root / "sites" / name / "own.json") for name in ("north", "south")]
    (root / "all.json").write_text(merged(cards).to_json())
    return root / "all.json"


def test_the_signed_card_says_who_agreed_when_and_to_what(root: Path) -> None:
    card = united(root)
    sign_again(root / "server", root / "authority" / "ca.key", card)
    consent = read_card(root / "sites" / "south" / "card.json").clients["south"].consent
    assert consent["by"] == WHO
    assert len(consent["policy"]) == len(consent["card"]) == 64
    assert consent["on"].startswith("20")


@pytest.mark.parametrize("word", ["by", "on", "policy", "card", "signature"])
def test_no_word_of_a_consent_can_be_changed(word: str, root: Path) -> None:
    card, keys = read_card(united(root)), read_sites(root / "server" / "sites.json")
    check_consents(card, keys)
    consent = card.clients["north"].consent
    changed = {**consent, word: ("00" if word == "signature" else "x") + consent[word][2:]}
    clients = {**card.clients, "north": replace(card.clients["north"], consent=changed)}
    (root / "changed.json").write_text(replace(card, clients=clients).to_json())
    before = (root / "server" / "federation.json").read_bytes()
    with pytest.raises(ValueError, match="the consent of 'north' in the card is not signed with the key of that site"):
        sign_again(root / "server", root / "authority" / "ca.key", root / "changed.json")
    assert (root / "server" / "federation.json").read_bytes() == before


def test_nobody_consents_for_another_site(root: Path, tmp_path: Path) -> None:
    south, file = root / "sites" / "south", root / "sites" / "north" / "own.json"
    give_consent(file, "north", WHO, south / "key", south / "policy.toml")
    refuses("the consent of 'north'", check_consents, read_card(file), read_sites(root / "server" / "sites.json"))


def test_another_policy_than_agreed_to_is_refused_on_joining(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = root / "sites" / "north"
    sign_again(root / "server", root / "authority" / "ca.key", united(root))
    monkeypatch.chdir(site)
    check_policy(read_card(site / "card.json"), "north", "policy.toml")
    (site / "policy.toml").write_text("rounds = 200\n")
    assert confed("client", "recipe.toml", "--site", "north", "--ca", "ca.crt", "--card", "card.json")
    said = " ".join(capsys.readouterr().err.split())
    assert f"policy.toml is not what {WHO} consented to on 20" in said
    (site / "policy.toml").unlink()
    refuses("no policy is not what", check_policy, read_card(site / "own.json"), "north", "")


def test_the_command_writes_a_consent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = root / "sites" / "north"
    monkeypatch.chdir(site)
    (site / "own.json").write_text(card_of_site("north").to_json())
    assert "consent" not in json.loads((site / "own.json").read_text())["clients"]["north"]
    assert confed("federation", "consent", "own.json", "north", "--by", "A. Weber") == 0
    check_consents(read_card(site / "own.json"), read_sites(root / "server" / "sites.json"))


@pytest.mark.parametrize(
    ("site", "by", "policy", "why"),
    [
        ("west", WHO, "rounds = 2", "has no client 'west'; there are north"),
        ("north", " ", "rounds = 2", "--by must name who consents"),
        ("north", WHO, "rounds = 0", "rounds must be at least 1"),
    ],
)
def test_what_is_no_consent_is_refused(site: str, by: str, policy: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(card_of_site("north").to_json())
    (tmp_path / "policy.toml").write_text(policy)
    make_key(tmp_path / "key")
    refuses(why, give_consent, tmp_path / "card.json", site, by, tmp_path / "key", tmp_path / "policy.toml")
