"""What a two-key backdoor does, as a table.

What a backdoor planted during training does: success rates of finished runs' global and personal models.

The keys are those of the run's data (dataset ``poisoned``). A run on clean data, asked with the keys of another one
given with it, shows what a model does that has no backdoor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from confed.analysis.victim import (
    Finding,
    Victim,
    expand,
    names_of,
    percent_cell,
    scores,
    test_examples,
)
from confed.comparison.records import distinct_labels
from confed.data.encode import encode
from confed.data.examples import Examples
from confed.datasets.poisoned import VARIANTS, DualKey, attack_success, key_of, triggered, without_target
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.recipes.recipe import load_recipe
from confed.report.tables.table import Cell, Column, Table
from confed.results.folder import RunFolder
from confed.results.summary import average
from confed.runs.samples import fill
from confed.system.events import Note, Progress, ignore

GLOBAL = "global"
_CHUNK = 256


@dataclass(frozen=True)
class Opened:
    """One model asked in every way."""

    run: str
    label: str  # as people read it
    model: str  # "global", or a client with a personal model
    malicious: bool | None  # whether that client poisoned its data; None for the global model
    poisoned: bool  # whether the run was trained on poisoned data
    # variant -> attack success rate; None where every question has the target as its answer
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
    for place in victim.places if victim.algorithm.traits.has_personal else ():
        file = RunFolder(victim.folder).personal_model(place)
        if file.is_file():
            fill(victim.workspace, load_file(file))
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


_TITLES = {"clean": "no key", "troj": "both keys", "troji": "patch alone", "trojq": "word alone"}


def finding(rows: Sequence[Opened], key: DualKey, values: Mapping[str, Any]) -> Finding:
    groups = _groups(rows)
    words = [
        f"The backdoor's keys are a patch in the picture and the word {key.word!r} in front of the question; its "
        f"target is the answer {key.target!r}. The success rate is the share of questions answered with the target, of "
        "those without it as a right answer: with no key this is how often a model errs that way by itself. Malicious "
        "clients poison their training examples and otherwise follow the protocol.",
        *values.get("notes", ()),
    ]
    return Finding("dual-key", "Dual-key backdoor", words, [_table(groups, list(rows))], values)


Group = tuple[str, str, Sequence[Opened]]  # a run's label, which of its models, and these


def _groups(rows: Sequence[Opened]) -> list[Group]:
    """Per run the global model, the malicious clients' own models, and the others'."""
    labels = distinct_labels({row.run: row.label + ("" if row.poisoned else " (clean data)") for row in rows})
    groups: list[Group] = []
    for run, label in labels.items():
        run_rows = [row for row in rows if row.run == run]
        kinds = {
            "global": [row for row in run_rows if row.malicious is None],
            "personal, honest": [row for row in run_rows if row.malicious is False],
            "personal, malicious": [row for row in run_rows if row.malicious],
        }
        groups += [(label, kind, members) for kind, members in kinds.items() if members]
    return groups


def _accuracy(rows: Sequence[Opened], variant: str) -> float | None:
    return average([row.accuracy[variant] for row in rows])


def _table(groups: Sequence[Group], rows: Sequence[Opened]) -> Table:
    columns = [Column("run", words=True), Column("model", words=True), Column("clean", "accuracy, %", "%")]
    columns += [Column(_TITLES[variant], "attack success, %", "%") for variant in VARIANTS]
    columns += [Column(_TITLES[v], "accuracy, %", "%", detail=True) for v in VARIANTS if v != "clean"]

    def line(label: str, kind: str, members: Sequence[Opened]) -> tuple[Cell, ...]:
        values = [_accuracy(members, "clean")]
        for variant in VARIANTS:
            values.append(average([row.success[variant] for row in members]))
        values += [_accuracy(members, variant) for variant in VARIANTS if variant != "clean"]
        return (Cell(label), Cell(kind), *map(percent_cell, values))

    of_groups = tuple(line(*group) for group in groups)
    labels: dict[str, str] = {}
    for label, _, members in groups:
        labels |= dict.fromkeys((row.run for row in members), label)
    of_clients = tuple(
        line(labels[row.run], row.model + (" (malicious)" if row.malicious else ""), [row])
        for row in rows
        if row.malicious is not None
    )
    note = "Personal models are asked their own client's questions; above the rule, means over clients."
    return Table("A backdoor with two keys", tuple(columns), (of_groups, of_clients), (note,))


def dual_key(folders: Sequence[Path], *, examples: int = 200, seed: int = 0, progress: Progress = ignore) -> Finding:
    """Asks the models of finished runs with both keys, with each alone, and with none."""
    if examples < 1:
        raise ValueError(f"examples must be at least 1, got {examples}")
    runs, notes = expand(folders)
    sections = {run: load_recipe(RunFolder(run).recipe).sections["data"] for run in runs}
    keyed = {run: data for run, data in sections.items() if data["name"] == "poisoned"}
    if not keyed:
        raise ValueError(
            "none of the runs was trained on poisoned data; a recipe plants a backdoor with data.name = 'poisoned'"
        )
    first = next(iter(keyed.values()))
    opened: list[Opened] = []
    for run, name in zip(runs, names_of(runs), strict=True):
        progress(Note(f"asking {run}"))
        data = keyed.get(run)
        malicious = () if data is None else tuple(data["clients"])
        key = key_of(first if data is None else data)
        if key != key_of(first):
            notes.append(f"{name} has other keys, and is tested with these: {key.word!r} and {key.target!r}")
        opened += _ask(Victim(run, name=name), key, malicious, data is not None, examples, seed)

    values: dict[str, Any] = {
        "kind": "dual-key",
        "key": {"target": first["target"], "word": first["word"], "rate": first["rate"], "clients": first["clients"]},
        "examples": examples,
        "rows": [vars(row) for row in opened],
        "notes": notes,
    }
    return finding(opened, key_of(first), values)
