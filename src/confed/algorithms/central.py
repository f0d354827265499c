"""Centralised training on the pooled data of all clients ("CT" in FedVQA), with the same number of epochs."""

from dataclasses import dataclass

from confed.federation.algorithm import Algorithm
from confed.federation.traits import Traits


@dataclass(frozen=True)
class Central(Algorithm):
    """One member holds all training data: the upper bound that privacy forbids.

    The engine merges the clients into one member because of its trait ``centralised``; on that one member FedAvg is
    ordinary training. Its one model stands in every client's column.
    """

    traits = Traits(
        label="Centralised",
        group="references",
        centralised=True,
        neutral="there is one member, so it never becomes FedAvg over several",
    )
