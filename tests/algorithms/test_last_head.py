"""A last pass over private heads after the final average: FedPEFT and FedDAT."""

import pytest
import torch
from torch import Tensor

from confed.algorithms.feddat import FedDAT
from confed.algorithms.fedpeft import FedPEFT
from confed.engines.local import RoundRecord
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_setup
from toy_runs import simulated

LOCAL = Local(epochs=1, batch_size=8, lr=0.02)


def run(method: Algorithm) -> tuple[list[RoundRecord], MemoryStore]:
    records, store, _ = simulated(toy_setup(method, local=LOCAL, rounds=2, noisy=False))
    return records, store


def kept(store: MemoryStore, what: str) -> dict[str, Tensor]:
    return dict(store.load("client-1").tensors[what])


@pytest.mark.parametrize("method", [FedPEFT, FedDAT])
def test_only_the_head_learns_in_the_last_pass(method: type[FedPEFT | FedDAT]) -> None:
    (before, usual), (records, store) = run(method()), run(method(head_epochs=1))
    final = records[-1].servers["main"].params
    assert all(torch.equal(t, before[-1].servers["main"].params[name]) for name, t in final.items())
    heads = {name for name in kept(store, "private") if name.startswith("head.")}
    assert heads
    for name, value in kept(store, "private").items():
        assert torch.equal(value, kept(usual, "private")[name]) is (name not in heads), name
    personal = kept(store, "personal")
    assert all(torch.equal(t, final[name]) for name, t in personal.items())
    assert not all(torch.equal(t, personal[name]) for name, t in kept(usual, "personal").items())


@pytest.mark.parametrize("method", [FedPEFT, FedDAT])
def test_heads_learn_in_the_last_pass(method: type[FedPEFT | FedDAT]) -> None:
    """The mean loss over many passes is below that of the first one."""
    one, many = (run(method(head_epochs=epochs))[0][-1].losses for epochs in (1, 20))
    assert one.keys() == many.keys()
    assert all(many[client] < one[client] - 0.05 for client in one)
