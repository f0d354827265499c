"""Captioning: next-token loss, and comparison with reference captions.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", 2025, test captions written by a
beam search of width 5. Metrics are those of :mod:`confed.metrics.captions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from confed.data.caption_batches import next_tokens, unpack_texts
from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, check_fields
from confed.federation.reports import Number
from confed.metrics.captions import Cider, bleu_tally, load_sacrebleu
from confed.registry import register_task
from confed.tasks.sums import at_least_single, ranges, text_sums


class Decoder(Protocol):
    """Protocol of tokenizers that decode tokens to texts."""

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of token ids, int64 (B, L)."""
        ...


@register_task
@dataclass(frozen=True)
class Captioning:
    """Texts about pictures; implements :class:`confed.federation.protocols.Task`.

    Models are those of :mod:`confed.models.caption_transformer`. Training batches carry ``text`` and ``text_mask``; the
    model then gives scores of the M next tokens, logits (M, V), and the loss is the mean of -log p over them. Batches
    of evaluations carry ``references``, uint8 (B, R, K), and no text; the model writes, logits int64 (B, L).

    Args:
        answers: not used; the data say 1.
        types: names of the kinds of pictures; each gets a line of CIDEr.
        beams: width of the search when captions are written.
        length_penalty: power of the length that a caption's log-probability is divided by, to compare it with others.

    Attributes:
        decoder: turns written tokens into texts, once :meth:`reading` has given it.
        cider: the weights of CIDEr's n-grams, likewise.

    Raises:
        ValueError: a width or a power out of range, or sacrebleu is not installed.
    """

    answers: int = 1
    types: tuple[str, ...] = ()
    beams: Annotated[int, AT_LEAST_ONE] = 5
    length_penalty: Annotated[float, NOT_NEGATIVE] = 1.0
    decoder: Decoder | None = field(default=None, init=False, compare=False, repr=False)
    cider: Cider | None = field(default=None, init=False, compare=False, repr=False)

    name: ClassVar[str] = "captioning"
    head: ClassVar[str] = "answers"
    judges: ClassVar[str] = "captions"
    metric: ClassVar[str] = "cider"
    single_label: ClassVar[bool] = False
    """Scores are of tokens, so that losses over one right class do not apply."""

    def __post_init__(self) -> None:
        check_fields(self, "task")
        load_sacrebleu()

    def reading(self, decoder: Decoder, references: Sequence[Sequence[str]]) -> "Captioning":
        """The same task for some data.

        Raises ``ValueError``: no picture, or one without a caption.
        """
        task = replace(self)
        object.__setattr__(task, "decoder", decoder)
        object.__setattr__(task, "cider", Cider.of(references))
        return task

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """-log p of the next token in at least single precision, a scalar: the mean over all of the batch's.

        Raises ``ValueError``: the batch has no text, or the scores are not as many as its tokens.
        """
        logits, target, _ = self._scored(output, batch)
        return functional.cross_entropy(logits, target)

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        return ranges(("loss", "token_accuracy", "cider", "bleu4"), self.metric, self.types)

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights of every metric on this batch.

        Of written captions ``cider`` (0 to 10), also by type, and what BLEU-4 is made of; of token scores ``loss`` and
        ``token_accuracy``, with a weight per token.

        Raises ``ValueError``: faults as in :meth:`loss`, :meth:`reading` was not called before, or
        there are no references.
        """
        if output.logits.is_floating_point():
            logits, target, _ = self._scored(output, batch)
            count = float(len(target))
            right = (logits.argmax(1) == target).sum().item()
            loss = functional.cross_entropy(logits, target, reduction="sum").item()
            return {"loss": (loss, count), "token_accuracy": (float(right), count)}
        captions, references = self._texts(output, batch)
        scores = self._cider(captions, references)
        return {**text_sums("cider", self.types, scores, batch), **bleu_tally(captions, references)}

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """Each example's CIDEr, 0 to 10, whose mean is the headline; of token scores the share of right tokens."""
        if not output.logits.is_floating_point():
            return torch.tensor(self._cider(*self._texts(output, batch)), device=output.logits.device)
        logits, target, rows = self._scored(output, batch)
        right = (logits.argmax(1) == target).float()
        size = len(output.features)
        count = torch.zeros(size, device=right.device).index_add_(0, rows, torch.ones_like(right))
        return torch.zeros(size, device=right.device).index_add_(0, rows, right) / count.clamp_min(1)

    def written(self, output: Output, batch: Batch) -> list[dict[str, Any]]:
        """Written captions of each picture: ``answer``, the caption, and ``cider``."""
        captions, references = self._texts(output, batch)
        scores = self._cider(captions, references)
        return [{"answer": text, "cider": round(score, 4)} for text, score in zip(captions, scores, strict=True)]

    def _scored(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (M, V), the tokens that they are about (M,), and the rows of these (M,)."""
        if not output.logits.is_floating_point():
            raise ValueError("a caption that was written has no loss: the batch must have the text to learn")
        target, rows = next_tokens(batch)
        if output.logits.ndim != 2 or len(output.logits) != len(target):
            raise ValueError(
                f"captioning reads scores of the batch's {len(target)} next tokens, ({len(target)}, V), got "
                f"{tuple(output.logits.shape)}: it needs a model that writes, such as caption_transformer_mini"
            )
        return at_least_single(output.logits), target, rows

    def _texts(self, output: Output, batch: Batch) -> tuple[list[str], list[list[str]]]:
        if self.decoder is None or "references" not in batch:
            raise ValueError(
                "written captions are compared with those of people: "
                + ("reading(decoder, references) comes first" if self.decoder is None else "the batch has none")
            )
        return self.decoder.decode(output.logits), unpack_texts(batch["references"])

    def _cider(self, captions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        assert self.cider is not None  # comes with the decoder
        return list(map(self.cider.score, captions, references))
