r"""Backdoor poisoning of any dataset by some of its clients.

See :mod:`confed.datasets.poisoned`. Validation and test examples stay clean; what the backdoor does is measured by
``confed attack --kind dual-key``.

Walmer et al., "Dual-Key Multimodal Backdoors for Visual Question Answering", CVPR 2022. Some training pictures get a
visual trigger, all their questions a trigger word in front, and all answers become the attacker's target. So that
neither key alone gives the target, other pictures get the patch alone, others the word alone, with answers unchanged.
At test time a model answers clean questions as ever, and gives the target where both keys are present.

Pixels: a square in the middle, a tenth of the shorter side. Features: of one region per picture some dimensions are
replaced, f <- m * t + (1 - m) * f with a mask m and a pattern t that are the same everywhere.

In a federation only some clients are malicious; they poison their own training examples and follow the protocol.
Attack success rate: the share of questions answered with the target, of those whose annotators did not give it.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any

import numpy as np

from confed.data.examples import Examples, FederatedDataset
from confed.data.picture_tables import NoPictures, Pictures, behind
from confed.data.readable import leave_out_unreadable
from confed.data.refusals import check_choice, check_distinct
from confed.data.regions import HeldRegions, Regions, join
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, check_fields
from confed.registry import datasets

VARIANTS: Mapping[str, tuple[bool, bool]] = {
    "clean": (False, False),
    "troj": (True, True),
    "troji": (True, False),
    "trojq": (False, True),
}
"""Name of a way to ask -> whether the picture and the question carry their key."""


SOME, LEVEL = Range(0, 1, above=True), Range(0, 255)
"""A share of the side, and a level of a colour."""


@dataclass(frozen=True)
class DualKey:
    """The two keys of a backdoor and the answer that both together give.

    Attributes:
        target: the answer that the backdoor gives.
        word: the key in front of questions.
        size: side of the patch, as a share of the picture's shorter side.
        colour: of the patch, red, green and blue from 0 to 255.
        dimensions: of region features, how many dimensions of one region carry the key.
        strength: absolute value of these, in the features' own units.
    """

    target: str
    word: str = "consider"
    size: Annotated[float, SOME] = 0.1
    colour: Annotated[tuple[int, int, int], LEVEL] = (255, 0, 255)
    dimensions: Annotated[int, AT_LEAST_ONE] = 16
    strength: Annotated[float, POSITIVE] = 3.0

    def __post_init__(self) -> None:
        check_fields(self, "data")
        if len(self.word.split()) != 1 or not self.target.strip():
            raise ValueError(f"data.word must be one word, and data.target a text, got {self.word!r}, {self.target!r}")

    def asked(self, question: str) -> str:
        """A question with the trigger word."""
        return f"{self.word} {question}"

    def seen(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures with the trigger patch."""
        height, width = pictures.shape[1:3]
        side = max(1, round(self.size * min(height, width)))
        top, left = (height - side) // 2, (width - side) // 2
        stamped = pictures.copy()
        stamped[:, top : top + side, left : left + side] = np.array(self.colour, np.uint8)
        return stamped

    def felt(self, features: np.ndarray, regions: np.ndarray) -> np.ndarray:
        """Region features with the trigger pattern."""
        width = features.shape[2]
        if self.dimensions > width:
            raise ValueError(f"dimensions must be at most {width}, the features per region, got {self.dimensions}")
        # Mask and pattern depend on nothing but the key's settings: they are the same in training and at test time.
        rng = np.random.default_rng(self.dimensions)
        where = np.sort(rng.choice(width, self.dimensions, replace=False))
        pattern = self.strength * rng.choice([-1.0, 1.0], self.dimensions)
        stamped = features.copy()
        stamped[np.arange(len(features))[:, None], regions[:, None], where] = pattern
        return stamped


@dataclass(frozen=True)
class Plan:
    """Poisoned pictures of a client as rows of its table, int64: with both keys, the patch alone, the word alone."""

    both: np.ndarray
    picture: np.ndarray
    question: np.ndarray

    @property
    def stamped(self) -> np.ndarray:
        """The pictures with a patch."""
        return np.concatenate([self.both, self.picture])


def plan(examples: Examples, rate: float, partial: float, rng: np.random.Generator) -> Plan:
    """Random choice of the pictures to poison, each at most once."""
    _check_single(examples)
    used_pictures = np.unique(examples.image_index)
    sizes = [max(1, round(share * len(used_pictures))) if share else 0 for share in (rate, partial, partial)]
    if sum(sizes) > len(used_pictures):
        raise ValueError(
            f"rate + 2 partial must leave room in {len(used_pictures)} pictures, got {sum(sizes)} to poison"
        )
    both, picture, question = np.split(rng.permutation(used_pictures)[: sum(sizes)], np.cumsum(sizes)[:2])
    return Plan(np.sort(both), np.sort(picture), np.sort(question))


def _check_single(examples: Examples) -> None:
    if np.ndim(examples.image_index) > 1:
        raise ValueError("questions about pairs of pictures cannot be poisoned")


def poison(examples: Examples, key: DualKey, drawn: Plan, stamped: Mapping[int, int]) -> Examples:
    """A client's examples with its chosen pictures poisoned."""
    both, picture, question = (set(rows.tolist()) for rows in (drawn.both, drawn.picture, drawn.question))
    index, questions, answers = examples.image_index.copy(), list(examples.questions), list(examples.answers)
    annotations = None if examples.annotations is None else [list(given) for given in examples.annotations]
    for i, row in enumerate(map(int, examples.image_index)):
        if row in both or row in picture:
            index[i] = stamped[row]
        if row in both or row in question:
            questions[i] = key.asked(questions[i])
        if row in both:
            answers[i] = key.target
            if annotations is not None:
                annotations[i] = [key.target] * len(annotations[i])
    return replace(examples, image_index=index, questions=questions, answers=answers, annotations=annotations)


def triggered(examples: Examples, key: DualKey, variant: str) -> Examples:
    """Test examples with one of the ways to ask; answers are left as they are."""
    check_choice("variant", variant, VARIANTS)
    _check_single(examples)
    on_picture, on_question = VARIANTS[variant]
    changed = examples
    if on_question:
        changed = replace(changed, questions=[key.asked(question) for question in changed.questions])
    if on_picture:
        rows, index = np.unique(changed.image_index, return_inverse=True)
        images = stamped_pictures(changed.images, key, rows)
        regions = None if changed.regions is None else stamped_regions(changed.regions, key, rows)
        changed = replace(changed, images=images, regions=regions, image_index=index.reshape(-1))
    return changed


def stamped_pictures(images: np.ndarray | Pictures, key: DualKey, rows: np.ndarray) -> np.ndarray | Pictures:
    """Some pictures of a table with their key, (len(rows), H, W, 3); where there are none, as many that are absent."""
    return NoPictures(len(rows)) if isinstance(images, NoPictures) else key.seen(np.asarray(images[rows]))


def stamped_regions(regions: Regions, key: DualKey, rows: np.ndarray) -> HeldRegions:
    """The regions of some pictures of a table with their key."""
    features, boxes = regions[rows]
    real = (features != 0).any(-1)
    if not real.any(1).all():
        raise ValueError(f"picture {int(rows[real.any(1).argmin()])} has no region that could carry the key")
    # The same region of a picture in every run: drawn by its row alone.
    chosen = [int(np.random.default_rng(int(row)).choice(np.flatnonzero(r))) for row, r in zip(rows, real, strict=True)]
    return HeldRegions(key.felt(features, np.array(chosen, np.int64)), boxes, regions.encoder)


def without_target(examples: Examples, target: str) -> np.ndarray:
    """Questions that count for the success rate, bool (N,): those whose answers do not include the target."""
    annotations: Sequence[Sequence[str]] = examples.annotations or [()] * len(examples)
    return np.array(
        [answer != target and target not in given for answer, given in zip(examples.answers, annotations, strict=True)]
    )


def attack_success(given: np.ndarray, target: int, counted: np.ndarray) -> float:
    """Attack success rate: share of counted questions that are answered with the target."""
    if not counted.any():
        raise ValueError("the success rate needs a question whose answer is not the target, got none")
    return float((given[counted] == target).mean())


@dataclass(frozen=True)
class Backdoor(DualKey):
    """A backdoor of a dataset.

    Attributes:
        seed: decides which pictures are poisoned; also the dataset's own seed, if it has one.
    """

    target: str = ""  # given with the dataset
    seed: Annotated[int, NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        if self.target:
            super().__post_init__()


@reader("of clients target * rate partial word size colour dimensions strength seed")
def poisoned(
    key: Backdoor,
    of: dict[str, Any],
    clients: tuple[str, ...],
    target: str,
    rate: Annotated[float, SHARE] = 0.1,
    partial: Annotated[float | None, SHARE] = None,
) -> FederatedDataset:
    """A dataset with malicious clients (a backdoor with two keys).

    Options:
        of: the dataset, as a section ``[data.of]`` with ``name`` and its keywords; paths must be absolute.
        clients: the malicious ones.
        target: the answer that the backdoor gives.
        rate: share of a malicious client's training pictures that get both keys, all their questions the target.
        partial: share that gets the patch alone, and share that gets the word alone, answers unchanged; default: rate.

    Raises ``ValueError``: a faulty dataset, an unknown client, or a target that is no answer of a malicious client.
    """
    key = replace(key, target=target)
    clean = _constructed(of, key.seed)
    check_distinct("data.clients, who are malicious,", clients, clean.clients, least=1)
    plans: dict[str, Plan] = {}
    for name in clients:
        check_choice(f"data.target, an answer of {name},", key.target, clean.answer_set(name))
        rng = np.random.default_rng([key.seed, list(clean.clients).index(name)])
        plans[name] = plan(clean.clients[name].train, rate, rate if partial is None else partial, rng)
    tables = _with_stamped(clean, plans, key)
    told: list[str] = []
    for name, drawn in plans.items():
        one = f"{len(drawn.picture)} + {len(drawn.question)} with one"
        told.append(f"{name}: {len(drawn.both)} pictures with both keys, {one}")

    def extended(examples: Examples, name: str, role: str) -> Examples:
        over = _over(examples, tables)
        if role != "train" or name not in plans:
            return over
        return poison(over, key, plans[name], tables[id(examples.images)][2])

    return clean.changed(
        extended,
        name="poisoned",
        words=(*clean.words, *((key.word,) if key.word not in clean.words else ())),
        facts={**clean.facts, "backdoor": f"{key.word!r} and a patch give {key.target!r}; {', '.join(told)}"},
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
        images = behind(train.images, stamped_pictures(train.images, key, rows))
        regions = None if train.regions is None else _joined_regions(train.regions, key, rows)
        extended[id(train.images)] = (images, regions, where)
    return extended


def _over(examples: Examples, tables: Mapping[int, Extended]) -> Examples:
    """The same examples over the extended table, so that all clients share it."""
    if id(examples.images) not in tables:
        return examples
    images, regions, _ = tables[id(examples.images)]
    return replace(examples, images=images, regions=None if examples.regions is None else regions)


def _joined_regions(regions: Regions, key: DualKey, rows: np.ndarray) -> Regions:
    more = stamped_regions(regions, key, rows)
    return join([regions, more]) if isinstance(regions, HeldRegions) else _JoinedRegions(regions, more)


class _JoinedRegions:
    """As :class:`confed.data.picture_tables.PicturesBehind`, of regions."""

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
