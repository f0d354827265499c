"""Similarity matrices of a test batch before and after training, for contrastive models."""

from typing import Any

import torch
from safetensors.torch import load_file

from confed.engines.local import Workspace
from confed.models.contrastive import ContrastiveAnswerer
from confed.results.folder import RunFolder
from confed.runs.encode import RunData
from confed.runs.samples import fill, rounded
from confed.tasks.contrastive import same_answer_share

EXAMPLES = 32
"""Examples of the batch; more could not be told apart in a drawing."""


def measure(
    folder: RunFolder, workspace: Workspace, run_data: RunData, batch_size: int, count: int = EXAMPLES
) -> dict[str, Any] | None:
    """Content of ``similarity.json`` for a run with stored models; None for models that are not contrastive.

    The examples are spread over the test data of the first client that has some.
    """
    model = workspace.model
    if not isinstance(model, ContrastiveAnswerer):
        return None
    place = next((name for name, data in run_data.clients.items() if len(data.tables[2])), None)
    if place is None:
        return None
    files = {"personal": folder.personal_model(place), "global": folder.models / "global" / "trained.safetensors"}
    trained = {whose: load_file(path) for whose, path in files.items() if path.is_file()}
    if not trained:
        return None
    table = run_data.clients[place].tables[2]
    labels = table.columns["label"]
    in_vocabulary = (labels >= 0).nonzero().flatten()  # an answer outside the vocabulary has no representation
    if len(in_vocabulary) < 2:
        return None
    rows = in_vocabulary[torch.linspace(0, len(in_vocabulary) - 1, min(count, len(in_vocabulary))).round().long()]
    names = run_data.dataset.answers
    rows = torch.tensor(sorted(rows.tolist(), key=lambda row: (names[int(labels[row])], row)))
    batch = table.batch(rows)
    answers = [names[int(label)] for label in labels[rows]]
    summary: dict[str, Any] = {"place": place, "kind": model.eval_similarity, "answers": answers}
    summary["same"] = _same(run_data, batch_size)
    # What is global, with what the client keeps to itself where it does.
    after = trained.get("personal", {}) | trained.get("global", {})
    for when, tensors in (("before", {}), ("after", after)):
        fill(workspace, tensors)
        with torch.no_grad():
            similar = model(batch).logits[:, labels[rows]]
        summary[when] = rounded(similar.cpu(), 4)
    return summary


def _same(run_data: RunData, batch_size: int) -> float:
    """The share of same-answer negatives of an epoch, the mean over clients weighted by their examples."""
    total, examples = 0.0, 0
    for data in run_data.clients.values():
        labels = data.tables[0].columns["label"]
        total += len(labels) * same_answer_share(labels, batch_size, torch.Generator().manual_seed(0))
        examples += len(labels)
    return total / max(examples, 1)
