"""What one server bears: processor time per update, measured, and rounds of many clients, simulated from it.

``measure``: a server with TLS, keys and sockets, and sites in another process that send back the model they received
(see server_memory.py). The server's processor time per call, out and in together, for updates of several sizes, and a
line through it: a + b MB.

``simulate``: rounds of C of N clients at one server and at a tree of aggregators, by discrete events and without any
training. Clients are asked at once, train for lognormal times, upload at their own rate, and wait for the processor of
the server, which serves one after the other; a tree has one aggregator per ``--fan`` clients, and its root averages
their means. Costs per update are those of ``measure`` (``--cost a b``, seconds and seconds per MB).

``checks``: what the checks of one update cost the server beside taking it into the mean: its header, names, shapes and
values (``open_body``), and its norm.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from confed.algorithms.fedavg import FedAvg
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import read_public
from confed.engines.flower.transport import FlowerTransport
from confed.engines.local import Simulation, simulate
from confed.engines.remote.protocol import Limits, open_body, schema_of, seal
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Registered, Timeouts
from confed.engines.remote.update_bounds import norm_of
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.params import Mean
from confed.federation.state import MemoryStore
from confed.federation.wire import decode
from confed.testing.toy import toy_setup
from measure import finish
from server_memory import model, sites

TRAINING, SPREAD = 60.0, 0.5
"""Median seconds of a client's training, and the standard deviation of their logarithm."""

UPLINK = 2.0
"""Median MB per second of a client's uplink, with the same spread."""


def seconds_per_call(count: int, rounds: int, megabytes: float) -> float:
    """The server's processor time for one client's call in a round after the first."""
    names = tuple(f"site{i}" for i in range(count))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        provision(root / "made", Federation(names, "localhost", 8443, ""))
        server = root / "made" / "server"
        keys = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        setup = replace(
            toy_setup(FedAvg(), rounds=rounds), build=lambda: model(megabytes),
            population=Registered([ClientInfo(name, 10) for name in names]),
        )  # fmt: skip
        opened = open_superlink(
            keys, certificate=server / "server.crt", key=server / "server.key", waiting=root / "post"
        )
        with opened as (grid, port):
            command = [sys.executable, __file__, "--echo", str(root / "made"), "--port", str(port)]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as others:
                try:
                    remote = Remote(
                        setup, FlowerTransport(grid, keys.get), timeouts=Timeouts(interval=0.05), spool=root / "spool"
                    )
                    remote.sites.gather(names, wait=300)
                    simulation = Simulation(setup, MemoryStore(), remote)
                    servers = simulation.start(remote._local.workspace)
                    taken = list[float]()
                    before = time.process_time()
                    for record in simulate(simulation, servers):
                        if record.errors:
                            raise RuntimeError(f"a site failed: {record.errors}")
                        taken.append(time.process_time() - before)
                        before = time.process_time()
                finally:
                    others.kill()
    return min(taken[1:]) / count


def checks(megabytes: float, repeats: int = 9) -> dict[str, float]:
    """Median milliseconds of processor time: checks of an update, its norm; beside them decoding and averaging."""
    tensors = {name: t for name, t in model(megabytes).state_dict().items() if t.is_floating_point()}
    call = Call(ClientInfo("site", 10), "fit", Message(tensors))
    body, schema = seal(Message({name: t + 1 for name, t in tensors.items()}, {"loss": 0.5})), schema_of(tensors)
    found: dict[str, list[float]] = {name: [] for name in ("checked_ms", "norm_ms", "decoded_ms", "averaged_ms")}
    for _ in range(repeats + 1):
        mean, times = Mean(), [time.process_time()]
        message = open_body(body, Limits(), schema, frozenset(schema), schema)
        times.append(time.process_time())
        norm_of(call, message, ())
        times.append(time.process_time())
        decode(body)
        times.append(time.process_time())
        mean.add(tensors, 1.0)
        mean.add(message.tensors, 1.0)
        times.append(time.process_time())
        for kept, began, ended in zip(found.values(), times, times[1:], strict=False):
            kept.append(1000 * (ended - began))
    found["averaged_ms"] = [value / 2 for value in found["averaged_ms"]]
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds per update and per MB: least squares of relative errors, as sizes span three orders of magnitude."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * mb for w, (mb, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    slope = sum(w * (mb - x) * (s - y) for w, (mb, s) in zip(weights, points, strict=True)) / sum(
        w * (mb - x) ** 2 for w, (mb, _) in zip(weights, points, strict=True)
    )
    return y - slope * x, slope


def served(arrivals: list[float], cost: float, start: float = 0.0) -> float:
    """When the last of these updates has been served, one after the other, in the order of arrival."""
    free = start
    for arrival in sorted(arrivals):
        free = max(free, arrival) + cost
    return free


def uploads(cohort: int, megabytes: float, random: Random) -> list[float]:
    """When the updates of a round have reached their aggregator, in seconds from its start."""
    return [
        random.lognormvariate(math.log(TRAINING), SPREAD) + megabytes / random.lognormvariate(math.log(UPLINK), SPREAD)
        for _ in range(cohort)
    ]


def tree(finished: list[float], cost: float, fan: int) -> float:
    """When the root has the mean of all updates, with an aggregator for each ``fan`` of them."""
    edges = math.ceil(len(finished) / fan)
    return served([served(finished[edge::edges], cost) for edge in range(edges)], cost)


def rounds(cohort: int, megabytes: float, cost: float, fan: int, repeats: int = 3) -> dict[str, float]:
    """Mean seconds until the last update is there, with one server, with the first 90 % only, and with a tree."""
    found: dict[str, float] = dict.fromkeys(("slowest_client", "one_server", "first_90_percent", "tree"), 0.0)
    for seed in range(repeats):
        finished = uploads(cohort, megabytes, Random(seed))
        quick = sorted(finished)[: max(1, math.ceil(0.9 * cohort))]
        times = (max(finished), served(finished, cost), served(quick, cost), tree(finished, cost, fan))
        found = {name: total + time / repeats for (name, total), time in zip(found.items(), times, strict=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "simulate", "checks"), default="measure")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 1.0, 10.0, 100.0], help="MB of an update")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cost", type=float, nargs=2, default=(0.02, 0.01), metavar=("A", "B"))
    parser.add_argument("--fan", type=int, default=100)
    parser.add_argument("--echo", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given, _ = parser.parse_known_args()
    if given.echo is not None:
        sites(given.echo, given.port)
        return
    torch.set_num_threads(1)
    if given.what == "measure":
        points = [(mb, seconds_per_call(given.sites, given.rounds, mb)) for mb in given.sizes]
        a, b = line(points)
        finish(
            "server load", float("inf"), sites=given.sites, per_update_s=a, per_mb_s=b,
            **{f"seconds_{mb:g}_mb": seconds for mb, seconds in points}, load=os.getloadavg()[0],
        )  # fmt: skip
        return
    if given.what == "checks":
        for megabytes in given.sizes:
            finish(f"checks of an update of {megabytes:g} MB", float("inf"), **checks(megabytes))
        return
    a, b = given.cost
    for cohort in (10, 100, 1_000, 10_000, 100_000):
        for megabytes in (0.1, 1.0, 10.0, 100.0, 1_000.0):
            figures = rounds(cohort, megabytes, a + b * megabytes, given.fan)
            finish(
                f"round of {cohort:,} updates of {megabytes:g} MB", float("inf"), **figures,
                gigabytes=cohort * megabytes / 1024,
            )  # fmt: skip


if __name__ == "__main__":
    main()
