r"""Differential privacy of single examples in training (DP-SGD): per-example clipping and noise on every gradient.

Abadi et al., "Deep learning with differential privacy", CCS 2016.

Notation: g_i the gradients of example i, all tensors together; C the ``clip``, z the ``noise`` multiplier; B the
client's batch size. A step follows

    (1 / B) (sum over the batch of g_i min(1, C / ||g_i||_2) + N(0, (z C)^2 I)).

**Who is protected.** One example. Where it is *replaced* by another one the sum moves by at most 2 C, where its
gradient is replaced by zeros ("zero-out") by at most C. B is a constant: a last batch that is smaller is divided by it
too.

**Composition.** Every step with the example in its batch is a Gaussian mechanism. Batches are made by shuffling, so
that an example is in one batch of every epoch, and its steps are as many as epochs in all rounds in which its client
was asked. The steps of other batches read what was released before and not the example: they cost it nothing, and
nothing is claimed for sampling. What follows from noised gradients (optimiser states, models, averages) has the same
guarantee.

**What it does not cover**: numbers of examples, evaluations, and losses, which a method must therefore not send.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from confed.federation.keyed_noise import Noise, noise_for
from confed.privacy.accountant import Adjacency, epsilon


@dataclass(frozen=True)
class ExamplePrivacy:
    """Clipping and noise on gradients of examples.

    Attributes:
        clip: largest L2 norm C of an example's gradients, over all tensors together.
        noise: noise multiplier z; the standard deviation is ``noise * clip`` in every coordinate of a batch's sum. 0
            clips only, which guarantees nothing.
        delta: of the (epsilon, delta) that reports give; well below one over a client's number of examples.
        adjacency: what two neighbouring data sets differ in: an example is another one, or its gradient is zero.
        repeatable: noise is a function of the run's seed, so that a run can be repeated; a party that knows the seed
            can subtract it. False: the operating system draws every number. Across machines a site makes it from a
            secret of its own in either case (:mod:`confed.federation.keyed_noise`).
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    clip: float = 1.0
    noise: float = 0.0
    delta: float = 1e-5
    adjacency: Adjacency = "replace"
    repeatable: bool = True

    def __post_init__(self) -> None:
        where = "algorithm.example_privacy"
        if not 0 < self.clip < math.inf:
            raise ValueError(f"{where}.clip must be positive and finite, got {self.clip}")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"{where}.noise must be finite and not negative, got {self.noise}")
        if not 0 < self.delta < 1:
            raise ValueError(f"{where}.delta must lie in (0, 1), got {self.delta}")
        if self.adjacency not in get_args(Adjacency):
            raise ValueError(f"{where}.adjacency must be one of {', '.join(get_args(Adjacency))}, got {self.adjacency}")

    def release(self, gradients: Sequence[Tensor], batch_size: int, rng: Noise) -> list[Tensor]:
        """The noised mean of clipped gradients, tensor by tensor, without the leading dimension."""
        flat = torch.cat([g.flatten(1) for g in gradients], dim=1).double()
        norms: Tensor = torch.linalg.vector_norm(flat, dim=1)  # pyright: ignore
        total = (self.clip / norms.clamp(min=self.clip)) @ flat
        if self.noise > 0:
            total = total + self.noise * self.clip * noise_for(total, rng, torch.float64, self.clip, self.noise).to(
                total.device
            )
        parts = (total / batch_size).split([g[0].numel() for g in gradients])
        return [gradient_sum.view(g.shape[1:]).to(g.dtype) for gradient_sum, g in zip(parts, gradients, strict=True)]

    def epsilon(self, epochs: int) -> float:
        """Epsilon of an example after so many passes over its client's examples; infinity without noise."""
        return epsilon(self.noise, epochs, self.delta, self.adjacency)


@runtime_checkable
class ProtectsExamples(Protocol):
    """A method that trains with noise on gradients of examples, in every step of ``fit``."""

    @property
    def example_privacy(self) -> ExamplePrivacy: ...

    def claimed_epsilon(self, rounds: int) -> Mapping[str, float]:
        """Other ways of counting the same noise: whose they are, and the epsilon that they give."""
        ...
