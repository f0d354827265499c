"""Multi-label classification of C labels, of which some may be known.

Lanchantin, Wang, Ordonez and Qi, "General multi-label image classification with transformers" (C-Tran, CVPR 2021),
train with a random part of the labels given (label-mask training); FedLGT's client-aware masked label embedding
(CA-MLE) takes back those of which the global model is unsure. A label's state is -1 unknown, 0 known to be absent,
1 known to be present.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from confed.federation.protocols import Batch, Output, Tally
from confed.federation.ranges import AT_LEAST_ONE, SHARE, Range, check_fields
from confed.federation.reports import Number
from confed.losses.label_states import UNKNOWN, label_states, uncertain
from confed.metrics.multilabel import (
    LabelCounts,
    Undefined,
    bin_counts,
    binned_average_precision,
    label_counts,
    mean_over_classes,
)
from confed.registry import register_task
from confed.tasks.sums import at_least_single, ranges, sums_by_type

__all__ = ["UNKNOWN", "Multilabel", "Reduction", "label_states", "uncertain"]

Reduction = Literal["sum", "mean", "labels"]
"""Of the loss: the sum over unknown labels and the batch; the mean over the batch of the sum over unknown labels; or
the mean over all unknown labels of the batch."""


_LOST = "{} of {} label scores of a batch are NaN, which a diverged model gives: they count as not predicted"


@register_task
@dataclass(frozen=True)
class Multilabel:
    """Any of C labels; implements :class:`confed.federation.protocols.Task`.

    Batches carry ``labels`` (B, C) in {0, 1}, and may carry ``known`` (B, C) int8, the labels' states, -1, 0 or 1;
    without it all labels are unknown. Only unknown labels count, in the loss and in every metric. Batches may carry
    ``type`` (B,) int64, each example's position in ``types``.

    Args:
        answers: the number C of labels.
        known: the largest share of labels that training batches state as known, in [0, 1]: a random number of each
            example's labels, anew in every epoch (label-mask training; C-Tran's and FedLGT's is 0.75). 0 for none, as
            models that read no states need it: they would only miss the known labels in their loss. Evaluation
            batches state nothing.
        types: names of kinds of examples; each gets a line of the headline metric.
        reduction: of the training loss; "sum" is FedLGT's. Tallies are not changed.
        threshold: a label is predicted where its probability is at least this.
        undefined: whether classes without positives count as 0 in means over classes or are left out.
        thresholds: number of thresholds of average precision from counts (:meth:`counts`).

    Raises:
        ValueError: an option is unknown or outside its range, or a type is repeated.
    """

    answers: Annotated[int, AT_LEAST_ONE]
    known: Annotated[float, SHARE] = 0.0
    types: tuple[str, ...] = ()
    reduction: Reduction = "sum"
    threshold: Annotated[float, Range(0, 1, above=True, below=True)] = 0.5
    undefined: Undefined = "zero"
    thresholds: Annotated[int, Range(2)] = 200

    name: ClassVar[str] = "multilabel"
    head: ClassVar[str] = "answers"
    judges: ClassVar[str] = "labels"
    score: ClassVar[str] = "C-AP-binned"
    """Of :meth:`values`, what settings are chosen by unless a recipe says otherwise."""

    def __post_init__(self) -> None:
        check_fields(self, "task")
        if len(set(self.types)) != len(self.types):
            raise ValueError(f"types must be distinct, got {self.types}")

    @property
    def metric(self) -> str:
        """``example_f1``, the mean of :meth:`predictions`: it is defined for every client, whatever its labels.

        AP and the means over classes are not means over examples; they come from :meth:`counts` and :meth:`scores`.
        """
        return "example_f1"

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Binary cross-entropy with logits over unknown labels, a scalar in at least single precision.

        Known labels get no gradient. 0 if there are no unknown ones.

        Raises ``ValueError``: ``labels`` is missing, or it, ``known`` or the logits have a wrong shape or value.
        """
        logits, truth, unknown = self._inputs(output, batch)
        # A known label's entry is replaced, not multiplied by zero, so that an infinite loss there changes nothing.
        entries = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none").where(unknown, 0.0)
        if self.reduction == "sum":
            return entries.sum()
        return entries.sum() / (max(len(entries), 1) if self.reduction == "mean" else unknown.sum().clamp_min(1))

    def example_losses(self, output: Output, batch: Batch) -> Tensor | None:
        """See :class:`confed.federation.protocols.LossPerExample`; None where the loss is no mean over examples."""
        if self.reduction != "mean":
            return None
        logits, truth, unknown = self._inputs(output, batch)
        entries = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        return entries.where(unknown, 0.0).sum(1)

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        names = ("loss", "example_f1", "exact_match", "label_accuracy", "O-P", "O-R", "O-F1", "nan_logits")
        return ranges(names, self.metric, self.types)

    @property
    def count_shapes(self) -> dict[str, tuple[int, ...]]:
        """See :class:`confed.federation.protocols.Counting`."""
        classes = dict.fromkeys(("true_positives", "predicted", "positives"), (self.answers,))
        return {**classes, "bins": (2, self.answers, self.thresholds - 1)}

    def tally(self, output: Output, batch: Batch) -> Tally:
        """Sums and weights of every metric on this batch; one copy to the host.

        Keys: ``loss`` (sum over unknown labels, mean over examples); ``example_f1``, overall and as
        ``example_f1/<type>`` (see :meth:`predictions`); ``exact_match``, the share of examples with all unknown labels
        right; ``label_accuracy``, the share of right unknown labels, one minus the Hamming loss; and ``O-P``, ``O-R``
        and ``O-F1``, whose numerators and denominators are sums over entries, so that added tallies give them exactly.
        The denominator of ``O-P`` is 0 without predictions, of ``O-R`` without positives, of ``O-F1`` without both.
        A logit that is NaN is no prediction. Batches that have some warn, and add ``nan_logits``, their share of the
        batch's unknown labels.

        Raises ``ValueError``: faults as in :meth:`loss`, or a type outside [0, number of types).
        """
        logits, truth, unknown = self._inputs(output, batch)
        if not len(logits):
            return {}
        loss = functional.binary_cross_entropy_with_logits(logits.detach(), truth, reduction="none").where(unknown, 0.0)
        hits, predicted, positives, right, unknown_count = self._rows(logits, truth, unknown)
        lost = (logits.isnan() & unknown).sum(1)
        rows = [loss.sum(1), hits, predicted, positives, right, unknown_count, lost]
        if self.types and "type" in batch:
            rows.append(batch["type"])
        # Numbers up to 2^24 are exact in single precision, which covers counts and types.
        host = torch.stack([row.float() for row in rows]).cpu().double()
        loss, hits, predicted, positives, right, unknown_count, lost = host[:7]
        f1, count = _example_f1(hits, predicted, positives), float(len(loss))
        sums = {
            "loss": (loss, count),
            "example_f1": (f1, count),
            "exact_match": (right == unknown_count, count),
            "label_accuracy": (right, unknown_count),
            "O-P": (hits, predicted),
            "O-R": (hits, positives),
            "O-F1": (2 * hits, predicted + positives),
        }
        tally = {
            key: (value.sum().item(), weight if isinstance(weight, float) else weight.sum().item())
            for key, (value, weight) in sums.items()
        }
        if lost.any():
            tally["nan_logits"] = (lost.sum().item(), unknown_count.sum().item())
            warnings.warn(_LOST.format(int(lost.sum()), int(unknown_count.sum())), RuntimeWarning, stacklevel=2)
        return tally | (sums_by_type(self.metric, self.types, host[7].long(), f1) if len(host) > 7 else {})

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """Each example's F1 over its unknown labels, for tests that pair methods example by example.

        ``2 tp / (predicted + positives)``; 1 where nothing is predicted and nothing is positive, for all is right.

        Returns:
            In [0, 1], float32, shape (B,).
        """
        hits, predicted, positives, _, _ = self._rows(*self._inputs(output, batch))
        return _example_f1(hits, predicted, positives).float()

    def counts(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Counts for the metrics over classes, which add up over batches, clients and processes.

        Returns:
            On the host, int64: ``true_positives``, ``predicted`` and ``positives`` (C,), and ``bins`` (2, C, T - 1),
            see :func:`confed.metrics.multilabel.bin_counts`.
        """
        probabilities, truth, unknown = self.scores(output, batch)
        label_sums = label_counts(probabilities, truth, unknown, threshold=self.threshold)
        bins = bin_counts(probabilities, truth, unknown, thresholds=self.thresholds)
        arrays = {**vars(label_sums), "bins": bins}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def values(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of added :meth:`counts`."""
        host = {name: value.cpu().numpy() for name, value in counts.items()}
        label_sums = LabelCounts(host["true_positives"], host["predicted"], host["positives"])
        per_class = binned_average_precision(host["bins"])
        return {
            **label_sums.summary(self.undefined),
            "C-AP-binned": mean_over_classes(per_class, label_sums.positives, self.undefined),
            "O-AP-binned": float(binned_average_precision(host["bins"].sum(1, keepdims=True))[0]),
        }

    def scores(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and labels for exact average precision (:func:`confed.metrics.multilabel.multilabel_metrics`).

        Returns:
            On the host, each (B, C): probabilities in at least single precision, the labels and which of them are
            unknown, both bool. Where a logit is NaN the probability is 0: not predicted. (FedLGT's evaluation has 0.5
            there, which is predicted.)
        """
        logits, truth, unknown = self._inputs(output, batch)
        return _probabilities(logits).cpu(), truth.bool().cpu(), unknown.cpu()

    def records(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Records of each example for the final evaluation, on the host.

        Returns:
            ``probabilities`` float32 and ``labels`` uint8, each (B, C).
        """
        probabilities, truth, _ = self.scores(output, batch)
        return {"probabilities": probabilities.float(), "labels": truth.to(torch.uint8)}

    def _rows(self, logits: Tensor, truth: Tensor, unknown: Tensor) -> tuple[Tensor, ...]:
        """Per example, over unknown labels: true positives, predicted, positives, right and all, each (B,)."""
        real = truth.bool() & unknown
        predicted = (_probabilities(logits) >= self.threshold) & unknown
        right = (predicted == real) & unknown
        return tuple(entries.sum(1) for entries in (predicted & real, predicted, real, right, unknown))

    def _inputs(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and labels in at least single precision, and which labels are unknown, each (B, C)."""
        logits = at_least_single(output.logits)
        if logits.ndim != 2 or logits.shape[1] != self.answers:
            raise ValueError(f"logits must have shape (B, {self.answers}), got {tuple(logits.shape)}")
        if "labels" not in batch:
            raise ValueError(f"multi-label examples need batch['labels'], got keys {sorted(batch)}")
        truth, known_labels = batch["labels"], batch.get("known")
        for key, value in (("labels", truth), ("known", known_labels)):
            if value is not None and value.shape != logits.shape:
                raise ValueError(f"{key} must have shape {tuple(logits.shape)}, got {tuple(value.shape)}")
        _check("labels", truth, (0, 1))
        if known_labels is None:
            return logits, truth.to(logits.dtype), torch.ones_like(logits, dtype=torch.bool)
        _check("known", known_labels, (UNKNOWN, 0, 1))
        return logits, truth.to(logits.dtype), known_labels == UNKNOWN


def _check(name: str, values: Tensor, allowed: tuple[int, ...]) -> None:
    """Check that every value is one of those allowed."""
    wrong = torch.stack([values != value for value in allowed]).all(0)
    if bool(wrong.any()):
        raise ValueError(f"every entry of {name} must be one of {allowed}, got {values[wrong][0].item()}")


def _probabilities(logits: Tensor) -> Tensor:
    """Sigmoids; 0 where a logit is NaN, so that what a diverged model gives is no prediction."""
    return logits.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sigmoid()


def _example_f1(hits: Tensor, predicted: Tensor, positives: Tensor) -> Tensor:
    both = predicted + positives
    return (2 * hits / both.clamp_min(1)).where(both > 0, 1.0)
