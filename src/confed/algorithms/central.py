"""Centralised training (FedVQA's "CT"): everybody's data in one place, with the same total of epochs."""

from dataclasses import dataclass
from typing import ClassVar

from confed.federation.algorithm import Algorithm

__all__ = ["Central"]


@dataclass(frozen=True)
class Central(Algorithm):
    """One member holds all training data: the upper bound that privacy forbids.

    The engine merges the clients into one member because the class is ``pooled``; on that one member FedAvg is
    ordinary training. Its one model stands in every client's column.
    """

    label: ClassVar[str] = "Centralised"
    pooled: ClassVar[bool] = True
    neutral: ClassVar[str] = "there is one member, so it never becomes FedAvg over several"
