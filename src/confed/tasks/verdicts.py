"""Verdicts on statements about pictures: NLVR2 (two pictures) and visual entailment (one).

Suhr et al., ACL 2019, arXiv 1811.00491 (NLVR2); Xie et al. 2019, arXiv 1901.06706 (SNLI-VE).
"""

from dataclasses import dataclass
from typing import ClassVar

from confed.registry import register_task
from confed.tasks.vqa import VQA


@register_task
@dataclass(frozen=True)
class NLVR2(VQA):
    """Two verdicts, false and true, with cross-entropy and accuracy; losses and tallies are those of :class:`VQA`.

    Batches carry ``image`` and ``image2``, both (B, 3, H, W), and ``label`` (B,) int64: 0 is false, 1 is true.

    Args:
        answers: 2.
        objective: "ce".
        types: names of the kinds of statements.

    Raises:
        ValueError: other than two answers, or another objective.
    """

    answers: int = 2

    name: ClassVar[str] = "nlvr2"
    head: ClassVar[str] = "nlvr2"
    verdicts: ClassVar[tuple[str, ...]] = ("false", "true")


@register_task
@dataclass(frozen=True)
class Entailment(VQA):
    """Three verdicts with cross-entropy and accuracy; losses and tallies are those of :class:`VQA`.

    Batches carry ``label`` (B,) int64: 0 is entailment, 1 contradiction, 2 neutral, as in CLiMB.

    Args:
        answers: 3.
        objective: "ce".
        types: names of the kinds of statements.

    Raises:
        ValueError: other than three answers, or another objective.
    """

    answers: int = 3

    name: ClassVar[str] = "entailment"
    head: ClassVar[str] = "entailment"
    verdicts: ClassVar[tuple[str, ...]] = ("entailed", "contradicted", "neutral")
