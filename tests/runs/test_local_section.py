"""Settings of local training that a method cannot have are refused before the run."""

import pytest

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedrep import FedRep
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.runs.checks import check_local


@pytest.mark.parametrize("method", [FedRep(), BiCSL()])
def test_steps_cannot_replace_epochs_where_rounds_are_made_of_these(method: Algorithm) -> None:
    with pytest.raises(ValueError, match=f"must be 0 for {method.title}, got 5"):
        check_local(method, Local(iterations=5))


def test_split_learning_has_one_schedule_over_the_run() -> None:
    with pytest.raises(ValueError, match="horizon must be 0"):
        check_local(BiCSL(), Local(schedule="linear", horizon=5))


def test_other_methods_may_have_either() -> None:
    check_local(FedAvg(), Local(iterations=5))
    check_local(FedAvg(), Local(schedule="linear", horizon=5))
