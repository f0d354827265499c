"""What a backdoor planted during training does: success rates of finished runs' global and personal models.

The keys are those of the run's data (dataset ``poisoned``). A run on clean data, asked with the keys of another one
given with it, shows what a model does that has no backdoor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from confed.analysis.victim import Victim, open_victim, scores, test_examples
from confed.data.backdoor import VARIANTS, DualKey, attack_success, triggered, without_target
from confed.data.encode import encode
from confed.data.examples import Examples
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.results.folder import RunFolder

GLOBAL = "global"
_CHUNK = 256


@dataclass(frozen=True)
class Opened:
    """One model asked in every way.

    Attributes:
        label: as people read it.
        model: "global", or a client with a personal model.
        malicious: whether that client poisoned its data; None for the global model.
        poisoned: whether the run was trained on poisoned data.
        success: variant -> attack success rate; None where every question has the target as its answer.
    """

    run: str
    label: str
    model: str
    malicious: bool | None
    poisoned: bool
    success: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    accuracy: Mapping[str, float] = field(default_factory=dict[str, float])
    examples: int = 0


def _ask(victim: Victim, key: DualKey, malicious: Sequence[str], poisoned: bool, count: int, seed: int) -> list[Opened]:
    """The global model on the questions of all clients, and every personal model on its client's questions."""
    answers = victim.run_data.dataset.answers
    if key.target not in answers:
        raise ValueError(f"{victim.name}: the target {key.target!r} is not one of the {len(answers)} answers")
    target = answers.index(key.target)
    drawn = {place: _draw(test_examples(victim, place), count, seed) for place in victim.places}
    batches = {}
    for place, variant in product(drawn, VARIANTS):
        batches[place, variant] = _batches(victim, triggered(drawn[place], key, variant))

    def row(model: str, places: Sequence[str], bad: bool | None) -> Opened:
        success: dict[str, float | None] = {}
        accuracy: dict[str, float] = {}
        counted = np.concatenate([without_target(drawn[place], key.target) for place in places])
        for variant in VARIANTS:
            right, given = scores(victim, list(chain.from_iterable(batches[place, variant] for place in places)))
            accuracy[variant] = float(right.mean())
            success[variant] = attack_success(given.numpy(), target, counted) if counted.any() else None
        return Opened(victim.name, victim.label, model, bad, poisoned, success, accuracy, len(counted))

    rows = [row(GLOBAL, victim.places, None)]
    for place in victim.places if victim.setup.algorithm.traits.has_personal else ():
        file = RunFolder(victim.folder).personal_model(place)
        if file.is_file():
            victim.fill(load_file(file))
            rows.append(row(place, [place], place in malicious))
    return rows


def _draw(examples: Examples, count: int, seed: int) -> Examples:
    order = torch.randperm(len(examples), generator=generator(seed, 0, "", "questions with keys"))
    return examples.take(np.sort(order[:count].numpy()))


def _batches(victim: Victim, examples: Examples) -> list[Batch]:
    """Questions as the model reads them."""
    run_data = victim.run_data
    regions = None
    if run_data.region_width:
        regions = examples.regions
        if regions is None:
            from confed.models.grid_features import grid_features

            rows, index = np.unique(examples.image_index, return_inverse=True)
            examples = _over(examples, rows, index)
            regions = grid_features(examples.images)
    table = encode(
        examples, run_data.tokenizer, run_data.dataset.answers, run_data.types,
        outside=run_data.dataset.outside, width=run_data.dataset.widest, regions=regions,
    )  # fmt: skip
    return list(table.batches(_CHUNK))


def _over(examples: Examples, rows: np.ndarray, index: np.ndarray) -> Examples:
    """The same questions over a table of their own pictures only."""
    return replace(examples, images=np.asarray(examples.images[rows]), image_index=index.reshape(-1))


def _shown(folder: Path, key: DualKey) -> list[tuple[str, str, np.ndarray, np.ndarray]]:
    """A few test questions of a run with both keys: the question, it with its key, and both pictures."""
    victim = open_victim(folder)
    shown_rows: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    for place in victim.places:
        chosen = test_examples(victim, place).take([0])
        opened = triggered(chosen, key, "troj")
        if chosen.images.shape[1]:
            pictures = [np.asarray(e.images[int(e.image_index[0])]) for e in (chosen, opened)]
            shown_rows.append((chosen.questions[0], opened.questions[0], pictures[0], pictures[1]))
    return shown_rows
