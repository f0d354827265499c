"""Everything that is measured on a GPU, with one command: about ten minutes on one card.

    python benchmarks/gpu.py --write                 # on a card; the table of docs/speed.md is written anew
    python benchmarks/gpu.py --small --device cpu    # the same parts at small sizes, to try the script

W1 and W5 of ``rivals/work.py``, at their own size and with 12 blocks of width 768: a round against the plain loop one
by one, all clients at once, with ``run.compile``, and with examples on the device; beside the roofline, which is the
larger of the time that a step's operations take at the rate of a large matrix product and the time that its weights,
read in both passes, take at the rate of a copy, both measured here. What the work makes of the values is compared with
the same work on the processor. W4 at the sizes of SmolVLM-256M and Qwen3-VL-2B, with random weights: a step against
``transformers`` and ``peft``, a base of 4 bits against bf16, tokens written in a second, peak memory with 1, 8 and 64
clients, and two GPUs where there are two.
"""

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, f"{Path(__file__).parent / 'rivals'}")

from confed.engines.executor import InProcess
from confed.engines.local import Setup, Simulation, Workspace, simulate
from confed.federation.state import MemoryStore
from measure import finish, side_by_side
from networks import final_loss, learned, network_of, tensors
from ours import federation as federation_of
from plain import rounds as plain_rounds
from vlm import CLIENTS, clock_of, federation, finished, memory, plain_loop, tokens_per_second, write_model
from vlm import SIZES as VLM_SIZES
from work import SIZES, Work, prepare

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
BEGIN, END = "<!-- gpu.py writes from here -->\n", "<!-- to here -->\n"
ROWS: list[str] = []
"""Lines of the table."""


def told(name: str, target: float, **figures: Any) -> None:
    """Prints a result and keeps its line of the table."""
    finish(name, target, **figures)
    ratio = (
        f"{figures['ratio']:.2f} ({figures['lowest']:.2f} to {figures['highest']:.2f})" if "lowest" in figures else "–"
    )
    beside = [f"{key} {value:.4g}" for key, value in figures.items() if key in SHOWN or key.endswith("_tokens")]
    ROWS.append(f"| {name} | {ratio} | {', '.join(beside)} |\n")


SHOWN = (
    "examples_per_second",
    "roofline_per_second",
    "difference_from_processor",
    "1_clients",
    "8_clients",
    "64_clients",
)


# W1 and W5: a round against the plain loop ------------------------------------------------------------------------


def measured(name: str, device: str, repeats: int, rates: tuple[float, float]) -> None:
    """One work, each way to train beside the plain loop."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        prepare(name, folder)
        work = Work(folder)
        examples = work.size.cohort * work.size.examples
        model = network_of(work).to(device)
        floor = roofline(work, model, device, rates)
        plain = finished(lambda: list(plain_rounds(work, model, device)), device)
        ways: dict[str, dict[str, Any]] = {
            "one by one": {}, "at once": {"batch_clients": work.size.cohort}, "compiled": {"compile": True},
            "examples on the device": {"device_data": 4 * 10**9},
        }  # fmt: skip
        for way, options in ways.items():
            run, executor = runner(setup_of(work, device, options))
            losses = [loss_after(work, setup_of(work, place, options)) for place in (device, "cpu")]
            figures = side_by_side(plain, finished(run, device), repeats, clock_of(device))
            told(
                f"{name}, {way}", 1.03, **figures, examples_per_second=examples / figures["ours_seconds"],
                roofline_per_second=work.size.batch / floor, difference_from_processor=abs(losses[0] / losses[1] - 1),
                why_not=executor.unbatchable_reason if way == "at once" else executor.features.reason,
            )  # fmt: skip


def setup_of(work: Work, device: str, options: Mapping[str, Any]) -> Setup:
    """The work on a device, with a model of its own."""
    return replace(federation_of(work, 1, False), device=device, **options)


def runner(setup: Setup) -> tuple[Callable[[], object], InProcess]:
    """A function that runs all rounds, and the executor, which lives on as in a run."""
    workspace = Workspace(setup.model(), setup.device)
    executor = InProcess(setup, workspace)
    simulation = Simulation(setup, MemoryStore(), executor)
    start = simulation.start(workspace)
    return lambda: list(simulate(simulation, start)), executor


def loss_after(work: Work, setup: Setup) -> float:
    """Loss on the processor after the work on a device."""
    workspace = Workspace(setup.model(), setup.device)
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    *_, last = simulate(simulation, simulation.start(workspace))
    values = last.servers["main"].params
    return final_loss(work, {name.removeprefix("network."): t.cpu().numpy() for name, t in values.items()})


def peak_rates(device: str) -> tuple[float, float]:
    """Floating-point operations per second of a large matrix product, and bytes per second of a copy (both ways)."""
    side, count = (4096, 2**26) if device == "cuda" else (512, 2**20)
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    source, target = (torch.empty(count, device=device) for _ in range(2))
    product, copy = fastest(lambda: torch.mm(a, b), device), fastest(lambda: target.copy_(source), device)
    return 2 * side**3 / product, 2 * source.nbytes / copy


def fastest(function: Callable[[], object], device: str) -> float:
    """The shortest of several times, wall-clock."""
    run, times = finished(function, device), list[float]()
    for _ in range(6):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def roofline(work: Work, model: Any, device: str, rates: tuple[float, float]) -> float:
    """Least seconds of a step; see the module."""
    batch = {name: tensor.to(device) for name, tensor in tensors(next(work.batches(0, 0))).items()}
    with FlopCounterMode(display=False) as counter:
        model.loss(**batch).backward()
    model.zero_grad(set_to_none=True)
    weights = sum(p.nbytes for p in model.parameters()) + sum(p.nbytes for p in learned(model).values())
    return max(counter.get_total_flops() / rates[0], weights / rates[1])


# W4: vision-language models with LoRA -----------------------------------------------------------------------------

BASES = ("bf16", "nf4")


def vlm_round(folder: Path, name: str, device: str, base: str, **options: Any) -> tuple[Any, Any, Any]:
    """A round of one client, its workspace and its examples."""
    simulation, workspace, table = federation(folder, VLM_SIZES[name], base, device, **options)
    start = simulation.start(workspace)
    return finished(lambda: list(simulate(simulation, start)), device), workspace, table


def measured_vlm(name: str, device: str, repeats: int) -> None:
    """All figures of one size."""
    size, clock = VLM_SIZES[name], clock_of(device)
    compare = partial(side_by_side, repeats=repeats, clock=clock)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder, size)
        memory(folder, name, device, BASES, told, (1, 8) if name.endswith("_tiny") else CLIENTS)
        ours, workspace, table = vlm_round(folder, name, device, "bf16")
        told(f"W4, {name}, bf16", 1.03, **compare(plain_loop(folder, size, "bf16", device), ours))
        quantised, small, _ = vlm_round(folder, name, device, "nf4")
        told(f"W4, {name}, NF4 against bf16", float("inf"), **compare(ours, quantised))
        spaces = zip(BASES, (workspace, small), strict=True)
        written = {f"{base}_tokens": tokens_per_second(space, table, size, device) for base, space in spaces}
        told(f"W4, {name}, tokens written in a second", float("inf"), **written)
        if device == "cuda" and torch.cuda.device_count() > 1:
            del quantised, small
            spread, _, _ = vlm_round(folder, name, device, "bf16", device_map="auto")
            told(f"W4, {name}, two GPUs against one", float("inf"), **compare(ours, spread))


# The command ------------------------------------------------------------------------------------------------------


def works(small: bool) -> Iterator[str]:
    """Names of the works; those of width 768 are added, and small ones are cut."""
    for name in ("W1", "W5"):
        if small:
            few = {"network": "tiny_vl", "clients": 2, "cohort": 2, "examples": 16, "batch": 8, "rounds": 1}
            SIZES[name] = replace(SIZES[name], **few)
        else:
            SIZES[name] = replace(SIZES[name], rounds=2)
            SIZES[f"{name} of width 768"] = replace(SIZES[name], network="base_vl", rounds=1)
        yield from (known for known in list(SIZES) if known.startswith(name))


def main() -> None:
    """Measures everything, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="two clients, two blocks, two small language models")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table of docs/speed.md")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is here: try --small --device cpu")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False  # as by default, and as the processor counts
    rates = peak_rates(given.device)
    for name in works(given.small):
        measured(name, given.device, given.repeats, rates)
    for name in ("256m", "2b"):
        measured_vlm(f"{name}_tiny" if given.small else name, given.device, given.repeats)
    card = torch.cuda.get_device_name() if given.device == "cuda" else "a processor, to try the script"
    head = f"Measured on {datetime.date.today()} on {card}, torch {torch.__version__} (`gpu.py`):\n\n"
    text = f"{BEGIN}{head}| | ratio | |\n|---|---:|---|\n{''.join(ROWS)}{END}"
    print(text)
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(before + text + after, encoding="utf-8")


if __name__ == "__main__":
    main()
