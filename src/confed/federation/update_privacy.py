"""Differential privacy of whole updates: clipping, and noise at the client or the server.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR 2018 (DP-FedAvg,
Algorithm 1: updates of bounded norm, a sum with a fixed denominator, Gaussian noise); Geyer, Klein and Nabi,
"Differentially private federated learning: a client level perspective", 2017; Dwork and Roth, "The algorithmic
foundations of differential privacy", 2014, appendix A (the Gaussian mechanism).

Notation: w what a client received, x_k what it has after training, d_k = x_k - w its update over all shared
floating-point tensors together, C the ``clip``, z the ``noise`` multiplier, m the number of clients asked.

    clipping     d_k <- d_k min(1, C / ||d_k||_2)
    at "client"  x_k <- w + d_k + N(0, (z C)^2 I)                   the server sees no update without noise
    at "server"  sum over k of (w + d_k) / m + N(0, (z C / m)^2 I)  who sees the models that the server hands out

**Who is protected.** One client with all its data. Where it is *replaced* by another client, the sum of the updates
moves by at most 2 C; where its update is replaced by none ("zero-out"), by at most C.

**Weights.** At the server every client counts the same (whatever the method says) and the sum is divided by the
number of clients *asked*; one that fails counts with an update of zero. With weights by numbers of examples the
sensitivity of the mean would be C max_k N_k / sum_j N_j, which depends on the data of all clients, and the numbers are
what a client says of itself. At the client the weights do not matter: what is sent is private already.

**Rounding.** Updates are clipped and noised in float64 and rounded once, at the end, to what travels. With noise that
rounding is a function of what was released already, and costs nothing. Without, a server that hands out huge values
could have it lengthen an update (one unit in the last place of w may be as large as a coordinate of d_k), so the norm
is taken again after it, and coordinates that it moved beyond d_k are rounded towards w where that is needed.

**Tensors that only some clients send.** The released object is the vector of sums, name by name; the updates of one
client lie in a ball of radius C over all its names together, so every sum gets noise of z C, and is then divided by
the number of clients that were asked for this name.

**Where the noise is drawn.** The server adds N(0, (z C)^2 / m) to each of the m updates rather than N(0, (z C)^2) to
their sum: the same distribution, and the method that takes the mean need not know of it.

**What the guarantee does not cover.** Numbers of examples, which are sent in the clear; what a method sends beside
``fit``; evaluations (a site has its own policy for these, :mod:`confed.privacy.evaluation_policy`). That noise is
drawn from floating-point numbers and not from all real ones (Mironov, "On significance of the least significant bits
for differential privacy", 2012).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from confed.federation.params import Params, is_change
from confed.federation.randomness import normal
from confed.federation.ranges import NOT_NEGATIVE, POSITIVE, Range, check_fields

Place = Literal["client", "server"]
Norm = Literal["update", "tensor"]
Adjacency = Literal["replace", "zero-out"]

STATISTICS = ("running_mean", "running_var")
"""How torch names the running statistics of normalisation layers, which are no parameters."""

COARSE = 2.0**-8  # share by which an update is shortened further for its rounding, at most


@dataclass(frozen=True)
class UpdatePrivacy:
    """What happens to an update on its way into the mean.

    Attributes:
        clip: largest L2 norm C of an update, over all floating-point tensors together.
        noise: noise multiplier z; the standard deviation is ``noise * clip`` in every coordinate (of the sum, at the
            server). 0 clips only, which guarantees nothing.
        at: who clips and adds noise: the "client" before it sends, or the "server", which is trusted then.
        norm: one norm for the whole "update", or for every "tensor" its own, at most C / sqrt(number of tensors) each
            (McMahan et al., per-layer clipping): the whole is within C again.
        delta: of the (epsilon, delta) that reports give; well below one over the number of clients.
        adjacency: what two neighbouring federations differ in: a client is another one ("replace"), or its updates
            are zero ("zero-out").
        repeatable: noise is a function of the run's seed, so that a run can be repeated; a party that knows the seed
            can subtract it. False: the operating system draws every number, as it does across machines in any case.
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    clip: Annotated[float, POSITIVE]
    noise: Annotated[float, NOT_NEGATIVE] = 0.0
    at: Place = "client"
    norm: Norm = "update"
    delta: Annotated[float, Range(0, 1, above=True, below=True)] = 1e-5
    adjacency: Adjacency = "replace"
    repeatable: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "algorithm.update_privacy")

    def release(
        self,
        sent: Params,
        start: Params,
        rng: torch.Generator | None,
        *,
        changes: Sequence[str] = (),
        among: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """What may be seen of an update: clipped, and with noise.

        Integers (counters of batches) are those of ``start``: they tell nothing then.

        A name of ``sent`` that is not in ``start``, or has another shape there, is a ValueError.
        """
        origins = {name: origin(name, tensor, start, changes) for name, tensor in sent.items()}
        moved = {n: sent[n].double() - origins[n].double() for n in _floating(sent)}
        released: dict[str, Tensor] = {}
        scales = self._scales(moved)
        for name, tensor in sent.items():
            if name not in scales:
                released[name] = origins[name]
            elif self.noise > 0:
                spread = self.noise * self.clip / math.sqrt(1 if among is None else among[name])
                wide = torch.promote_types(tensor.dtype, torch.float32)
                noise = normal(tensor.shape, rng, wide if rng is not None else torch.float64).double()
                # Origin last: what it is added to is released already, whatever its scale.
                update = scales[name] * moved[name] + spread * noise.to(tensor.device)
                released[name] = (origins[name].double() + update).to(tensor.dtype)
            else:
                released[name] = _rounded(tensor, origins[name], moved[name], scales[name])
        return released if self.noise > 0 else self._within(released, sent, origins, moved)

    def _within(
        self, released: dict[str, Tensor], sent: Params, origins: Params, moved: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What leaves without noise, within the clip after it was rounded, too."""
        scales, slack = self._scales(moved), 2.0**-20
        while True:
            left = {n: released[n].double() - origins[n].double() for n in moved}
            over = [name for name, scale in self._scales(left).items() if scale < 1]
            if not over:
                return released
            for name in over:
                rounded = _rounded(sent[name], origins[name], moved[name], scale := scales[name] * (1 - slack))
                if slack >= COARSE:  # no update moves further than before rounding, so that neither does the whole
                    far = (rounded.double() - origins[name].double()).abs() > (scale * moved[name]).abs()
                    rounded = torch.where(far, origins[name], rounded)
                released[name] = rounded
            if slack >= COARSE:
                return released
            slack *= 16

    def nothing(self, names: Params, changes: Sequence[str] = ()) -> dict[str, Tensor]:
        """An update of zero: the values themselves, and changes of zero."""
        return {n: torch.zeros_like(t) if is_change(n, changes) else t for n, t in names.items()}

    def _scales(self, updates: Mapping[str, Tensor]) -> dict[str, float]:
        """Clipping factor of each tensor's update, at most 1."""
        if not updates:
            return {}
        squares = {name: float(d.square().sum()) for name, d in updates.items()}
        if self.norm == "update":
            scale = _at_most(self.clip, math.sqrt(sum(squares.values())))
            return dict.fromkeys(updates, scale)
        each = self.clip / math.sqrt(len(updates))
        return {name: _at_most(each, math.sqrt(square)) for name, square in squares.items()}


def _rounded(sent: Tensor, start: Tensor, moved: Tensor, scale: float) -> Tensor:
    """A shortened update of a value, in the value's precision; the value itself where nothing is shortened."""
    return sent if scale == 1.0 else (start.double() + scale * moved).to(sent.dtype)


def _at_most(bound: float, norm: float) -> float:
    # A NaN stays one, so that the update is refused as every other that is not finite.
    return 1.0 if norm <= bound else bound / norm


def _floating(params: Params) -> list[str]:
    return [name for name, tensor in params.items() if tensor.is_floating_point()]


def origin(name: str, tensor: Tensor, start: Params, changes: Sequence[str]) -> Tensor:
    """Where the update of a tensor that a client sends begins: what it received, or zero if it sends a change."""
    if is_change(name, changes):
        return torch.zeros_like(tensor)
    received_tensor = start.get(name)
    if received_tensor is None or received_tensor.shape != tensor.shape:
        received = (
            "nothing of that name was received"
            if received_tensor is None
            else f"{tuple(received_tensor.shape)} was received"
        )
        raise ValueError(
            f"updates can be protected where they are of what a client received: {name!r} has shape "
            f"{tuple(tensor.shape)}, and {received}"
        )
    return received_tensor
