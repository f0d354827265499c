"""Peak memory of FedDAT with 25 clients against 1: one frozen backbone, whatever the number of clients.

Every client has a head, a local adapter and its version of the shared one; with ``MemoryStore`` all of them are in main
memory, and what they take is all that more clients may cost. The clients have the same examples, so that data do not
count. Each figure is the smallest of several fresh processes, as the allocator's luck only adds to it.
"""

import json
import subprocess
import sys

from measure import finish

CLIENTS, REPEATS = 25, 5
ANSWERS, WORDS, EXAMPLES = 100, 400, 64


def child(clients: int, rounds: int) -> None:
    """One run of two rounds and an evaluation; prints peak memory and the bytes of what all clients keep."""
    import torch

    from confed.algorithms.feddat import FedDAT
    from confed.data.examples import Table, TableData
    from confed.engines.local import InProcess, Members, Setup, Simulation, Workspace, simulate
    from confed.engines.usage import keep_freed_memory, peak_memory
    from confed.federation.state import MemoryStore
    from confed.federation.train import Local
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
    method = FedDAT(preset="code").suit(build(), task)
    setup = Setup(method, members, task, Local(epochs=1, batch_size=32), build, rounds=rounds)
    store, workspace = MemoryStore(), Workspace(setup.model())
    simulation = Simulation(setup, store, InProcess(setup, workspace))
    for record in simulate(simulation, simulation.start(workspace)):
        simulation.evaluate(record.servers, record.round, split="validation")
    states = [store.load(info.id) for info in simulation.clients()]
    kept = sum(t.numel() * t.element_size() for s in states for group in s.tensors.values() for t in group.values())
    backbone = sum(t.numel() * t.element_size() for t in workspace.tensors.values())
    print(json.dumps({"peak": peak_memory(), "kept": kept, "backbone": backbone}))


def measure(clients: int) -> dict[str, int]:
    """A child's figures."""
    output = subprocess.run([sys.executable, __file__, "child", str(clients)], check=True, capture_output=True)
    return json.loads(output.stdout)


def main() -> None:
    found = {clients: [measure(clients) for _ in range(REPEATS)] for clients in (1, CLIENTS)}
    one, many = (min(entry["peak"] for entry in found[clients]) for clients in (1, CLIENTS))
    allowed = found[CLIENTS][0]["kept"] - found[1][0]["kept"]
    finish(
        "adapters_memory", 1.0, ratio=(many - one) / allowed, unit="of what the further clients keep",
        extra_mb=(many - one) / 2**20, allowed_mb=allowed / 2**20, one_client_mb=one / 2**20,
        model_mb=found[1][0]["backbone"] / 2**20, copies_of_the_model_mb=(CLIENTS - 1) * found[1][0]["backbone"] / 2**20,
    )  # fmt: skip


if __name__ == "__main__":
    child(int(sys.argv[2]), int(sys.argv[3])) if sys.argv[1:2] == ["child"] else main()
