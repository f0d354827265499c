"""Contract of datasets: what runs, paired tests and federations across machines rely on of a dataset's function."""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, getdoc, signature
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from confed.data.examples import Examples, FederatedDataset
from confed.federation.file_names import Title

MOST_CLIENTS = 100
"""Clients that are looked at; all are built alike."""

DATASET_CHECKS = (
    "options are described",
    "returns a dataset",
    "names can be files",
    "somebody trains",
    "names are unique",
    "answers are declared",
    "the same options give the same examples",
    "a seed leaves the tests as they are",
    "global randomness is left alone",
    "test pictures are nobody's training pictures",
    "the account adds up",
)


def dataset_faults(build: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Checks that a dataset's function fails with these options, each with the end of a sentence on why."""
    parameters = signature(build).parameters
    text = getdoc(build) or ""
    undescribed = [name for name in parameters if not re.search(rf"^\s+{name}: \S", text, re.MULTILINE)]
    if undescribed:
        needed = "confed show and its help have only what the Args of its docstring say"
        yield DATASET_CHECKS[0], f"does not say what {', '.join(undescribed)} means: {needed}"
    missing = [name for name, item in parameters.items() if item.default is Parameter.empty and name not in options]
    if missing:
        yield DATASET_CHECKS[1], f"needs {missing[0]}: give it, as a recipe would under [data]"
        return
    before = _global_states()
    dataset = build(**options)
    if not isinstance(dataset, FederatedDataset):
        yield DATASET_CHECKS[1], f"must return a FederatedDataset, got {type(dataset).__name__}"
        return
    if _global_states() != before:
        needed = "draw from np.random.default_rng(seed) or torch.Generator().manual_seed(seed)"
        yield DATASET_CHECKS[8], f"draws from a generator that all of the process share: {needed}"
    yield from _faults_of_parts(dataset)
    again = build(**options)
    if _digests(dataset) != _digests(again):
        yield (
            DATASET_CHECKS[6],
            "gives other examples when it is called again: every draw must depend on its seed alone",
        )
    elif "seed" in parameters:
        other = build(**{**options, "seed": int(options.get("seed", parameters["seed"].default)) + 1})
        if _tests(dataset) != _tests(other):
            yield DATASET_CHECKS[7], "has other test examples for another seed: runs could not be compared by example"
    if "root" in parameters:
        yield from _faults_of_account(dataset)


def _faults_of_parts(dataset: FederatedDataset) -> Iterator[tuple[str, str]]:
    """Faults in the clients' examples and in those of unseen places."""
    for name in chain(islice(dataset.clients, MOST_CLIENTS), dataset.unseen):
        if fault := Title.fault(name):
            yield DATASET_CHECKS[2], f"calls a client or place {name!r}, which must {fault}"
            return
    if dataset.elsewhere is None and not any(len(split.train) for split in dataset.clients.values()):
        yield DATASET_CHECKS[3], "has no client with a training example"
    answers = set(dataset.answers)
    trained: dict[bytes, str] = {}
    for place, role, examples in _parts(dataset):
        names = list(examples.names)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            yield DATASET_CHECKS[4], f"names two {role} examples of {place} {twice!r}: tests pair runs by these names"
            return
        plain = examples.kind == "answers" and examples.choices is None
        if plain and not dataset.outside and not dataset.answer_sets:
            strange = next((answer for answer in examples.answers if answer not in answers), None)
            if strange is not None:
                yield DATASET_CHECKS[5], f"answers a {role} example of {place} with {strange!r}, which answers lacks"
                return
        if role != "test":
            trained.update(dict.fromkeys(_pictures(examples), place))
    for place, role, examples in _parts(dataset):
        shown = next((picture for picture in _pictures(examples) if picture in trained), None)
        if role == "test" and shown is not None:
            same = f"shows a picture in the test of {place} that {trained[shown]} trains or validates on"
            yield DATASET_CHECKS[9], f"{same}: leave copies on one side"
            return


def _faults_of_account(dataset: FederatedDataset) -> Iterator[tuple[str, str]]:
    """Faults of what is said of the rows of files."""
    account = dataset.account
    if account is None:
        needed = "give the dataset an account (confed.data.intake.account)"
        yield DATASET_CHECKS[10], f"reads files and does not say what became of their rows: {needed}"
        return
    counts = account.counts
    if counts["rows"] != counts["used"] + counts["left out"] + counts["merged"]:
        yield DATASET_CHECKS[10], f"has an account that does not add up: {account}"


def _parts(dataset: FederatedDataset) -> Iterator[tuple[str, str, Examples]]:
    """Client or place, role, and the examples."""
    for place, role, examples in dataset.placed(MOST_CLIENTS):
        yield place, "test" if role == "unseen" else role, examples


def _tests(dataset: FederatedDataset) -> dict[str, list[Any]]:
    """Names and targets of the test examples of each client and place."""
    tests: dict[str, list[Any]] = {}
    for place, role, examples in _parts(dataset):
        if role == "test":
            tests[place] = [list(examples.names), _targets(examples)]
    return tests


def _digests(dataset: FederatedDataset) -> dict[tuple[str, str], list[Any]]:
    """Names, targets and pictures of each part."""
    digests: dict[tuple[str, str], list[Any]] = {}
    for place, role, examples in _parts(dataset):
        digests[place, role] = [list(examples.names), _targets(examples), _pictures(examples)]
    return digests


def _targets(examples: Examples) -> list[Any]:
    return [list(examples.questions), [examples.right_answer(row) for row in range(len(examples))]]


def _pictures(examples: Examples) -> list[bytes]:
    """Digest of each picture that examples show."""
    if not examples.has_pictures:
        return []
    digests: list[bytes] = []
    for number in np.unique(examples.image_index).tolist():
        digests.append(hashlib.blake2b(np.ascontiguousarray(examples.images[number]).tobytes()).digest())
    return digests


def _global_states() -> tuple[Any, ...]:
    """States of the generators that a whole process shares."""
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
