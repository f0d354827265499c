"""Gallery of a multi-label run: test examples with predicted labels and attention maps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from confed.data.labelled import LabelDataset, LabelExamples
from confed.engines.local import Setup, Workspace
from confed.federation.protocols import Batch
from confed.federation.specs import Attends, HasGrid, task_spec
from confed.models.tokenizer import HasVocabulary
from confed.results.folder import RunFolder
from confed.results.summary import VALIDATION
from confed.runs.encode import RunData
from confed.runs.evaluate import evenly
from confed.runs.samples import by_view, png, rounded

CLIENTS, UNSEEN = 6, 4
"""Places that samples are of: clients spread evenly over all with test examples, and the first unseen places."""

ASKED = 50
"""Clients that are looked through for those with test examples."""

SHOWN = 8
"""Labels of an example that are shown: those that it has or that are predicted, and the most probable ones."""

LEAST = 5

SIDE = 256
"""Pixels per side of a picture in a page."""


class AtLabels:
    """Probabilities of labels, and how each label's token looks at the picture or the text."""

    def __init__(self, network: nn.Module, model: nn.Module | None = None) -> None:
        self.network, self.model = network, network if model is None else model

    @torch.no_grad()
    def probabilities(self, batch: Batch) -> Tensor:
        """Probabilities of labels, (B, C); 0 where a logit is NaN, as in evaluations."""
        return self.network(batch).logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf).sigmoid()

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor | None:
        """Attention of each label to each place, (B, C, rows, columns), or to each token (B, C, L).

        The largest of each label is 1; None if the model does not say.
        """
        if not isinstance(self.model, Attends):
            return None
        maps = self.model.attention(batch)
        maps = maps / maps.amax(-1, keepdim=True).clamp_min(1e-12)
        if "image" not in batch:
            return maps
        return maps.unflatten(-1, self.model.grid) if isinstance(self.model, HasGrid) else None


def look(
    at: AtLabels, batch: Batch, labels: Sequence[str], threshold: float, words: Sequence[Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """Predictions and attention of a model for each example of a batch."""
    maps, examples = at.attention(batch), list[dict[str, Any]]()
    rows = zip(at.probabilities(batch).cpu(), batch["labels"].bool().cpu(), strict=True)
    for row, (probabilities, truth) in enumerate(rows):
        chosen, others = _chosen(probabilities, truth, threshold)
        entries: list[dict[str, Any]] = []
        for number in chosen:
            probability = round(float(probabilities[number]), 4)
            entry: dict[str, Any] = {"label": labels[number], "probability": probability, "there": bool(truth[number])}
            if maps is not None:
                weights = maps[row, number]
                entry["attention"] = rounded(weights if words is None else weights[: len(words[row])])
            entries.append(entry)
        examples.append({"labels": entries, "others": others})
    return examples


def _chosen(probabilities: Tensor, truth: Tensor, threshold: float) -> tuple[list[int], int]:
    """The labels shown, most probable first, and how many that matter are left out."""
    order = probabilities.argsort(descending=True, stable=True).tolist()
    matter = {number for number in order if probabilities[number] >= threshold or truth[number]}
    first = [number for number in order if number in matter][:SHOWN]
    # What is there and not predicted must not be pushed out by what is predicted.
    missed = [number for number in order if truth[number] and number not in first]
    first = (first[: max(SHOWN - len(missed), SHOWN // 2)] + missed)[:SHOWN]
    others = [number for number in order if number not in matter]
    shown = {*first, *others[: max(0, LEAST - len(first))]}
    return [number for number in order if number in shown], len(matter - shown)


def gallery(
    folder: RunFolder, workspace: Workspace, run_data: RunData, count: int, setup: Setup
) -> list[dict[str, Any]]:
    """``count`` test examples of each of some places, spread over their rows, from the models the run has written."""
    dataset = run_data.dataset
    assert isinstance(dataset, LabelDataset)
    at = AtLabels(setup.algorithm.deployed_model(workspace.model), workspace.model)
    threshold, entries = task_spec(setup.task).threshold, list[dict[str, Any]]()
    for name, examples, seen in _places(dataset):
        rows = evenly(range(len(examples)), count)
        data = (run_data.clients if seen else run_data.unseen)[name]
        batch = data.tables[2].batch(torch.tensor(rows))
        words = words_of(batch, run_data.tokenizer)
        seeing = partial(look, at, batch, dataset.labels, threshold, words)
        views = by_view(folder, workspace, setup.algorithm, name, seen, seeing)
        for position, row in enumerate(rows):
            entry = _example(examples, row, None if words is None else words[position])
            outputs = {view: None if given is None else given[position] for view, given in views.items()}
            entries.append({"place": name, "seen": seen, **entry, "threshold": threshold, **outputs})
            for output in filter(None, outputs.values() if position else ()):
                for label in output["labels"]:
                    label.pop("attention", None)
    return entries


def _places(dataset: LabelDataset) -> list[tuple[str, LabelExamples, bool]]:
    seen = {name: dataset.clients[name].test for name in evenly(list(dataset.clients), ASKED)}
    unseen = {name: examples for name, examples in dataset.unseen.items() if name != VALIDATION}
    seen_places = [(name, examples, True) for name, examples in seen.items() if len(examples)]
    unseen_places = [(name, examples, False) for name, examples in unseen.items() if len(examples)]
    return [*evenly(seen_places, CLIENTS), *unseen_places[:UNSEEN]]


def _example(examples: LabelExamples, row: int, words: Sequence[str] | None) -> dict[str, Any]:
    number = int(examples.rows[row])
    entry: dict[str, Any] = {"name": examples.names[row], "labels": list(examples.table.labels_of(number))}
    if examples.types is not None:
        entry["type"] = str(examples.types[number])
    if examples.pictures is not None:
        entry["image"] = png(shrunk(examples.pictures[number]))
    elif examples.table.texts is not None:
        entry["text"] = examples.table.texts[number]
    return entry | ({} if words is None else {"words": list(words)})


def shrunk(pixels: np.ndarray) -> np.ndarray:
    """A picture, uint8 (H, W, 3), with at most :data:`SIDE` pixels per side, as a page shows it."""
    scale = SIDE / max(pixels.shape[:2])
    if scale >= 1:
        return pixels
    height, width = (max(1, round(scale * side)) for side in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def words_of(batch: Batch, tokenizer: Any) -> list[list[str]] | None:
    """The tokens of each text; None of pictures, and where the tokenizer does not tell them."""
    if "text" not in batch or "image" in batch or not isinstance(tokenizer, HasVocabulary):
        return None
    result: list[list[str]] = []
    for row, length in zip(batch["text"].tolist(), batch["text_mask"].sum(1).tolist(), strict=True):
        result.append([tokenizer.vocabulary[token] for token in row[:length]])
    return result
