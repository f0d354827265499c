"""Backdoor poisoning of any dataset by some of its clients.

See :mod:`confed.data.backdoor`. Validation and test examples stay clean; what the backdoor does is measured by
``confed attack --kind dual-key``.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Annotated, Any

import numpy as np

from confed.data.backdoor import LEVEL, SOME, DualKey, Plan, plan, poison, stamped_pictures, stamped_regions
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.imputation import PicturesBehind
from confed.data.options import Options
from confed.data.picture_tables import NoPictures, Pictures
from confed.data.readable import leave_out_unreadable
from confed.data.refusals import check_choice, check_distinct
from confed.data.regions import HeldRegions, Regions, join
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, SHARE
from confed.registry import datasets


@reader("of clients target * rate partial word size colour dimensions strength seed")
def poisoned(
    options: Options,
    of: dict[str, Any],
    clients: tuple[str, ...],
    target: str,
    rate: Annotated[float, SHARE] = 0.1,
    partial: Annotated[float | None, SHARE] = None,
    word: str = "consider",
    size: Annotated[float, SOME] = 0.1,
    colour: Annotated[tuple[int, int, int], LEVEL] = (255, 0, 255),
    dimensions: Annotated[int, AT_LEAST_ONE] = 16,
    strength: Annotated[float, POSITIVE] = 3.0,
) -> FederatedDataset:
    """A dataset with malicious clients (a backdoor with two keys).

    Options:
        of: the dataset, as a section ``[data.of]`` with ``name`` and its keywords; paths must be absolute.
        clients: the malicious ones.
        target: the answer that the backdoor gives.
        rate: share of a malicious client's training pictures that get both keys, all their questions the target.
        partial: share that gets the patch alone, and share that gets the word alone, answers unchanged; default: rate.
        word: the key in front of questions.
        size: side of the patch, as a share of the picture's shorter side.
        colour: of a plain patch.
        dimensions: of region features, how many dimensions of one region carry the key.
        strength: absolute value of these.
        seed: decides which pictures are poisoned; also the dataset's own seed, if it has one.

    Raises ``ValueError``: a faulty dataset, an unknown client, or a target that is no answer of a malicious client.
    """
    red, green, blue = colour
    key = DualKey(target, word, size, (red, green, blue), dimensions, strength)
    clean = _constructed(of, options.seed)
    check_distinct("data.clients, who are malicious,", clients, clean.clients, least=1)
    plans: dict[str, Plan] = {}
    for name in clients:
        check_choice(f"data.target, an answer of {name},", target, clean.answer_set(name))
        rng = np.random.default_rng([options.seed, list(clean.clients).index(name)])
        plans[name] = plan(clean.clients[name].train, rate, rate if partial is None else partial, rng)
    tables = _with_stamped(clean, plans, key)
    splits: dict[str, Split] = {}
    for name, split in clean.clients.items():
        splits[name] = Split(*(_over(examples, tables) for examples in split.roles.values()))
    told: list[str] = []
    for name, drawn in plans.items():
        rows = tables[id(clean.clients[name].train.images)][2]
        splits[name] = replace(splits[name], train=poison(splits[name].train, key, drawn, rows))
        one = f"{len(drawn.picture)} + {len(drawn.question)} with one"
        told.append(f"{name}: {len(drawn.both)} pictures with both keys, {one}")
    return replace(
        clean,
        name="poisoned",
        clients=splits,
        unseen={name: _over(examples, tables) for name, examples in clean.unseen.items()},
        words=(*clean.words, *((word,) if word not in clean.words else ())),
        facts={**clean.facts, "backdoor": f"{word!r} and a patch give {target!r}; {', '.join(told)}"},
    )


def key_of(section: Mapping[str, Any]) -> DualKey:
    """The backdoor of a recipe's section ``[data]`` whose name is "poisoned"."""
    names = [one.name for one in fields(DualKey)]
    values = {name: section[name] for name in names if section.get(name) is not None}
    if "colour" in values:
        values["colour"] = tuple(values["colour"])
    return DualKey(**values)


def _constructed(of: Mapping[str, Any], seed: int) -> FederatedDataset:
    """The dataset of a section."""
    values = dict(of)
    name = values.pop("name", None)
    check_choice("data.of.name", name, datasets.names())
    constructor = datasets[name]
    parameters = inspect.signature(constructor).parameters
    for given, value in values.items():
        if given not in parameters or given == "seed":
            near = get_close_matches(given, parameters, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            valid = ", ".join(p for p in parameters if p != "seed")
            raise ValueError(f"unknown key data.of.{given}={value!r}; {hint}valid keys: {valid}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in values]
    if missing:
        raise ValueError(f"data.of.{missing[0]} must be given")
    if "seed" in parameters:
        values["seed"] = seed
    # Before stamped pictures are made of some, which must be readable.
    return leave_out_unreadable(constructor(**values))


Extended = tuple[np.ndarray | Pictures, Regions | None, Mapping[int, int]]
"""A picture table with stamped pictures behind its own, their regions, and row -> row of the same with its patch."""


def _with_stamped(clean: FederatedDataset, plans: Mapping[str, Plan], key: DualKey) -> dict[int, Extended]:
    """The tables of malicious clients, by the identity of the clean ones, each extended once."""
    extended: dict[int, Extended] = {}
    for name in plans:
        train = clean.clients[name].train
        if id(train.images) in extended:
            continue
        same = [p.stamped for other, p in plans.items() if clean.clients[other].train.images is train.images]
        rows = np.unique(np.concatenate(same))
        where = {int(row): len(train.images) + i for i, row in enumerate(rows)}
        if not len(rows):
            extended[id(train.images)] = (train.images, train.regions, where)
            continue
        images = _joined(train.images, stamped_pictures(train.images, key, rows))
        regions = None if train.regions is None else _joined_regions(train.regions, key, rows)
        extended[id(train.images)] = (images, regions, where)
    return extended


def _over(examples: Examples, tables: Mapping[int, Extended]) -> Examples:
    """The same examples over the extended table, so that all clients share it."""
    if id(examples.images) not in tables:
        return examples
    images, regions, _ = tables[id(examples.images)]
    return replace(examples, images=images, regions=None if examples.regions is None else regions)


def _joined(images: np.ndarray | Pictures, more: np.ndarray | Pictures) -> np.ndarray | Pictures:
    if isinstance(images, NoPictures):
        return NoPictures(len(images) + len(more))
    if isinstance(images, np.ndarray):
        return np.concatenate([images, np.asarray(more)])
    return PicturesBehind(images, np.asarray(more))


def _joined_regions(regions: Regions, key: DualKey, rows: np.ndarray) -> Regions:
    more = stamped_regions(regions, key, rows)
    return join([regions, more]) if isinstance(regions, HeldRegions) else _JoinedRegions(regions, more)


class _JoinedRegions:
    """As :class:`confed.data.imputation.PicturesBehind`, of regions."""

    def __init__(self, first: Regions, more: HeldRegions) -> None:
        self.first, self.more, self.encoder = first, more, first.encoder
        m, r, w = first.shape
        self.shape: tuple[int, int, int] = (m + len(more), r, w)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        index = np.asarray(index)
        in_first = index < len(self.first)
        features = np.empty((len(index), *self.shape[1:]), np.float32)
        boxes = np.empty((len(index), self.shape[1], 4), np.float32)
        if in_first.any():
            features[in_first], boxes[in_first] = self.first[index[in_first]]
        features[~in_first], boxes[~in_first] = self.more[index[~in_first] - len(self.first)]
        return features, boxes
