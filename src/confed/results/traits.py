"""Traits of the method of a finished run."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_args

from confed.federation.traits import GlobalModel, Traits

_OLDER: Mapping[str, str] = {
    "has_personal": "has_personal",
    "has_global": "has_global",
    "pooled": "centralised",
}
"""Key of a summary before summaries stated all traits -> trait."""


def traits_of(summary: Mapping[str, Any]) -> Traits:
    """What a run's summary states of its method; for older summaries, what the registered method says."""
    stated = summary.get("traits")
    traits = Traits() if isinstance(stated, Mapping) else _registered(str(summary.get("algorithm", "")))
    older_traits = {trait: summary[key] for key, trait in _OLDER.items() if isinstance(summary.get(key), bool)}
    for name, default in traits.stated().items():
        value = stated.get(name) if isinstance(stated, Mapping) else None
        if type(value) is type(default):
            older_traits[name] = value
    return replace(traits, **older_traits)


def global_model_of(summary: Mapping[str, Any]) -> GlobalModel:
    """What is global of the method and the model of a run; older summaries say whether the method has private heads."""
    stated: Any = summary.get("global_model")
    if stated in get_args(GlobalModel):
        return stated
    if not traits_of(summary).has_global:
        return "none"
    traits = summary.get("traits", {})
    own_parts = traits.get("private_heads", summary.get("own_heads"))
    if own_parts is None:
        own_parts = _needs_own_parts(str(summary.get("algorithm", "")))
    return "with own parts" if own_parts else "alone"


@lru_cache(maxsize=256)
def _needs_own_parts(name: str) -> bool:
    """Whether the registered method needs parts of clients' own on a model with a head, as all early ones had."""
    from confed.registry import algorithms

    try:
        method = algorithms[name]
    except ValueError:
        return False
    try:
        return method().global_model == "with own parts"
    except ValueError:  # it keeps the model's head private, and was not told which one that is
        return True


@lru_cache(maxsize=256)
def _registered(name: str) -> Traits:
    """Those of the method of that name; the defaults where none is registered here."""
    from confed.federation.algorithm import Algorithm
    from confed.registry import algorithms

    try:
        method = algorithms[name]
    except ValueError:
        return Traits()
    return method.traits if isinstance(method, type) and issubclass(method, Algorithm) else Traits()
