"""Contract checks with known results: neutral settings, and one step of gradient descent."""

from dataclasses import replace

import torch

from confed.algorithms.fedavg import FedAvg
from confed.data.table_concatenation import concatenate_tables
from confed.federation.algorithm import Algorithm
from confed.federation.equivalence import unbatchable_training
from confed.federation.local import Local
from confed.federation.ownership import modalities_of
from confed.federation.params import named_tensors
from confed.testing.toy import toy_clients, toy_setup
from confed.testing.trial import ROUNDS, ContractViolation, Outcome, Together, run, same

PLAIN = Local(epochs=1, batch_size=10_000, lr=0.1, optimizer="sgd", weight_decay=0.0)


def neutral_is_fedavg(algorithm: Algorithm) -> None:
    """Neutral hyper-parameters give FedAvg's servers (model without BatchNorm and dropout, SGD)."""
    if isinstance(algorithm.traits.neutral, str):
        return
    neutral = replace(algorithm, **algorithm.traits.neutral)
    local = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd", weight_decay=0.0)
    kind = algorithm.traits.made_for
    runs = [run(toy_setup(a, local=local, rounds=ROUNDS, noisy=False, kind=kind)) for a in (neutral, FedAvg())]
    servers = [Outcome(run.servers, {}, (), (), ()) for run in runs]
    same("neutral coefficients give FedAvg", *servers, tolerance=1e-6)


def stacked_equals_one_by_one(algorithm: Algorithm) -> None:
    """Training two clients at once gives what training one by one gives (without BatchNorm and dropout)."""
    if unbatchable_training(algorithm):
        return
    for local in (
        Local(epochs=2, batch_size=5, lr=0.05, optimizer="sgd", momentum=0.5, clip=1.0),
        Local(iterations=4, batch_size=4, lr=0.01, optimizer="adamw"),
    ):
        alone = toy_setup(algorithm, local=local, rounds=ROUNDS, noisy=False, kind=algorithm.traits.made_for)
        both = run(replace(alone, batch_clients=2), Together)
        same("clients trained at once equal one by one", run(alone), both, tolerance=1e-5)


def one_step_is_gradient_descent(algorithm: Algorithm) -> None:
    """One full-batch step on every client and a weighted mean is one step on all clients' data."""
    check = "one full step equals gradient descent"
    if isinstance(algorithm.traits.neutral, str):
        return
    neutral = replace(algorithm, **algorithm.traits.neutral)
    clients = toy_clients(kind=neutral.traits.made_for)
    setup = toy_setup(neutral, clients=clients, local=PLAIN, rounds=1, noisy=False)
    got = run(setup).servers["main"].params
    model, task = setup.build(), setup.task
    tables = [c.tables[0] for c in clients.values()]
    alike = all(table.columns.keys() == tables[0].columns.keys() for table in tables)
    # For tensors that read one modality, all clients are those that have it.
    owners = dict[str, int]()
    for batch in [concatenate_tables(tables)] if alike else tables:
        whole = next(iter(batch.batches(10_000)))
        (task.loss(model(whole), whole) * len(batch)).backward()
        for modality in ("", *modalities_of(named_tensors(model))):
            owners[modality] = owners.get(modality, 0) + len(batch) * (not modality or modality in whole)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            count = owners[next(iter(modalities_of([name])), "")]
            wanted = parameter.detach() - PLAIN.lr * parameter.grad / count
            if not torch.allclose(got[name], wanted, rtol=1e-5, atol=1e-6):
                raise ContractViolation(f"{check}: {name} differs by up to {(got[name] - wanted).abs().max():.3g}")
