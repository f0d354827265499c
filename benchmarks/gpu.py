"""FedAvg of a ViLT with adapters on a GPU: pictures per second against a plain loop and against the roofline.

Eight clients train one epoch in a round, for batches of 1 to 64: one by one, all at once (``run.batch_clients``),
with features of frozen layers, and with the examples on the device (``run.device_data``). The roofline is the larger of
two times: a step's floating-point operations, counted by ``torch.utils.flop_counter``, at the rate of a large matrix
product measured here, and the bytes of the weights, read in the forward and in the backward pass, at the rate of a copy
measured here. What else a step moves is not in it.

    python benchmarks/gpu.py --device cuda           # ViLT-B/32, pictures of 384
    python benchmarks/gpu.py --device cpu --tiny     # two blocks of width 32: whether everything here works
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.federation.batches import to_device
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local, make_optimizer
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.models.finetuning import Finetuning
from confed.tasks.vqa import VQA
from measure import finish, side_by_side

CLIENTS, ANSWERS, WORDS, LENGTH = 8, 44, 120, 16


def main() -> None:
    """Prints one result per batch size and way to train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="a model of two blocks of width 32")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=8, help="of each client in a round")
    parser.add_argument("--repeats", type=int, default=3)
    arguments, _ = parser.parse_known_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is here: try --device cpu --tiny")
    torch.set_num_threads(1)
    build, side = _model(arguments.tiny)
    rates = peak_rates(arguments.device)
    for batch in arguments.batches:
        compare(build, side, batch, arguments, rates)


def _model(tiny: bool) -> tuple[Callable[[], nn.Module], int]:
    options: dict[str, Any] = {"answers": ANSWERS, "vocab_size": WORDS, "trainable": "adapters"}
    if tiny:
        return partial(create_model, "vilt_tiny", **options, peft=Finetuning(reduction=8)), 64
    return partial(create_model, "vilt_b32", **options), 384


def compare(
    build: Callable[[], nn.Module], side: int, batch: int, arguments: argparse.Namespace, rates: tuple[float, float]
) -> None:
    """One batch size: the plain loop beside each way to train."""
    device, images = torch.device(arguments.device), CLIENTS * batch * arguments.steps
    tables = _tables(batch * arguments.steps, side)
    data = Members({f"{i}": TableData(t, t.take(0), t.take(0)) for i, t in enumerate(tables)})
    local = Local(epochs=1, batch_size=batch, lr=1e-3)
    setup = Setup(FedAvg(), data, VQA(ANSWERS), local, build, 1, device=arguments.device, keep_personal=False)
    model = build().to(device)
    floor = roofline(model, tables[0].batch(torch.arange(batch)), device, rates)
    plain = partial(plain_round, model, tables, local, device)
    ways = {
        "unbatchable_reason": setup,
        "at_once": replace(setup, batch_clients=CLIENTS),
        "features": replace(setup, features=FeatureSettings(4 * 10**9)),
        "data_on_device": replace(setup, device_data=4 * 10**9),
    }
    for name, own in ways.items():
        ours, told = _federation(own)
        figures = side_by_side(plain, ours, arguments.repeats, partial(_now, device))
        executor = told()
        why = executor.unbatchable_reason if name == "at_once" else executor.features.reason
        finish(
            f"gpu, batches of {batch}, {name}", 1.03 if name == "unbatchable_reason" else 1.0, **figures,
            images_per_second=images / figures["ours_seconds"], plain_per_second=images / figures["plain_seconds"],
            roofline_per_second=batch / floor, why_not=why,
            reused=executor.features.reused, bytes_on_device=executor.device_data.held,
        )  # fmt: skip


def _now(device: torch.device) -> float:
    """Wall-clock time once a GPU is done; of a processor its own time."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _tables(examples: int, side: int) -> list[Table]:
    rng = torch.Generator().manual_seed(0)
    tables: list[Table] = []
    for _ in range(CLIENTS):
        columns = {
            "text": torch.randint(5, WORDS, (examples, LENGTH), generator=rng),
            "text_mask": torch.ones(examples, LENGTH, dtype=torch.int64),
            "label": torch.randint(0, ANSWERS, (examples,), generator=rng),
        }
        images = torch.randint(0, 256, (examples, 3, side, side), generator=rng).to(torch.uint8)
        tables.append(Table(images, torch.arange(examples), columns))
    return tables


def _federation(setup: Setup) -> tuple[Callable[[], object], Callable[[], InProcess]]:
    """A function that runs a round, whose executor lives on as in a run, and one that returns the executor."""
    workspace = Workspace(setup.build(), setup.device)
    executor = InProcess(setup, workspace)
    simulation = Simulation(setup, MemoryStore(), executor)
    start = simulation.start(workspace)
    return lambda: list(simulate(simulation, start)), lambda: executor


def plain_round(model: nn.Module, tables: list[Table], local: Local, device: torch.device) -> dict[str, Tensor]:
    """A round as a careful researcher writes it."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in learning.items()}
    mean: dict[str, Tensor] = {}
    for number, table in enumerate(tables):
        with torch.no_grad():
            for name, p in learning.items():
                p.copy_(start[name])
        model.train()
        optimizer = make_optimizer(list(learning.values()), local)
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(number))
        for rows in order.split(local.batch_size):
            batch = to_device(table.batch(rows), device)
            loss = functional.cross_entropy(model(batch).logits, batch["label"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        for name, p in learning.items():
            part = p.detach() / len(tables)
            mean[name] = mean[name] + part if name in mean else part
    with torch.no_grad():
        for name, p in learning.items():
            p.copy_(start[name])
    return mean


def peak_rates(device: str) -> tuple[float, float]:
    """Floating-point operations per second of a large matrix product, and bytes per second of a copy (both ways)."""
    side = 4096 if device == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    source, target = (torch.empty(2**26 if device == "cuda" else 2**22, device=device) for _ in range(2))
    product = _fastest(lambda: torch.mm(a, b), torch.device(device))
    copy = _fastest(lambda: target.copy_(source), torch.device(device))
    return 2 * side**3 / product, 2 * source.nbytes / copy


def _fastest(function: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(6):
        began = _now(device)
        function()
        times.append(_now(device) - began)
    return min(times)


def roofline(model: nn.Module, examples: dict[str, Tensor], device: torch.device, rates: tuple[float, float]) -> float:
    """Least seconds of a step; see the module."""
    batch = to_device(examples, device)
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(model(batch).logits, batch["label"]).backward()
    model.zero_grad(set_to_none=True)
    weights = sum(p.nbytes for p in model.parameters())
    return max(counter.get_total_flops() / rates[0], 2 * weights / rates[1])


if __name__ == "__main__":
    sys.exit(main())
