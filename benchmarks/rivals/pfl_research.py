"""Apple's pfl-research (PyPI ``pfl``): its simulated backend and its FederatedAveraging."""

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from networks import learned, make_optimizer, network_of, tensors
from work import Work, begun


class Cohorts(FederatedDataset):
    """The cohorts of the work one after the other, each client's examples in its order."""

    def __init__(self, work: Work) -> None:
        calls = iter([(r, p) for r in range(work.size.rounds) for p in range(work.size.cohort)])
        super().__init__(lambda call: Dataset(list(tensors(work.ordered(*call)).values())), lambda: next(calls))


class Began(TrainingProcessCallback):
    """Says when the first round is over."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def after_central_iteration(self, *given: Any, central_iteration: int, **other: Any) -> tuple[bool, Metrics]:
        if not central_iteration:
            self.work.began()
        return False, Metrics()


def main() -> None:
    """All rounds."""
    work, _ = begun()
    size, network = work.size, network_of(work)
    by_name, names = network.loss, tuple(work.columns)
    network.loss = lambda *batch: by_name(**dict(zip(names, batch, strict=True)))
    network.metrics = lambda *batch: {"examples": Weighted(0.0, 1)}  # it has to be one; once, before the first round
    values = list(learned(network).values())
    model = PyTorchModel(
        network, lambda parameters, lr: make_optimizer(values, size, lr), torch.optim.SGD(values, lr=1.0)
    )
    data = Cohorts(work)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=size.rounds, evaluation_frequency=size.rounds + 1, train_cohort_size=size.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data), model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=size.lr, local_batch_size=size.batch),
        callbacks=[Began(work)],
    )  # fmt: skip
    work.ended({name: parameter.detach().numpy() for name, parameter in learned(network).items()})


if __name__ == "__main__":
    main()
