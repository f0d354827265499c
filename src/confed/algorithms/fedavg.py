"""FedAvg: federated averaging.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.
Restated as Eq. 8.3 of FedVQA: the server averages the clients' models, weighted by their numbers of examples N_i.
A client's personal model is its last local model before averaging (FedVQA, section 8.3.2).
"""

from dataclasses import dataclass

from confed.federation.algorithm import Algorithm
from confed.federation.traits import Traits


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: every default of :class:`Algorithm`."""

    traits = Traits(reference=1)
