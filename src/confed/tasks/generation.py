"""Generative visual question answering: trained on answer tokens, scored on a list of answers."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from confed.data.chat import answered
from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import check_fields
from confed.federation.reports import Number
from confed.registry import register_task
from confed.tasks.sums import at_least_single, ranges
from confed.tasks.vqa import VQA

ANY = "vqa_any"
"""The share of answers that at least one annotator gave."""

Scores = Literal["exact", "soft", "any"]
"""What an answer is worth: 1 if it is the label; its soft score of 10 annotators; 1 if any annotator gave it."""


@register_task
@dataclass(frozen=True)
class Generation:
    """Answers as texts; implements :class:`confed.federation.protocols.Task`.

    Models are those of :mod:`confed.models.answer_ranking`. Training batches carry ``answer_tokens``, int64, start
    token first and 0 after the end: (B, T), or (B, K, T) where people gave up to K different answers to a question,
    with ``answer_weight``, float (B, K), the share of the people who gave it, 0 where there is none. The model then
    gives token scores (B, T - 1, V), or (R, T' - 1, V) of the R answers that there are. All other batches are scored as
    :class:`confed.tasks.vqa.VQA` does, on log-likelihoods of candidates (B, C).

    The loss is ALBEF's (Li et al., NeurIPS 2021; its ``model_vqa.py``): the negative log-likelihood of an answer's
    tokens, summed over tokens, weighted, summed over answers and divided by B,

        1/B sum_i sum_k w_ik (-log p(a_ik | q_i)).

    A single answer weighs 1, or ``answer_weight`` (B,). Its momentum distillation is not here; FedDAT trains ALBEF
    without it as well.

    Args:
        answers: number of candidates C.
        scores: what an answer is worth. ``soft`` and ``any`` need ``target`` (B, C); FedDAT scores ALBEF by ``any``.
        types: names of the question types.

    Attributes:
        candidates: the answers' tokens, int64 (C, T), once :meth:`choosing` has given them.

    Raises:
        ValueError: unknown scores, or what ``VQA`` refuses.
    """

    answers: int
    scores: Scores = "exact"
    types: tuple[str, ...] = ()
    candidates: Tensor | None = field(default=None, init=False, compare=False, repr=False)

    name: ClassVar[str] = "generation"
    head: ClassVar[str] = "answers"
    judges: ClassVar[str] = "answers"
    single_label: ClassVar[bool] = False
    """Training scores are of tokens, so that losses over one right class do not apply."""

    def __post_init__(self) -> None:
        check_fields(self, "task")
        self._ranked  # noqa: B018  # checks answers and types

    @property
    def _ranked(self) -> VQA:
        return VQA(self.answers, "ce" if self.scores == "exact" else "bce", self.types)

    @property
    def metric(self) -> str:
        """``accuracy`` with exact scores, ``vqa_accuracy`` with soft ones, ``vqa_any`` if any annotator's counts."""
        return ANY if self.scores == "any" else self._ranked.metric

    def labels(self, batch: Batch) -> Tensor:
        """The right answers among the candidates, int64, shape (B,)."""
        return self._ranked.labels(batch)

    def choosing(self, candidates: Tensor) -> "Generation":
        """The same task with these candidates, int64 (C, T)."""
        task = replace(self, answers=len(candidates))
        object.__setattr__(task, "candidates", candidates)
        return task

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Training loss in at least single precision, a scalar: the mean over the batch.

        Raises ``ValueError``: token scores do not fit ``answer_tokens``, or there are none and ``VQA.loss`` refuses.
        """
        if output.logits.ndim == 2:
            return self._ranked.loss(*self._scored(output, batch))
        surprise = token_loss(output.logits, batch)
        weight = batch.get("answer_weight")
        if weight is None:
            return surprise.mean()
        return (surprise * weight[weight > 0]).sum() / len(weight) if weight.ndim == 2 else (surprise * weight).mean()

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        soft = ANY if self.scores == "any" else "vqa_accuracy"
        return ranges(("loss", "accuracy", soft, "ece"), self.metric, self.types)

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights as :meth:`confed.tasks.vqa.VQA.tally`; of token scores ``loss`` and the metric."""
        if output.logits.ndim == 2:
            return self._named(self._ranked.tally(*self._scored(output, batch)))
        written = self.predictions(output, batch)
        count = float(len(written))
        loss = self.loss(output, batch).item() * count if count else 0.0
        return {"loss": (loss, count), self.metric: (written.sum().item(), count)} if count else {}

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """Each example's score in [0, 1], float32, shape (B,).

        Of token scores: 1 if every token of the answer is the best one; of several answers the weights of those.
        """
        if output.logits.ndim == 2:
            return self._ranked.predictions(*self._scored(output, batch))
        target = answers_there(output.logits, batch)
        written = ((output.logits.argmax(-1) == target) | ~answered(target)).all(1).float()
        if batch["answer_tokens"].ndim == 2:
            return written
        weight = batch["answer_weight"].float()
        return torch.zeros_like(weight).masked_scatter(weight > 0, written * weight[weight > 0]).sum(1)

    def _named(self, values: Tally) -> Tally:
        """The same values under the metric's own name; a share of answers that any annotator gave is no soft score."""
        if self.metric != ANY:
            return values
        return {key.replace("vqa_accuracy", ANY): value for key, value in values.items()}

    def _scored(self, output: Output, batch: Batch) -> tuple[Output, Batch]:
        """Output and batch as :class:`VQA` reads them.

        With soft scores these are log-odds of the candidates' probabilities, so that sigmoids are probabilities; with
        ``any``, targets are 1 for each answer that an annotator gave.
        """
        if self.scores == "exact":
            return output, batch
        odds: Any = output.logits.float().softmax(1).logit(eps=1e-6)
        if self.scores == "any" and "target" in batch:
            batch = {**batch, "target": (batch["target"] > 0).float()}
        return Output(odds, output.features), batch


def token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """-log p(answer) of each of R answers, (R,): cross-entropy of token scores (R, T - 1, V), summed over its tokens.

    Raises ``ValueError``: as :func:`answers_there`.
    """
    logits = at_least_single(logits)
    target = answers_there(logits, batch)
    surprise = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return surprise.masked_fill(~answered(target), 0.0).sum(1)


def answers_there(logits: Tensor, batch: Batch) -> Tensor:
    """Tokens that the scores (R, T - 1, V) of R answers are about, int64 (R, T - 1)."""
    tokens, weight = batch.get("answer_tokens"), batch.get("answer_weight")
    expected = (logits.shape[0], logits.shape[1] + 1)
    if tokens is not None and tokens.ndim == 3:
        if weight is None or weight.shape != tokens.shape[:2]:
            came = "none" if weight is None else f"shape {tuple(weight.shape)}"
            raise ValueError(
                f"several answers need batch['answer_weight'] of shape {tuple(tokens.shape[:2])}, got {came}"
            )
        tokens = tokens[weight > 0]
        # The model reads no further than the longest answer of the batch.
        if not bool(tokens[:, expected[1] :].any()):
            tokens = tokens[:, : expected[1]]
    if tokens is None or tuple(tokens.shape) != expected:
        came = "none" if tokens is None else f"shape {tuple(tokens.shape)}"
        raise ValueError(f"token scores need batch['answer_tokens'] of shape {expected}, got {came}")
    return tokens[:, 1:]
