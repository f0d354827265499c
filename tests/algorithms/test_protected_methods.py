"""Every registered method with every protection: it works, or it says why not before anything runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from confed.engines.local import InProcess, Simulation, simulate
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.registry import algorithms
from confed.testing import CHECKS
from confed.testing.toy import toy_setup

PROTECTIONS: dict[str, dict[str, Any]] = {
    "noise at the client": {"update_privacy": UpdatePrivacy(clip=0.1, noise=0.01)},
    "noise at the server": {"update_privacy": UpdatePrivacy(clip=0.1, noise=0.01, at="server")},
    "median": {"robust": RobustMean("median")},
    "secure sum": {"secure_sum": SecureSum()},
}
REFUSED = {
    "noise at the client": {
        "bicsl",
        "central",
        "creamfl",
        "fedkd",
        "fedmd",
        "fedmosaic",
        "local",
        "pmcmfl",
        "split_learning",
    },
    "noise at the server": {
        "bicsl",
        "central",
        "creamfl",
        "feddc",
        "fedkd",
        "fedmd",
        "fedmosaic",
        "local",
        "pfedmoap",
        "pmcmfl",
        "robust",
        "split_learning",
    },
    "median": {
        "afl",
        "bicsl",
        "central",
        "creamfl",
        "feddc",
        "fedmd",
        "fedmosaic",
        "local",
        "pfedmoap",
        "pmcmfl",
        "robust",
        "split_learning",
    },
    "secure sum": {
        "bicsl",
        "central",
        "creamfl",
        "feddc",
        "fedkd",
        "fedmd",
        "fedmosaic",
        "local",
        "pfedmoap",
        "pmcmfl",
        "robust",
        "split_learning",
    },
}
"""With default hyper-parameters."""


def _runs(name: str, protection: str) -> None:
    method = replace(algorithms[name](), **PROTECTIONS[protection])
    if name in REFUSED[protection]:
        with pytest.raises(ValueError, match="must be left out for"):
            toy_setup(method)
        return
    setup = toy_setup(method, rounds=2, noisy=name == "fedbn")  # which is nothing without normalisation
    executor = InProcess(setup)
    simulation = Simulation(setup, MemoryStore(), executor)
    start = servers = simulation.start(executor.workspace)
    if protection == "secure sum" and method.traits.made_for == "modalities":  # two of the toy clients own pictures
        with pytest.raises(ValueError, match="at least 3 clients that send a tensor, got 2"):
            next(simulate(simulation, servers))
        return
    for record in simulate(simulation, servers):
        servers = dict(record.servers)
        assert not record.errors
    moved = [not torch.equal(t, start["main"].params[n]) for n, t in servers["main"].params.items()]
    assert any(moved)
    assert all(torch.isfinite(t.double()).all() for t in servers["main"].params.values())
    simulation.evaluate(servers, setup.rounds, split="validation")


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("name", ["fedavg", "fedper", "bicsl"])
def test_some_methods_run_protected(name: str, protection: str) -> None:
    _runs(name, protection)


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("name", algorithms.names())
def test_every_method_runs_protected_or_refuses(name: str, protection: str) -> None:
    _runs(name, protection)


@pytest.mark.parametrize(
    "check",
    ["finite and deterministic", "resumes exactly", "ignores the workspace", "sends only what is shared",
     "nothing leaks from client to client", "survives the wire"],
)  # fmt: skip
def test_protected_methods_keep_the_contract(check: str) -> None:
    privacy = UpdatePrivacy(clip=0.5)
    for method in (
        replace(algorithms["scaffold"](), update_privacy=privacy),
        replace(algorithms["fedavg"](), update_privacy=replace(privacy, at="server", noise=1e-4)),
        replace(algorithms["fedyogi"](), robust=RobustMean("trimmed")),
    ):
        CHECKS[check](method)
