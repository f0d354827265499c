"""VQA-RAD (Lau et al., 2018): questions of clinicians about radiology pictures of head, chest and abdomen.

Below ``root``, as published (https://osf.io/89kps): ``VQA_RAD Dataset Public.json``, a list of objects with ``qid``,
``image_name``, ``image_organ`` (HEAD, CHEST, ABD), ``question``, ``answer``, ``answer_type`` (OPEN, CLOSED) and
``phrase_type``, which begins with "test" in the test questions; and the pictures in ``VQA_RAD Image Folder``.
"""

from functools import partial
from typing import Annotated, Any

from confed.data.chat_federate import ChatOptions, Partition, share_conversations, shown_files
from confed.data.chat_files import records_of
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import read_records
from confed.data.intake.values import file_in, find_file, plain_text
from confed.data.refusals import refuse
from confed.datasets.reader import reader

_FILES = ("VQA_RAD Dataset Public.json", "VQA_RAD_Dataset_Public.json")
_FOLDERS = ("VQA_RAD Image Folder", "VQA_RAD_Image_Folder", "images", ".")
_PUBLISHED = 2_248
_FACTS = {
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
    file = find_file((folder,), _FILES[0]) or find_file((folder,), _FILES[1])
    if file is None:
        refuse("vqa_rad", f"{_FILES[0]!r} in {folder}", found="none", remedy="it is at https://osf.io/89kps")
    rows = read_records(file).rows
    account.rows[str(file)] = len(rows)
    entries = [(f"{file}, row {row}", _entry(entry, f"{file}, row {row}")) for row, entry in rows]
    records = records_of(entries, "", "vqa_rad", account)
    places = [folder / name for name in _FOLDERS]
    records, pictures, index = shown_files(records, partial(file_in, places), account, how)
    seen = {record.pictures for record in records if record.columns["split"] == "train"}
    tested = {record.pictures for record in records if record.columns["split"] == "test"}
    facts = {
        **(_FACTS if len(rows) == _PUBLISHED else {"origin": f"{len(rows)} questions in VQA-RAD's format"}),
        "pictures seen in training": f"{len(tested & seen)} of {len(tested)} test pictures",
    }
    return share_conversations("vqa_rad", records, pictures, index, how, facts, account)


def _entry(given: Any, where: str) -> dict[str, Any]:
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
