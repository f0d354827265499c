"""Visual question answering as classification over a fixed answer vocabulary."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from confed.federation.actions import among_offered
from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import AT_LEAST_ONE, check_fields
from confed.federation.reports import Number
from confed.metrics.calibration import calibration_tally
from confed.registry import register_task
from confed.tasks.sums import at_least_single, check_below, ranges, sums_by_type

Objective = Literal["ce", "bce", "kl"]
"""Softmax cross-entropy on the one right answer, binary cross-entropy on soft scores of all answers, or the
Kullback-Leibler divergence of the softmax from the annotators' answers."""

Reduction = Literal["mean", "sum"]

Headline = Literal["", "accuracy", "vqa_accuracy"]
"""Which metric heads results: exact match or the soft score; empty: as the objective says."""


@register_task
@dataclass(frozen=True)
class VQA:
    """One answer out of C; implements :class:`confed.federation.protocols.Task`.

    Batches carry ``label`` (B,) int64, or soft scores ``target`` (B, C) in [0, 1], or both, and may carry
    ``type`` (B,) int64, each question's position in ``types``, and ``annotated`` (B, A) int64, the labels that A
    annotators gave, C for an answer outside the vocabulary. Test batches may carry ``answerable`` (B,) bool, false
    where the right answer is outside the vocabulary: with label -1, such an example counts as wrong and has no loss.

    Args:
        answers: size C of the answer vocabulary.
        objective: ``ce`` trains on ``label`` with softmax cross-entropy, the mean over the batch (FedVQA,
            Eq. 8.2), and its confidence is the softmax probability; ``bce`` trains on ``target`` with binary
            cross-entropy, the sum over answers and mean over the batch (the usual loss of VQA-v2 models), and
            its confidence is the sigmoid probability; ``kl`` trains on the answers' distribution p with
            ``sum_c p_c (log p_c - log softmax_c)``, the mean over the batch (MFB). p is the share of the annotators who
            gave each answer, so that answers outside the vocabulary leave a sum below 1; without ``annotated`` it is
            ``target`` divided by its sum, so that with one answer it is ``ce``.
        types: names of the question types; each gets a line of the headline metric.
        reduction: "sum" makes the training loss the sum over the batch instead of its mean, as OpenVQA has it; what
            a method adds to the loss then weighs less. Tallies are not changed.
        headline: the metric that heads results and is tested, "accuracy" or "vqa_accuracy"; empty: ``accuracy`` with
            ``ce``, else ``vqa_accuracy``. Where batches have what both need, tallies have both either way.

    Raises:
        ValueError: fewer than one answer, an unknown objective, reduction or headline, or a repeated type.
    """

    answers: Annotated[int, AT_LEAST_ONE]
    objective: Objective = "ce"
    types: tuple[str, ...] = ()
    reduction: Reduction = "mean"
    headline: Headline = ""

    name: ClassVar[str] = "vqa"
    head: ClassVar[str] = "answers"
    verdicts: ClassVar[tuple[str, ...]] = ()
    """The answers, of a task that always has the same."""

    def __post_init__(self) -> None:
        check_fields(self, "task")
        if len(set(self.types)) != len(self.types):
            raise ValueError(f"types must be distinct, got {self.types}")
        if self.verdicts and self.answers != len(self.verdicts):
            listed = f"{len(self.verdicts)} for {self.name} ({', '.join(self.verdicts)})"
            raise ValueError(f"answers must be {listed}, got {self.answers}")
        if self.name != VQA.name and self.objective != "ce":
            raise ValueError(f"objective must be 'ce' for {self.name}, got {self.objective!r}")

    @property
    def metric(self) -> str:
        """The headline; by default ``accuracy`` (exact match) with ``ce``, ``vqa_accuracy`` (soft score) otherwise."""
        return self.headline or ("accuracy" if self.objective == "ce" else "vqa_accuracy")

    @property
    def single_label(self) -> bool:
        """Whether one answer is right: with ``ce``."""
        return self.objective == "ce"

    def labels(self, batch: Batch) -> Tensor:
        """The right answers, int64, shape (B,); implements :class:`confed.federation.protocols.SingleLabel`."""
        if "label" not in batch:
            raise ValueError(f"single answers need batch['label'], got keys {sorted(batch)}")
        return batch["label"]

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Training loss in at least single precision, a scalar: the mean over the batch, or the sum.

        Raises ``ValueError``: ``label`` or ``target`` is missing, or one of these or ``annotated`` has the wrong shape
        or a label out of range.
        """
        mean = self._loss(output, batch, "mean")
        return mean * len(output.logits) if self.reduction == "sum" else mean

    def example_losses(self, output: Output, batch: Batch) -> Tensor | None:
        """See :class:`confed.federation.protocols.LossPerExample`; None of a sum over the batch."""
        return None if self.reduction == "sum" else self._loss(output, batch, "none")

    def _loss(self, output: Output, batch: Batch, reduction: Literal["mean", "none"]) -> Tensor:
        logits, truth = self._logits_and_truth(output, self._with_target(batch))
        if self.objective == "bce":
            loss = functional.binary_cross_entropy_with_logits(logits, truth.to(logits.dtype), reduction=reduction)
            return loss * self.answers if reduction == "mean" else loss.sum(1)
        if self.objective == "kl":
            loss = self._divergence(logits, truth, batch.get("annotated"))
            return loss.mean() if reduction == "mean" else loss
        # Cross-entropy itself skips a label of -100 in silence, and one above C ends a GPU process.
        check_below("label", truth, self.answers)
        return functional.cross_entropy(logits, truth, reduction=reduction)

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        return ranges(("loss", "accuracy", "vqa_accuracy", "ece"), self.metric, self.types)

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights of every metric on this batch; one copy to the host.

        Keys: ``loss``; ``accuracy`` (argmax equals ``label``) if the batch has labels; ``vqa_accuracy``
        (``target`` at the argmax) if it has targets; the headline metric as ``<metric>/<type>`` for each
        question type that occurs; and the bins of :func:`confed.metrics.calibration.calibration_tally`. Where
        ``answerable`` is false every prediction is wrong, and ``loss`` leaves the example out. Keys without
        examples are absent. :func:`confed.metrics.scores.summarise` turns added tallies into values.

        Raises ``ValueError``: faults as in :meth:`loss`, or a type outside [0, number of types).
        """
        batch = self._with_target(batch)
        rows = self._rows(output, batch)
        self._judged_by(batch)
        # Numbers up to 2^24 are exact in single precision, which covers labels and types.
        host = dict(zip(rows, torch.stack([row.float() for row in rows.values()]).cpu(), strict=True))
        count = float(len(host["loss"]))
        if not count:
            return {}
        answerable = host.get("answerable", torch.ones(len(host["loss"])))
        if "label" in host:
            check_below("label", host["label"] * answerable, self.answers)
        weights = {"loss": float(answerable.sum()), "accuracy": count, "vqa_accuracy": count}
        tally = {key: (host[key].double().sum().item(), n) for key, n in weights.items() if key in host and n}
        if "type" in host:
            tally |= sums_by_type(self.metric, self.types, host["type"].long(), host[self.metric].double())
        # A diverged model shows in its loss; it has no confidence rather than ending the run.
        confidence = host["confidence"].nan_to_num(0.0)
        return tally | calibration_tally(confidence, host[self.metric])

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """Each example's headline score, for tests that pair methods example by example.

        Raises ``ValueError``: faults as in :meth:`loss`, or the batch lacks what the headline needs. Labels outside the
        vocabulary are allowed; no answer matches them.

        Returns:
            1 or 0 for ``accuracy``, the soft score in [0, 1] for ``vqa_accuracy``; float32, shape (B,).
        """
        batch = self._with_target(batch)
        logits, _ = self._logits_and_truth(output, batch)
        return self._score(logits.argmax(dim=1), self._judged_by(batch))

    def _judged_by(self, batch: Batch) -> Tensor:
        """Ground truth of the headline metric: labels (B,) or soft scores (B, C)."""
        key = "label" if self.metric == "accuracy" else "target"
        if key not in batch:
            raise ValueError(f"the headline {self.metric!r} needs batch[{key!r}], got keys {sorted(batch)}")
        return batch[key]

    def _with_target(self, batch: Batch) -> Batch:
        """Soft scores, if they are needed: of a dataset with one answer per question, that answer's one-hot row."""
        if (self.objective == "ce" and self.metric == "accuracy") or "target" in batch or "label" not in batch:
            return batch
        label, answerable = batch["label"], batch.get("answerable")
        if answerable is not None:
            label = label * answerable
        check_below("label", label, self.answers)
        target = functional.one_hot(label, self.answers).float()
        return {**batch, "target": target if answerable is None else target * answerable.unsqueeze(1)}

    def _rows(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """One value per example and quantity, each of shape (B,), on the model's device."""
        logits, truth = self._logits_and_truth(output, batch)
        logits = logits.detach()
        best, predicted = logits.max(dim=1)
        if self.objective == "kl":
            confidence = (best - logits.logsumexp(dim=1)).exp()
            loss = self._divergence(logits, truth, batch.get("annotated"))
        elif self.objective == "ce":
            normaliser = logits.logsumexp(dim=1)
            confidence = (best - normaliser).exp()
            # Clamped so that a bad label is reported by name on the host instead of by the device.
            inside = truth.clamp(0, self.answers - 1)
            loss = normaliser - logits.gather(1, inside.unsqueeze(1)).squeeze(1)
        else:
            confidence = best.sigmoid()
            soft = truth.to(logits.dtype)
            loss = functional.binary_cross_entropy_with_logits(logits, soft, reduction="none").sum(dim=1)
        rows = {"loss": loss, "confidence": confidence}
        if "answerable" in batch:
            rows |= {"answerable": batch["answerable"], "loss": loss.where(batch["answerable"], 0.0)}
        if "label" in batch:
            rows |= {"label": batch["label"], "accuracy": self._score(predicted, batch["label"])}
        if "target" in batch:
            rows["vqa_accuracy"] = self._score(predicted, batch["target"])
        if self.types and "type" in batch:
            rows["type"] = batch["type"]
        return rows

    def _divergence(self, logits: Tensor, target: Tensor, annotated: Tensor | None) -> Tensor:
        """Kullback-Leibler divergence of the softmax from the annotators' answers, shape (B,).

        With n_a the annotators who answered as a did, ``sum_c p_c (log p_c - log q_c)`` is
        ``sum_a (log(n_a / A) - log q_a) / A`` over the annotators whose answer is in the vocabulary.
        """
        q = logits.log_softmax(1)
        if annotated is None:
            p = target / target.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            return functional.kl_div(q, p.to(q.dtype), reduction="none").sum(1)
        if annotated.ndim != 2 or len(annotated) != len(logits):
            raise ValueError(f"annotated must have shape ({len(logits)}, annotators), got {tuple(annotated.shape)}")
        check_below("annotated", annotated, self.answers + 1)
        share = (annotated.unsqueeze(2) == annotated.unsqueeze(1)).to(q.dtype).mean(2)
        annotated_share = q.gather(1, annotated.clamp_max(self.answers - 1))
        return (share.log() - annotated_share).where(annotated < self.answers, 0.0).sum(1) / annotated.shape[1]

    def _logits_and_truth(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (B, C) in at least single precision, and what the objective compares them with."""
        logits = at_least_single(among_offered(output.logits, batch))
        if logits.ndim != 2 or logits.shape[1] != self.answers:
            raise ValueError(f"logits must have shape (B, {self.answers}), got {tuple(logits.shape)}")
        key, shape = ("label", logits.shape[:1]) if self.objective == "ce" else ("target", logits.shape)
        if key not in batch:
            raise ValueError(f"objective {self.objective!r} needs batch[{key!r}], got keys {sorted(batch)}")
        if batch[key].shape != shape:
            raise ValueError(f"{key} must have shape {tuple(shape)}, got {tuple(batch[key].shape)}")
        return logits, batch[key]

    @staticmethod
    def _score(predicted: Tensor, truth: Tensor) -> Tensor:
        """Exact match with labels (B,), or the soft score of the prediction in targets (B, C); shape (B,)."""
        if truth.ndim == 1:
            return (predicted == truth).float()
        return truth.gather(1, predicted.unsqueeze(1)).squeeze(1).float()
