"""Features of frozen layers kept, against a plain loop: 8 clients x 256 examples, 6 rounds x 2 epochs with evaluation.

The plain loop trains and evaluates the same examples in the same batches, and sends each through all layers each time.
Evaluation is that of the global model and of the personal model on a quarter as many validation examples per client,
once a round. The floor is the same plain loop on features given from the start: no look-ups and no checks, only what
cannot be saved. ``--memory`` compares peak memory instead, each of a fresh process: the plain loop, the federation
with features off, and with features on.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.engines.usage import peak_memory
from confed.federation import feature_store as states
from confed.federation.evaluate import Tally, evaluate
from confed.federation.frozen_features import FeatureCounts, FeatureSettings
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.specs import frozen_names
from confed.federation.stages import Staged, frozen_stages
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.tasks.vqa import VQA
from federations import ANSWERS, WORDS, plain_fedavg, vilt_tables
from measure import finish, side_by_side

ROUNDS = 6
LOCAL = Local(epochs=2, batch_size=32, lr=1e-3)
MODELS = {
    "vilt_mini top": (0.55, partial(create_model, "vilt_mini", pretrained=False, trainable="top")),
    "vilt_mini head": (0.55, partial(create_model, "vilt_mini", pretrained=False, trainable="head")),
    "12 layers of 256, top": (0.25, partial(create_model, "vilt_tiny", width=256, layers=12, trainable="top")),
    "vilt_mini all": (1.03, partial(create_model, "vilt_mini", pretrained=False)),
}


EXTRA_MB = 20.0
"""What the federation with features off may hold beyond the plain loop."""


def main() -> None:
    """Times each model, or compares peak memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=1, help="clients trained at once, run.batch_clients")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--only", choices=("plain", "off", "on"), help="print the peak of this process, for --memory")
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    if arguments.memory and not arguments.only:
        for name in arguments.models:
            compare_memory(name, arguments.clients, arguments.examples)
        return
    tables = vilt_tables(arguments.clients, arguments.examples)
    held_out = vilt_tables(arguments.clients, arguments.examples // 4)
    for name in arguments.models:
        target, build = MODELS[name]
        model = partial(build, answers=ANSWERS, vocab_size=WORDS)
        if arguments.only:
            run_only(arguments.only, model, tables, held_out)
            return
        plain = partial(plain_rounds, model(), tables, held_out)
        ours, counts = federation(model, tables, held_out, FeatureSettings(10**9), arguments.at_once)
        without, _ = federation(model, tables, held_out, None, arguments.at_once)
        expected, found, same = plain(), ours(), without()
        seen = counts()
        figures = side_by_side(plain, ours, arguments.repeats)
        floor = side_by_side(plain, floor_rounds(model(), tables, held_out), arguments.repeats) if seen.stage else {}
        finish(
            name, target, **figures, floor=floor.get("ratio"), largest_difference=largest(found, expected),
            largest_difference_from_off=largest(found, same), stage=seen.stage, computed=seen.computed,
            reused=seen.reused, held_mb=seen.held / 2**20, exact=seen.exact, why_not=seen.reason,
        )  # fmt: skip


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two models; a plain mean of several clients rounds otherwise than a running one."""
    return max(float((found[n].double() - t.double()).abs().max()) for n, t in expected.items() if n in found)


def compare_memory(name: str, clients: int, examples: int) -> None:
    """Peak memory of the federation, with features off and on, above the plain loop's."""
    peaks: dict[str, float] = {}
    for kind in ("plain", "off", "on"):
        size = ["--clients", str(clients), "--examples", str(examples)]
        command = [sys.executable, __file__, "--only", kind, "--models", name, *size]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[kind] = json.loads(output)["peak"] / 2**20
    finish(
        f"memory, {name}", EXTRA_MB, ratio=peaks["off"] - peaks["plain"], unit="MB above the plain loop, features off",
        plain_mb=peaks["plain"], extra_mb_with_features=peaks["on"] - peaks["plain"],
    )  # fmt: skip


def run_only(kind: str, build: Callable[[], nn.Module], tables: list[Table], held_out: list[Table]) -> None:
    """All rounds once; prints the peak memory of this process."""
    if kind == "plain":
        plain_rounds(build(), tables, held_out)
    else:
        federation(build, tables, held_out, FeatureSettings(10**9) if kind == "on" else None)[0]()
    print(json.dumps({"peak": peak_memory()}))


def federation(
    build: Callable[[], nn.Module],
    tables: list[Table],
    held_out: list[Table],
    features: FeatureSettings | None,
    at_once: int = 1,
) -> tuple[Callable[[], dict[str, Tensor]], Callable[[], FeatureCounts]]:
    """A function that runs all rounds, each time with nothing kept before, and one that returns its counts."""
    data = {f"{i}": TableData(t, v, t.take(0)) for i, (t, v) in enumerate(zip(tables, held_out, strict=True))}
    setup = Setup(FedAvg(), Members(data), VQA(ANSWERS), LOCAL, build, ROUNDS, features=features, batch_clients=at_once)
    executors, workspace = list[InProcess](), Workspace(setup.build())

    def run() -> dict[str, Tensor]:
        executors.append(InProcess(setup, workspace))
        simulation = Simulation(setup, MemoryStore(), executors[-1])
        servers = simulation.start(workspace)
        for record in simulate(simulation, servers):
            servers = record.servers
            simulation.evaluate(servers, record.round, split="validation")
        return dict(servers["main"].params)

    return run, lambda: executors[-1].features


def plain_rounds(model: nn.Module, tables: list[Table], held_out: list[Table]) -> dict[str, Tensor]:
    """The same rounds as a plain loop."""
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    task = VQA(ANSWERS)

    def evaluated(number: int) -> None:
        evaluate(model, Tally(task), held_out[number].batches(LOCAL.eval_batch_size))

    result = plain_fedavg(
        model, tables, ROUNDS, LOCAL, list(range(len(tables))), after_client=evaluated,
        after_round=lambda: [evaluated(number) for number in range(len(tables))],
    )  # fmt: skip
    model.load_state_dict(start)
    return result


class FromFeatures(nn.Module):
    """The stages of a model behind its frozen ones, for batches with their states.

    Args:
        model: the model.
        cut: number of its frozen stages.
    """

    def __init__(self, model: nn.Module, cut: int) -> None:
        super().__init__()
        self.model, self.cut = model, cut
        self.constants: states.Constants = (None, ())

    def features(self, table: Table) -> Table:
        """A table with the states of its rows in place of pictures."""
        staged: Any = self.model
        found: list[list[Tensor]] = []
        with torch.no_grad():
            for batch in table.batches(LOCAL.batch_size):
                parts = states.packed(staged.forward_stages(None, 0, self.cut, batch), len(batch["index"]))
                assert parts is not None
                found.append(parts[0])
                self.constants = parts[1]
        columns = {f"state{number}": torch.cat(column) for number, column in enumerate(zip(*found, strict=True))}
        none = torch.zeros(1, dtype=torch.uint8)
        return Table(none, torch.zeros(len(table), dtype=torch.int64), {**table.columns, **columns})

    def forward(self, batch: Batch) -> Output:
        """The output of the whole model."""
        staged: Any = self.model
        kept = [batch[name] for name in sorted(batch) if name.startswith("state")]
        return staged.forward_stages(states.unpacked(kept, self.constants), self.cut, len(staged.stages), batch)


def floor_rounds(model: nn.Module, tables: list[Table], held_out: list[Table]) -> Callable[[], object]:
    """A function that runs the rounds of the plain loop behind the frozen stages; their features are made before."""
    assert isinstance(model, Staged)
    cut = min(frozen_stages(model, set(model.state_dict()) - frozen_names(model)), len(model.stages) - 1)
    rest = FromFeatures(model, cut)
    return partial(plain_rounds, rest, *([rest.features(table) for table in own] for own in (tables, held_out)))


if __name__ == "__main__":
    sys.exit(main())
