"""Protections of a method, denied by default: hooks of its own that may go round them, and their declaration.

A method that changes none of the hooks below has every protection. One that has a hook of its own has those that stand
above that hook, ``@keeps_protections("robust", "secure_sum")``; a subclass with the same hook must say so again. The
contract (:func:`confed.testing.check_algorithm`) proves what is declared. A ``fit`` of its own needs no declaration: an
engine accepts nothing of it but new values of what the round expects.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

Protection = Literal["update_privacy", "robust", "secure_sum", "record_privacy"]
"""Protections of clients' updates from the server, or of the server from them: fields of every method."""

HOOKS = ("phases", "round", "broadcast", "actions", "weight", "average", "aggregate", "finish")
"""Hooks in which a server may use more of the replies than a protected mean of them."""

HOOKS_AT_CLIENT = ("actions", "reports")
"""Hooks by which more may leave a client than the update that it clips and noises."""

HOOKS_IN_TRAINING = ("fit", "local_training", "objective", "actions", "reports")
"""Hooks by which more than noised gradients of a client's records may get into what it sends."""

_MARK = "kept_protections"
Hook = TypeVar("Hook", bound=Callable[..., Any])


def keeps_protections(*protections: Protection) -> Callable[[Hook], Hook]:
    """Declaration, above a method's own hook, of the protections that hold with it.

    Args:
        protections: "robust": what the server learns of the replies is what ``algorithm.robust`` makes of them;
            "update_privacy": it uses the sum of the clipped updates and nothing else of the replies, and above
            ``reports`` or ``actions``: nothing but the update depends on the client's examples; "secure_sum": it needs
            the mean with the weights of :meth:`Algorithm.weight <confed.federation.algorithm.Algorithm.weight>` only;
            "record_privacy": what a client sends depends on its examples by the steps of one call of ``train`` alone,
            whose objective has one loss per batch, a mean over its examples.

    Raises:
        ValueError: there is no protection of that name.
    """
    unknown = [name for name in protections if name not in get_args(Protection)]
    if unknown:
        raise ValueError(f"keeps_protections knows {', '.join(get_args(Protection))}, got {unknown[0]!r}")

    def declare(hook: Hook) -> Hook:
        hook.__dict__[_MARK] = frozenset(protections)
        return hook

    return declare


def is_declared(hook: Callable[..., Any], protection: Protection) -> bool:
    """Whether a protection is declared to hold with a hook."""
    return protection in getattr(hook, _MARK, ())
