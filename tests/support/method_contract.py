"""The contract of a variant of a method: in the simulator, and in the slow set over Flower and FLARE."""

import pytest

from confed.federation.algorithm import Algorithm
from confed.testing import checks

TRANSPORTS = ("simulator equals Flower", "simulator equals FLARE")

with_and_without_transports = pytest.mark.parametrize(
    "transports",
    [pytest.param(False, id="simulator"), pytest.param(True, id="transports", marks=pytest.mark.slow)],
)


def keep_contract(method: Algorithm, transports: bool) -> set[str]:
    """Runs the checks that apply to a method, those of the transports or all others.

    Returns:
        The names of the checks that ran.
    """
    applying = {name: check for name, check in checks(method) if (name in TRANSPORTS) == transports}
    for check in applying.values():
        check(method)
    return set(applying)
