"""Answers that FedP3's filter ranks first, for the gallery."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from confed.federation.algorithm import Algorithm
from confed.losses.preference import Filter, FiltersAnswers, forgotten

__all__ = ["SHOWN", "filter_of", "picked"]


SHOWN = 3
"""Answers per question, as in the paper."""


def filter_of(algorithm: Algorithm) -> Filter | None:
    """Answer filter of the method; None for other methods, and for filters that keep all or pick at random."""
    return algorithm.answer_filter if isinstance(algorithm, FiltersAnswers) else None


def picked(student: Tensor, teacher: Tensor, mode: Filter, answers: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The answers that a filter ranks first, per example.

    Args:
        student: the local model's logits, shape (B, C).
        teacher: the global model's, shape (B, C).
        mode: the filter.
        answers: names of the C answers.

    Returns:
        Up to three answers with r and both models' probabilities of it.
    """
    r = forgotten(student, teacher, mode).softmax(dim=1)
    best = r.topk(min(SHOWN, len(answers)), dim=1).indices
    columns = {"r": r, "teacher": teacher.softmax(dim=1), "student": student.softmax(dim=1)}
    chosen = {name: torch.gather(values, 1, best).tolist() for name, values in columns.items()}
    return [
        [
            {"answer": answers[answer], **{name: float(f"{rows[b][n]:.3g}") for name, rows in chosen.items()}}
            for n, answer in enumerate(row)
        ]
        for b, row in enumerate(best.tolist())
    ]
