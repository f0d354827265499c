"""What a thousand to ten million registered clients cost, from parts that are measured here, and what is full first.

    python benchmarks/scale.py                             # one client of a hundred is asked in a round
    python benchmarks/scale.py --share 0.001 --megabytes 20 --training 30

Measured: drawing a cohort uniformly and by size, what a client costs the simulator beyond its training with everything
that a run does by default, what its state takes on disk and in the index in memory, and what its line of an evaluation
takes in the records. What a call costs a server across machines comes from ``server_load.py measure`` (``--server``),
and the head of a Ray cluster from ``ray_engine.py`` (``--ray``): seconds, and seconds per MB. The rest is multiplied.
Limits: a round's time is ``--training`` times ten where clients train side by side; memory 16 GB, disk 1 TB.
"""

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

import records
from confed.engines.local import InProcess, Simulation, Workspace, simulate
from confed.federation.checkpoint import Checkpoint, Checkpoints, CheckpointWriter
from confed.federation.randomness import sample_cohort
from confed.federation.state import ClientState, MemoryStore
from confed.results.run_files import line_digest
from confed.results.stored import Recorder, write_records
from federations import VECTOR_LOCAL, Linear, plain_fedavg, vector_setup, vector_tables
from measure import finish

MANY, COHORT, ROUNDS = 10**6, 100, 5


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of the second call."""
    work()
    began = time.process_time()
    work()
    return time.process_time() - began


def per_client() -> float:
    """Seconds of the simulator for a client beyond its training."""
    tables = vector_tables(8)
    every = [tables[i % 8] for i in range(MANY // 1000)]
    setup = vector_setup(MANY, ROUNDS, tables, keep_personal=True)
    workspace = Workspace(setup.build())
    start = Simulation(setup, MemoryStore(), InProcess(setup, workspace), COHORT).start(workspace)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            kept = Simulation(setup, checkpoints.store, InProcess(setup, workspace), COHORT)
            with closing(CheckpointWriter(checkpoints)) as writer:
                for record in simulate(kept, start):
                    writer.save(Checkpoint(record.round, record.servers, 0))

    plain = seconds(lambda: plain_fedavg(Linear(), every, ROUNDS, VECTOR_LOCAL, list(range(COHORT))))
    return (seconds(run) - plain) / (COHORT * ROUNDS)


def per_state(count: int = 2000) -> dict[str, float]:
    """Bytes of a client's state beyond its values: in the index in memory, and on disk."""
    values = {"weight": torch.zeros(10)}
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(Path(folder)).store
        store.begin(1)
        tracemalloc.start()
        for number in range(count):
            store.save(f"client-{number:07d}", ClientState({"private": values}, {}))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"index_bytes": held / count, "state_bytes": size / count - 40}


def per_record(count: int = 5000) -> dict[str, float]:
    """Bytes and seconds of a client's line of an evaluation with two views and five measures each."""
    records.CLIENTS, records.ROUNDS = count, 2
    recorder, spent = Recorder(), 0.0
    for line in records.history():
        digest = line_digest(json.dumps(line).encode(), line)
        began = time.process_time()
        recorder.add({**line, "digest": digest})
        spent += time.process_time() - began
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write_records(Path(folder), recorder.records(), {})
        spent += time.process_time() - began
        size = sum(path.stat().st_size for path in (Path(folder) / "records").iterdir())
    return {"record_bytes": size / (2 * count), "record_seconds": spent / (2 * count)}


def parts() -> dict[str, float]:
    """Everything that is measured here."""
    sizes = torch.randint(1, 100, (MANY,))
    return {
        "drawing_per_asked": seconds(lambda: sample_cohort(MANY, 10_000, 0, 0)) / 10_000,
        "drawing_by_size_per_registered": seconds(lambda: sample_cohort(MANY, 10_000, 0, 0, sizes)) / MANY,
        "simulator_per_client": per_client(),
        **per_state(),
        **per_record(),
    }


def costs(registered: int, cost: dict[str, float], given: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Name -> what a federation of this size needs, and how much there is."""
    asked, patience = max(10, int(registered * given.share)), 10 * given.training
    server, ray = (a + b * given.megabytes for a, b in (given.server, given.ray))
    return {
        "drawing by size, s": (registered * cost["drawing_by_size_per_registered"], patience),
        "simulator beyond training, s": (asked * cost["simulator_per_client"], patience),
        "head of a Ray cluster, s": (asked * ray, patience),
        "one server, s": (asked * server, patience),
        "an evaluation's records, s": (registered * cost["record_seconds"], patience),
        "index, GB": (registered * cost["index_bytes"] / 1e9, 16.0),
        "states, GB": (registered * (cost["state_bytes"] + given.megabytes * 1e6) / 1e9, 1000.0),
        "a record of all, GB": (registered * cost["record_bytes"] / 1e9, 1000.0),
    }


def main() -> None:
    """Prints the parts, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.01, help="of the clients that are asked in a round")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of an update, and of a client's state")
    parser.add_argument("--training", type=float, default=60.0, help="seconds of a client in a round")
    parser.add_argument("--server", type=float, nargs=2, default=(0.0051, 0.0115), metavar=("A", "B"))
    parser.add_argument("--ray", type=float, nargs=2, default=(0.00127, 0.001), metavar=("A", "B"))
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    cost = parts()
    finish("scale", float("inf"), **cost)
    sizes = [10**power for power in range(3, 8)]
    table = {size: costs(size, cost, given) for size in sizes}
    print(f"\n| | {' | '.join(f'{size:,}' for size in sizes)} |\n|---|{'---:|' * len(sizes)}")
    for name in table[sizes[0]]:
        cells = [f"{table[size][name][0]:.3g}" for size in sizes]
        print(f"| {name} | {' | '.join(cells)} |")
    fullest = [
        max(table[size], key=lambda name, size=size: table[size][name][0] / table[size][name][1]) for size in sizes
    ]
    shares = [table[size][name][0] / table[size][name][1] for size, name in zip(sizes, fullest, strict=True)]
    cells = [f"{name.partition(',')[0]} ({share:.0%})" for name, share in zip(fullest, shares, strict=True)]
    print(f"| fullest | {' | '.join(cells)} |")
    ray = given.ray[0] + given.ray[1] * given.megabytes
    print(f"\nThe head of a Ray cluster keeps {given.training / ray:,.0f} actors busy whose clients train that long.")


if __name__ == "__main__":
    main()
