"""Which test example each row of a run's predictions is: hashes of names, and right answers, in stored order.

``predictions.safetensors`` holds ``names/<place>``, int64 (N,), and of questions with answers ``truth/<place>`` and
``answers/<place>``, int64 (N,), beside the rows of every view. Rows may stand in another order for another seed
(examples that lack modalities are sorted by what they have), so comparisons pair them by these hashes and never by
position.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from confed.data.labelled import LabelExamples
from confed.runs.encode import Materials
from confed.runs.evaluate import Examination

__all__ = ["ANSWERS", "NAMES", "TRUTH", "examples_tried", "name_hashes"]

NAMES = "names"
TRUTH = "truth"
ANSWERS = "answers"


def name_hashes(names: Iterable[str]) -> np.ndarray:
    """A 64-bit hash of each name, the same on every machine: the first 8 bytes of BLAKE2b, little-endian.

    Args:
        names: N names.

    Returns:
        int64, shape (N,).
    """
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def examples_tried(materials: Materials, examined: Examination) -> dict[str, Tensor]:
    """Names and right answers of the test examples that models were tried on, for ``predictions.safetensors``.

    Args:
        materials: the run's data.
        examined: the final models on test examples.

    Returns:
        ``names/<place>`` and, of questions with answers, ``truth/<place>``: the positions of the right answers among
        the place's, -1 for one outside, and ``answers/<place>``: hashes of their texts, the same whatever the
        place's answers are and however they are ordered. Nothing of a place whose rows were not kept, as across
        machines.
    """
    dataset, found = materials.dataset, dict[str, Tensor]()
    kept = {
        place: len(tensors["correct"]) for (_, own, place), (_, tensors) in examined.results.items() if own == place
    }
    for place, count in kept.items():
        examples = dataset.unseen[place] if place in dataset.unseen else dataset.clients[place].test
        if len(examples) != count:
            continue
        found[f"{NAMES}/{place}"] = torch.from_numpy(name_hashes(examples.names))
        if not isinstance(examples, LabelExamples):
            table = (materials.unseen if place in materials.unseen else materials.clients)[place].tables[2]
            columns: Mapping[str, Tensor] = table.columns
            if "label" in columns:
                found[f"{TRUTH}/{place}"] = columns["label"]
                found[f"{ANSWERS}/{place}"] = torch.from_numpy(name_hashes(examples.answers))
    return found
