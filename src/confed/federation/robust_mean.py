r"""Robust aggregation against malicious clients: norm bounding, medians, trimmed means, Krum, Multi-Krum.

Notation: w the server's weights, x_k client k's, K replies, d_k = x_k - w its update, f how many clients may lie.

    clip        w + sum_k p_k d_k min(1, c / |d_k|)                 Sun et al. 2019 (norm bounding)
    median      the median over k, value by value                   Yin et al., ICML 2018
    trimmed     the mean over k without the f smallest and the      Yin et al., ICML 2018
                f largest, value by value
    krum        the x_k with the smallest sum of squared            Blanchard et al., NeurIPS 2017
                distances to its K - f - 2 nearest others
    multi_krum  the mean of the s best in that order                Blanchard et al., NeurIPS 2017, section 4

Sources: Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019; Yin, Chen, Ramchandran
and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018; Blanchard, El
Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.

|.| is the Euclidean norm over all floating-point values together. With an even K the median is the mean of the middle
two. Only ``clip`` uses weights p_k: a count of examples is what a client says of itself. Of integers (counters of
batches) every rule keeps the maximum, as the plain mean does.

**Tensors that only some clients send.** A client that did not send a tensor does not count for it. Tensors that the
same clients sent are one block, to which the rule is applied with these clients as its K; in a block with too few of
them for the rule the server's values stay. Krum may thus choose another client in every block. ``clip`` shortens all
that a client sent together.

The guarantee of Krum's authors needs K >= 2 f + 3; with fewer replies liars that agree can be in the midst.
None is a guarantee against backdoors: an update that stays within the norm or the range of the others passes, and with
clients that differ honestly, what these rules cut off is also what honest minorities have learned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from confed.federation.params import Mean, Params
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, check_fields

Rule = Literal["clip", "median", "trimmed", "krum", "multi_krum"]  # a way to aggregate


@dataclass(frozen=True)
class RobustMean:
    """Robust replacement of the mean of the clients' models.

    Attributes:
        rule: how replies are put together.
        norm: for "clip", the largest norm c of an update.
        malicious: for "trimmed", "krum" and "multi_krum", how many clients f may lie. They need 2 f + 1, f + 3 and
            f + 3 replies (for the guarantee of Krum's authors 2 f + 3); a round with fewer leaves the model as it is.
        selected: for "multi_krum", how many clients s are averaged; None for K - f.
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    rule: Rule
    norm: Annotated[float, POSITIVE] = 1.0
    malicious: Annotated[int, NOT_NEGATIVE] = 1
    selected: Annotated[int | None, AT_LEAST_ONE] = None

    def __post_init__(self) -> None:
        check_fields(self, "algorithm.robust")

    @property
    def needed(self) -> int:
        """Number of replies that the rule needs."""
        kin = max(self.malicious + 3, self.selected or 1)
        return {"clip": 1, "median": 1, "trimmed": 2 * self.malicious + 1, "krum": self.malicious + 3}.get(
            self.rule, kin
        )

    @property
    def streams(self) -> bool:
        """Whether one reply is in memory at a time."""
        return self.rule == "clip"

    def of(
        self, updates: Iterable[tuple[Params, float]], start: Params, *, precision: torch.dtype, clients: int = 0
    ) -> dict[str, Tensor]:
        """The robust mean."""
        if 0 < clients < self.needed:
            raise ValueError(
                f"the robust mean {self.rule!r} with malicious = {self.malicious} needs at least {self.needed} "
                f"clients, got {clients}"
            )
        if self.streams:
            mean = Mean(precision)
            for tensors, weight in updates:
                mean.add(clipped(tensors, start, self.norm), weight)
            return mean.result(start)
        sent = [tensors for tensors, _ in updates]
        means: dict[str, Tensor] = {}
        for names, senders in _blocks(sent):
            if len(senders) >= self.needed:
                block: list[dict[str, Tensor]] = []
                for sender in senders:
                    block.append({name: sent[sender][name] for name in names})
                means |= self._block(block, precision)
        unknown = sorted(set(means) - set(start))
        if unknown:
            raise ValueError(f"updates carry names the model does not have: {unknown}")
        return {name: means[name].to(value.dtype) if name in means else value for name, value in start.items()}

    def _block(self, updates: Sequence[Params], precision: torch.dtype) -> dict[str, Tensor]:
        """The rule on tensors that the same clients sent."""
        if self.rule == "median":
            return median(updates)
        if self.rule == "trimmed":
            return trimmed_mean(updates, self.malicious)
        if self.rule == "krum":
            return dict(updates[krum(updates, self.malicious)])
        count = len(updates) - self.malicious if self.selected is None else self.selected
        mean, best = Mean(precision), krum_order(updates, self.malicious)[:count]
        for k in sorted(best):
            mean.add(updates[k], 1.0)
        return mean.result(updates[0])


def distance(one: Params, other: Params) -> Tensor:
    """Squared Euclidean distance over all floating-point tensors of ``one``, a float64 scalar."""
    parts = [
        (tensor.double() - other[name].double()).square().sum()
        for name, tensor in one.items()
        if tensor.is_floating_point()
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def clipped(update: Params, start: Params, most: float) -> dict[str, Tensor]:
    """Norm bounding: an update of at most a given length, w + d min(1, c / |d|)."""
    if not most > 0:
        raise ValueError(f"the largest norm of an update must be positive, got {most}")
    norm = float(distance(update, start).sqrt())
    if norm <= most:
        return dict(update)
    share = most / norm
    return {
        name: torch.lerp(start[name].to(tensor), tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in update.items()
    }


def median(updates: Sequence[Params]) -> dict[str, Tensor]:
    """Coordinate-wise median.

    No update, and updates that do not hold the same tensors, are a ValueError.
    """
    k = len(updates)
    return _by_value(updates, (k - 1) // 2)


def trimmed_mean(updates: Sequence[Params], trim: int) -> dict[str, Tensor]:
    """Coordinate-wise trimmed mean: without the smallest and the largest values."""
    if trim < 0 or 2 * trim >= len(updates):
        raise ValueError(f"trim must leave a value of {len(updates)} clients, got {trim} on either side")
    return _by_value(updates, trim)


def krum(updates: Sequence[Params], liars: int) -> int:
    """Krum: position of the update with the smallest distances to the others, the first of :func:`krum_order`."""
    return krum_order(updates, liars)[0]


def krum_order(updates: Sequence[Params], liars: int) -> list[int]:
    """Positions of the updates by their Krum score, the most central first."""
    k, near = len(updates), len(updates) - liars - 2
    _check(updates)
    if liars < 0 or near < 1:
        raise ValueError(f"krum with {liars} lying clients needs at least {max(liars, 0) + 3} replies, got {k}")
    apart = torch.zeros(k, k, dtype=torch.float64)
    for i in range(k):
        for j in range(i):
            apart[i, j] = apart[j, i] = distance(updates[i], updates[j])
    sums = [torch.cat([apart[i, :i], apart[i, i + 1 :]]).sort().values for i in range(k)]
    # Two that are each other's nearest are equally good; then all distances decide, and not the order of clients.
    return sorted(range(k), key=lambda i: (float(sums[i][:near].sum()), float(sums[i].sum())))


def _blocks(updates: Sequence[Params]) -> list[tuple[list[str], list[int]]]:
    """Names that the same clients sent, and the positions of these clients."""
    senders: dict[str, list[int]] = {}
    for k, tensors in enumerate(updates):
        for name in tensors:
            senders.setdefault(name, []).append(k)
    blocks: dict[tuple[int, ...], list[str]] = {}
    for name, positions in senders.items():
        blocks.setdefault(tuple(positions), []).append(name)
    return [(names, list(positions)) for positions, names in blocks.items()]


def _by_value(updates: Sequence[Params], trim: int) -> dict[str, Tensor]:
    """The mean of what is left, value by value, without ``trim`` values on either side."""
    _check(updates)
    means: dict[str, Tensor] = {}
    for name, first in updates[0].items():
        stacked = torch.stack([update[name] for update in updates])
        if first.is_floating_point():
            left = stacked.sort(0).values[trim : len(updates) - trim]
            mean = Mean()  # of equal values exactly that value
            for row in left:
                mean.add({name: row}, 1.0)
            means[name] = mean.result({name: first})[name]
        else:
            means[name] = stacked.amax(0)
    return means


def _check(updates: Sequence[Params]) -> None:
    if not updates:
        raise ValueError("robust aggregation needs at least one update, got none")
    for update in updates[1:]:
        if update.keys() != updates[0].keys():
            raise ValueError("robust aggregation needs the same tensors of every client, got others of some")
