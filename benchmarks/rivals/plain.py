"""A careful loop in PyTorch: one network, values loaded in place, one running sum, fused optimisers."""

import torch

from networks import learned, network_of, tensors, train
from work import begun


def main() -> None:
    """All rounds."""
    work, _ = begun()
    model = network_of(work)
    values = learned(model)
    state = {name: parameter.detach().clone() for name, parameter in values.items()}
    for round in range(work.size.rounds):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for place in range(work.size.cohort):
            with torch.no_grad():
                for name, tensor in state.items():
                    values[name].copy_(tensor)
            train(model, work.size, map(tensors, work.batches(round, place)))
            with torch.no_grad():
                for name, parameter in values.items():
                    mean[name].add_(parameter, alpha=1 / work.size.cohort)
        state = mean
        if not round:
            work.began()
    work.ended({name: tensor.numpy() for name, tensor in state.items()})


if __name__ == "__main__":
    main()
