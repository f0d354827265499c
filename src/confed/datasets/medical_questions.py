"""Questions about medical pictures: SLAKE, VQA-RAD and PathVQA, as they were published.

SLAKE (Liu et al., 2021; https://www.med-vqa.com/slake), in English and Chinese about CT, MRI and X-ray pictures:
``train.json``, ``validate.json`` and ``test.json``, lists of objects with ``qid``, ``img_name`` ("xmlab0/source.jpg"),
``question``, ``answer``, ``q_lang`` (en, zh), ``answer_type`` (OPEN, CLOSED), ``modality`` and ``location``; and the
pictures in ``imgs``.

VQA-RAD (Lau et al., 2018; https://osf.io/89kps), of clinicians about radiology pictures of head, chest and abdomen:
``VQA_RAD Dataset Public.json``, a list of objects with ``qid``, ``image_name``, ``image_organ`` (HEAD, CHEST, ABD),
``question``, ``answer``, ``answer_type`` (OPEN, CLOSED) and ``phrase_type``, which begins with "test" in the test
questions; and the pictures in ``VQA_RAD Image Folder``.

PathVQA (He et al., 2020), about pictures of pathology, from captions in textbooks; as it is on the hub
(flaviagiammarino/path-vqa): ``train-*.parquet``, ``validation-*.parquet`` and ``test-*.parquet``, also in ``data/``,
with the columns ``image`` (bytes), ``question`` and ``answer``. The first release has the questions as pickled objects
(``qas/train/train_qa.pkl``), which could run code and are not read; instead, ``qas/{train,val,test}.jsonl`` with
``image`` ("train_0422"), ``question`` and ``answer`` are read with the pictures in ``images/{train,val,test}``.
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from confed.data.chat_federate import ChatOptions, Partition, share_conversations, shown_files
from confed.data.chat_files import ChatRecord, records_of
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import parquet_rows, read_jsonl, read_records
from confed.data.intake.values import file_in, find_file, plain_text
from confed.data.refusals import first_of, refuse
from confed.datasets.hub import PictureTable
from confed.datasets.reader import reader


def _facts(published: Collection[int], facts: Mapping[str, str], title: str, account: Account) -> Mapping[str, str]:
    """What is told of a published data set; files with other numbers of questions are somebody's own."""
    count = sum(account.rows.values())
    return facts if count in published else {"origin": f"{count} questions in {title}'s format"}


# SLAKE --------------------------------------------------------------------------------------------------------

_SPLIT_FILES = {"train": ("train.json",), "validation": ("validate.json", "validation.json"), "test": ("test.json",)}
_SLAKE = {
    "origin": "SLAKE (Liu et al., 2021)",
    "licence": "CC BY 4.0",
    "citation": 'B. Liu et al., "SLAKE: a semantically-labeled knowledge-enhanced dataset for medical visual question '
    'answering", ISBI 2021',
}


@reader(
    "root partition * language place clients alpha max_train max_test image_size unreadable check seed",
    partition=Annotated[Partition, "place"], clients=3,
)  # fmt: skip
def slake(
    how: ChatOptions, language: Literal["en", "zh", "all"] = "en", place: Literal["modality", "location"] = "modality"
) -> FederatedDataset:
    """Medical questions, one client per kind of picture or part of the body, in the published splits.

    Options:
        partition: one client per "place" or "type" (open or closed), equal random shares ("iid"), or shares skewed by
            answers ("dirichlet").
        language: of the questions; those of the other one are left out and counted.
        place: what "place" is: "modality" (CT, MRI, X-Ray) or "location" (part of the body).

    Raises ``ValueError``: a file or picture is missing or faulty (names file and row), or an option is out of range.
    """
    folder, account = how.folder, Account()
    records: list[ChatRecord] = []
    for split, names in _SPLIT_FILES.items():
        file = first_of([folder / name for name in names], "questions", "see https://www.med-vqa.com/slake")
        rows = read_records(file).rows
        account.rows[str(file)] = len(rows)
        entries: list[tuple[str, dict[str, Any]]] = []
        for row, given in rows:
            where = f"{file}, row {row}"
            if not isinstance(given, dict) or "qid" not in given or not isinstance(given.get("img_name"), str):
                refuse(where, "an object with qid, img_name and question", given)
            if language not in ("all", given.get("q_lang")):
                account.leave(f"another language than {language}", where)
                continue
            entries.append((where, _slake_entry(given, split, place)))
        records += records_of(entries, "", f"slake-{split}", account)
    places = (folder / "imgs", folder / "images", folder)
    records, pictures, index = shown_files(records, partial(file_in, places), account, how)
    facts = _facts({14_028}, _SLAKE, "SLAKE", account)
    return share_conversations("slake", records, pictures, index, how, facts, account)


def _slake_entry(given: dict[str, Any], split: str, place: str) -> dict[str, Any]:
    """A question with its columns under the names that they have here."""
    return {
        "id": f"slake-{split}-{given['qid']}",
        "image": given["img_name"],
        "question": given.get("question"),
        "answer": given.get("answer"),
        "place": plain_text(given.get(place)) or "none",
        "type": (plain_text(given.get("answer_type")) or "question").lower(),
        "split": split,
    }


# VQA-RAD ------------------------------------------------------------------------------------------------------

_RAD_FILES = ("VQA_RAD Dataset Public.json", "VQA_RAD_Dataset_Public.json")
_RAD_FOLDERS = ("VQA_RAD Image Folder", "VQA_RAD_Image_Folder", "images", ".")
_VQA_RAD = {
    "origin": "VQA-RAD (Lau et al., 2018)",
    "licence": "CC0 1.0",
    "citation": 'J. Lau et al., "A dataset of clinically generated visual questions and answers about radiology '
    'images", Scientific Data 5, 2018',
}


@reader(
    "root partition * clients alpha validation max_train max_test image_size unreadable check seed",
    partition=Annotated[Partition, "place"], clients=3,
)  # fmt: skip
def vqa_rad(how: ChatOptions) -> FederatedDataset:
    """Radiology questions, one client per organ or shared out; test questions are the published ones.

    Test questions are about pictures that others are trained on, as published: a fact says about how many.

    Options:
        partition: one client per "place" (organ) or "type" (open or closed), equal random shares ("iid"), or shares
            skewed by answers ("dirichlet").

    Raises ``ValueError``: a file or picture is missing or faulty (names file and row), or an option is out of range.
    """
    folder, account = how.folder, Account()
    file = find_file((folder,), _RAD_FILES[0]) or find_file((folder,), _RAD_FILES[1])
    if file is None:
        refuse("vqa_rad", f"{_RAD_FILES[0]!r} in {folder}", found="none", remedy="it is at https://osf.io/89kps")
    rows = read_records(file).rows
    account.rows[str(file)] = len(rows)
    entries = [(f"{file}, row {row}", _rad_entry(entry, f"{file}, row {row}")) for row, entry in rows]
    records = records_of(entries, "", "vqa_rad", account)
    places = [folder / name for name in _RAD_FOLDERS]
    records, pictures, index = shown_files(records, partial(file_in, places), account, how)
    seen = {record.pictures for record in records if record.columns["split"] == "train"}
    tested = {record.pictures for record in records if record.columns["split"] == "test"}
    both = {"pictures seen in training": f"{len(tested & seen)} of {len(tested)} test pictures"}
    facts = {**_facts({2_248}, _VQA_RAD, "VQA-RAD", account), **both}
    return share_conversations("vqa_rad", records, pictures, index, how, facts, account)


def _rad_entry(given: Any, where: str) -> dict[str, Any]:
    """A question with its columns under the names that they have here."""
    needed = ("qid", "image_name", "question", "phrase_type")
    if not isinstance(given, dict) or any(given.get(key) is None for key in needed):
        refuse(where, f"an object with {', '.join(needed)} and answer", given)
    return {
        "id": f"vqa_rad-{given['qid']}",
        "image": given["image_name"],
        "question": given["question"],
        "answer": given.get("answer"),
        "place": (plain_text(given.get("image_organ")) or "none").lower(),
        "type": (plain_text(given.get("answer_type")) or "question").lower(),
        "split": "test" if str(given["phrase_type"]).startswith("test") else "train",
    }


# PathVQA ------------------------------------------------------------------------------------------------------

_SPLITS = {"train": "train", "validation": "val", "test": "test"}
"""Names of the splits in Parquet, and in the first release."""
_COLUMNS = ("image", "question", "answer")
_PATH_VQA = {
    "origin": "PathVQA (He et al., 2020)",
    "licence": "MIT, as the hub's copy says; pictures: of the textbooks",
    "citation": 'X. He et al., "PathVQA: 30000+ questions for medical visual question answering", arXiv:2003.10286',
}


@reader(
    "root partition * clients alpha max_train max_test image_size unreadable seed",
    partition=Annotated[Partition, "iid"],
)  # fmt: skip
def path_vqa(how: ChatOptions) -> FederatedDataset:
    """Questions about pathology shared out among clients, in the published splits; a picture has one client.

    Options:
        partition: equal random shares ("iid"), shares skewed by answers ("dirichlet"), or one client per "type" of
            answer, closed (yes or no) or open.
        image_size: side of the pictures in pixels; other proportions are squeezed. They are kept in memory.

    Raises ``ValueError``: a file or picture is missing or faulty (names file and row), or an option is out of range.
    """
    folder, account, table = how.folder, Account(), PictureTable(how.image_size, how.folder.resolve())
    records: list[ChatRecord] = []
    for split, short in _SPLITS.items():
        entries: list[tuple[str, dict[str, Any]]] = []
        for file in _path_files(folder, split, short):
            of_hub = file.suffix == ".parquet"
            for row, given in parquet_rows(file, _COLUMNS) if of_hub else read_jsonl(file):
                where = f"{file}, row {row}"
                account.count(file)
                shown = given.get("image")
                shown = f"images/{short}/{shown}.jpg" if isinstance(shown, str) else shown
                kind = "closed" if given.get("answer") in ("yes", "no") else "open"
                texts = {key: given[key] for key in _COLUMNS[1:] if key in given}
                entries.append((where, {**texts, "images": [table.add(shown, where)], "type": kind, "split": split}))
        records += records_of(entries, "", f"path_vqa-{split}", account)
    records = table.readable(records, f"in {folder}", how.unreadable, account)
    facts = _facts({32_632, 32_795, 32_799}, _PATH_VQA, "PathVQA", account)
    return share_conversations("path_vqa", records, table.pictures(), table.index, how, facts, account)


def _path_files(folder: Path, split: str, short: str) -> list[Path]:
    """The files of a split, those of the hub or those of the first release as JSON lines."""
    files = [*sorted(folder.glob(f"{split}-*.parquet")), *sorted(folder.glob(f"data/{split}-*.parquet"))]
    lines = folder / "qas" / f"{short}.jsonl"
    if files or lines.is_file():
        return files or [lines]
    pickled = next(iter(sorted(folder.rglob("*.pkl"))), None)
    why = f"; {pickled.name} is of pickled objects, which could run code: take the hub's files" if pickled else ""
    refuse("path_vqa", f"{split}-*.parquet in {folder} or its data/", found=f"none{why}")
