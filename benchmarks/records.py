"""Records of 100,000 clients, 2 views and 20 measured rounds: bytes at rest, and time beside that of the rounds.

The history is made up, with five metrics a client and view; a round's time is what evaluating one small client of a
784 -> 10 linear model takes in this process, times the clients, and so the least that such a round can take. Reading
is of all values of one metric. Targets: 70 MB, and 2 % of the rounds.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from confed.engines.local import InProcess, Simulation, Workspace
from confed.federation.state import MemoryStore
from confed.results.run_files import line_digest
from confed.results.stored import Recorder, read_records, write_records
from federations import vector_setup, vector_tables
from measure import finish

CLIENTS, ROUNDS, COHORT, EVALUATED = 100_000, 20, 1000, 50
METRICS = ("loss", "accuracy", "accuracy/colour", "accuracy/count", "ece")


def history() -> Iterator[dict[str, Any]]:
    """Lines as a run writes them."""
    rng, names = np.random.default_rng(0), [f"client-{number:06d}" for number in range(CLIENTS)]
    for round_of in range(1, ROUNDS + 1):
        cohort = [names[number] for number in rng.choice(CLIENTS, COHORT, replace=False)]
        sent = dict.fromkeys(cohort, 31400)
        losses = dict(zip(cohort, rng.random(COHORT).tolist(), strict=True))
        yield {
            "event": "round", "round": round_of, "loss": losses, "errors": {}, "bytes_up": sent, "bytes_down": sent,
        }  # fmt: skip
        line: dict[str, Any] = {"event": "evaluation", "round": round_of, "split": "validation"}
        for view in ("global", "personal"):
            rows = rng.random((CLIENTS, len(METRICS))).tolist()
            line[view] = {name: dict(zip(METRICS, row, strict=True)) for name, row in zip(names, rows, strict=True)}
        yield line


def seconds_of(work: Callable[[], object]) -> float:
    """Processor seconds of a piece of work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def seconds_per_client() -> float:
    """Processor seconds of evaluating a client's global and personal model."""
    setup = vector_setup(EVALUATED, 1, vector_tables(EVALUATED))
    workspace = Workspace(setup.model())
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    servers = simulation.start(workspace)
    simulation.evaluate(servers, 0, split="test", most=None)
    return seconds_of(lambda: simulation.evaluate(servers, 0, split="test", most=None)) / EVALUATED


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        journal = folder / "metrics.jsonl"
        recorder, spent = Recorder(), 0.0
        with journal.open("w", encoding="utf-8") as file:
            for line in history():
                text = json.dumps(line)
                file.write(text + "\n")
                began = time.process_time()
                recorder.add({**line, "digest": line_digest(text.encode(), line)})
                spent += time.process_time() - began
        spent += seconds_of(lambda: write_records(folder, recorder.records(), {}))
        size = sum(path.stat().st_size for path in (folder / "records").iterdir())
        read = seconds_of(lambda: read_records(folder).by_round("personal", "accuracy"))
        rounds = ROUNDS * CLIENTS * seconds_per_client()
        finish(
            "records of 100,000 clients, 2 views, 20 rounds", 0.02,
            ratio=spent / rounds, megabytes=size / 1e6, history_megabytes=journal.stat().st_size / 1e6,
            seconds=spent, seconds_of_rounds=rounds, seconds_to_read_a_metric=read,
        )  # fmt: skip


if __name__ == "__main__":
    main()
