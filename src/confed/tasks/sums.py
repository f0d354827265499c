"""What tasks share: scores in single precision, ranges of tallies, and sums of a metric by type of example."""

from collections.abc import Sequence

import torch
from torch import Tensor

from confed.federation.protocols import Batch
from confed.federation.reports import LOSS, Number
from confed.metrics.scores import SCORES


def at_least_single(logits: Tensor) -> Tensor:
    """The scores in single precision, or in their own where that is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def ranges(scores: Sequence[str], headline: str = "", types: Sequence[str] = ()) -> dict[str, Number]:
    """Name in a tally of these scores, and of the headline by type -> its range."""
    tallied: dict[str, tuple[float, float]] = {}
    for name in scores:
        tallied |= SCORES[name].tallied(name)
    tallied |= {f"{headline}/{name}": tallied[headline] for name in types}
    return {name: Number(max(low, LOSS.low), min(high, LOSS.high)) for name, (low, high) in tallied.items()}


def check_below(name: str, values: Tensor, stop: int) -> None:
    """Error where a whole number of a batch is not in [0, stop)."""
    if values.numel():
        for extreme in torch.stack(torch.aminmax(values)).tolist():
            if not 0 <= extreme < stop:
                raise ValueError(f"every {name} must lie in [0, {stop}), got {int(extreme)}")


def sums_by_type(metric: str, types: Sequence[str], kind: Tensor, scores: Tensor) -> dict[str, tuple[float, float]]:
    """``<metric>/<type>`` -> sum and number of the scores (B,) of each type that occurs; kinds are int64 (B,)."""
    check_below("type", kind, len(types))
    counts = torch.bincount(kind, minlength=len(types)).tolist()
    sums = torch.bincount(kind, weights=scores, minlength=len(types)).tolist()
    return {f"{metric}/{name}": (sums[i], float(counts[i])) for i, name in enumerate(types) if counts[i]}


def text_sums(
    metric: str, types: Sequence[str], scores: Sequence[float], batch: Batch
) -> dict[str, tuple[float, float]]:
    """Sum and number of the scores of written texts, overall and by type; other types than those are not told."""
    tally = {metric: (sum(scores), float(len(scores)))}
    for kind, score in zip(batch["type"].tolist() if "type" in batch else (), scores, strict="type" in batch):
        if 0 <= kind < len(types):
            total, weight = tally.get(f"{metric}/{types[kind]}", (0.0, 0.0))
            tally[f"{metric}/{types[kind]}"] = (total + score, weight + 1.0)
    return tally
