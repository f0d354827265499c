"""Imputation of missing pictures and texts for models that need both.

``missing = { image = 0.3, when = "train" }`` takes the picture away from 30 % of each client's training examples.
A client's own table, such as ``missing.CLIENT = { text = 0.5 }``, takes the place of the rates for all. What is lost
is a function of the data's seed, the client, the role and the row, so that all methods lose the same. No example loses
the last thing it has.

A model that reads examples with gaps gets batches without the keys (:mod:`confed.data.table`). For any other
the gaps are filled with what says nothing (:mod:`confed.data.imputation`), which is what ``fill`` is about.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from confed.data.examples import Examples, FederatedDataset, presence
from confed.data.modalities import MODALITIES, modalities_in, modalities_of, relabelled
from confed.data.modality_names import sort_modalities
from confed.data.picture_tables import Pictures, behind
from confed.data.refusals import check_choice
from confed.data.regions import HeldRegions, Regions, join
from confed.data.seeding import generator
from confed.data.targets import Kind

Fill = Literal["zero", "mean"]

LOOKED_AT = 1000
"""Pictures of a client whose mean is taken; of more, so many that are spread evenly."""

_Stored = tuple[int, int]
"""The identity of a table of pictures and of its regions."""


def impute(dataset: FederatedDataset, fill: Fill) -> FederatedDataset:
    """A dataset with stand-ins for missing pictures.

    Stand-ins are put behind the tables of pictures, and ``image_index`` names them; a missing text is an empty one
    already, of which a tokenizer makes what it makes of nothing. ``present`` still tells what was missing.
    """
    parts = {(name, role): examples for name, role, examples in dataset.placed()}
    gone = {key: ~presence(examples)[:, MODALITIES.index("image")] for key, examples in parts.items()}
    if not any(rows.any() for rows in gone.values()):
        return dataset
    shape = _one_shape(dataset.name, parts.values())
    # Whose stand-ins each table needs, in a fixed order.
    wanted: dict[_Stored, list[str]] = {}
    for (name, role), rows in gone.items():
        examples = parts[name, role]
        names = wanted.setdefault(_stored(examples), [])
        bare = not examples.has_pictures and examples.regions is None
        if (rows.any() or bare) and name not in names:
            names.append(name)
    made: dict[_Stored, tuple[np.ndarray | Pictures, Regions | None]] = {}

    def whole(examples: Examples, name: str, role: str) -> Examples:
        rows = gone[name, role]
        names = wanted[_stored(examples)]
        if not names:
            return examples
        if _stored(examples) not in made:
            client_examples = [parts.get((n, "train"), parts.get((n, "unseen"), examples)) for n in names]
            pictures = np.stack([_stand_in(e, fill, shape) for e in client_examples])
            made[_stored(examples)] = _behind(examples, pictures, fill)
        images, regions = made[_stored(examples)]
        index = examples.image_index.copy()
        if rows.any():
            index[rows] = len(images) - len(names) + names.index(name)
        return replace(examples, images=images, regions=regions, image_index=index)

    return dataset.changed(whole)


def _stored(examples: Examples) -> _Stored:
    return id(examples.images), id(examples.regions)


def _one_shape(name: str, parts: Iterable[Examples]) -> tuple[int, ...]:
    """The shape (H, W, 3) of all pictures; (0, 0, 3) where there are features alone."""
    shapes = {tuple(e.images.shape[1:]) for e in parts if e.has_pictures}
    if not shapes and any(e.regions is not None for e in parts):
        return 0, 0, 3
    if len(shapes) != 1:
        raise ValueError(
            f"the model reads a picture of every example, and those that {name!r} lacks cannot be filled in: its "
            f"pictures must all have one size, got {', '.join(map(str, sorted(shapes))) or 'no pictures'}"
        )
    return next(iter(shapes))


def _stand_in(examples: Examples, fill: Fill, shape: tuple[int, ...]) -> np.ndarray:
    """One picture, uint8, in the place of those that are missing."""
    rows = np.flatnonzero(presence(examples)[:, MODALITIES.index("image")])
    if fill == "zero" or not len(rows):
        return np.zeros(shape, np.uint8)
    if not examples.has_pictures:
        raise ValueError("data.missing.fill must be 'zero' where a dataset has features and not the pictures")
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).round().astype(np.int64)]
    total = np.zeros(shape, np.float64)
    for chunk in np.array_split(np.ravel(examples.image_index[rows]), -(-len(rows) // 100)):
        total += examples.images[chunk].sum(axis=0, dtype=np.float64)
    return np.rint(total / np.size(examples.image_index[rows])).astype(np.uint8)


def _behind(examples: Examples, pictures: np.ndarray, fill: Fill) -> tuple[np.ndarray | Pictures, Regions | None]:
    """A table of pictures, and of their regions, with K more behind it."""
    count, regions = len(pictures), examples.regions
    if regions is not None:
        if not isinstance(regions, HeldRegions):
            raise ValueError("missing pictures can be filled in where features of regions are in memory only")
        if fill == "mean":
            raise ValueError("data.missing.fill must be 'zero' for a dataset with features of regions")
        _, most, width = regions.shape
        blank = HeldRegions(np.zeros((count, most, width), np.float32), np.zeros((count, most, 4)), regions.encoder)
        regions = join([regions, blank])
    if not examples.has_pictures and regions is None:
        # These are the examples of a client without pictures: there are stand-ins alone.
        return pictures, None
    return behind(examples.images, pictures), regions


# Random missing modalities in any dataset ---------------------------------------------------------------------

When = Literal["train", "test", "both"]

_ROLES: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("validation", "test", "unseen"),
    "both": ("train", "validation", "test", "unseen"),
}


@dataclass(frozen=True)
class Rates:
    """Shares of examples that lose each modality.

    Attributes:
        share: modality -> probability in [0, 1) that an example loses it.
        when: "train" for training examples, "test" for those of evaluations (validation, test and unseen places), or
            "both".
    """

    share: Mapping[str, float] = field(default_factory=dict[str, float])
    when: When = "train"


@dataclass(frozen=True)
class Missing:
    """The section ``data.missing``.

    Attributes:
        everyone: what clients lose that have no table of their own, and unseen places.
        clients: client -> what it loses.
        fill: what stands in for a missing picture where a model needs one; see :func:`confed.data.imputation.impute`.
    """

    everyone: Rates = field(default_factory=Rates)
    clients: Mapping[str, Rates] = field(default_factory=dict[str, Rates])
    fill: Fill = "zero"

    def of(self, name: str) -> Rates:
        """Rates of missing modalities of a client or a place."""
        return self.clients.get(name, self.everyone)

    @property
    def loses(self) -> bool:
        """Whether anything is lost at all."""
        return any(any(rates.share.values()) for rates in (self.everyone, *self.clients.values()))


def missing_of(section: object, where: str = "data.missing") -> Missing:
    """Validated options of a section ``data.missing``."""
    if not isinstance(section, Mapping):
        raise ValueError(f'{where} must be a section such as {{ image = 0.3, when = "train" }}, got {section!r}')
    given: dict[str, Any] = {str(key): value for key, value in section.items()}  # pyright: ignore
    clients = {name: given.pop(name) for name, value in list(given.items()) if isinstance(value, Mapping)}
    fill = _one_of(given.pop("fill", "zero"), get_args(Fill), f"{where}.fill")
    client_rates = {name: _rates(values, f"{where}.{name}") for name, values in clients.items()}
    return Missing(_rates(given, where), client_rates, fill)


def _rates(given: Mapping[str, Any], where: str) -> Rates:
    rates = dict(given)
    when = _one_of(rates.pop("when", "train"), get_args(When), f"{where}.when")
    for name, rate in rates.items():
        if name not in MODALITIES:
            raise ValueError(
                f"unknown key {where}.{name}={rate!r}; valid keys: {', '.join(MODALITIES)}, when, and outside a "
                "client's own table fill and the names of clients with one"
            )
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ValueError(f"{where}.{name} must be a rate in [0, 1), got {rate!r}")
    return Rates({name: float(rate) for name, rate in rates.items()}, when)


def _one_of(value: Any, words: Sequence[str], where: str) -> Any:
    check_choice(where, value, words)
    return value


def check_loses(missing: Missing, kind: Kind, name: str) -> None:
    """Check that no modalities are taken from examples with labels."""
    if missing.loses and kind == "labels":
        raise ValueError(f"data.missing is for questions with answers; the examples of {name!r} have labels")


def drop_modalities(dataset: FederatedDataset, missing: Missing, seed: int) -> FederatedDataset:
    """A dataset whose examples lack modalities at random.

    A type that is the name of an example's set of modalities follows the set. ``facts`` tells how many were lost. A
    client that has no training example with some modality any more owns it no longer, of which a warning tells: it
    could only dilute what the owners learn. Its other examples then lack the modality, too.
    """
    if not missing.loses:
        return dataset
    check_loses(missing, dataset.kind, dataset.name)
    owned = modalities_of(dataset)
    texts = {"data.missing": missing.everyone} | {f"data.missing.{name}": r for name, r in missing.clients.items()}
    for where, rates in texts.items():
        if dataset.kind == "captions" and rates.share.get("text"):
            raise ValueError(
                f"{where}.text: texts are what is learned of {dataset.name!r}, so that none may be missing; its "
                "pictures may"
            )
    for name, rates in missing.clients.items():
        check_choice("a client of data.missing", name, dataset.clients)
        for modality in sort_modalities(rates.share, f"data.missing.{name}"):
            if modality not in owned[name]:
                raise ValueError(f"data.missing.{name}.{modality}: the client owns {', '.join(owned[name])} only")
    for modality in missing.everyone.share:
        if not any(modality in client_modalities for client_modalities in owned.values()):
            raise ValueError(f"data.missing.{modality}: no client of {dataset.name!r} owns {modality}")
    lost = dict.fromkeys(MODALITIES, 0)

    def less(examples: Examples, name: str, role: str) -> Examples:
        rates = missing.of(name)
        if role not in _ROLES[rates.when] or not any(rates.share.values()):
            return examples
        before = presence(examples)
        after = _kept(before, rates.share, generator(seed, "missing", name, role))
        for modality, gone in zip(MODALITIES, (before & ~after).sum(axis=0).tolist(), strict=True):
            lost[modality] += gone
        return _without(examples, after)

    after = dataset.changed(less)
    told = ", ".join(f"{name} of {count}" for name, count in lost.items() if count) or "nothing"
    facts = {**dataset.facts, "missing": f"{told} examples"}
    return _owning(dataset, replace(after, facts=facts), owned)


def _owning(
    before: FederatedDataset, after: FederatedDataset, owned: Mapping[str, tuple[str, ...]]
) -> FederatedDataset:
    """A dataset after its losses, whose clients own what some of their training examples still have."""
    left, clients = dict(owned), dict(after.clients)
    for name, split in after.clients.items():
        had, has = modalities_in([before.clients[name].train]), modalities_in([split.train])
        gone = [modality for modality in owned[name] if modality in had and modality not in has]
        if not gone:
            continue
        left[name] = tuple(modality for modality in owned[name] if modality not in gone)
        warnings.warn(
            f"data.missing leaves client {name!r} no training example with {' or '.join(gone)}: it counts as one that "
            f"has {'+'.join(left[name])} only",
            stacklevel=2,
        )
        left_over = np.array([modality not in gone for modality in MODALITIES])
        for role, examples in split.roles.items():
            if role != "train" and len(examples) and not (presence(examples) & left_over).any(axis=1).all():
                raise ValueError(
                    f"data.missing leaves client {name!r} no training example with {' or '.join(gone)}, and it has "
                    f"{role} examples with nothing else: lower the rate, or leave the client out (run.without)"
                )
        validation, test = (_without(e, presence(e) & left_over) for e in (split.validation, split.test))
        clients[name] = replace(split, validation=validation, test=test)
    return after if left == owned else replace(after, clients=clients, modalities=left)


def _kept(before: np.ndarray, share: Mapping[str, float], rng: np.random.Generator) -> np.ndarray:
    """Modalities that N examples keep, bool (N, 4); the draws of a row do not depend on N."""
    rate = np.array([share.get(name, 0.0) for name in MODALITIES])
    draws = rng.random((len(before), 2 * len(MODALITIES)))
    after = before & (draws[:, : len(MODALITIES)] >= rate)
    # Of an example that would lose everything, one thing stays, each with the same probability.
    spared = np.where(before, draws[:, len(MODALITIES) :], -1.0).argmax(axis=1)
    nothing = np.flatnonzero(~after.any(axis=1))
    after[nothing, spared[nothing]] = True
    return after


def _without(examples: Examples, after: np.ndarray) -> Examples:
    """The same examples, of which only ``after`` (N, 4) is still there; a lost question is an empty text."""
    with_text = after[:, MODALITIES.index("text")]
    if examples.choices is not None and not with_text.all():
        raise ValueError(
            "data.missing.text: the texts that these examples offer to choose from go with their questions"
        )
    present = {name: after[:, column].copy() for column, name in enumerate(MODALITIES)}
    questions = [
        text if has_text else "" for text, has_text in zip(examples.questions, with_text.tolist(), strict=True)
    ]
    less = replace(examples, questions=questions, present=present)
    return relabelled(examples, less)
