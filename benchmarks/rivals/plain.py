"""A careful loop in PyTorch: one network, values loaded in place, one running sum, fused optimisers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from networks import learned, network_of, tensors, train
from work import Work, begun


def rounds(work: Work, model: Any, device: str = "cpu") -> Iterator[dict[str, Tensor]]:
    """The mean of each round."""
    values = learned(model)
    state = {name: parameter.detach().clone() for name, parameter in values.items()}
    for round in range(work.size.rounds):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for place in range(work.size.cohort):
            with torch.no_grad():
                for name, tensor in state.items():
                    values[name].copy_(tensor)
            batches = map(tensors, work.batches(round, place))
            train(model, work.size, ({k: t.to(device) for k, t in batch.items()} for batch in batches))
            with torch.no_grad():
                for name, parameter in values.items():
                    mean[name].add_(parameter, alpha=1 / work.size.cohort)
        state = mean
        yield state


def main() -> None:
    """All rounds."""
    work, _ = begun()
    each = rounds(work, network_of(work))
    last = next(each)
    work.began()
    for state in each:
        last = state
    work.ended({name: tensor.numpy() for name, tensor in last.items()})


if __name__ == "__main__":
    main()
