"""Soft scores of answers, kept as the few that are not zero."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from confed.metrics.vqa import soft_targets

__all__ = ["DENSE", "SoftTargets"]

DENSE = 2**26
"""Scores of a table up to which all are kept, zeros included: 256 MiB. VQA v2 has 22 times as many."""


class SoftTargets:
    """The scores of N questions, shape (N, C), of which at most K in a row are not zero.

    Args:
        labels: int64, shape (N, K); C where a row has fewer.
        scores: float32, shape (N, K), zero there.
        width: C.
    """

    def __init__(self, labels: Tensor, scores: Tensor, width: int) -> None:
        self.labels, self.scores, self.width = labels, scores, width

    @classmethod
    def of(cls, annotations: Sequence[Sequence[str]], answers: Sequence[str], width: int) -> "SoftTargets":
        """From all annotators' answers; answers outside the vocabulary score nothing.

        Args:
            annotations: N lists, one normalised answer per annotator.
            answers: the vocabulary.
            width: C, at least as many.
        """
        label_of = {answer: label for label, answer in enumerate(answers)}
        most = max(map(len, annotations), default=0)
        labels = torch.full((len(annotations), most), width, dtype=torch.int64)
        counts = torch.zeros((len(annotations), most), dtype=torch.int64)
        for row, given in enumerate(annotations):
            known = [(label_of[answer], count) for answer, count in Counter(given).items() if answer in label_of]
            if known:
                own = torch.tensor(known, dtype=torch.int64)
                labels[row, : len(known)], counts[row, : len(known)] = own[:, 0], own[:, 1]
        return cls(labels, soft_targets(counts), width)

    @classmethod
    def join(cls, parts: Sequence["SoftTargets"]) -> "SoftTargets":
        """Several one behind the other.

        Raises:
            ValueError: their widths differ.
        """
        if len({part.width for part in parts}) > 1:
            raise ValueError(f"soft scores must be over as many answers, got {[part.width for part in parts]}")
        most = max(part.labels.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        return cls(
            torch.cat([pad(p.labels, (0, most - p.labels.shape[1]), value=p.width) for p in parts]),
            torch.cat([pad(p.scores, (0, most - p.scores.shape[1])) for p in parts]),
            parts[0].width,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The scores of B rows, float32, shape (B, C)."""
        found = torch.zeros(len(rows), self.width + 1)
        return found.scatter_(1, self.labels[rows], self.scores[rows])[:, : self.width].contiguous()

    def take(self, count: int) -> "SoftTargets":
        """The first ``count`` rows."""
        return SoftTargets(self.labels[:count], self.scores[:count], self.width)
