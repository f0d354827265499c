"""Measures: numbers by which models are judged beside a task's own, each declared in one place."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from confed.federation.protocols import Batch, Output

KEPT = "measure/"
"""Start of the names of what is kept of each test example."""

PER_CENT = "%"
"""Unit of measures that are shares."""


class Measure:
    """A number by which models are judged on test examples; a subclass declares it.

    ``run.measures = ["NAME"]`` computes it for the final models at every client and unseen place. Tables, figures,
    frames and paired tests follow from the declaration.

    Attributes:
        name: in recipes, files and frames, such as "top-5".
        title: in tables and figures; the name by default.
        unit: of values in tables and figures, where they have one decimal; shares, which are fractions, are shown in
            per cent.
        low: smallest value.
        high: largest value.
        better: which values are better.

    Example:
        >>> import torch
        >>> from confed.measures.top5 import Top5
        >>> from confed import Output
        >>> logits = torch.tensor([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]).expand(2, -1)
        >>> Top5().per_example(Output(logits, logits), {"label": torch.tensor([4, 5])})
        tensor([1., 0.])
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    unit: ClassVar[str] = PER_CENT
    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    def per_example(self, output: Output, batch: Batch) -> Tensor:
        """What is kept of each example: its score, shape (B,), or what :meth:`combine` reads, shape (B, K)."""
        raise NotImplementedError(f"{type(self).__name__} must say what it keeps of each example: def per_example")

    def combine(self, kept: Tensor) -> float:
        """The value of a place, of what was kept of its N examples, float64 (N,) or (N, K); by default the mean."""
        return float(kept.mean())

    @property
    def is_mean(self) -> bool:
        """Whether its value is the mean over examples."""
        return type(self).combine is Measure.combine

    def stated(self) -> dict[str, Any]:
        """Its declaration, as ``summary.json`` has it."""
        stated: dict[str, Any] = {"title": self.title or self.name, "low": self.low, "high": self.high}
        stated |= {"better": self.better, "mean": self.is_mean}
        return stated if self.unit == PER_CENT else {**stated, "unit": self.unit}


def kept_of(measures: Sequence[Measure], output: Output, batch: Batch) -> dict[str, Tensor]:
    """Name -> what each measure keeps of the examples of a batch, float32 on the CPU; a fault is a ValueError."""
    columns: dict[str, Tensor] = {}
    for measure in measures:
        rows = measure.per_example(output, batch)
        if rows.ndim not in (1, 2) or len(rows) != len(output.logits) or not torch.isfinite(rows.float()).all():
            raise ValueError(
                f"the measure {measure.name!r} must keep finite numbers of each example, of shape "
                f"({len(output.logits)},) or ({len(output.logits)}, K), got shape {tuple(rows.shape)}"
            )
        columns[f"{KEPT}{measure.name}"] = rows.float().cpu()
    return columns


def values_of(measures: Sequence[Measure], columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Name -> value of each measure at one place with examples; a value outside its declared range is a ValueError."""
    values: dict[str, float] = {}
    for measure in measures:
        rows = columns.get(f"{KEPT}{measure.name}")
        if rows is None or not len(rows):
            continue
        value = measure.combine(rows.double())
        if not measure.low <= value <= measure.high:
            bounds = f"{measure.low:g} and {measure.high:g}"
            raise ValueError(f"the measure {measure.name!r} declares values between {bounds}, and gave {value:g}")
        values[measure.name] = float(value)
    return values
