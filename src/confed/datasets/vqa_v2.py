"""VQA v2 (Goyal et al., CVPR 2017) in BiCSL's random partition, tested on val2014.

The folder holds the four official files of questions and annotations. Models that read regions need
``regions.safetensors`` beside them, which ``confed data prepare vqa-v2`` writes; models that read pictures need the
folders of COCO's pictures.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import cap, floors, words
from confed.data.intake.account import account_of, settled
from confed.data.options import SOME_OF_ALL, Options
from confed.data.partitions import hold_out
from confed.data.picture_files import PictureFiles, find_pictures
from confed.data.picture_tables import NoPictures, Pictures
from confed.data.refusals import check_nothing_lacks, existing_folder, refuse
from confed.data.region_files import REGIONS, StoredRegions, image_number
from confed.data.regions import Regions
from confed.data.vl_files.records import Record
from confed.data.vl_files.vqa import vqa_records
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE

_FACTS = {
    "origin": "VQA v2 on the pictures of COCO; tested on val2014, as test2015 has no published answers",
    "licence": "questions and annotations: CC BY 4.0; each picture its own",
    "citation": 'Y. Goyal et al., "Making the V in VQA matter: Elevating the role of image understanding in visual '
    'question answering", CVPR 2017',
}
PUBLISHED = (443_757, 214_354)
"""Questions of train2014 and val2014 as published (version 2)."""


@reader(
    "root partition * clients regions images image_size unreadable check min_answers validation max_train max_test "
    "seed",
    partition=Literal["halves", "code"], clients=2, validation=Annotated[float, SOME_OF_ALL, 0.02],
)  # fmt: skip
def vqa_v2(
    options: Options,
    regions: Path | str | None = None,
    images: tuple[str, ...] = (),
    min_answers: Annotated[int, AT_LEAST_ONE] = 9,
) -> FederatedDataset:
    """VQA v2 at random clients.

    The answers are the normalised majority answers that occur at least ``min_answers`` times in train2014 and val2014
    together, without the empty one (the normal form of "a"), which the 3,129 answers in common use contain. A training
    question's answer is the one of them that most annotators gave (the majority answer among equals); training
    questions without such an answer are left out. A test question whose majority answer is none of them stays, and is
    answered wrongly by every model. Question types are the official answer types: yes/no, number, other.

    Options:
        root: the folder of the four official files.
        partition: "halves": every training question has one client, at random, in equal shares (as in the paper).
            "code": every client has a random share of that size, drawn for itself, so that shares overlap (the released
            code draws such shares anew in every epoch, here they are drawn once).
        clients: how many.
        regions: the file that ``confed data prepare vqa-v2`` wrote; None: ``regions.safetensors`` in ``root``, if it is
            there.
        images: folders of COCO's pictures, train2014 and val2014; empty: no pictures.
        min_answers: least occurrences of an answer of the vocabulary.
        validation: share of every client's training pictures held out to choose settings on. (The paper has none.)
        max_test: most test questions per client. By default all of val2014 is used, in equal random shares, so that
            the mean over clients is the accuracy on val2014.

    Raises ``ValueError``: a file is missing, damaged or of another split, there are neither regions nor pictures, a
    picture has no regions or no file, or an option is out of range.
    """
    base = options.folder
    existing_folder(base, "data.root is the folder of the official files")
    features = _regions(base, None if regions is None else Path(regions), images)
    train, test = (list(vqa_records(base, split)) for split in ("train2014", "val2014"))
    # Other questions in these files' layout have an origin and a licence of their own, and numbers of their own.
    published = (len(train), len(test)) == PUBLISHED
    if not published and {record.name for record in train} & {record.name for record in test}:
        test = [replace(record, name=f"{record.name}-val2014") for record in test]
    answers = vocabulary([*train, *test], min_answers)
    answer_set = frozenset(answers)
    learned = [(record, answer) for record in train if (answer := _label(record, answer_set)) is not None]
    row_of, table = _table([*train, *test], features, images, options.pictures())
    first = _examples([r for r, _ in learned], [a for _, a in learned], row_of, table, features)
    last = _examples(test, [record.answer for record in test], row_of, table, features)
    splits = _splits(first, last, options)
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
    account = account_of([*train, *test]).keep([*first.names, *last.names], "answer outside the vocabulary")
    return settled(dataset, account, "beyond max_train, max_test or the clients' shares")


def _splits(first: Examples, last: Examples, options: Options) -> dict[str, Split]:
    """The clients' splits of all training and all test questions."""
    rng = np.random.default_rng([0, options.seed])
    held = hold_out(first.image_index, options.validation, rng)
    splits: dict[str, Split] = {}
    tests = np.array_split(np.random.default_rng(1).permutation(len(last)), options.clients)
    shares = _deal(len(first), options.partition, options.clients, rng)
    for number, (client_rows, tested) in enumerate(zip(shares, tests, strict=True), 1):
        trained = cap(client_rows[~held[client_rows]], options.max_train, rng)
        if not len(trained) or not held[client_rows].any():
            expected = f"training and validation questions for each of {options.clients} clients"
            refuse("vqa_v2", expected, found=f"too few, {len(first)}, at data.validation = {options.validation:g}")
        validation, test = client_rows[held[client_rows]], np.sort(tested[: options.max_test])
        splits[f"client-{number:02d}"] = Split(first.take(trained), first.take(validation), last.take(test))
    return splits


def _deal(count: int, partition: str | None, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every client's training questions, ascending."""
    if partition == "halves":
        return [np.sort(client_rows) for client_rows in np.array_split(rng.permutation(count), clients)]
    return [np.sort(rng.permutation(count)[: count // clients]) for _ in range(clients)]


def vocabulary(records: Sequence[Record], least: int) -> tuple[str, ...]:
    """The majority answers that occur at least so often, most frequent first, equals in alphabetical order."""
    counts = Counter(record.answer for record in records if record.answer)
    frequent = sorted((a for a, n in counts.items() if n >= least), key=lambda answer: (-counts[answer], answer))
    if len(frequent) < 2:
        expected = f"two answers to at least {least} of {len(records)} questions"
        refuse("data.min_answers", expected, found=len(frequent), remedy="lower it")
    return tuple(frequent)


def _label(record: Record, answers: frozenset[str]) -> str | None:
    """The answer of the vocabulary that most annotators gave; the majority answer, then the alphabet, among equals."""
    given = Counter(answer for answer in record.annotations or (record.answer,) if answer in answers)
    if not given:
        return record.answer if record.answer in answers else None
    return min(given, key=lambda answer: (-given[answer], answer != record.answer, answer))


def _table(
    records: Sequence[Record], features: StoredRegions | None, folders: Sequence[str], like: PictureFiles
) -> tuple[dict[int, int], Pictures]:
    """Picture number -> its row, and the table of pictures, with the options of an empty one."""
    needed = sorted({image_number(record.pictures[0]) for record in records})
    numbers = needed if features is None else features.index.images
    row_of = {image: row for row, image in enumerate(numbers)}
    lacking = [image for image in needed if image not in row_of]
    if features is not None:
        check_nothing_lacks("pictures that questions are about", lacking, len(needed), features.file)
    if not folders:
        return row_of, NoPictures(len(numbers))
    columns: dict[int, Path] = {}
    for folder in folders:
        for name, path in find_pictures(Path(folder)).items():
            if name.rpartition("_")[2].isdigit():
                columns[image_number(name)] = path
    lacking = [image for image in numbers if image not in columns]
    check_nothing_lacks("pictures", lacking, len(numbers), ", ".join(folders))
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
        remedy = f"`confed data prepare vqa-v2 --root {base}` writes {REGIONS}"
        refuse(base / REGIONS, "this file, or folders of pictures (data.images)", found="neither", remedy=remedy)
    return None
