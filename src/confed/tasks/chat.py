"""Conversations about pictures: trained on answer tokens, scored on answers that are written freely or chosen.

What is learned follows Liu et al., "Visual instruction tuning", NeurIPS 2023 (LLaVA): the tokens of the answer behind
picture and prompt. The loss is that of ``transformers`` with ``labels``: the mean over all answer tokens of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from confed.data.caption_batches import unpack_texts
from confed.data.chat import answered
from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, check_fields
from confed.federation.reports import Number
from confed.federation.specs import Writing
from confed.metrics.captions import Cider
from confed.metrics.texts import anls, token_f1
from confed.metrics.vqa import normalise_answer, vqa_accuracy
from confed.registry import register_task
from confed.tasks.captioning import Decoder
from confed.tasks.generation import answers_there
from confed.tasks.sums import at_least_single, ranges, text_sums

Metric = Literal["exact", "vqa", "anls", "f1", "cider", "choice"]
"""How answers are scored: the same text in the VQA challenge's normal form; the official VQA accuracy over annotators;
ANLS; token F1; CIDEr-D; or the same text, chosen among the dataset's answers by likelihood instead of written."""

_FEWEST = 4
"""Annotators of a question from which on the official VQA accuracy can be 1."""


@register_task
@dataclass(frozen=True)
class Chat:
    """Answers that end conversations; implements :class:`confed.federation.protocols.Task`.

    Models are those of :mod:`confed.models.hf`. Training batches carry ``answer_tokens`` as
    :class:`confed.tasks.generation.Generation` has them. The loss is the mean over all answer tokens of the batch, each
    weighted by the share of people who gave the answer where there are several:

        sum_i w_i sum_t (-log p(a_it | a_i<t, q_i)) / sum_i w_i T_i.

    Batches of evaluations carry ``references``, uint8 (B, R, K), and no answer tokens; the model writes, logits int64
    (B, L), or with ``metric = "choice"`` gives log-likelihoods of the candidates (B, C).

    Args:
        answers: number of candidates C.
        metric: see :data:`Metric`.
        max_new_tokens: most tokens of a written answer.
        beams: width of the search; 1 takes the most probable token each time.
        length_penalty: power of the length that log-probabilities of a search are divided by.
        types: names of the question types; each gets a line of the metric.

    Attributes:
        decoder: turns written tokens into texts, once :meth:`reading` has given it.
        cider: the weights of CIDEr's n-grams, likewise.
        candidates: the answers' tokens, int64 (C, T), once :meth:`choosing` has given them.

    Raises:
        ValueError: an unknown metric, or a length, a width or a power out of range.
    """

    answers: int
    metric: Metric = "exact"
    max_new_tokens: Annotated[int, AT_LEAST_ONE] = 32
    beams: Annotated[int, AT_LEAST_ONE] = 1
    length_penalty: Annotated[float, NOT_NEGATIVE] = 1.0
    types: tuple[str, ...] = ()
    decoder: Decoder | None = field(default=None, init=False, compare=False, repr=False)
    cider: Cider | None = field(default=None, init=False, compare=False, repr=False)
    candidates: Tensor | None = field(default=None, init=False, compare=False, repr=False)

    name: ClassVar[str] = "chat"
    head: ClassVar[str] = "answers"
    judges: ClassVar[str] = "texts"
    single_label: ClassVar[bool] = False
    """Training scores are of tokens, so that losses over one right class do not apply."""

    def __post_init__(self) -> None:
        check_fields(self, "task")

    @property
    def writing(self) -> Writing | None:
        """How answers are written; None where they are chosen."""
        return None if self.metric == "choice" else Writing(self.max_new_tokens, self.beams, self.length_penalty)

    def reading(self, decoder: Decoder, references: Sequence[Sequence[str]]) -> "Chat":
        """The same task for some data."""
        fewest = min(map(len, references), default=_FEWEST)
        if self.metric == "vqa" and fewest < _FEWEST:
            raise ValueError(
                f'task.metric = "vqa" needs the answers of several people ({_FEWEST} at least, ten in VQA), and a '
                f'question has {fewest}: set task.metric = "exact", "anls" or "f1"'
            )
        cider = Cider.of(references) if self.metric == "cider" and references else None
        return self._with(self.answers, decoder, cider, self.candidates)

    def choosing(self, candidates: Tensor) -> "Chat":
        """The same task with these candidates, int64 (C, T)."""
        if self.metric == "choice" and not len(candidates):
            raise ValueError(
                'task.metric = "choice" needs a list of answers to choose from, and the data have too many different '
                'ones: set task.metric = "exact", "anls", "f1" or "cider"'
            )
        return self._with(max(len(candidates), 1), self.decoder, self.cider, candidates)

    def _with(self, answers: int, decoder: Decoder | None, cider: Cider | None, candidates: Tensor | None) -> "Chat":
        task = replace(self, answers=answers)
        for name, value in (("decoder", decoder), ("cider", cider), ("candidates", candidates)):
            object.__setattr__(task, name, value)
        return task

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Training loss in at least single precision, a scalar: the mean over the batch's answer tokens.

        Of scores of candidates it is the cross-entropy with the right one, the mean over the examples that have one.

        Raises ``ValueError``: the batch has no answers to learn, or the scores are not those of its answers.
        """
        if output.logits.is_floating_point() and output.logits.ndim == 2 and "label" in batch:
            logits = at_least_single(output.logits)
            answered_count = (batch["label"] >= 0).sum().clamp_min(1)
            return functional.cross_entropy(logits, batch["label"], ignore_index=-1, reduction="sum") / answered_count
        surprise, weight, _ = self._surprise(output, batch)
        return (surprise * weight).sum() / weight.sum().clamp_min(torch.finfo(surprise.dtype).tiny)

    def batch_weight(self, batch: Batch) -> float:
        """Number of answer tokens of a training batch, each counted by its weight: what :meth:`loss` divides by."""
        answer_lengths = answered(batch["answer_tokens"][..., 1:]).sum(-1)
        given = batch.get("answer_weight")
        return float(answer_lengths.sum() if given is None else (answer_lengths * given).sum())

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        return ranges(("loss", "token_accuracy", self.metric), self.metric, self.types)

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights on this batch: of answers the metric, also by type; of token scores those of tokens.

        ``loss`` and ``token_accuracy`` have a weight per token.

        Raises ``ValueError``: faults as in :meth:`loss`, :meth:`reading` was not called before, or there are no
        references.
        """
        if output.logits.is_floating_point() and output.logits.ndim == 3:
            surprise, weight, right = self._surprise(output, batch)
            count = weight.sum().item()
            return {
                "loss": ((surprise * weight).sum().item(), count),
                "token_accuracy": ((right * weight).sum().item(), count),
            }
        scores = self.predictions(output, batch).tolist()
        if not scores:
            return {}
        return text_sums(self.metric, self.types, scores, batch)

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """Each example's score, float32 (B,), in [0, 1], of CIDEr-D up to 10.

        Of token scores the share of the answer's tokens that are the best ones, of several answers the weights of
        those.
        """
        if output.logits.is_floating_point() and output.logits.ndim == 3:
            _, weight, right = self._surprise(output, batch)
            tokens, rows = batch["answer_tokens"], len(batch["answer_tokens"])
            has_weight = (
                batch["answer_weight"] > 0 if tokens.ndim == 3 else torch.ones(rows, 1, device=weight.device) > 0
            )
            place = has_weight.nonzero()[:, 0]
            sums = [weight.new_zeros(rows).index_add(0, place, values.sum(1)) for values in (right * weight, weight)]
            return (sums[0] / sums[1].clamp_min(1e-12)).float()
        if "references" not in batch:
            raise ValueError(f"written answers need batch['references'], got {', '.join(sorted(batch)) or 'none'}")
        pairs = zip(self.texts(output), unpack_texts(batch["references"]), strict=True)
        scores = [self.score(text, references) for text, references in pairs]
        return torch.tensor(scores, dtype=torch.float32, device=output.logits.device)

    def written(self, output: Output, batch: Batch) -> list[dict[str, Any]]:
        """Answers of each example: ``answer``, the text, and its ``score``."""
        scores = self.predictions(output, batch).tolist()
        return [
            {"answer": text, "score": round(score, 4)} for text, score in zip(self.texts(output), scores, strict=True)
        ]

    def score(self, text: str, references: Sequence[str]) -> float:
        """Score of one answer."""
        if self.metric == "vqa":
            return vqa_accuracy(text, references, "always")
        if self.metric == "cider":
            assert self.cider is not None  # comes with the decoder
            return self.cider.score(text, references)
        if self.metric in ("anls", "f1"):
            return (anls if self.metric == "anls" else token_f1)(text, references)
        return float(normalise_answer(text) in map(normalise_answer, references))

    def texts(self, output: Output) -> list[str]:
        """Answers as texts."""
        tokens = output.logits
        if self.decoder is None or (tokens.is_floating_point() and self.candidates is None):
            raise ValueError("answers are compared with those of people: reading and choosing come first")
        if tokens.is_floating_point():
            assert self.candidates is not None
            best = tokens[:, : len(self.candidates)].argmax(1)
            chosen = self.candidates.to(best.device)[best][:, 1:]
            rows = [row[is_answer][None] for row, is_answer in zip(chosen, answered(chosen), strict=True)]
            return [self.decoder.decode(row)[0].strip() for row in rows]
        return [text.strip() for text in self.decoder.decode(tokens)]

    def learned(self, output: Output, batch: Batch) -> Tensor | None:
        """See :class:`confed.federation.specs.LearnsTokens`."""
        if not output.logits.is_floating_point() or output.logits.ndim != 3:
            return None
        return answered(answers_there(output.logits, batch))

    def _surprise(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """-log p of each token of the R answers, its weight, and whether it is the best one, each (R, T)."""
        if not output.logits.is_floating_point() or output.logits.ndim != 3:
            raise ValueError("an answer that was written or chosen has no loss: the batch must have answer_tokens")
        target = answers_there(output.logits, batch)
        logits = at_least_single(output.logits)
        surprise = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        weight = answered(target).to(surprise.dtype)
        given = batch.get("answer_weight")
        if given is not None:
            weight = weight * given[given > 0].to(weight.dtype).reshape(-1, 1)
        return surprise, weight, (logits.argmax(-1) == target).to(surprise.dtype)
