"""Named actions that a server may ask a client to run.

Where base and new classes are apart, or clients hold classes of their own, a batch has ``offered``, bool (B, C): scores
of other classes do not count, in no loss and no metric.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from confed.federation.messages import Message
from confed.federation.protocols import Batch

if TYPE_CHECKING:
    from confed.federation.client import Client

# Classification among some of the classes ---------------------------------------------------------------------

OFFERED = "offered"  # key of a batch: the classes that are offered for each example, bool (B, C)
NOT_OFFERED = -1e4  # score of a class that is not offered: its probability is exactly 0, and no product with it is NaN


def among_offered(logits: Tensor, batch: Batch) -> Tensor:
    """Scores (B, C) in which classes that are not offered cannot win; the scores themselves where all are."""
    if OFFERED not in batch or logits.ndim != 2 or not logits.is_floating_point():
        return logits
    return logits.masked_fill(~batch[OFFERED], NOT_OFFERED)


# Named actions that a server may ask a client to run ----------------------------------------------------------

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
