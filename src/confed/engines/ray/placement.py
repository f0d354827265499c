"""How many actors a cluster's nodes take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    id: str
    name: str  # its address, and its host's name
    cores: float  # processor cores that it offers
    gpus: float  # GPUs that it offers
    memory: float  # bytes that it offers to actors


@dataclass(frozen=True)
class Wanted:
    """What a run asks of a cluster."""

    count: int  # actors in all; 0 for one per core, or per GPU
    threads: int = 1
    gpu: bool | None = False  # whether each has a GPU; None for one each where the cluster has any
    memory: int = 0  # bytes that one needs

    def fit(self, node: Node) -> int:
        """How many actors a node has room for."""
        by_memory = int(node.memory // self.memory) if self.memory else 2**31
        return min(int(node.gpus) if self.gpu else int(node.cores // self.threads), by_memory)


def nodes_of(listed: Sequence[Mapping[str, Any]]) -> dict[str, Node]:
    """The nodes that are alive, by id, from what ``ray.nodes()`` returns."""
    nodes = dict[str, Node]()
    for entry in listed:
        if entry["Alive"]:
            offered, address, host = entry["Resources"], entry["NodeManagerAddress"], entry["NodeManagerHostname"]
            nodes[entry["NodeID"]] = Node(
                entry["NodeID"], f"{address} ({host})", offered.get("CPU", 0.0), offered.get("GPU", 0.0),
                offered.get("memory", 0.0),
            )  # fmt: skip
    return nodes


def places(nodes: Mapping[str, Node], wanted: Wanted, running: Mapping[str, int]) -> list[str]:
    """Nodes for the actors that are to be started, an id for each."""
    room = {name: wanted.fit(node) for name, node in nodes.items()}
    used = {name: running.get(name, 0) for name in nodes}
    left = wanted.count - sum(running.values()) if wanted.count else 2**31
    chosen = list[str]()
    while len(chosen) < left:
        free = [name for name in nodes if used[name] < room[name]]
        if not free:
            break
        best = min(free, key=lambda name: used[name] / room[name])
        used[best] += 1
        chosen.append(best)
    return chosen


def too_small(nodes: Mapping[str, Node], wanted: Wanted) -> list[str]:
    """Sentences about the nodes whose memory is less than an actor needs."""
    return [
        f"node {node.name} offers {node.memory / 2**30:.2f} GiB of memory, an actor needs about "
        f"{wanted.memory / 2**30:.2f} GiB for data, model, gradients and moments"
        for node in nodes.values()
        if node.memory < wanted.memory and (node.gpus >= 1 if wanted.gpu else node.cores >= wanted.threads)
    ]
