"""A FedDAT step against a step of plain adapters, in time and memory: naive, in turn, and both branches in one pass.

``naive`` is the released order with nothing shared: three forward and two backward passes over the whole model.
All kinds take turns in one run; times are processor time. ``--large`` measures a ViLT of 6 blocks and width 256 instead
of the mini ViLT.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from confed.federation.families.branches import Branches
from confed.federation.protocols import Batch
from confed.losses.distillation import divergence
from confed.models.vilt import vilt_mini, vilt_tiny
from confed.tasks.vqa import VQA
from measure import finish

SHARED, TEACHER = {"adapter": 1.0}, {"anchor": 0.5, "local": 0.5}
ANSWERS, WORDS, BATCH = 100, 200, 32
Losses = Callable[[Batch], Iterator[Tensor]]


def kinds(model: Any, task: VQA) -> Mapping[str, Losses]:
    """The losses of a batch, per way of computing them; settings of the preset "code"."""
    branches = Branches(model, "FedDAT", task)

    def loss(output: Any, batch: Batch, teacher: Tensor) -> Tensor:
        return (task.loss(output, batch) + divergence(output.logits, teacher, 3.0)) / 2

    def whole(batch: Batch, blend: Mapping[str, float]) -> Any:
        with model.adapters.using(blend):
            return model(batch)

    def plain(batch: Batch) -> Iterator[Tensor]:
        yield task.loss(whole(batch, SHARED), batch)

    def naive(batch: Batch) -> Iterator[Tensor]:
        with torch.no_grad():
            teacher = whole(batch, TEACHER).logits
        output = whole(batch, SHARED)
        yield loss(output, batch, teacher)
        yield loss(whole(batch, TEACHER), batch, output.logits)

    def sequential(batch: Batch) -> Iterator[Tensor]:
        state = branches.begin(batch)
        first = branches.run(state, SHARED)
        second, again = branches.answered(state, TEACHER)
        yield loss(first, batch, second.logits)
        assert again is not None
        yield loss(again(), batch, first.logits)

    def simultaneous(batch: Batch) -> Iterator[Tensor]:
        one, other = branches.together(branches.begin(batch), SHARED, TEACHER)
        yield loss(one, batch, other.logits) + loss(other, batch, one.logits)

    return {"adapter": plain, "naive": naive, "sequential": sequential, "simultaneous": simultaneous}


def run(model: nn.Module, losses: Losses, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    for loss in losses(batch):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # pyright: ignore
        optimizer.step()


def peak(work: Callable[[], None]) -> float:
    """MiB that a step holds at once beyond what there was before, by the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = highest = 0
    for event in record.profiler.kineto_results.events():  # pyright: ignore
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest / 2**20


def main() -> None:
    torch.set_num_threads(1)
    large = "--large" in sys.argv
    if large:
        size: Any = {"width": 256, "layers": 6, "attention_heads": 4, "image_size": 128}
        model: Any = vilt_tiny(ANSWERS, WORDS, trainable="adapters", **size)
    else:
        model = vilt_mini(ANSWERS, WORDS + 200, trainable="adapters", pretrained=False)
    for name in ("local", "anchor"):
        model.adapters.add(name, torch.Generator().manual_seed(1))
    for name, parameter in model.named_parameters():
        if ".anchor." in name:
            parameter.requires_grad_(False)
    side = 128 if large else 64
    batch = {
        "image": torch.randint(0, 256, (BATCH, 3, side, side), dtype=torch.uint8),
        "text": torch.randint(1, WORDS, (BATCH, 14)),
        "text_mask": torch.ones(BATCH, 14, dtype=torch.int64),
        "label": torch.randint(0, ANSWERS, (BATCH,)),
    }
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-4, fused=True)
    ways = kinds(model, VQA(ANSWERS))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(6 if large else 31):
        for name, losses in ways.items():
            begin = time.process_time()
            run(model, losses, batch, optimizer)
            if repeat:
                times[name].append(time.process_time() - begin)
    memory = {name: peak(lambda losses=losses: run(model, losses, batch, optimizer)) for name, losses in ways.items()}
    ratios = {n: sorted(o / p for o, p in zip(t, times["adapter"], strict=True)) for n, t in times.items()}
    figures: dict[str, Any] = {f"{n}_seconds": median(t) for n, t in times.items()}
    figures |= {f"{n}_ratio": median(r) for n, r in ratios.items() if n != "adapter"}
    figures |= {f"{n}_mib": m for n, m in memory.items()}
    simultaneous = ratios["simultaneous"]
    finish(
        "feddat" + ("_large" if large else ""),
        2.0,
        ratio=median(simultaneous),
        lowest=simultaneous[0],
        highest=simultaneous[-1],
        **figures,
    )


if __name__ == "__main__":
    sys.exit(main())
