"""Multi-label text classification: tagged captions of the built-in scenes, or a file.

Built in: a caption says which things of a scene graph there are, in everyday words. It leaves some of them out, does
not name every colour, and some of its words stand for several things ("animal"), so that what else is there helps. Tags
are the things and the colours of the whole picture. From a folder: ``texts.jsonl``, one object a line with ``text`` and
``labels`` and, if wanted, ``id``, ``user`` and ``split`` (:func:`confed.data.ml_files.records.line_records`); and, if
wanted, ``labels.txt`` with one label a line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.federate import words
from confed.data.intake.account import Account, settled
from confed.data.label_federate import LabelPool, federate_labels, label_facts
from confed.data.labelled import LabelDataset
from confed.data.ml_files.records import LabelRecord, line_records, listed_labels
from confed.data.ml_files.table import build_table
from confed.data.owners import with_owner
from confed.data.seeding import generator
from confed.datasets.scenes.graph import COLOURS, GENERAL_NOUNS, NOUNS, OWN_NOUNS, SCENES, Object, objects, sample
from confed.registry import register_dataset

TAGS: tuple[str, ...] = (*NOUNS, *COLOURS)
"""The tags of built-in captions."""

TEST_SEED = 0
MENTIONED, COLOURED, SIZED = 0.8, 0.6, 0.2
"""How often a thing is mentioned, and a mentioned one's colour and size."""

_SAID: Mapping[str, tuple[str, ...]] = {
    "person": ("person", "man", "woman"),
    "dog": ("dog", "puppy", "animal"),
    "box": ("box", "crate", "container"),
    "clock": ("clock", "timepiece"),
    "car": ("car", "automobile", "vehicle"),
    "bus": ("bus", "coach", "vehicle"),
    "sign": ("sign", "signpost"),
    "ball": ("ball", "round thing"),
    "racket": ("racket", "bat"),
    "net": ("net", "mesh"),
    "book": ("book", "volume"),
    "lamp": ("lamp", "light"),
    "globe": ("globe", "round thing"),
    "tree": ("tree", "plant"),
    "deer": ("deer", "stag", "animal"),
    "hill": ("hill", "slope"),
    "cup": ("cup", "mug"),
    "chair": ("chair", "seat"),
    "cat": ("cat", "kitten", "animal"),
    "shelf": ("shelf", "rack"),
    "till": ("till", "register"),
    "bag": ("bag", "sack", "container"),
    "red": ("red", "crimson"),
    "orange": ("orange", "amber"),
    "yellow": ("yellow", "golden"),
    "green": ("green", "olive"),
    "cyan": ("cyan", "turquoise"),
    "blue": ("blue", "navy", "turquoise"),
    "purple": ("purple", "violet"),
    "pink": ("pink", "rosy"),
}
_OPENINGS = ("there is", "one can see", "this shows", "")
_LINKS = ("and", "next to", "behind", "with")


@register_dataset
def tagged_texts(
    root: Path | str | None = None,
    partition: Literal["label_skew", "iid", "user"] = "label_skew",
    *,
    user_key: str = "user",
    clients: int = 20,
    alpha: float = 1.0,
    minimum: int = 10,
    train: int = 150,
    validation: int = 30,
    test: int = 50,
    held_out: float = 0.2,
    fold_case: bool = False,
    seed: int = 0,
) -> LabelDataset:
    """Tagged texts shared out among clients that differ in how often each tag occurs.

    Test texts and their owners are the same for all seeds.

    Args:
        root: a folder with ``texts.jsonl``; None for the built-in captions.
        partition: skew of single tags (:func:`confed.data.label_partitions.label_skew`); equal random shares; or one
            client per user of the file who has training texts. The test texts of the others are the place
            "newcomers", their validation texts are left out, and so are texts that are nobody's.
        user_key: what the file calls whose a text is.
        clients: number of clients, but for "user".
        alpha: concentration of "label_skew".
        minimum: fewest training texts of a client ("label_skew").
        train: training captions per client, the mean over clients; as the next two, of the built-in captions.
        validation: validation captions per client.
        test: test captions per client.
        held_out: of a file without test texts, the share of a client's texts that are its test; without validation
            texts, the share of the rest that is its validation. At least one text stays.
        fold_case: whether labels of a file that differ in case alone are one, spelled as in ``labels.txt`` or as most.
        seed: chooses training and validation captions, or validation texts.

    Raises:
        ValueError: a file is missing or faulty, a row has no text, a label is not in ``labels.txt`` (the first few are
            listed), there are no users, or an option is out of range.
    """
    for name, number in (("train", train), ("validation", validation), ("test", test)):
        if number < (1 if name == "train" else 0):
            raise ValueError(f"{name} must be a number of captions per client, got {number}")
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    account: Account | None = None
    if root is None:
        if partition == "user":
            raise ValueError("partition 'user' needs data.root, a folder with texts.jsonl; captions have no users")
        wanted = {"train": train, "validation": validation, "test": test}
        records, labels = _built_in({role: clients * number for role, number in wanted.items()}, seed), TAGS
    else:
        account, listed = Account(), Path(root) / "labels.txt"
        labels = listed_labels(listed) if listed.is_file() else None
        file = Path(root) / "texts.jsonl"
        records = line_records(file, user=user_key, account=account, fold_case=fold_case, known=labels or ())
    texts = list(records)
    if partition == "user":
        if not any(record.user for record in texts):
            raise ValueError(f"partition 'user' needs a {user_key} of texts, and no row has one")
        texts = with_owner(texts, [record.user for record in texts], user_key)
        assert account is not None
        account = account.keep([record.name for record in texts], f"no {user_key}")
    if account is not None:
        account.check_remains(len(texts))
    if silent := [record for record in texts if not record.text]:
        raise ValueError(f"{silent[0].where}: expected a text, got none ({len(silent)} such rows)")
    table = build_table((replace(record, split="", user="") for record in texts), labels)[""]
    roles = np.array([{"validation": "val"}.get(record.split, record.split) or "train" for record in texts])
    users = np.array([record.user.strip() for record in texts])
    shown = (text.picture for text in texts if text.picture)
    pictures = {name: number for number, name in enumerate(dict.fromkeys(shown))}
    together = np.array([pictures.get(r.picture, -1 - row) for row, r in enumerate(texts)]) if pictures else None
    pool = LabelPool(table, None, roles, keys={"user": users} if partition == "user" else {}, together=together)
    splits = federate_labels(
        pool,
        partition,
        clients=clients,
        alpha=alpha,
        minimum=minimum,
        # Captions have as many of each role as was asked for, which may be none.
        validation=0.0 if root is None else held_out,
        test=0.0 if root is None else held_out,
        seed=seed,
    )
    strange = (roles == "test") & ~np.isin(users, list(splits))
    places = {"newcomers": pool.examples(np.flatnonzero(strange))} if partition == "user" and strange.any() else {}
    origin = "captions of the built-in scenes with the things and colours in them" if root is None else "a file"
    facts = {"origin": origin, **table.facts(), **label_facts(splits, places.values())}
    dataset = LabelDataset("tagged_texts", table.labels, splits, places, facts, words(r.text for r in texts))
    return settled(dataset, account, "validation of no client that trains")


def captions(role: str, number: int, seed: int) -> Iterator[LabelRecord]:
    """Captions of new scene graphs with their tags."""
    choose = generator(seed, "captions", role)
    uniform = np.full(len(COLOURS), 1 / len(COLOURS))
    streams = [
        sample(role, GENERAL_NOUNS + OWN_NOUNS[scene], uniform, generator(seed, "graphs", "captions", role, scene))
        for scene in SCENES
    ]
    for row in range(number):
        graph = objects(next(streams[int(choose.integers(len(SCENES)))]), 0)
        found = set(chain.from_iterable((thing.noun, thing.colour) for thing in graph))
        tags = tuple(tag for tag in TAGS if tag in found)
        yield LabelRecord(
            Path("captions"), row, f"caption/{role}/{row:06d}", tags, text=caption(graph, choose), split=role
        )


def caption(graph: Sequence[Object], rng: np.random.Generator) -> str:
    """A caption of a picture that mentions at least one thing."""
    mentioned = [thing for thing in graph if rng.random() < MENTIONED] or [graph[int(rng.integers(len(graph)))]]
    parts: list[str] = []
    for position in rng.permutation(len(mentioned)).tolist():
        thing = mentioned[position]
        colour = f"{_one_of(_SAID[thing.colour], rng)} " if rng.random() < COLOURED else ""
        size = f"{thing.size} " if rng.random() < SIZED else ""
        link = f"{_one_of(_LINKS, rng)} " if parts else ""
        named = f"{size}{colour}{_one_of(_SAID[thing.noun], rng)}"
        parts.append(f"{link}{'an' if named[0] in 'aeiou' else 'a'} {named}")
    return " ".join([_one_of(_OPENINGS, rng), *parts]).strip()


def _one_of(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def _built_in(numbers: Mapping[str, int], seed: int) -> Iterator[LabelRecord]:
    for role, number in numbers.items():
        yield from captions(role, number, TEST_SEED if role == "test" else seed)
