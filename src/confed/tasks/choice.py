"""Multiple choice among texts (VCR Q -> A, Zellers et al., CVPR 2019)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from confed.federation.protocols import Batch, Output, Tally
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

    answers: int = 4

    name: ClassVar[str] = "choice"
    head: ClassVar[str] = "choice"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answers < 2:
            raise ValueError(f"answers must be at least 2 for choice, got {self.answers}")

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """See :meth:`VQA.loss`.

        Raises ``ValueError``: faults as in the parent class, or a question comes with another number of texts.
        """
        self._offered(batch)
        return super().loss(output, batch)

    def tally(self, output: Output, batch: Batch) -> Tally:
        """See :meth:`VQA.tally`.

        Raises ``ValueError``: faults as in the parent class, or a question comes with another number of texts.
        """
        self._offered(batch)
        return super().tally(output, batch)

    def _offered(self, batch: Batch) -> None:
        texts = batch.get("choices")
        if texts is not None and (texts.ndim != 3 or texts.shape[1] != self.answers):
            raise ValueError(f"choices must have shape (B, {self.answers}, L), got {tuple(texts.shape)}")
