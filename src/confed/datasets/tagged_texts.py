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
from typing import Annotated, Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account
from confed.data.ml_files.records import LabelRecord, line_records, listed_labels
from confed.data.ml_files.table import build_table
from confed.data.options import Options
from confed.data.owners import with_owner
from confed.data.refusals import refuse
from confed.data.seeding import generator
from confed.datasets.reader import Reading, reader
from confed.datasets.scenes.graph import COLOURS, GENERAL_NOUNS, NOUNS, OWN_NOUNS, SCENES, Object, objects, sample
from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE

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


@reader(
    "root partition * user_key clients alpha minimum train validation test held_out fold_case seed",
    things="texts", kind="labels", partition=Literal["label_skew", "iid", "user"], clients=20, alpha=1.0,
)  # fmt: skip
def tagged_texts(
    options: Options,
    root: Path | str | None = None,
    user_key: str = "user",
    train: Annotated[int, AT_LEAST_ONE] = 150,
    validation: Annotated[int, NOT_NEGATIVE] = 30,
    test: Annotated[int, NOT_NEGATIVE] = 50,
    held_out: Annotated[float, BELOW_ONE] = 0.2,
    fold_case: bool = False,
) -> Reading:
    """Tagged texts shared out among clients that differ in how often each tag occurs.

    Test texts and their owners are the same for all seeds.

    Options:
        root: a folder with ``texts.jsonl``; None for the built-in captions.
        partition: skew of single tags (:func:`confed.data.partitions.label_skew`); equal random shares; or one
            client per user of the file who has training texts. The test texts of the others are the place
            "newcomers", their validation texts are left out, and so are texts that are nobody's.
        user_key: what the file calls whose a text is.
        train: training captions per client, the mean over clients; as the next two, of the built-in captions.
        validation: validation captions per client.
        test: test captions per client.
        held_out: of a file without test texts, the share of a client's texts that are its test; without validation
            texts, the share of the rest that is its validation. At least one text stays.
        fold_case: whether labels of a file that differ in case alone are one, spelled as in ``labels.txt`` or as most.
        seed: chooses training and validation captions, or validation texts.

    Raises ``ValueError``: a file is missing or faulty, a row has no text, a label is not in ``labels.txt`` (the first
    few are listed), there are no users, or an option is out of range.
    """
    by_user, account, labels = options.partition == "user", None, TAGS
    if root is None:
        if by_user:
            refuse("data.root", "a folder with texts.jsonl for the partition 'user', as captions have none", root)
        sizes = {"train": train, "validation": validation, "test": test}
        made = (
            captions(role, options.clients * number, TEST_SEED if role == "test" else options.seed)
            for role, number in sizes.items()
        )
        texts = list(chain.from_iterable(made))
    else:
        account, listed = Account(), Path(root) / "labels.txt"
        labels = listed_labels(listed) if listed.is_file() else None
        file = Path(root) / "texts.jsonl"
        texts = list(line_records(file, user=user_key, account=account, fold_case=fold_case, known=labels or ()))
        if by_user:
            texts, account = _of_users(texts, account, user_key)
        account.check_remains(len(texts))
    if silent := [record for record in texts if not record.text]:
        refuse(silent[0].where, "a text", found=f"none ({len(silent)} such rows)")
    table = build_table((replace(record, split="", user="") for record in texts), labels)[""]
    roles = np.array([{"validation": "val"}.get(record.split, record.split) or "train" for record in texts])
    users = np.array([record.user.strip() for record in texts])
    shown = (text.picture for text in texts if text.picture)
    pictures = {name: number for number, name in enumerate(dict.fromkeys(shown))}
    together = np.array([pictures.get(r.picture, -1 - row) for row, r in enumerate(texts)]) if pictures else None
    origin = "captions of the built-in scenes with the things and colours in them" if root is None else "a file"
    # Captions have as many of each role as was asked for, which may be none.
    share = 0.0 if root is None else held_out
    examples = Examples.labelled(table, None, np.arange(len(table)))
    keys = {"user": users} if by_user else {}
    return Reading(
        Pool(examples, roles, keys=keys, together=together, newcomers=("user",)),
        account,
        "validation of no client that trains",
        {"origin": origin, **table.facts()},
        options=replace(options, validation=share, test_share=share),
    )


def _of_users(texts: list[LabelRecord], account: Account, user_key: str) -> tuple[list[LabelRecord], Account]:
    """The texts that are somebody's."""
    users = [record.user for record in texts]
    if not any(users):
        refuse("texts.jsonl", f"a {user_key} of texts for the partition 'user'", found="no row with one")
    texts = with_owner(texts, users, user_key)
    return texts, account.keep([record.name for record in texts], f"no {user_key}")


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
        shown = set(chain.from_iterable((thing.noun, thing.colour) for thing in graph))
        tags = tuple(tag for tag in TAGS if tag in shown)
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
