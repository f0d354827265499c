"""Fairness over clients: spread, worst client, and clients that would be better off otherwise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from confed.metrics.statistics import mean


@dataclass(frozen=True)
class Clients:
    """Spread of a metric over clients; larger values of the metric are better."""

    mean: float  # mean over clients, each counted once
    sd: float  # standard deviation over clients (divisor n - 1); NaN for one client
    worst: float  # value of the worst client
    worst_client: str  # which one it is
    bottom: float  # mean of the worst tenth of the clients, at least one
    spread: float  # best value minus worst
    n: int  # number of clients


@dataclass(frozen=True)
class Hurt:
    """Clients that do worse than with a reference."""

    share: float  # their share of all clients
    clients: tuple[str, ...]  # who they are, the most hurt first
    worst: float  # the largest loss, 0 if no client is hurt
    n: int  # number of clients


def across_clients(values: Mapping[str, float]) -> Clients:
    """Mean, spread and worst of one metric over clients."""
    summary = mean(list(values.values()))
    order = sorted(values, key=values.__getitem__)
    bottom = [values[client] for client in order[: max(1, len(order) // 10)]]
    worst, best = values[order[0]], values[order[-1]]
    return Clients(
        summary.mean,
        summary.sd,
        float(worst),
        order[0],
        sum(bottom) / len(bottom),
        float(best - worst),
        summary.n,
    )


def hurt(values: Mapping[str, float], reference: Mapping[str, float], margin: float = 0.0) -> Hurt:
    """Clients whose value is below the reference's by more than a margin."""
    if not values or values.keys() != reference.keys():
        raise ValueError(
            f"values and reference must name the same clients, got {sorted(values)} and {sorted(reference)}"
        )
    for name, of in (("values", values), ("reference", reference)):
        for client, value in of.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}[{client!r}] must be finite, got {value}")
    loss = {client: float(reference[client] - value) for client, value in values.items()}
    clients = tuple(sorted((c for c in loss if loss[c] > margin), key=lambda c: -loss[c]))
    return Hurt(len(clients) / len(values), clients, loss[clients[0]] if clients else 0.0, len(values))
