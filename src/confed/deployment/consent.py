"""Consent of a site, in its data card: who agreed to take part, when, and under which policy, signed with its key.

The coordinator checks the signature before signing the card, and the site before it takes part that its policy is the
one that was agreed to. Merged cards keep the consent of every site.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from confed.datasets.card import Card, read_card
from confed.deployment.manifest import digest_of, signature_by, signed_by
from confed.deployment.policy import read_policy
from confed.federation.checkpoint import write_atomically
from confed.system.private_keys import load_private

_WORDS = ("by", "on", "policy", "card")


def give_consent(file: Path, site: str, by: str, key: Path, policy: Path) -> None:
    """Consent to a site's card and policy, written into the card; an earlier one of the site is replaced."""
    card = read_card(file)
    if site not in card.clients:
        raise ValueError(f"{file} has no client {site!r}; there are {', '.join(card.clients)}")
    if not by.strip():
        raise ValueError("--by must name who consents, got nothing")
    read_policy(policy)
    described = replace(card, clients={name: replace(told, consent={}) for name, told in card.clients.items()})
    consent = {"by": by, "on": time.strftime("%Y-%m-%d"), "policy": digest_of(policy)}
    consent["card"] = sha256(described.to_json().encode()).hexdigest()
    consent["signature"] = signature_by(load_private(key.read_bytes(), str(key)), _text(site, consent)).hex()
    clients = {**card.clients, site: replace(card.clients[site], consent=consent)}
    write_atomically(file, replace(card, clients=clients).to_json().encode())


def check_consents(card: Card, keys: Mapping[str, str]) -> None:
    """Check of the signatures under all consents of a card, by the list of the sites' public keys."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    for site, client in card.clients.items():
        if not client.consent or site not in keys:
            continue
        try:
            signature, text = bytes.fromhex(client.consent["signature"]), _text(site, client.consent)
            sound = signed_by(load_ssh_public_key(keys[site].encode()), signature, text)
        except (ValueError, KeyError):
            sound = False
        if not sound:
            raise ValueError(
                f"the consent of {site!r} in the card is not signed with the key of that site: it has to be given "
                "again (`confed federation consent`)"
            )


def check_policy(card: Card, site: str, policy: str) -> None:
    """Check that a site's policy is the one that was agreed to, where its card has a consent."""
    client = card.clients.get(site)
    if client is None or not client.consent:
        return
    agreed = client.consent
    if not policy or digest_of(Path(policy)) != agreed["policy"]:
        raise ValueError(
            f"{policy or 'no policy'} is not what {agreed['by']} consented to on {agreed['on']}: put that policy back, "
            "or have the consent given again (`confed federation consent`)"
        )


def _text(site: str, consent: Mapping[str, str]) -> bytes:
    return json.dumps(["confed consent", site, *(consent[word] for word in _WORDS)]).encode()
