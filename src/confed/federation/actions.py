"""Named actions that a server may ask a client to run."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from confed.federation.messages import Message

if TYPE_CHECKING:
    from confed.federation.client import Client

__all__ = ["Action", "action", "actions_of"]

Action = Callable[["Client", Message], Message]
"""What a client does on request: its workspace and a message in, the reply out."""

Method = TypeVar("Method", bound=Callable[..., Message])

_MARK = "is_action"


def action(method: Method) -> Method:
    """Marks a method that a server may ask a client to run."""
    method.__dict__[_MARK] = True
    return method


def actions_of(instance: object) -> dict[str, Action]:
    """The marked methods of an object, bound, by name in alphabetical order."""
    return {name: getattr(instance, name) for name in _marked(type(instance))}


@lru_cache
def _marked(kind: type) -> tuple[str, ...]:
    """Names of a class's marked methods; asked for in every call."""
    return tuple(name for name in dir(kind) if getattr(getattr(kind, name), _MARK, False))
