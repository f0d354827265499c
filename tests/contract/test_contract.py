"""Every registered method keeps the contract."""

import pytest

from confed.algorithms.fedp3 import FedP3
from confed.federation.algorithm import Algorithm
from confed.registry import algorithms
from confed.testing import check_algorithm


@pytest.mark.parametrize("name", algorithms.names())
def test_contract(name: str) -> None:
    verdicts = dict(check_algorithm(algorithms[name]()))
    assert all(verdicts.values())
    assert verdicts["resumes exactly"] == "passed"


@pytest.mark.parametrize(
    "method",
    [
        FedP3(filter="random", top_n=2, start_round=0),
        FedP3(pairs="all", space="logit", reduction="mean", start_round=2),
        FedP3(filter="diff", top_n=2, accumulator="float64"),
    ],
    ids=repr,
)
def test_contract_with_other_switches(method: Algorithm) -> None:
    assert dict(check_algorithm(method))["one full step equals gradient descent"] == "passed"
