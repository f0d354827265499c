"""Visual entailment between a picture and a statement (SNLI-VE, Xie et al. 2019, arXiv 1901.06706)."""

from dataclasses import dataclass
from typing import ClassVar

from confed.registry import register_task
from confed.tasks.vqa import VQA


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
