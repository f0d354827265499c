"""The contract that every method keeps, as executable checks.

``check_algorithm(MyMethod())`` runs all of them on the toy federation in a second or two and raises
:class:`ContractViolation` at the first that fails. The test suite runs it for every registered method.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from confed.engines.buffered import unsupported_reason
from confed.engines.together import one_by_one
from confed.federation.algorithm import Algorithm
from confed.testing.engines import simulator_equals_flare, simulator_equals_flower, survives_the_wire
from confed.testing.global_model import one_global_model
from confed.testing.known_cases import neutral_is_fedavg, one_step_is_gradient_descent, stacked_equals_one_by_one
from confed.testing.privacy import (
    keeps_frozen_tensors,
    nothing_leaks,
    sends_only_what_is_shared,
    servers_see_their_own_part,
)
from confed.testing.steadiness import (
    a_failure_changes_nothing,
    finite_and_deterministic,
    has_asynchronous_rounds,
    ignores_the_workspace,
    order_is_irrelevant,
    resumes_exactly,
)
from confed.testing.trial import ContractViolation

__all__ = ["CHECKS", "ContractViolation", "check_algorithm", "checks", "contract"]

Check = Callable[[Algorithm], None]


def check_algorithm(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Results of all checks of the contract that apply to a method.

    A failed check is a :class:`ContractViolation`.

    Args:
        algorithm: the method with the hyper-parameters to check.

    Returns:
        Check -> "passed", or why it does not apply.
    """
    verdicts: list[tuple[str, str]] = []
    for name, check in CHECKS.items():
        reason = exemption(algorithm, name)
        if reason is None:
            check(algorithm)
        verdicts.append((name, reason or "passed"))
    return verdicts


def checks(algorithm: Algorithm) -> Iterator[tuple[str, Check]]:
    """The checks of the contract that apply to a method, by name, for a test runner that reports each by itself.

    Args:
        algorithm: the method with the hyper-parameters to check.
    """
    return ((name, check) for name, check in CHECKS.items() if exemption(algorithm, name) is None)


def contract(name: str) -> list[tuple[str, str]]:
    """Applicable checks of one registered method: each check and either "applies" or why it does not.

    An unknown name is a ValueError.
    """
    from confed.registry import algorithms

    algorithm = algorithms[name]()
    return [(check, exemption(algorithm, check) or "applies") for check in CHECKS]


def exemption(algorithm: Algorithm, check: str) -> str | None:
    """Reason why a check does not apply to a method, in the method's own words; None if it applies."""
    if check in ("neutral coefficients give FedAvg", "one full step equals gradient descent"):
        return algorithm.traits.neutral if isinstance(algorithm.traits.neutral, str) else None
    reasons = {
        "asynchronous rounds": unsupported_reason,
        "clients trained at once equal one by one": one_by_one,
        "one global model": lambda method: "" if method.traits.has_global else "there is no global model",
    }
    if check in reasons:
        return reasons[check](algorithm) or None
    if algorithm.traits.centralised and check in ("a failure changes nothing", "nothing leaks from client to client"):
        return "there is one member, so there are no others to go on or to leak to"
    if check == "simulator equals Flower" and find_spec("flwr") is None:
        return "Flower is not installed (the extra 'flower')"
    if check == "simulator equals FLARE" and find_spec("nvflare") is None:
        return "NVIDIA FLARE is not installed (the extra 'flare')"
    return None


CHECKS: dict[str, Check] = {
    "finite and deterministic": finite_and_deterministic,
    "resumes exactly": resumes_exactly,
    "asynchronous rounds": has_asynchronous_rounds,
    "ignores the workspace": ignores_the_workspace,
    "sends only what is shared": sends_only_what_is_shared,
    "a failure changes nothing": a_failure_changes_nothing,
    "the order of clients is irrelevant": order_is_irrelevant,
    "nothing leaks from client to client": nothing_leaks,
    "servers see their own part only": servers_see_their_own_part,
    "keeps frozen tensors": keeps_frozen_tensors,
    "survives the wire": survives_the_wire,
    "simulator equals Flower": simulator_equals_flower,
    "simulator equals FLARE": simulator_equals_flare,
    "neutral coefficients give FedAvg": neutral_is_fedavg,
    "one full step equals gradient descent": one_step_is_gradient_descent,
    "one global model": one_global_model,
    "clients trained at once equal one by one": stacked_equals_one_by_one,
}
