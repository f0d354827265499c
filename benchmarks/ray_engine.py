"""Ray actors against worker processes: cost per call and per megabyte, and 1,000 of 100,000 clients per round.

``ray_engine.py many`` is the second; ``ray_engine.py flower`` times the same echo on Flower's simulation engine, which
is Ray too, and then on ours; ``ray_engine.py nodes`` runs a federation on 1, 2 and 4 nodes that are processes of this
machine, with one actor each.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from confed.algorithms.fedavg import FedAvg
from confed.engines.executor import Executor, InProcess
from confed.engines.local import Setup, Simulation, Workspace, simulate
from confed.engines.ray.executor import RayActors
from confed.engines.ray.placement import Wanted
from confed.engines.setup_source import SetupSource
from confed.engines.usage import cpu_seconds, peak_memory
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm, action
from confed.federation.client import Client
from confed.federation.messages import Call, Message
from confed.federation.state import MemoryStore
from confed.federation.traits import Traits
from federations import VECTOR_LOCAL, Classification, Linear, SharedVectors, vector_tables
from measure import finish

ACTORS, REPEATS = 2, 5
SIZES = {1_000: 100, 100_000: 100, 1_000_000: 40, 10_000_000: 10}
"""Bytes of a message, one way -> calls at a time."""


@dataclass(frozen=True)
class Echo(Algorithm):
    """A client that sends back what it gets."""

    traits = Traits(neutral="-")

    @action
    def echo(self, client: Client, message: Message) -> Message:
        """The tensors received."""
        return Message(message.tensors)


def setup(method: str, clients: int, rounds: int) -> Setup:
    """The federation, made anew in every process."""
    algorithm = Echo() if method == "echo" else FedAvg()
    population = SharedVectors(clients, vector_tables(8))
    return Setup(algorithm, population, Classification(), VECTOR_LOCAL, Linear, rounds, keep_personal=False)


def source(method: str, clients: int, rounds: int = 1) -> SetupSource:
    return SetupSource("ray_engine:setup", {"method": method, "clients": clients, "rounds": rounds})


def payload(size: int) -> dict[str, Tensor]:
    return {"x": torch.arange(size // 4, dtype=torch.float32)}


def seconds(executor: Executor, calls: Sequence[Call]) -> float:
    """Wall-clock time of all calls with everything that takes their replies."""
    began = time.perf_counter()
    for reply in executor(calls, MemoryStore(), 0):
        assert reply.error is None
    return time.perf_counter() - began


def echo() -> None:
    """Milliseconds per call by size, medians of repeats that alternate between the engines."""
    made = source("echo", 1000)
    federation = made.setup()
    engines = {"workers": Workers(federation, ACTORS), "ray": RayActors(made, Wanted(ACTORS), cores=ACTORS)}
    for size, count in SIZES.items():
        message = Message(payload(size))
        calls = [Call(federation.population.info(n), "echo", message) for n in range(count)]
        found: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(REPEATS + 1):
            for name, engine in engines.items():
                taken = seconds(engine, calls)
                if repeat:  # the first is for warming up
                    found[name].append(1000 * taken / count)
        ratios = sorted(r / w for w, r in zip(found["workers"], found["ray"], strict=True))
        finish(
            f"echo_{size}", float("inf"), ratio=statistics.median(ratios), lowest=ratios[0], highest=ratios[-1],
            **{f"{name}_ms_per_call": statistics.median(values) for name, values in found.items()},
            **{f"{name}_ms_least": min(values) for name, values in found.items()},
        )  # fmt: skip
    for engine in engines.values():
        engine.close()


def flower() -> None:
    """Milliseconds per call of the same echo on Flower's Ray engine and then on ours."""
    import contextlib

    from flwr.app import ArrayRecord, Context, RecordDict
    from flwr.app import Message as Letter
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    client, server, theirs = ClientApp(), ServerApp(), dict[int, list[float]]()

    @client.query()
    def answer(letter: Letter, context: Context) -> Letter:
        del context
        return Letter(letter.content, reply_to=letter)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        while len(nodes := list(grid.get_node_ids())) < max(SIZES.values()):
            time.sleep(0.2)
        for size, count in SIZES.items():
            record = RecordDict({"arrays": ArrayRecord(dict(payload(size)))})
            for repeat in range(REPEATS + 1):
                began = time.perf_counter()
                letters = [Letter(record, dst_node_id=node, message_type="query") for node in nodes[:count]]
                replies = list(grid.send_and_receive(letters))
                assert len(replies) == count
                assert not any(reply.has_error() for reply in replies)
                if repeat:
                    theirs.setdefault(size, []).append(1000 * (time.perf_counter() - began) / count)

    resources = {
        "init_args": {"num_cpus": ACTORS, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    with contextlib.redirect_stdout(sys.stderr):
        run_simulation(server, client, max(SIZES.values()), backend_config=resources)
    made = source("echo", 1000)
    federation = made.setup()
    executor = RayActors(made, Wanted(ACTORS), cores=ACTORS)
    for size, count in SIZES.items():
        calls = [Call(federation.population.info(n), "echo", Message(payload(size))) for n in range(count)]
        ours = [1000 * seconds(executor, calls) / count for _ in range(REPEATS + 1)][1:]
        finish(
            f"flower_echo_{size}", float("inf"), ratio=statistics.median(ours) / statistics.median(theirs[size]),
            flower_ms_per_call=statistics.median(theirs[size]), ours_ms_per_call=statistics.median(ours),
            flower_ms_least=min(theirs[size]), ours_ms_least=min(ours),
        )  # fmt: skip
    executor.close()


def many(registered: int = 100_000, cohort: int = 1_000, rounds: int = 3) -> None:
    """Rounds of FedAvg on a linear model, 60 examples a client: seconds per round of the three engines."""
    made = source("fedavg", registered, rounds)
    federation = made.setup()
    builders: dict[str, Callable[[], Workers | InProcess | RayActors]] = {
        "one": lambda: InProcess(federation),
        "workers": lambda: Workers(federation, ACTORS),
        "ray": lambda: RayActors(made, Wanted(ACTORS), cores=ACTORS),
    }
    times, sums, memory, used = dict[str, float](), dict[str, float](), dict[str, float](), dict[str, float]()
    for name, build in builders.items():
        executor, cpu = build(), cpu_seconds()
        with Simulation(federation, MemoryStore(), executor, cohort) as simulation:
            records = list(simulate(simulation, simulation.start(Workspace(federation.model()))))
            memory[name] = peak_memory() / 2**20
            used[name] = cpu_seconds() - cpu
            if isinstance(executor, RayActors):
                memory["ray_actor"] = executor.peak_memory / 2**20
        times[name] = min(record.seconds for record in records)
        sums[name] = float(records[-1].servers["main"].params["layer.weight"].double().sum())
    finish(
        "many_clients", float("inf"), ratio=times["ray"] / times["workers"], registered=registered, cohort=cohort,
        equal=len(set(sums.values())) == 1, **{f"{name}_seconds": value for name, value in times.items()},
        **{f"{name}_mb": value for name, value in memory.items()},
        **{f"{name}_server_cpu": value for name, value in used.items()},
    )  # fmt: skip


def nodes(clients: int = 200, rounds: int = 3) -> None:
    """Rounds of FedAvg on a linear model on 1, 2 and 4 nodes: time, memory, bytes, and whether models are equal."""
    import ray
    from ray.cluster_utils import Cluster

    made, store = source("fedavg", clients, rounds), 150 * 2**20
    federation = made.setup()
    with Simulation(federation, MemoryStore(), InProcess(federation)) as simulation:
        one = list(simulate(simulation, simulation.start(Workspace(federation.model()))))
    for count in (1, 2, 4):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": store})
        for _ in range(count):
            cluster.add_node(num_cpus=1, object_store_memory=store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        executor, cpu = RayActors(made, Wanted(count), cores=1), cpu_seconds()
        with Simulation(federation, MemoryStore(), executor) as simulation:
            records = list(simulate(simulation, simulation.start(Workspace(federation.model()))))
            described, actors_cpu, memory = executor.described(), executor.cpu_seconds, executor.peak_memory
        finish(
            f"nodes_{count}", float("inf"), ratio=min(r.seconds for r in records) / min(r.seconds for r in one),
            round_seconds=min(record.seconds for record in records), one_process=min(record.seconds for record in one),
            actors_cpu=actors_cpu, server_cpu=cpu_seconds() - cpu, actor_mb=memory / 2**20,
            mb_up=sum(sum(record.bytes_up.values()) for record in records) / 1e6,
            nodes=[node["actors"] for node in described["nodes"]], exact=described["exact"],
            equal=all(
                torch.equal(tensor, records[-1].servers["main"].params[name])
                for name, tensor in one[-1].servers["main"].params.items()
            ),
        )  # fmt: skip
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    import ray_engine  # under this name its classes are found in every process

    torch.set_num_threads(1)
    kinds = {"many": ray_engine.many, "flower": ray_engine.flower, "nodes": ray_engine.nodes}
    sys.exit(next((kinds[word] for word in sys.argv[1:] if word in kinds), ray_engine.echo)())
