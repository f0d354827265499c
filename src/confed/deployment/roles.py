"""Roles of a federation: who may do what, decided by the key that somebody has.

The authority's key and the server's are a lead's, and a site's is on the list of sites. Further leads, and auditors,
are on a list of their own that the authority signs (:mod:`confed.deployment.roster`); no site needs it.
"""

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """Part that the owner of a key has in a federation."""

    lead = "lead"
    site = "site"
    auditor = "auditor"


class Action(StrEnum):
    """Whatever asks for a key, in the words of its refusal."""

    run = "lead a run"
    sign = "sign the federation"
    add = "add to a list"
    revoke = "take off a list"
    quarantine = "quarantine a site"
    renew = "renew a certificate"
    rotate = "add an authority"
    erase = "erase a site"
    retain = "remove old states"
    take_part = "take part as a site"
    page = "read the server's page"
    audit = "audit the journals"
    dossier = "read the dossier"


MAY: Mapping[Role, frozenset[Action]] = {
    Role.lead: frozenset(Action) - {Action.take_part},
    Role.site: frozenset({Action.take_part}),
    Role.auditor: frozenset({Action.page, Action.audit, Action.dossier}),
}


class NotAllowed(ValueError):
    """Refusal of an action to a role, with who may do it."""

    def __init__(self, name: str, role: Role, action: Action) -> None:
        able = " or ".join(_with_article(other) for other in Role if action in MAY[other])
        super().__init__(f"{name!r} is {_with_article(role)}, which may not {action}: {able} may")


def described() -> str:
    """The table in a sentence for each role."""
    sentences: list[str] = []
    for role in Role:
        actions = [action.value for action in Action if action in MAY[role]]
        sentences.append(f"{_with_article(role).capitalize()} may {', '.join(actions)}.")
    return " ".join(sentences)


def _with_article(role: Role) -> str:
    return f"an {role}" if role is Role.auditor else f"a {role}"


def check_role(name: str, role: Role, action: Action) -> None:
    """Check that somebody's role may do something."""
    if action not in MAY[role]:
        raise NotAllowed(name, role, action)
