"""Every registered method keeps the contract."""

import pytest

from confed.algorithms.fedp3 import FedP3
from confed.registry import algorithms
from confed.testing import CHECKS, checks, exemption
from method_contract import TRANSPORTS, keep_contract, with_and_without_transports

# Flower and FLARE carry the messages of every method alike. These six send what there is to send: means of weights,
# control variates, personal parts, scores of public examples, cuts for several servers, prototypes. The other methods'
# items are in the slow set.
REPRESENTATIVE = ("bicsl", "fedavg", "feddat", "fedmd", "pmcmfl", "scaffold")


def items() -> list[object]:
    """One item per method and check that applies to it."""
    return [
        pytest.param(
            name,
            check,
            marks=pytest.mark.slow if check in TRANSPORTS and name not in REPRESENTATIVE else (),
            id=f"{name}-{check.replace(' ', '_')}",
        )
        for name in algorithms.names()
        for check, _ in checks(algorithms[name]())
    ]


@pytest.mark.parametrize(("name", "check"), items())
def test_every_method_keeps_each_clause(name: str, check: str) -> None:
    CHECKS[check](algorithms[name]())


@pytest.mark.parametrize("name", algorithms.names())
def test_contract_exemptions_have_a_reason(name: str) -> None:
    method = algorithms[name]()
    applying = dict(checks(method))
    assert "resumes exactly" in applying
    assert all(exemption(method, check) for check in CHECKS.keys() - applying.keys())


SWITCHES = [
    FedP3(filter="random", top_n=2, start_round=0),
    FedP3(pairs="all", space="logit", reduction="mean", start_round=2),
    FedP3(filter="diff", top_n=2, accumulator="float64"),
]


@with_and_without_transports
@pytest.mark.parametrize("method", SWITCHES, ids=repr)
def test_contract_with_other_switches(method: FedP3, transports: bool) -> None:
    ran = keep_contract(method, transports)
    assert transports or "one full step equals gradient descent" in ran
