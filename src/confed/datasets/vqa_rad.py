"""VQA-RAD (Lau et al., 2018): questions of clinicians about radiology pictures of head, chest and abdomen.

Below ``root``, as published (https://osf.io/89kps): ``VQA_RAD Dataset Public.json``, a list of objects with ``qid``,
``image_name``, ``image_organ`` (HEAD, CHEST, ABD), ``question``, ``answer``, ``answer_type`` (OPEN, CLOSED) and
``phrase_type``, which begins with "test" in the test questions; and the pictures in ``VQA_RAD Image Folder``.
"""

from functools import partial
from pathlib import Path
from typing import Any

from confed.data.chat_federate import Partition, share_conversations, shown_files
from confed.data.chat_files import records_of
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import read_records
from confed.data.intake.values import file_in, find_file, plain_text
from confed.data.options import Options
from confed.data.picture_files import Check
from confed.registry import register_dataset

_FILES = ("VQA_RAD Dataset Public.json", "VQA_RAD_Dataset_Public.json")
_FOLDERS = ("VQA_RAD Image Folder", "VQA_RAD_Image_Folder", "images", ".")
_PUBLISHED = 2_248
_FACTS = {
    "origin": "VQA-RAD (Lau et al., 2018)",
    "licence": "CC0 1.0",
    "citation": 'J. Lau et al., "A dataset of clinically generated visual questions and answers about radiology '
    'images", Scientific Data 5, 2018',
}


@register_dataset
def vqa_rad(
    root: Path | str,
    partition: Partition = "place",
    *,
    clients: int = 3,
    alpha: float = 0.5,
    validation: float = 0.1,
    max_train: int | None = None,
    max_test: int | None = None,
    image_size: int = 224,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """Radiology questions, one client per organ or shared out; test questions are the published ones.

    Test questions are about pictures that others are trained on, as published: a fact says about how many.

    Args:
        root: see the module.
        partition: one client per "place" (organ) or "type" (open or closed), equal random shares ("iid"), or shares
            skewed by answers ("dirichlet").
        clients: number of clients, but for "place" and "type".
        alpha: concentration of "dirichlet".
        validation: share of each client's training pictures held out.
        max_train: most training questions per client.
        max_test: most test questions per client.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their questions.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses validation questions and, under ``max_train``, training questions.

    Raises:
        ValueError: a file or picture is missing or faulty (names file and row), or an option is out of range.
    """
    folder, account = Path(root), Account()
    file = find_file((folder,), _FILES[0]) or find_file((folder,), _FILES[1])
    if file is None:
        raise ValueError(f"vqa_rad: expected {_FILES[0]!r} in {folder}, found none; it is at https://osf.io/89kps")
    rows = read_records(file).rows
    account.rows[str(file)] = len(rows)
    entries = [(f"{file}, row {row}", _entry(entry, f"{file}, row {row}")) for row, entry in rows]
    records = records_of(entries, "", "vqa_rad", account)
    places = [folder / name for name in _FOLDERS]
    records, pictures, index = shown_files(
        records, partial(file_in, places), account, size=image_size, unreadable=unreadable, check=check
    )
    seen = {record.pictures for record in records if record.columns["split"] == "train"}
    tested = {record.pictures for record in records if record.columns["split"] == "test"}
    facts = {
        **(_FACTS if len(rows) == _PUBLISHED else {"origin": f"{len(rows)} questions in VQA-RAD's format"}),
        "pictures seen in training": f"{len(tested & seen)} of {len(tested)} test pictures",
    }
    options = Options(
        root, partition, clients=clients, alpha=alpha, validation=validation, test_share=0.2, max_train=max_train,
        max_test=max_test, seed=seed,
    )  # fmt: skip
    return share_conversations("vqa_rad", records, pictures, index, options, facts, account)


def _entry(given: Any, where: str) -> dict[str, Any]:
    """A question with its columns under the names that they have here."""
    needed = ("qid", "image_name", "question", "phrase_type")
    if not isinstance(given, dict) or any(given.get(key) is None for key in needed):
        raise ValueError(f"{where}: expected an object with {', '.join(needed)} and answer, got {given!r:.80}")
    return {
        "id": f"vqa_rad-{given['qid']}",
        "image": given["image_name"],
        "question": given["question"],
        "answer": given.get("answer"),
        "place": (plain_text(given.get("image_organ")) or "none").lower(),
        "type": (plain_text(given.get("answer_type")) or "question").lower(),
        "split": "test" if str(given["phrase_type"]).startswith("test") else "train",
    }
