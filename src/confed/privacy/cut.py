r"""Differential privacy on the cut of split learning: rows are clipped, noised and, if wanted, freed of duplicates.

Notation: v (B, D) crosses the cut, one row per example; C is ``clip``, s the ``noise`` multiplier. What is sent is

    v~_i = v_i min(1, C / ||v_i||_2) + z_i,    z_i ~ N(0, (s C)^2 I_D),

which is the Gaussian mechanism (Dwork and Roth, "The algorithmic foundations of differential privacy", 2014, appendix
A; Abadi et al., "Deep learning with differential privacy", 2016, for the clipping) applied to each row by itself.

**Sensitivity.** A clipped row lies in a ball of radius C, so its distance to any other is at most 2 C: where one
example is *replaced* by another the multiplier that counts is s / 2. Where an example is replaced by a row of zeros
("zero-out", the counterpart of add/remove for messages of a fixed shape; Kairouz et al., "Practical and private (deep)
learning without sampling or shuffling", 2021) the distance is at most C and s itself counts. Rows are released one by
one, so every receiver, however it combines them, has this guarantee about each example ("local" privacy).

**Composition.** An example is in one batch per epoch, hence each kind of row is released once per epoch: BiCSL's
v_MHA and v_APN make two releases per example and epoch. ``confed.privacy.accountant`` adds them up. Shuffling and
batching are not counted in favour of privacy, because the receiver sees which row belongs to which step.

**What the guarantee needs.** (1) A row depends on its own example only: no batch normalisation on the client's side of
the cut (:func:`refuse_mixing`). (2) The client's part is frozen. A part that learns carries what it learnt from an
example into the later rows of all others, even if its weights never leave the client: the epsilon then covers each row
given the weights, and neither the weights nor the losses that clients report have a guarantee. (3) No other party can
make the noise again. In the simulator it is a function of the run's seed, so that runs can be repeated, and a party
that knows the seed can subtract it. At a site of a federation across machines it is a function of a secret of the
site, of the rows, and of the messages that they follow from (``Client.fixed_noise``): a request that comes again, with
the same messages before it, gets the same rows with the same noise, so that a server cannot average it away by asking
twice. A server that sends *other* messages, such as a model that differs in one bit, gets rows with noise of their own;
each of these is one more release, which the composition above does not count. (4) Gaussian numbers in floating point
are an approximation (Mironov, "On significance of the least significant bits for differential privacy", 2012).

**Gradients.** Where rows that go up are noised, gradients that come back are a function of what the server already has
and cost nothing more. Where the client computes the loss (split learning whose top is at the client), the gradients it
sends up tell of the labels: ``gradient_clip`` and ``gradient_noise`` treat their rows in the same way, and they are one
more release per epoch. Rows of gradients that a loss over the whole batch produces depend on all examples of the batch;
noise on them carries no guarantee for one example by itself.

**Duplicates.** Without noise, equal answers are equal rows, and a server can count them. Jitter below the distance of
two different answers hides nothing: rows of one answer still lie together. Sending each distinct answer once with an
index of who uses it hides nothing either: the index is the grouping. ``distinct`` lets an answer be in a batch at most
once, so that in a batch there is nothing to count. It costs the examples whose answer came before in their batch (they
are drawn again in other batches), it changes the mix of answers that is learnt, and it does not stop a server that
recognises an answer's row from one step to the next.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from confed.federation.keyed_noise import Noise, noise_for


@dataclass(frozen=True)
class CutPrivacy:
    """Protection of rows that cross the cut of split learning; none by default.

    Attributes:
        clip: largest L2 norm of an example's row of activations, or None for no limit.
        noise: noise multiplier of activations; the standard deviation is ``noise * clip`` in every coordinate.
        gradient_clip: largest L2 norm of an example's row of gradients, or None. In units of the gradients as they
            are sent: of a mean over B examples they are B times smaller than of a sum.
        gradient_noise: noise multiplier of gradients.
        distinct: an answer is in a batch at most once (see the module's text for its cost).
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    clip: float | None = None
    noise: float = 0.0
    gradient_clip: float | None = None
    gradient_noise: float = 0.0
    distinct: bool = False

    def __post_init__(self) -> None:
        for of, clip, noise in (("", self.clip, self.noise), ("gradient_", self.gradient_clip, self.gradient_noise)):
            if clip is not None and not 0 < clip < float("inf"):
                raise ValueError(f"privacy.{of}clip must be positive and finite, got {clip}")
            if not 0 <= noise < float("inf"):
                raise ValueError(f"privacy.{of}noise must be finite and not negative, got {noise}")
            if noise > 0 and clip is None:
                raise ValueError(f"privacy.{of}noise is in units of privacy.{of}clip, which must be given; got None")

    @property
    def off(self) -> bool:
        """Whether everything passes as it is."""
        return self == CutPrivacy()

    def activations(self, v: Tensor, rng: Noise) -> Tensor:
        """Rows as they are sent, of the same shape, dtype and device; ``v`` itself where nothing is set.

        The result is a differentiable function of ``v``: a client keeps it and starts its backward pass there, so
        that the gradients which come back are taken through the clipping.
        """
        return _release(v, self.clip, self.noise, rng)

    def gradients(self, g: Tensor, rng: Noise) -> Tensor:
        """Rows of gradients as they are sent; otherwise as :meth:`activations`."""
        return _release(g, self.gradient_clip, self.gradient_noise, rng)

    def rows(self, labels: Tensor) -> Tensor | None:
        """Which examples of a batch are sent: positions (int64, ascending), or None for all of them."""
        return first_of_each(labels) if self.distinct else None


def refuse_mixing(privacy: CutPrivacy, layers: nn.Module) -> None:
    """Check that no layer before the noise mixes the examples of a batch: its epsilon would be of no single row."""
    if not (privacy.noise or privacy.gradient_noise):
        return
    for name, layer in layers.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
            raise ValueError(
                f"algorithm.privacy noises rows that each depend on one example only, and {name or 'the model'} "
                f"({type(layer).__name__}) normalises over the batch: take a model without batch normalisation on the "
                "client's side, or one that keeps it frozen"
            )


def first_of_each(labels: Tensor) -> Tensor:
    """Positions of the first occurrence of every distinct value, ascending, int64."""
    inverse = labels.unique(return_inverse=True)[1]
    positions = torch.arange(len(labels), device=labels.device)
    first = torch.full((len(labels),), len(labels), dtype=torch.int64, device=labels.device)
    first = first.scatter_reduce(0, inverse, positions, "amin")
    return first[first < len(labels)].sort().values


def _release(rows: Tensor, clip: float | None, noise: float, rng: Noise) -> Tensor:
    if clip is None:
        return rows
    # Norms of half-precision rows overflow; and a norm below the bound must neither scale nor divide by zero.
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    norms = torch.linalg.vector_norm(wide.flatten(1), dim=1).clamp(min=clip)  # pyright: ignore
    sent = wide * (clip / norms).reshape(-1, *[1] * (rows.ndim - 1))
    if noise > 0:
        sent = sent + (noise * clip) * noise_for(rows, rng, wide.dtype, clip, noise).to(rows.device)
    return sent.to(rows.dtype)


@runtime_checkable
class ProtectsCut(Protocol):
    """A method of split learning with a protection of the rows that it sends."""

    @property
    def privacy(self) -> CutPrivacy: ...


def cut_privacy(algorithm: object) -> CutPrivacy:
    """The protection of a method's rows at the cut; none for a method without one."""
    return algorithm.privacy if isinstance(algorithm, ProtectsCut) else CutPrivacy()
