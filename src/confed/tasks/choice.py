"""Multiple choice among texts (VCR Q -> A, Zellers et al., CVPR 2019)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from confed.federation.ranges import Range
from confed.registry import register_task
from confed.tasks.vqa import VQA


@register_task
@dataclass(frozen=True)
class Choice(VQA):
    """One of K texts, with cross-entropy over their scores and accuracy; tallies are those of :class:`VQA`.

    Batches carry ``choices`` and ``choices_mask`` (B, K, L), each text behind its question, and ``label`` (B,) int64,
    the right one's position. A model gives one score per text, logits (B, K).

    Args:
        answers: how many texts are offered with a question, K.
        objective: "ce".
        types: names of the kinds of questions.

    Raises:
        ValueError: fewer than two texts, or another objective.
    """

    answers: Annotated[int, Range(2)] = 4

    name: ClassVar[str] = "choice"
    head: ClassVar[str] = "choice"
