"""What is asked of examples, and their labels; as tensors, labels and soft scores of annotators are stored sparsely.

A dense table of N questions and C answers would have N C numbers, 1.4 billion in VQA v2, of which at most ten
in a row are not zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from confed.data.ml_files.table import MultiLabelTable
from confed.data.ragged import Ragged, multi_hot
from confed.data.refusals import check_same
from confed.metrics.vqa import soft_targets

Kind = Literal["answers", "captions", "labels", "conversations"]
"""What the examples of a dataset have: one of some answers, texts that were written, any number of labels, or answers
behind turns."""
FITTING_TASK: dict[Kind, str] = {
    "answers": "vqa", "captions": "captioning", "labels": "multilabel", "conversations": "chat",
}  # fmt: skip
"""The task for each kind of data."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Any number of C labels on each of N examples, which are rows of a table that others share."""

    table: MultiLabelTable
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the C labels."""
        return self.table.labels

    def of(self, row: int) -> tuple[str, ...]:
        """The names of one example's labels."""
        return self.table.labels_of(int(self.rows[row]))

    def take(self, rows: np.ndarray) -> "Labels":
        """Those of the given ones of these N examples."""
        return replace(self, rows=self.rows[rows])

    def dense(self) -> np.ndarray:
        """Zeros and ones, float32, shape (N, C)."""
        return self.table.targets(self.rows)

    def numbers(self) -> np.ndarray:
        """Number of examples with each label, int64, shape (C,), computed without a table (N, C)."""
        return np.bincount(self.table.present.take(self.rows).values, minlength=len(self.names))


# As tensors ---------------------------------------------------------------------------------------------------

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
        check_same("widths of soft scores", [targets.width for targets in parts])
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


@dataclass(frozen=True)
class SparseLabels:
    """The labels of M rows, of which few of the C are present."""

    present: Ragged
    classes: int

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Zeros and ones of B rows, float32, shape (B, C)."""
        return torch.from_numpy(multi_hot(self.present, rows.cpu().numpy(), self.classes))
