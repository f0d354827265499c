"""Earlier names of the hooks and class variables of methods."""

from collections.abc import Mapping
from inspect import get_annotations

HOOKS: Mapping[str, str] = {
    "suit": "configure",
    "extend": "add_modules",
    "newcomer": "initial_private",
    "published": "with_public_data",
    "refuses": "unsupported_reason",
    "worth_trying": "search_space",
    "in_effect": "effective_value",
    "answering": "deployed_model",
}
"""Hook -> its name now."""

TRAITS: Mapping[str, str] = {
    "label": "label",
    "pooled": "centralised",
    "has_global": "has_global",
    "has_personal": "has_personal",
    "leavers": "clients_may_leave",
    "partial": "clients_may_lack_modalities",
    "counts_examples": "counts_examples",
    "in_sessions": "in_sessions",
    "carried": "aggregates",
    "changes": "changes",
    "finetuning": "made_for",
    "neutral": "neutral",
    "search": "search",
}
"""Class variable -> its name in :class:`confed.federation.traits.Traits`."""


def check_names(method: type) -> None:
    """Checks that a method uses no earlier name, which would be ignored: the method would run, but as FedAvg.

    Args:
        method: a class that is being made; a hyper-parameter may have such a name.

    Raises:
        ValueError: it does; the message says the name now.
    """
    members, where = method.__dict__, method.__qualname__
    if "own_heads" in members:
        raise ValueError(f"{where}.own_heads is now said by the property global_model, which follows from rules")
    annotated = get_annotations(method)
    for old, new in HOOKS.items():
        if callable(members.get(old)):
            raise ValueError(f"{where}.{old} is now called {new}: rename it")
    for old, new in TRAITS.items():
        if old in members and ("ClassVar" in str(annotated[old]) if old in annotated else not callable(members[old])):
            raise ValueError(f"{where}.{old} is now a trait: write traits = Traits({new}=...) instead")
