"""Metrics of multi-label runs over all places together, per label, and at two levels of labels.

Means over classes are no means over examples, so that clients' values cannot be averaged: while a run trains, counts
are added over places (:class:`PooledCounts`); at its end the scores of all test examples are put together
(:func:`summarise_labels`), and average precision is exact.

Where a dataset says which coarse label each label belongs to, a coarse label is present where any of its labels is,
and its score is the largest of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confed.data.examples import FederatedDataset
from confed.data.federate import label_numbers
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.protocols import Counting
from confed.federation.specs import task_spec
from confed.metrics.multilabel import (
    class_average_precision,
    flair_metrics,
    label_counts,
    mean_over_classes,
    overall_average_precision,
)
from confed.results.summary import VALIDATION
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination

KEPT = 4_000_000
"""Entries (examples times labels, over all views) up to which a run keeps the probabilities of its test examples."""


TOGETHER = 30  # labels, the most frequent ones, of which a run counts how often any two are on one example


class PooledCounts:
    """The counts of a task, added over places while a round is evaluated."""

    def __init__(self, task: object, algorithm: Algorithm, unseen: Iterable[str]) -> None:
        self._task = task if isinstance(task, Counting) else None
        self._pooled, self._unseen = algorithm.traits.centralised, frozenset(unseen)
        self._counts: dict[str, dict[str, Tensor]] = {}

    def add(self, view: str, place: str, counts: Mapping[str, Tensor]) -> None:
        """One place's counts of one view; see :meth:`confed.engines.local.Simulation.evaluate`."""
        if view == "unseen":
            # Of a pooled run the clients look on too: to them its one model is the global one.
            view = f"unseen/{place}" if place in self._unseen else "global"
        before = self._counts.setdefault(view, {})
        for key, value in counts.items():
            before[key] = before[key] + value if key in before else value

    def values(self) -> dict[str, dict[str, float]]:
        """View ("global", "personal", "unseen/<place>") -> metrics of all its places together."""
        if self._task is None:
            return {}
        return {view: self._task.values(counts) for view, counts in sorted(self._counts.items())}

    def lines(self) -> dict[str, Any]:
        """Fields for the line of an evaluation in the history; empty if the task does not count."""
        return {"pooled": values} if (values := self.values()) else {}


def kept_probabilities(examined: Examination) -> dict[str, Tensor]:
    """Float32 probabilities and uint8 labels (N, C) for ``predictions.safetensors``; empty beyond :data:`KEPT`."""
    probabilities: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    for (view, owner, place), (_, rows) in examined.results.items():
        if owner == place and "probabilities" in rows:
            probabilities[f"{view}/{place}/probabilities"] = rows["probabilities"]
            labels[f"labels/{place}"] = rows["labels"]
    return {} if sum(map(Tensor.numel, probabilities.values())) > KEPT else probabilities | labels


def summarise_labels(
    setup: Setup, run_data: RunData, examined: Examination, left: Sequence[str] = ()
) -> dict[str, Any]:
    """The section ``multilabel`` of ``summary.json``; empty for other runs."""
    dataset, task = run_data.dataset, setup.task
    if not isinstance(task, Counting):
        return {}
    if not all("probabilities" in tensors for _, tensors in examined.results.values()):
        return {}  # single examples' scores stay at the sites of a federation across machines
    threshold, undefined = task_spec(task).threshold, task_spec(task).undefined
    summary: dict[str, Any] = {}
    classes: dict[str, list[dict[str, Any]]] = {}
    coarse_classes: dict[str, list[dict[str, Any]]] = {}
    pairs: dict[str, Any] = {}
    train = label_numbers(split.train for split in dataset.clients.values()) + np.zeros(len(dataset.answers), np.int64)
    for view, places in _views(setup, run_data, examined, left).items():
        scores, truth = _together([examined.results[key][1] for key in places])
        classes[view] = _per_class(scores, truth, dataset.answers, threshold)
        for row, count in zip(classes[view], train.tolist(), strict=True):
            row["train"] = count
        pairs = pairs or _together_counts(scores, truth, dataset.answers, train, threshold)
        summary[view] = _metrics(scores, truth, classes[view], undefined)
        summary[view]["top3"] = label_counts(scores, truth, threshold=threshold, top=3).summary(undefined)
        summary[view]["flair"] = flair_metrics(scores, truth)
        if dataset.coarse:
            names, scores, truth = _coarse(scores, truth, dataset)
            coarse_classes[view] = _per_class(scores, truth, names, threshold)
            summary[view]["coarse"] = _metrics(scores, truth, coarse_classes[view], undefined)
    if not summary:
        return {}
    first = next(iter(summary))
    clients: dict[str, dict[str, dict[str, float]]] = {view: {} for view in ("global", "personal") if view in summary}
    for (view, owner, place), (values, _) in examined.results.items():
        if view in clients and owner == place:
            clients[view][place] = {name: value for name, value in values.items() if "/" not in name}
    return {
        **summary,
        "headline": first,
        "undefined": undefined,
        "threshold": threshold,
        "per_class": classes[first],
        **({"per_class_coarse": coarse_classes[first]} if dataset.coarse else {}),
        "co_occurrence": pairs,
        "clients": clients,
    }


def _views(
    setup: Setup, run_data: RunData, examined: Examination, left: Sequence[str]
) -> dict[str, list[tuple[str, str, str]]]:
    """View -> the keys of its results, views without any left out; the first is what the run is judged by."""
    keys = [key for key in examined.results if key[1] == key[2] and len(examined.results[key][1].get("labels", ()))]
    has_personal = setup.algorithm.traits.has_personal and not setup.algorithm.traits.centralised
    unseen = [key for key in keys if key[0] == "unseen"]
    views = {
        "global": [key for key in keys if key[0] == "global" and key[2] not in left],
        "unseen": [key for key in unseen if key[2] != VALIDATION],
        "personal": [key for key in keys if key[0] == "personal" and has_personal and key[2] not in left],
    }
    views |= {f"unseen/{key[2]}": [key] for key in unseen}
    return {view: places for view, places in views.items() if places}


def _together(parts: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """All probabilities and labels (N, C); those of a single place, which may be large, are not copied."""
    if len(parts) == 1:
        return parts[0]["probabilities"], parts[0]["labels"]
    return torch.cat([tensors["probabilities"] for tensors in parts]), torch.cat(
        [tensors["labels"] for tensors in parts]
    )


def _coarse(scores: Tensor, truth: Tensor, dataset: FederatedDataset) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Names, scores and labels of the coarse labels, in the order of their first fine ones."""
    groups: dict[str, list[int]] = {}
    for number, label in enumerate(dataset.answers):
        if label in dataset.coarse:
            groups.setdefault(dataset.coarse[label], []).append(number)
    return (
        tuple(groups),
        torch.stack([scores[:, members].amax(1) for members in groups.values()], 1),
        torch.stack([truth[:, members].amax(1) for members in groups.values()], 1),
    )


def _per_class(scores: Tensor, truth: Tensor, names: Sequence[str], threshold: float) -> list[dict[str, Any]]:
    """Counts and metrics of each class; AP is None where there are no positives."""
    counts, precision = label_counts(scores, truth, threshold=threshold), class_average_precision(scores, truth)
    columns = {
        "positives": counts.positives, "predicted": counts.predicted, "true_positives": counts.true_positives,
        "AP": precision, "P": counts.precision, "R": counts.recall, "F1": counts.f1,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, *row in zip(names, *(column.tolist() for column in columns.values()), strict=True):
        values = dict(zip(columns, row, strict=True))
        rows.append({"label": name, **values, "AP": None if np.isnan(values["AP"]) else values["AP"]})
    return rows


def _together_counts(
    scores: Tensor, truth: Tensor, names: Sequence[str], train: np.ndarray, threshold: float
) -> dict[str, Any]:
    """Co-occurrence counts of labels, by the truth and by predictions."""
    order = np.argsort(-train, kind="stable")[:TOGETHER]
    chosen = torch.from_numpy(order)
    real, predicted = truth[:, chosen].double(), (scores[:, chosen] >= threshold).double()
    return {
        "labels": [names[number] for number in order.tolist()],
        "truth": (real.T @ real).long().tolist(),
        "predicted": (predicted.T @ predicted).long().tolist(),
    }


def _metrics(scores: Tensor, truth: Tensor, classes: Sequence[Mapping[str, Any]], undefined: Any) -> dict[str, Any]:
    """The eight metrics of one view, those over classes by both conventions."""
    positives = np.array([row["positives"] for row in classes])

    def over_classes(convention: Any) -> dict[str, float]:
        means: list[float] = []
        for key in ("AP", "P", "R"):
            values = np.array([row[key] for row in classes], dtype=np.float64)
            means.append(mean_over_classes(values, positives, convention))
        ap, p, r = means
        return {"C-AP": ap, "C-P": p, "C-R": r, "C-F1": 2 * p * r / (p + r) if p + r else 0.0}

    hits, predicted = sum(row["true_positives"] for row in classes), sum(row["predicted"] for row in classes)
    positive_count = int(positives.sum())
    p, r = hits / predicted if predicted else 0.0, hits / positive_count if positive_count else 0.0
    overall = {"O-AP": overall_average_precision(scores, truth), "O-P": p, "O-R": r}
    other = "omit" if undefined == "zero" else "zero"
    return {
        **over_classes(undefined),
        **overall,
        "O-F1": 2 * p * r / (p + r) if p + r else 0.0,
        "examples": len(scores),
        "classes": len(positives),
        "without_positives": int((positives == 0).sum()),
        other: over_classes(other),
    }
