"""Metrics of FLAIR's test pictures at the fine level: 44,000 x 1,628 scores, each measurement in a process of its own.

Scores as a run keeps them, float32 with labels of uint8; about ten labels of a picture are present, so that hundreds of
classes are rare. ``metrics``: the eight metrics. ``summary``: what ``summary.json`` says of one place: those, every
class by itself, and the same of 17 coarse labels. ``counts``: the counts of thresholds that a round's evaluation adds
up instead, in batches of 128. Limits: 20 seconds and 2 GB of resident memory, scores included.
"""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from measure import finish

ROWS, CLASSES, COARSE = 44_000, 1_628, 17
SECONDS, GIGABYTES = 20.0, 2.0
BATCH = 128


def scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, float32, and labels, uint8, each (rows, classes): frequencies fall as 1 / rank."""
    rng = np.random.default_rng(0)
    share = (10 / np.log(CLASSES) / np.arange(1, CLASSES + 1)).clip(max=0.6).astype(np.float32)
    probabilities = np.empty((ROWS, CLASSES), np.float32)
    truth = np.empty((ROWS, CLASSES), np.uint8)
    for start in range(0, ROWS, 1000):  # in blocks: the limit is on what the metrics need, not on making numbers
        rows = slice(start, min(start + 1000, ROWS))
        truth[rows] = rng.random(truth[rows].shape, dtype=np.float32) < share
        noise = rng.standard_normal(truth[rows].shape, dtype=np.float32)
        logits = np.log(share / (1 - share)) + 1.5 * truth[rows] + noise
        probabilities[rows] = 1 / (1 + np.exp(-logits))
    return torch.from_numpy(probabilities), torch.from_numpy(truth)


def summary(probabilities: torch.Tensor, truth: torch.Tensor) -> dict[str, Any]:
    """What a run that has only the place "test" says of it."""
    from confed.algorithms.fedavg import FedAvg
    from confed.data.examples import FederatedDataset
    from confed.runs.evaluate import Examination, summarise_labels
    from confed.tasks.multilabel import Multilabel

    labels = tuple(map(str, range(CLASSES)))
    coarse = {label: f"group {number % COARSE}" for number, label in enumerate(labels)}
    setup: Any = SimpleNamespace(task=Multilabel(CLASSES), algorithm=FedAvg())
    materials: Any = SimpleNamespace(dataset=FederatedDataset("made up", labels, {}, {}, coarse=coarse))
    tensors = {"probabilities": probabilities, "labels": truth}
    examined = Examination({("unseen", "test", "test"): ({}, tensors)})
    return summarise_labels(setup, materials, examined)["unseen"]


def measure(kind: str) -> None:
    """Prints processor seconds, wall-clock seconds, and resident gigabytes before and at the peak."""
    from confed.engines.usage import peak_memory, reset_peak
    from confed.federation.protocols import Output
    from confed.metrics.multilabel import multilabel_metrics
    from confed.tasks.multilabel import Multilabel

    torch.set_num_threads(1)
    probabilities, truth = scores()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    if kind == "metrics":
        values = multilabel_metrics(probabilities, truth)
    elif kind == "summary":
        values = summary(probabilities, truth)
    else:
        task, total = Multilabel(CLASSES), dict[str, torch.Tensor]()
        for start in range(0, ROWS, BATCH):
            logits = probabilities[start : start + BATCH].logit()
            batch = {"labels": truth[start : start + BATCH].float()}
            for name, value in task.counts(Output(logits, logits), batch).items():
                total[name] = total[name] + value if name in total else value
        values = task.values(total)
    assert all(0 <= value <= 1 for value in values.values() if isinstance(value, float))
    print(time.process_time() - cpu, time.perf_counter() - wall, before / 1e9, peak_memory() / 1e9)


def main() -> None:
    for kind in ("metrics", "summary", "counts"):
        command = [sys.executable, __file__, kind]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=sys.path[0]).stdout
        seconds, wall, before, peak = map(float, output.split())
        finish(
            f"label_{kind}", 1.0, ratio=max(seconds / SECONDS, peak / GIGABYTES), processor_seconds=seconds,
            wall_seconds=wall, gigabytes_of_scores=before, gigabytes_at_the_peak=peak,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1]) if sys.argv[1:2] and not sys.argv[1].startswith("-") else main())
