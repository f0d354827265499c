"""VQA v2 (Goyal et al., CVPR 2017) in BiCSL's random partition, tested on val2014.

The folder holds the four official files of questions and annotations. Models that read regions need
``regions.safetensors`` beside them, which ``confed data prepare vqa-v2`` writes; models that read pictures need the
folders of COCO's pictures.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import floors, words
from confed.data.intake.account import account_of, settled
from confed.data.partitions import hold_out
from confed.data.picture_files import Check, PictureFiles, find_pictures
from confed.data.picture_tables import NoPictures, Pictures
from confed.data.region_files import REGIONS, StoredRegions, image_number
from confed.data.regions import Regions
from confed.data.vl_files.records import Record
from confed.data.vl_files.vqa import vqa_records
from confed.registry import register_dataset

_FACTS = {
    "origin": "VQA v2 on the pictures of COCO; tested on val2014, as test2015 has no published answers",
    "licence": "questions and annotations: CC BY 4.0; each picture its own",
    "citation": 'Y. Goyal et al., "Making the V in VQA matter: Elevating the role of image understanding in visual '
    'question answering", CVPR 2017',
}
PUBLISHED = (443_757, 214_354)
"""Questions of train2014 and val2014 as published (version 2)."""


@register_dataset
def vqa_v2(
    root: Path | str,
    partition: Literal["halves", "code"] = "halves",
    *,
    clients: int = 2,
    regions: Path | str | None = None,
    images: tuple[str, ...] = (),
    image_size: int = 224,
    unreadable: float = 0.01,
    check: Check = "decoded",
    min_answers: int = 9,
    validation: float = 0.02,
    max_train: int | None = None,
    max_test: int | None = None,
    seed: int = 0,
) -> FederatedDataset:
    """VQA v2 at random clients.

    The answers are the normalised majority answers that occur at least ``min_answers`` times in train2014 and val2014
    together, without the empty one (the normal form of "a"), which the 3,129 answers in common use contain. A training
    question's answer is the one of them that most annotators gave (the majority answer among equals); training
    questions without such an answer are left out. A test question whose majority answer is none of them stays, and is
    answered wrongly by every model. Question types are the official answer types: yes/no, number, other.

    Args:
        root: the folder of the four official files.
        partition: "halves": every training question has one client, at random, in equal shares (as in the paper).
            "code": every client has a random share of that size, drawn for itself, so that shares overlap (the released
            code draws such shares anew in every epoch, here they are drawn once).
        clients: how many.
        regions: the file that ``confed data prepare vqa-v2`` wrote; None: ``regions.safetensors`` in ``root``, if it is
            there.
        images: folders of COCO's pictures, train2014 and val2014; empty: no pictures.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        min_answers: least occurrences of an answer of the vocabulary.
        validation: share of every client's training pictures held out to choose settings on. (The paper has none.)
        max_train: most training questions per client.
        max_test: most test questions per client. By default all of val2014 is used, in equal random shares, so that
            the mean over clients is the accuracy on val2014.
        seed: chooses training and validation questions; the test questions are the same for all seeds.

    Raises:
        ValueError: a file is missing, damaged or of another split, there are neither regions nor pictures, a picture
            has no regions or no file, or an option is out of range.
    """
    base = Path(root)
    _check(base, partition, clients, min_answers, validation, {"max_train": max_train, "max_test": max_test}, seed)
    features = _regions(base, None if regions is None else Path(regions), images)
    train, test = (list(vqa_records(base, split)) for split in ("train2014", "val2014"))
    # Other questions in these files' layout have an origin and a licence of their own, and numbers of their own.
    published = (len(train), len(test)) == PUBLISHED
    if not published and {record.name for record in train} & {record.name for record in test}:
        test = [replace(record, name=f"{record.name}-val2014") for record in test]
    answers = vocabulary([*train, *test], min_answers)
    answer_set = frozenset(answers)
    learned = [(record, answer) for record in train if (answer := _label(record, answer_set)) is not None]
    row_of, table = _table(
        [*train, *test], features, images, PictureFiles([], image_size, unreadable=unreadable, check=check)
    )
    first = _examples([r for r, _ in learned], [a for _, a in learned], row_of, table, features)
    last = _examples(test, [record.answer for record in test], row_of, table, features)
    rng = np.random.default_rng([0, seed])
    held = hold_out(first.image_index, validation, rng)
    splits: dict[str, Split] = {}
    tests = np.array_split(np.random.default_rng(1).permutation(len(last)), clients)
    for number, (client_rows, tried) in enumerate(
        zip(_deal(len(first), partition, clients, rng), tests, strict=True), 1
    ):
        trained = client_rows[~held[client_rows]]
        if max_train is not None and len(trained) > max_train:
            trained = np.sort(rng.choice(trained, max_train, replace=False))
        if not len(trained) or not held[client_rows].any():
            raise ValueError(f"vqa_v2: {len(first)} training questions are too few for {clients} clients")
        splits[f"client-{number:02d}"] = Split(
            first.take(trained), first.take(client_rows[held[client_rows]]), last.take(np.sort(tried[:max_test]))
        )
    outside = sum(answer not in answer_set for answer in last.answers)
    facts = {
        **(_FACTS if published else {"origin": f"{base}: {len(train)} and {len(test)} questions, not those published"}),
        "vocabulary": f"{len(answers)} answers; {len(train) - len(learned)} training questions without one left out; "
        f"the majority answer of {outside} of {len(last)} test questions is none of them",
        "features": "none" if features is None else f"{features.shape[1]} regions x {features.shape[2]}",
        **floors(splits),
    }
    spoken = words([*first.questions, *last.questions])
    dataset = FederatedDataset("vqa_v2", answers, splits, {}, spoken, facts, outside=True)
    if published:
        return dataset
    account = account_of([*train, *test]).keep([*first.names, *last.names], "answer outside the vocabulary")
    return settled(dataset, account, "beyond max_train, max_test or the clients' shares")


def _deal(count: int, partition: str, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every client's training questions, ascending."""
    if partition == "halves":
        return [np.sort(client_rows) for client_rows in np.array_split(rng.permutation(count), clients)]
    return [np.sort(rng.permutation(count)[: count // clients]) for _ in range(clients)]


def vocabulary(records: Sequence[Record], least: int) -> tuple[str, ...]:
    """The majority answers that occur at least so often, most frequent first, equals in alphabetical order."""
    counts = Counter(record.answer for record in records if record.answer)
    kept = sorted((a for a, n in counts.items() if n >= least), key=lambda answer: (-counts[answer], answer))
    if len(kept) < 2:
        raise ValueError(
            f"vqa_v2: {len(kept)} answers occur at least {least} times among {len(records)} questions; lower "
            "min_answers"
        )
    return tuple(kept)


def _label(record: Record, known: frozenset[str]) -> str | None:
    """The answer of the vocabulary that most annotators gave; the majority answer, then the alphabet, among equals."""
    given = Counter(answer for answer in record.annotations or (record.answer,) if answer in known)
    if not given:
        return record.answer if record.answer in known else None
    return min(given, key=lambda answer: (-given[answer], answer != record.answer, answer))


def _table(
    records: Sequence[Record], features: StoredRegions | None, folders: Sequence[str], like: PictureFiles
) -> tuple[dict[int, int], Pictures]:
    """Picture number -> its row, and the table of pictures, with the options of an empty one."""
    asked = sorted({image_number(record.pictures[0]) for record in records})
    numbers = asked if features is None else features.index.images
    row_of = {image: row for row, image in enumerate(numbers)}
    lacking = [image for image in asked if image not in row_of]
    if lacking and features is not None:
        raise ValueError(f"{features.file} lacks {len(lacking)} pictures that questions are about, first {lacking[0]}")
    if not folders:
        return row_of, NoPictures(len(numbers))
    columns: dict[int, Path] = {}
    for folder in folders:
        for name, path in find_pictures(Path(folder)).items():
            if name.rpartition("_")[2].isdigit():
                columns[image_number(name)] = path
    lacking = [image for image in numbers if image not in columns]
    if lacking:
        raise ValueError(f"{', '.join(folders)}: {len(lacking)} pictures are missing, first {lacking[0]}")
    return row_of, like.of([columns[image] for image in numbers])


def _examples(
    records: Sequence[Record],
    answers: Sequence[str],
    row_of: dict[int, int],
    pictures: Pictures,
    features: Regions | None,
) -> Examples:
    return Examples(
        pictures,
        np.array([row_of[image_number(record.pictures[0])] for record in records], dtype=np.int64),
        [record.question for record in records],
        list(answers),
        [record.type for record in records],
        [record.name for record in records],
        [record.annotations or () for record in records],
        regions=features,
    )


def _regions(base: Path, given: Path | None, images: Sequence[str]) -> StoredRegions | None:
    """The features, if there are any."""
    if given is not None or (base / REGIONS).is_file():
        return StoredRegions(base / REGIONS if given is None else given)
    if not images:
        raise ValueError(
            f"vqa_v2: neither {base / REGIONS} (written by `confed data prepare vqa-v2 --root {base}`) is there nor "
            "are folders of pictures given (data.images)"
        )
    return None


def _check(
    base: Path,
    partition: str,
    clients: int,
    min_answers: int,
    validation: float,
    limits: dict[str, int | None],
    seed: int,
) -> None:
    if not base.is_dir():
        raise ValueError(f"vqa_v2: data.root must be the folder of the official files, {base} does not exist")
    if partition not in ("halves", "code"):
        raise ValueError(f"partition must be halves or code, got {partition!r}")
    for name, value in (("clients", clients), ("min_answers", min_answers), *limits.items()):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share of the pictures in (0, 1), got {validation}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
