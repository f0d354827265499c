"""Retrieval of texts for pictures and of pictures for texts, by dual encoders; contrastive training within the batch.

Radford et al., "Learning transferable visual models from natural language supervision", ICML 2021 (the loss, both
ways); Yang et al., "Unified contrastive learning in image-text-label space", CVPR 2022 (several right pairs in one).

Texts are the answers of the data: captions, or class names in the model's prompt. Scores s (B, C) of B pictures and all
C texts give those of pairs, s_ij = s[i, t_j] with t_j the text of example j. P_ij is 1 where t_i = t_j, else 0:

    L = 1/2 sum_ij P_ij / sum_j P_ij * -log softmax_j(s_ij) / B  +  the same with pictures and texts exchanged

With one right text each, and different ones in a batch, this is CLIP's loss. Texts that are not in a batch are no
negatives: **its size decides how hard it is**. Clients with few examples, or small batches, train against few
negatives, however many clients there are: a federation does not add them up, as one large batch would.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import Range, check_fields
from confed.federation.reports import Number
from confed.losses.info_nce import Contrast, same_answers
from confed.metrics.retrieval import ranks_of_relevant
from confed.metrics.scores import CUTS, RECALLS
from confed.registry import register_task
from confed.tasks.sums import ranges


@register_task
@dataclass(frozen=True)
class Retrieval:
    """Texts for pictures and pictures for texts; implements :class:`confed.federation.protocols.Task`.

    Metrics are means over queries. ``tr@k``: whether a picture's text is among the k best of all texts that the example
    is offered. ``ir@k``: whether one of a text's pictures is among the k best **of the batch**; every text of the batch
    is a query once. ``local.eval_batch_size`` should therefore be the number of a place's test pictures; ``pictures``
    is the mean number that they were looked for among.

    Args:
        answers: number of texts C.
        types: not told apart here.

    Raises:
        ValueError: fewer than two texts.
    """

    answers: Annotated[int, Range(2)]
    types: tuple[str, ...] = ()

    name: ClassVar[str] = "retrieval"
    head: ClassVar[str] = "answers"
    metric: ClassVar[str] = "tr@1"
    single_label: ClassVar[bool] = False
    """Scores are compared within a batch, so that losses over one right class do not apply."""

    def __post_init__(self) -> None:
        check_fields(self, "task")

    @property
    def contrast(self) -> Contrast:
        """The loss of two representations: CLIP's, of similarities that are scaled already."""
        return Contrast(1.0, "include", "dot", "mean", symmetric=True)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """The contrastive loss both ways, the mean over the batch, a scalar.

        Raises ``ValueError``: the batch has no labels, or the scores are not those of C texts.
        """
        pairs, right = self._pairs(output, batch)
        wanted = right.to(pairs.dtype) / right.sum(1, keepdim=True)
        return -(wanted * (pairs.log_softmax(1) + pairs.T.log_softmax(1))).sum(1).mean() / 2

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        return ranges(("loss", *RECALLS, "pictures"))

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights of every metric on this batch.

        Raises ``ValueError``: faults as in :meth:`loss`.
        """
        pairs, right = self._pairs(output, batch)
        count = float(len(pairs))
        if not count:
            return {}
        texts = self._text_ranks(output, batch)
        first = ~(right.tril(-1).any(1))  # every text is a query once
        pictures = ranks_of_relevant(pairs.T, right)[first]
        recalls = {f"tr@{k}": (float((texts <= k).sum()), count) for k in CUTS}
        recalls |= {f"ir@{k}": (float((pictures <= k).sum()), float(len(pictures))) for k in CUTS}
        loss = float(self.loss(output, batch)) * count
        return {"loss": (loss, count), **recalls, "pictures": (count * len(pictures), float(len(pictures)))}

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """1 where the best text is the right one, else 0; float32, shape (B,)."""
        self._pairs(output, batch)
        return (self._text_ranks(output, batch) <= 1).float()

    def _text_ranks(self, output: Output, batch: Batch) -> Tensor:
        scores = output.logits.float()
        every = torch.arange(self.answers, device=scores.device)
        return ranks_of_relevant(scores, batch["label"].unsqueeze(1) == every)

    def _pairs(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scores of the batch's pictures and texts, and which pairs are right, both (B, B)."""
        if "label" not in batch:
            raise ValueError(f"retrieval needs batch['label'], each picture's text, got keys {sorted(batch)}")
        labels, scores = batch["label"], output.logits
        if scores.ndim != 2 or scores.shape[1] != self.answers or not scores.is_floating_point():
            raise ValueError(f"retrieval reads scores of {self.answers} texts, (B, C), got {tuple(scores.shape)}")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.answers:
            raise ValueError(f"labels must lie in [0, {self.answers}), got {labels.tolist()}")
        return scores.float()[:, labels], same_answers(labels)
