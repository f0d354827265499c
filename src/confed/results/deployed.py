"""Which model a method deploys at a client, so that methods of different kinds stand in one column.

FedDAT's tables judge a federated row by the averaged part with each client's own head, and a local row by each
client's own model: what a client would use in either case. The first is ``global_seen`` in a run's summary, the second
``personal``; here both get the name ``deployed``, with the tests on the very predictions that the values are means of.

The column is there where a method has private heads, or where the recipe asks for the column: with ``[study]
headline`` or ``[methods.ROW] headline`` of a recipe, or ``--headline`` of ``confed compare``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from confed.federation.traits import GlobalModel
from confed.results import format as formats
from confed.results.traits import global_model_of, traits_of

HEADLINES = ("personal", "global_seen")
"""What may be deployed: each client's own model; what is global, with each client's own head where it has one."""

VIEWS: Mapping[str, str] = {"personal": "personal", "global_seen": "global"}
"""Key of the summary -> view of predictions and evaluations."""


def check_headline(value: str, where: str) -> str:
    """The value, if it is one of :data:`HEADLINES` or empty (as a method's kind asks); else a ``ValueError``."""
    if value not in ("", *HEADLINES):
        raise ValueError(f"{where} must be one of {', '.join(HEADLINES)}, got {value!r}")
    return value


def deployed(global_model: GlobalModel) -> str:
    """Key of the summary with what a method deploys unless a recipe says otherwise."""
    return "global_seen" if global_model == "with own parts" else "personal"


def deploys(summary: Mapping[str, Any], wanted: str = "") -> str:
    """The key of the summary with what a run's method deploys: the wanted one or its own, if it has values."""
    key = wanted or deployed(global_model_of(summary))
    return key if summary.get(key) else "personal"


def is_shown(summary: Mapping[str, Any]) -> bool:
    """Whether a summary that was read back has values of what is deployed."""
    return "deployed" in summary


def with_deployed(summaries: Sequence[Mapping[str, Any]], wanted: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The same summaries with ``deployed`` (client -> value) and ``deploys`` (the key that it is taken from).

    Without these where no run deploys ``global_seen``: then the column would only repeat the personal models'.
    """
    keys = [
        deploys(summary, wanted_view)
        for summary, wanted_view in zip(summaries, wanted or [""] * len(summaries), strict=True)
    ]
    bare: list[dict[str, Any]] = []
    for summary in summaries:
        bare.append({k: v for k, v in summary.items() if k not in ("deploys", "deployed")})
    if "global_seen" not in keys:
        return bare
    return [{**s, "deploys": key, "deployed": dict(s.get(key) or {})} for s, key in zip(bare, keys, strict=True)]


def deployed_note(firsts: Mapping[str, Mapping[str, Any]]) -> str:
    """What is deployed by whom, in a sentence."""
    of: dict[str, list[str]] = {}
    for key in HEADLINES:
        of[key] = [label for label, s in firsts.items() if s.get("deploys") == key]
    heads = any(global_model_of(firsts[label]) == "with own parts" for label in of["global_seen"])
    shared = "what is global, with each client's own head where it has one" if heads else "the global model"
    parts = [
        f"{shared} ({formats.names(of['global_seen'])})",
        f"each client's own model ({formats.names(of['personal'])})",
    ]
    return f"Deployed, on each client's test data: {', or '.join(parts if of['personal'] else parts[:1])}."


def without_personal(summary: Mapping[str, Any]) -> bool:
    """Whether a run's method makes no models of the clients' own; the global one stands where these would."""
    return not traits_of(summary).has_personal


def personal_note(firsts: Mapping[str, Mapping[str, Any]]) -> str:
    """Which methods' personal values are the global model's, in a sentence; the empty text if none are."""
    labels = [label for label, summary in firsts.items() if without_personal(summary)]
    if not labels:
        return ""
    return f"{formats.names(labels)}: no models of the clients' own, so under personal stands the global model."


def without_global(summary: Mapping[str, Any]) -> bool:
    """Whether a run's method makes no global model: clients train alone, or keep private parts."""
    return global_model_of(summary) == "none"


def global_note(firsts: Mapping[str, Mapping[str, Any]]) -> str:
    """Which methods have nothing under global, in a sentence; the empty text if all have."""
    labels = [label for label, summary in firsts.items() if without_global(summary)]
    verb = "trains" if len(labels) == 1 else "train"
    whose = "its" if len(labels) == 1 else "their"
    return f"{formats.names(labels)} {verb} no shared model, so {whose} global columns are empty." if labels else ""


def public_place(summary: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The unseen place whose examples every client holds; the empty text where a run's method has no such place."""
    stated = summary.get("public_place", recipe.get("algorithm", {}).get("public"))
    return stated if isinstance(stated, str) else ""
