"""Names and labels of test examples, for a run's stored predictions."""

from collections.abc import Mapping

import torch
from torch import Tensor

from confed.data.labelled import LabelExamples
from confed.results.example_names import ANSWERS, NAMES, TRUTH, name_hashes
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination

__all__ = ["examples_tried"]


def examples_tried(run_data: RunData, examined: Examination) -> dict[str, Tensor]:
    """Names and right answers of the test examples that models were tried on, for ``predictions.safetensors``.

    Args:
        run_data: the run's data.
        examined: the final models on test examples.

    Returns:
        ``names/<place>`` and, of questions with answers, ``truth/<place>``: the positions of the right answers among
        the place's, -1 for one outside, and ``answers/<place>``: hashes of their texts, the same whatever the
        place's answers are and however they are ordered. Nothing of a place whose rows were not kept, as across
        machines.
    """
    dataset, found = run_data.dataset, dict[str, Tensor]()
    kept = {
        place: len(tensors["correct"]) for (_, own, place), (_, tensors) in examined.results.items() if own == place
    }
    for place, count in kept.items():
        examples = dataset.unseen[place] if place in dataset.unseen else dataset.clients[place].test
        if len(examples) != count:
            continue
        found[f"{NAMES}/{place}"] = torch.from_numpy(name_hashes(examples.names))
        if not isinstance(examples, LabelExamples):
            table = (run_data.unseen if place in run_data.unseen else run_data.clients)[place].tables[2]
            columns: Mapping[str, Tensor] = table.columns
            if "label" in columns:
                found[f"{TRUTH}/{place}"] = columns["label"]
                found[f"{ANSWERS}/{place}"] = torch.from_numpy(name_hashes(examples.answers))
    return found
