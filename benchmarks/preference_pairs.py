"""Ways to compare answers: time and error against FedP³'s exact sum over all pairs, forward and backward."""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from confed.losses.distillation import knowledge_preserving
from confed.losses.preference import (
    forgotten,
    most_forgotten,
    pairwise_preference,
    sampled_preference,
    sorted_preference,
)
from measure import finish

BATCH = 32


def logits(answers: int) -> tuple[Tensor, Tensor]:
    """A student that is rather sure of few answers, and a teacher near it."""
    rng = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(BATCH, answers, generator=rng)
    return student.requires_grad_(), student.detach() + torch.randn(BATCH, answers, generator=rng)


def ways() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Name -> loss per example."""
    rng = torch.Generator().manual_seed(1)
    return {
        "all": pairwise_preference,
        "all_linear": lambda s, t: pairwise_preference(s, t, g="linear"),
        "sorted": sorted_preference,
        "sorted_linear": lambda s, t: sorted_preference(s, t, g="linear"),
        "sampled_400": lambda s, t: sampled_preference(s, t, 400, rng),
        "sampled_4000": lambda s, t: sampled_preference(s, t, 4000, rng),
        "filtered_20": lambda s, t: pairwise_preference(s, t, most_forgotten(forgotten(s, t), 20)),
        "kl": lambda s, t: knowledge_preserving(s, t, 2.0),
    }


def main() -> None:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for answers in (44, 1642):
        student, teacher = logits(answers)
        double = (student.detach().double().requires_grad_(), teacher.double())
        exact = pairwise_preference(*double)
        (slope,) = torch.autograd.grad(exact.sum(), double[0])
        times: dict[str, list[float]] = {name: [] for name in ways()}
        for _ in range(7):
            for name, way in ways().items():
                began = time.process_time()
                loss = way(student, teacher)
                (gradient,) = torch.autograd.grad(loss.sum(), student)
                times[name].append(1000 * (time.process_time() - began))
                if name.startswith(("all", "sorted", "sampled")):
                    # Root mean square over examples of the relative error of the sum, and the gradient's.
                    errors = ((loss - exact) / exact).square().mean().sqrt().item()
                    figures[f"{name}_{answers}_error"] = errors
                    figures[f"{name}_{answers}_gradient_error"] = ((gradient - slope).norm() / slope.norm()).item()
        figures |= {f"{name}_{answers}_ms": statistics.median(values) for name, values in times.items()}
    ratio = figures["sorted_1642_ms"] / figures["all_1642_ms"]
    finish("preference_pairs", 1.0, ratio=ratio, **figures)


if __name__ == "__main__":
    sys.exit(main())
