"""Peak memory of FedDAT with 25 clients against 1: one frozen backbone, whatever the number of clients.

Every client has a head, a local adapter and its version of the shared one. A run keeps them in files; the target is
what they take, as if they were in memory. Both runs train as often (1 client 50 times, 25 clients twice), as what a
process holds grows a little with what it has done, and their clients have the same examples, so that data do not count.
Each figure is the smallest of several fresh processes: the allocator's luck only adds to it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import finish

CLIENTS, ROUNDS, REPEATS = 25, 2, 5
ANSWERS, WORDS, EXAMPLES = 100, 400, 64


def child(clients: int, rounds: int, kind: str) -> None:
    """One run with an evaluation after every round; prints peak memory and the bytes of what all clients keep."""
    import torch

    from confed.algorithms.feddat import FedDAT
    from confed.data.examples import TableData
    from confed.data.table import Table
    from confed.engines.local import InProcess, Members, Setup, Simulation, Workspace, simulate
    from confed.engines.usage import keep_freed_memory, peak_memory
    from confed.federation.checkpoint import DirectoryStore
    from confed.federation.local import Local
    from confed.federation.state import MemoryStore
    from confed.models.vilt import vilt_mini
    from confed.tasks.vqa import VQA

    torch.set_num_threads(1)
    keep_freed_memory()
    rng = torch.Generator().manual_seed(0)
    columns = {
        "text": torch.randint(1, WORDS, (EXAMPLES, 14), generator=rng),
        "text_mask": torch.ones(EXAMPLES, 14, dtype=torch.int64),
        "label": torch.randint(0, ANSWERS, (EXAMPLES,), generator=rng),
    }
    pictures = torch.randint(0, 256, (EXAMPLES, 3, 64, 64), generator=rng, dtype=torch.uint8)
    table = Table(pictures, torch.arange(EXAMPLES), columns)
    task = VQA(ANSWERS)

    def build() -> torch.nn.Module:
        return vilt_mini(ANSWERS, WORDS, trainable="adapters", pretrained=False)

    members = Members({f"client-{number:02}": TableData(table, table, table) for number in range(clients)})
    method = FedDAT(preset="code").configure(build(), task)
    setup = Setup(method, members, task, Local(epochs=1, batch_size=32), build, rounds=rounds)
    with tempfile.TemporaryDirectory() as folder:
        store = MemoryStore() if kind == "memory" else DirectoryStore(Path(folder))
        workspace = Workspace(setup.model())
        simulation = Simulation(setup, store, InProcess(setup, workspace))
        for record in simulate(simulation, simulation.start(workspace)):
            simulation.evaluate(record.servers, record.round, split="validation")
        peak = peak_memory()
        states = [store.load(info.id) for info in simulation.clients()]
    kept = sum(t.numel() * t.element_size() for s in states for group in s.tensors.values() for t in group.values())
    model = sum(t.numel() * t.element_size() for t in workspace.tensors.values())
    print(json.dumps({"peak": peak, "kept": kept, "model": model}))


def measure(clients: int, kind: str) -> dict[str, int]:
    """A child's figures, those of the smallest peak."""
    command = [sys.executable, __file__, "child", str(clients), str(CLIENTS * ROUNDS // clients), kind]
    outputs = [subprocess.run(command, check=True, capture_output=True).stdout for _ in range(REPEATS)]
    return min((json.loads(output) for output in outputs), key=lambda found: found["peak"])


def main() -> None:
    one, many = (measure(clients, "files") for clients in (1, CLIENTS))
    held = [measure(clients, "memory")["peak"] for clients in (1, CLIENTS)]
    allowed = many["kept"] - one["kept"]
    finish(
        "adapters_memory", 1.0, ratio=(many["peak"] - one["peak"]) / allowed, unit="of what the further clients keep",
        extra_mb=(many["peak"] - one["peak"]) / 2**20, allowed_mb=allowed / 2**20, one_client_mb=one["peak"] / 2**20,
        extra_mb_states_in_memory=(held[1] - held[0]) / 2**20,
        copies_of_the_model_would_take_mb=(CLIENTS - 1) * one["model"] / 2**20,
    )  # fmt: skip


if __name__ == "__main__":
    child(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]) if sys.argv[1:2] == ["child"] else main()
