"""Weighted average of 8 updates of 87 million parameters against one copy of the same bytes."""

import os
import sys
from pathlib import Path

import torch

from confed.engines.usage import keep_freed_memory
from confed.federation.params import Mean
from measure import finish, side_by_side

PARAMETERS, UPDATES = 87_000_000, 8


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does
    size = PARAMETERS // 150
    updates = [{f"t{i}": torch.full((size,), float(u)) for i in range(150)} for u in range(UPDATES)]
    targets = {name: torch.empty_like(tensor) for name, tensor in updates[0].items()}

    def copy() -> None:
        for update in updates:
            for name, tensor in update.items():
                targets[name].copy_(tensor)

    params = dict(targets)

    def average(dtype: torch.dtype) -> None:
        # As a server does it round after round: the new parameters replace the old ones.
        mean = Mean(dtype)
        for number, update in enumerate(updates):
            mean.add(update, 100.0 + number)
        params.update(mean.result(params))

    figures = side_by_side(copy, lambda: average(torch.float32), repeats=3)
    mean, resident = Mean(torch.float32), []
    for number in range(3 * UPDATES):
        mean.add(updates[number % UPDATES], 1.0)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    # The first update makes the accumulator; the 23 that follow must add nothing.
    finish("averaging_fp32", 1.5, **figures, mb_growth_over_23_more_updates=resident[-1] - resident[0])
    del mean
    figures = side_by_side(copy, lambda: average(torch.float64), repeats=2)
    finish("averaging_fp64", float("inf"), **figures)


if __name__ == "__main__":
    sys.exit(main())
