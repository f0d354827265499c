"""Vision-language models on a GPU: all that is to be measured there, with one command.

For SmolVLM-256M's and Qwen3-VL-2B's sizes, with random weights: a step of FedAvg of LoRA against the plain loop of
``transformers`` and ``peft``, a round on a base of 4 bits against one of bf16, tokens written in a second, the GPU's
peak memory with 1, 8 and 64 clients on both bases, and, where there are two GPUs, a base spread over them against one.

    python benchmarks/vlm_gpu.py                    # both sizes on the GPU; --size 256m or 2b for one
    python benchmarks/vlm_gpu.py --device cpu       # the same parts of two small models, to try the script
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from confed.engines.local import simulate
from measure import finish, side_by_side
from vlm import SIZES, clock_of, federation, finished, memory, plain_loop, tokens_per_second, write_model

BASES = ("bf16", "nf4")


def rounds_of(folder: Path, name: str, device: str, base: str, **options: Any) -> tuple[Any, Any, Any]:
    """A round of one client, its workspace and its examples."""
    simulation, workspace, table = federation(folder, SIZES[name], base, device, **options)
    start = simulation.start(workspace)
    return finished(lambda: list(simulate(simulation, start)), device), workspace, table


def peak_of(device: str) -> dict[str, float]:
    """Peak memory of each GPU so far, in MB."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    return {f"gpu_{number}_mb": torch.cuda.max_memory_allocated(number) / 1e6 for number in range(count)}


def measured(folder: Path, name: str, device: str) -> None:
    """Prints all figures of one size."""
    size, clock = SIZES[name], clock_of(device)
    write_model(folder, size)
    memory(folder, name, device, BASES)
    ours, workspace, table = rounds_of(folder, name, device, "bf16")
    plain = plain_loop(folder, size, "bf16", device)
    finish(f"vlm_{name}_{device}_step_bf16", 1.03, **side_by_side(plain, ours, clock=clock))
    del plain
    quantised, small, _ = rounds_of(folder, name, device, "nf4")
    finish(f"vlm_{name}_{device}_nf4_against_bf16", float("inf"), **side_by_side(ours, quantised, clock=clock))
    written = {
        f"{base}_tokens_per_second": tokens_per_second(space, table, size, device)
        for base, space in zip(BASES, (workspace, small), strict=True)
    }
    finish(f"vlm_{name}_{device}_writing", float("inf"), **written)
    if device == "cuda" and torch.cuda.device_count() > 1:
        del quantised, small
        spread, _, _ = rounds_of(folder, name, device, "bf16", device_map="auto")
        figures = side_by_side(ours, spread, clock=clock)
        finish(f"vlm_{name}_{device}_two_gpus", float("inf"), **figures, **peak_of(device))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=("256m", "2b"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: --device cpu tries the script on two small models")
    torch.set_num_threads(1)
    for name in ("256m", "2b") if arguments.size is None else (arguments.size,):
        with tempfile.TemporaryDirectory() as place:
            measured(Path(place), name if device == "cuda" else f"{name}_tiny", device)


if __name__ == "__main__":
    sys.exit(main())
