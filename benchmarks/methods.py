"""Every method's time per round against FedAvg's and against what its passes over the data need.

The federation of the built-in benchmark: mini ViLT of which the top is trained, 4 clients x 400 examples, two epochs,
batch 32. FedAvg's and the method's rounds alternate in one process; the first of each, in which methods with a teacher
have none yet, does not count. A method's need is declared below in passes: how often it trains on an example in an
epoch (FedAvg: once), and how many further forward passes without gradient an example takes in a round (a teacher
whose outputs are kept: one). What those cost is measured here too, on the same batches.

``--methods a,b`` measures some, ``--repeats`` and ``--examples`` change the sizes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from confed.data.examples import TableData
from confed.data.table import concatenate_tables
from confed.engines.local import InProcess, Members, Simulation, Workspace, simulate
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.registry import algorithms
from confed.tasks.vqa import VQA
from federations import ANSWERS, VILT_LOCAL, WORDS, vilt_tables
from measure import finish

LOCAL = replace(VILT_LOCAL, epochs=2)
ALLOWED = 1.15


@dataclass(frozen=True)
class Need:
    """What a method must compute.

    Attributes:
        trained: training passes (forward, backward, step) per example and epoch.
        forward: further forward passes without gradient per example and round.
        why: in words.
    """

    trained: float = 1.0
    forward: float = 0.0
    why: str = ""


TEACHER = Need(forward=1, why="the global model's outputs, once a round")
NEEDS: Mapping[str, Need] = {
    **{
        name: Need()
        for name in (
            "central", "fedadam", "fedavg", "fedavgm", "fedavg_ft", "fedbn", "feddc", "feddyn", "fedper", "fedprox",
            "fedyogi", "local",
        )
    },
    **dict.fromkeys(("crd", "dkd", "fedp3", "sp", "st"), TEACHER),
    "ditto": Need(trained=2, why="a second, personal model"),
    "fedkd": Need(trained=2, why="mentor and mentee"),
    "fedrep": Need(why="every epoch trains a part, at most a whole pass"),
    "moon": Need(forward=2, why="the global and the previous model's features, once a round"),
    "scaffold": Need(trained=1 + 1 / LOCAL.epochs, why="the gradient over all examples, once a round"),
}  # fmt: skip

OPTIONS: Mapping[str, Mapping[str, Any]] = {"fedbn": {"layers": "all"}}
"""Where a method's defaults do not suit this model, which has layer normalisation only."""


def build() -> nn.Module:
    """The recipe's model; the values do not matter for time."""
    return create_model("vilt_mini", answers=ANSWERS, vocab_size=WORDS, pretrained=False, trainable="top")


def rounds(algorithm: Algorithm, examples: int) -> Iterator[float]:
    """Processor seconds of one round after the other."""
    tables = vilt_tables(4, examples)
    data = {f"{i}": TableData(t, t.take(0), t.take(0)) for i, t in enumerate(tables)}
    if algorithm.traits.centralised:
        everything = concatenate_tables(tables)
        data = {"everyone": TableData(everything, everything.take(0), everything.take(0))}
    task = VQA(ANSWERS)
    setup = Setup(algorithm.configure(build(), task), Members(data), task, LOCAL, build, rounds=100_000)
    workspace = Workspace(setup.model())
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    records = simulate(simulation, simulation.start(workspace))
    while True:
        began = time.process_time()
        record = next(records)
        if record.errors:
            raise ValueError(f"{type(algorithm).__name__}: {record.errors}")
        yield time.process_time() - began


def forwards(examples: int) -> Iterator[float]:
    """Processor seconds of one forward pass over everybody's examples, time after time."""
    model = build().eval()
    data = [TableData(t, t.take(0), t.take(0)) for t in vilt_tables(4, examples)]
    while True:
        began = time.process_time()
        with torch.no_grad():
            for table in data:
                for batch in table.train(LOCAL.batch_size, torch.Generator().manual_seed(0)):
                    model(batch)
        yield time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--examples", type=int, default=400)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    fedavg, forward = rounds(algorithms["fedavg"](), options.examples), forwards(options.examples)
    next(fedavg), next(forward)
    figures: dict[str, float | str] = {}
    worst: list[float] = []
    one_forward = statistics.median(next(forward) / next(fedavg) for _ in range(options.repeats))
    for name in options.methods.split(",") if options.methods else algorithms.names():
        method = rounds(algorithms[name](**OPTIONS.get(name, {})), options.examples)
        next(method)
        ratio = statistics.median([1 / (next(fedavg) / next(method)) for _ in range(options.repeats)])
        figures[f"{name}"] = ratio
        if name not in NEEDS:
            figures[f"{name}_needs"] = "not declared"
            continue
        need = NEEDS[name].trained + NEEDS[name].forward * one_forward
        figures[f"{name}_needs"] = need
        figures[f"{name}_excess"] = ratio / need
        worst.append(ratio / need)
        above = "  ABOVE" if ratio / need > ALLOWED else ""
        line = f"{name:>12} {ratio:6.3f} of FedAvg, needs {need:.3f}, {ratio / need:.3f}{above}  {NEEDS[name].why}"
        print(line, file=sys.stderr, flush=True)
    figures["forward_pass"] = one_forward
    finish("methods", ALLOWED, ratio=max(worst, default=0.0), unit="largest time over need", **figures)


if __name__ == "__main__":
    sys.exit(main())
