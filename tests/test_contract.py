"""Every registered method keeps the contract."""

import pytest

from confed.registry import algorithms
from confed.testing import check_algorithm


@pytest.mark.parametrize("name", algorithms.names())
def test_contract(name: str) -> None:
    verdicts = dict(check_algorithm(algorithms[name]()))
    assert all(verdicts.values())
    assert verdicts["resumes exactly"] == "passed"
