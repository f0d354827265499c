"""Peak memory against the plain loop, for 8, 200 and 1,000 clients, and start-up with a million."""

import json
import subprocess
import sys
import time

from measure import finish

EXTRA_MB, TARGET_SECONDS = 60.0, 1.0


def child(kind: str, clients: int) -> None:
    """One measurement in a fresh process; prints peak memory and the time to the end of round 1."""
    import torch

    from confed.engines.usage import peak_memory
    from federations import VECTOR_LOCAL, Linear, plain_fedavg, vector_setup, vector_tables

    torch.set_num_threads(1)
    tables = vector_tables(8)
    cohort = min(50, clients)
    began = time.perf_counter()
    if kind == "plain":
        every = [tables[i % 8] for i in range(clients)]
        plain_fedavg(Linear(), every, 2, VECTOR_LOCAL, list(range(cohort)))
    else:
        from confed.engines.local import InProcess, Simulation, Workspace, simulate
        from confed.federation.state import MemoryStore

        setup = vector_setup(clients, 2, tables)
        workspace = Workspace(setup.build())
        simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace), cohort)
        for _ in simulate(simulation, simulation.start(workspace)):
            pass
    print(json.dumps({"peak": peak_memory(), "seconds": time.perf_counter() - began}))


def measure(kind: str, clients: int) -> dict[str, float]:
    """A child's figures."""
    began = time.perf_counter()
    output = subprocess.run([sys.executable, __file__, "child", kind, str(clients)], check=True, capture_output=True)
    return {**json.loads(output.stdout), "process_seconds": time.perf_counter() - began}


def main() -> None:
    plain = measure("plain", 8)
    peaks = {clients: measure("confed", clients) for clients in (8, 200, 1000, 1_000_000)}
    megabytes = {f"extra_mb_{n}_clients": (p["peak"] - plain["peak"]) / 2**20 for n, p in peaks.items()}
    worst = max(megabytes.values())
    million, thousand = peaks[1_000_000]["seconds"], peaks[1000]["seconds"]
    finish(
        "memory", EXTRA_MB, ratio=worst, unit="MB above the plain loop", plain_mb=plain["peak"] / 2**20,
        **megabytes, million_clients_extra_seconds=million - thousand,
    )  # fmt: skip


if __name__ == "__main__":
    child(sys.argv[2], int(sys.argv[3])) if sys.argv[1:2] == ["child"] else main()
