"""Runs with features of frozen layers kept, and the same runs without."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from confed.engines.executor import InProcess
from confed.engines.local import Setup, Simulation, Workspace, simulate
from confed.engines.workers import Workers
from confed.federation.frozen_features import FeatureCounts
from confed.federation.state import MemoryStore

__all__ = ["run", "same"]


def run(given: Setup, workers: int = 0) -> tuple[dict[str, Tensor], list[Any], FeatureCounts]:
    """Values after all rounds, losses and evaluations of each round, and what was saved."""
    workspace = Workspace(given.model())
    executor = Workers(given, workers, start="fork") if workers else InProcess(given, workspace)
    with Simulation(given, MemoryStore(), executor) as simulation:
        servers, views = simulation.start(workspace), []
        for record in simulate(simulation, servers):
            assert not record.errors
            servers = record.servers
            views.append((record.losses, simulation.evaluate(servers, record.round, split="validation")))
        return dict(servers["main"].params), views, executor.features


def same(given: Setup, workers: int = 0) -> FeatureCounts:
    """What was saved by a run whose numbers are those of the same run without."""
    plain, plain_views, _ = run(replace(given, features=None))
    found, views, counts = run(given, workers)
    assert views == plain_views
    assert found.keys() == plain.keys()
    assert all(torch.equal(t, plain[n]) for n, t in found.items())
    return counts
