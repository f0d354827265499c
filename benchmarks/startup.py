"""From process start to the end of round 1: confed against the plain loop, mini ViLT, 2 clients."""

import statistics
import subprocess
import sys
import time

from measure import finish

CODE = {
    "plain": """
import torch; torch.set_num_threads(1)
from federations import VILT_LOCAL, plain_fedavg, vilt, vilt_tables
plain_fedavg(vilt(), vilt_tables(2, 64), 1, VILT_LOCAL, [0, 1])
""",
    "confed": """
import torch; torch.set_num_threads(1)
from federations import VILT_LOCAL, FedAvg, Members, Setup, TableData, VQA, ANSWERS, vilt, vilt_tables
from confed.engines.local import InProcess, Simulation, Workspace, simulate
from confed.federation.state import MemoryStore
data = {str(i): TableData(t, t.take(0), t.take(0)) for i, t in enumerate(vilt_tables(2, 64))}
setup = Setup(FedAvg(), Members(data), VQA(ANSWERS), VILT_LOCAL, vilt, 1)
workspace = Workspace(setup.build())
simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
list(simulate(simulation, simulation.start(workspace)))
""",
    "command": """
import sys
from confed.cli import main
import tempfile, pathlib
sys.argv = ["confed", "run", "fedvqa_scenes", "study.methods=[]", "algorithm.name=fedavg", "run.rounds=1",
    "data.train=64", "data.validation=8", "data.test=8", "run.workers=1", "run.evaluate_every=0", "run.gallery=0",
    "--json", "--out", str(pathlib.Path(tempfile.mkdtemp()) / "run")]
main()
""",
}


def seconds(kind: str) -> float:
    """Wall-clock seconds of one process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", CODE[kind]], check=True, cwd=sys.path[0], stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    seconds("plain")
    times = {kind: statistics.median(seconds(kind) for _ in range(3)) for kind in CODE}
    finish(
        "startup", 1.0, ratio=times["confed"] - times["plain"], unit="seconds more than the plain loop",
        plain_seconds=times["plain"], ours_seconds=times["confed"], whole_command_with_report_seconds=times["command"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
