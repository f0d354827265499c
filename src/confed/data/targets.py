"""Soft target scores from several annotators' answers, stored sparsely.

A dense table of N questions and C answers would have N C numbers, 1.4 billion in VQA v2, of which at most ten in a row
are not zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from confed.metrics.vqa import soft_targets

ANNOTATORS = 10
"""People who answer each question in VQA."""


class SoftTargets:
    """The scores of N questions, shape (N, C), made for the rows that are asked for."""

    def __init__(self, labels: Tensor, width: int) -> None:
        self.labels, self.width = labels, width

    @classmethod
    def of(cls, annotations: Sequence[Sequence[str]], answers: Sequence[str], width: int) -> "SoftTargets":
        """From all annotators' answers; answers outside the vocabulary score nothing."""
        label_of = {answer: label for label, answer in enumerate(answers)}
        most = max(ANNOTATORS, max(map(len, annotations), default=0))
        rows: list[list[int]] = []
        for given in annotations:
            rows.append([*(label_of.get(answer, width) for answer in given), *[width] * (most - len(given))])
        return cls(torch.tensor(rows, dtype=torch.int64).view(-1, most), width)

    @classmethod
    def join(cls, parts: Sequence["SoftTargets"]) -> "SoftTargets":
        """Several one behind the other."""
        if len({targets.width for targets in parts}) > 1:
            raise ValueError(f"soft scores must be over as many answers, got {[targets.width for targets in parts]}")
        most = max(targets.labels.shape[1] for targets in parts)
        pad = torch.nn.functional.pad
        labels = [pad(targets.labels, (0, most - targets.labels.shape[1]), value=targets.width) for targets in parts]
        return cls(torch.cat(labels), parts[0].width)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The scores of B rows, float32, shape (B, C)."""
        labels = self.labels[rows]
        alike = (labels.unsqueeze(2) == labels.unsqueeze(1)).sum(2)  # how many gave the same answer
        scores = soft_targets(alike.where(labels < self.width, 0))
        target = torch.zeros(len(rows), self.width + 1)
        return target.scatter_(1, labels, scores)[:, : self.width].contiguous()

    def take(self, count: int) -> "SoftTargets":
        """The first ``count`` rows."""
        return SoftTargets(self.labels[:count], self.width)
