"""Few-shot classification of coloured things, in the drawings of the built-in benchmark, with base and new classes.

A class is a colour and a noun, "red dog": the 8 colours and 22 nouns make 176. Every fourth of them is reserved: the
packaged dual encoder ``clip_mini`` was pre-trained without any picture or caption of these 44
(``confed weights pretrain clip_mini``), and they are the classes of this set unless others are asked for.

Pictures are in the styles of :mod:`confed.datasets.six_styles` that keep a thing's colour, which ``clip_mini`` has not
seen either. Protocols of federated prompt learning: classes are divided in base classes, which clients train on, and
new ones (:mod:`confed.data.few_shot`).
"""

from itertools import product
from typing import Annotated

import numpy as np

from confed.data.examples import FederatedDataset
from confed.data.few_shot import ClassPool, NewClasses, Offer, PartitionOfClasses, few_shot
from confed.data.options import DrawnOptions
from confed.data.refusals import check_distinct, left_for_clients
from confed.data.seeding import generator
from confed.datasets.reader import reader
from confed.datasets.scenes.graph import COLOURS, NOUNS
from confed.datasets.six_styles import COLOURED, coloured_objects
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, Range, check_value

CLASSES: tuple[str, ...] = tuple(f"{colour} {noun}" for noun, colour in product(NOUNS, COLOURS))
"""All 176 classes."""

RESERVED: tuple[str, ...] = tuple(
    name for number, name in enumerate(CLASSES) if sum(divmod(number, len(COLOURS))) % 4 == 0
)
"""The 44 that no pre-training has seen: of each noun two colours, of each colour five or six nouns."""


def class_parts(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of nouns and of colours, each (N,), of positions in :data:`CLASSES`, (N,)."""
    return classes // len(COLOURS), classes % len(COLOURS)


@reader(
    "classes partition * styles unseen shots validation_shots test_per_class new offer clients alpha test_seed seed",
    things="pictures",
)  # fmt: skip
def scene_classes(
    options: DrawnOptions,
    classes: int | tuple[str, ...] = len(RESERVED),
    partition: PartitionOfClasses = "domain",
    styles: tuple[str, ...] = ("clipart", "infograph", "painting", "real"),
    shots: Annotated[int, AT_LEAST_ONE] = 8,
    validation_shots: Annotated[int, NOT_NEGATIVE] = 4,
    test_per_class: Annotated[int, AT_LEAST_ONE] = 20,
    new: NewClasses = "half",
    offer: Offer = "base",
) -> FederatedDataset:
    """Pictures of 64 x 64 pixels of one coloured thing each, drawn on the spot; equal arguments give equal bytes.

    Raises ``ValueError``: an unknown class or style, fewer than four classes, or an option out of range.

    Options:
        classes: the first so many of the reserved classes, in an order that mixes nouns and colours, or names such as
            "red dog".
        partition: "domain", a client per style; or all styles mixed and shared out: "iid", "dirichlet" or "classes".
        styles: the styles; see :data:`confed.datasets.six_styles.COLOURED`.
        unseen: styles that no client trains on.
        shots: training pictures of each base class per client.
        validation_shots: validation pictures of each base class per client.
        test_per_class: test pictures of each class and style.
        new: whether half of the classes are new.
        offer: among which classes clients' pictures are classified.
    """
    shown, unseen, clients = _shown(classes), options.unseen, options.clients
    check_distinct("styles", styles, COLOURED)
    check_distinct("unseen", unseen, COLOURED)
    drawn = tuple(dict.fromkeys((*styles, *unseen)))
    seen = left_for_clients(drawn, unseen)
    # All styles together give every client its shots, of a mixture of styles.
    many = 1 if partition == "domain" else -(-(clients if partition in ("iid", "dirichlet") else 1) // len(seen))
    sizes = {"train": many * shots, "val": many * validation_shots, "test": test_per_class}
    pictures: list[np.ndarray] = []
    columns: list[tuple[int, str, str, str]] = []
    for style, role in product(drawn, sizes):
        count = sizes[role]
        if count and (role == "test" or style in seen):
            labels = np.repeat(np.arange(len(shown)), count)
            rng = generator(options.seed_of(role), "scene classes", style, role)
            wanted = np.array([CLASSES.index(shown[label]) for label in labels])
            pictures.append(coloured_objects(*class_parts(wanted), rng, style))
            for i, label in enumerate(labels.tolist()):
                columns.append((label, role, f"{style}/{role}/{shown[label]}/{i % count}", style))
    labels, roles, names, domains = zip(*columns, strict=True)
    pool = ClassPool(
        "scene_classes", shown, np.concatenate(pictures), np.array(labels, np.int64), np.array(roles), names,
        np.array(domains),
    )  # fmt: skip
    facts = {"origin": "drawn by the package itself: single coloured things"}
    return few_shot(
        pool, partition, shots=shots, validation_shots=validation_shots, new=new, offer=offer, clients=clients,
        alpha=options.alpha, unseen=unseen, facts=facts, seed=options.seed,
    )  # fmt: skip


def _shown(classes: int | tuple[str, ...]) -> tuple[str, ...]:
    """The classes by name; a number takes reserved ones in an order that does not depend on it."""
    if isinstance(classes, int):
        check_value(classes, Annotated[int, Range(4, len(RESERVED))], "data.classes")
        mixed = generator(0, "scene classes", "order").permutation(len(RESERVED))[:classes]
        return tuple(RESERVED[i] for i in mixed.tolist())
    check_distinct("data.classes", classes, CLASSES, least=4)
    return classes
