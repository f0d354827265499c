"""SLAKE (Liu et al., 2021): questions in English and Chinese about CT, MRI and X-ray pictures.

Below ``root``, as published (https://www.med-vqa.com/slake): ``train.json``, ``validate.json`` and ``test.json``, lists
of objects with ``qid``, ``img_name`` ("xmlab0/source.jpg"), ``question``, ``answer``, ``q_lang`` (en, zh),
``answer_type`` (OPEN, CLOSED), ``modality`` and ``location``; and the pictures in ``imgs``.
"""

from functools import partial
from typing import Annotated, Any, Literal

from confed.data.chat_federate import ChatOptions, Partition, share_conversations, shown_files
from confed.data.chat_files import ChatRecord, records_of
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import read_records
from confed.data.intake.values import file_in, plain_text
from confed.data.refusals import first_of, refuse
from confed.datasets.reader import reader

_FILES = {"train": ("train.json",), "validation": ("validate.json", "validation.json"), "test": ("test.json",)}
_PUBLISHED = 14_028
_FACTS = {
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
    for split, names in _FILES.items():
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
            entries.append((where, _entry(given, split, place)))
        records += records_of(entries, "", f"slake-{split}", account)
    places = (folder / "imgs", folder / "images", folder)
    records, pictures, index = shown_files(records, partial(file_in, places), account, how)
    published = sum(account.rows.values()) == _PUBLISHED
    facts = _FACTS if published else {"origin": f"{sum(account.rows.values())} questions in SLAKE's format"}
    return share_conversations("slake", records, pictures, index, how, facts, account)


def _entry(given: dict[str, Any], split: str, place: str) -> dict[str, Any]:
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
