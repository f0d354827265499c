"""Conversations and questions about pictures of one's own: JSON lines, JSON, CSV or Parquet, and pictures by path.

A folder holds one or several ``.jsonl`` files, or ``.json`` files with one list, in any of the layouts of
:mod:`confed.data.chat_files`, and the pictures below it or below its folder ``images/``. Where there are none of these,
``.csv``, ``.tsv`` and ``.parquet`` files are read. A file named ``train``, ``validation`` or ``test`` gives its rows
that split where they have none of their own. Columns of other names are mapped in the recipe, such as ``data.columns =
{image = "file", question = "query", answer = "label", client = "hospital"}``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from confed.data.chat_federate import ChatOptions, Partition, share_conversations, shown_files
from confed.data.chat_files import ChatRecord
from confed.data.chat_files import chat_records as read_records
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import ENDINGS, check_columns
from confed.data.intake.values import find_picture
from confed.data.intake.walk import ROLES, visible
from confed.data.refusals import refuse
from confed.datasets.reader import reader


@reader(
    "root partition * files columns question clients alpha skew unseen validation test_share max_train max_test turns "
    "fold_case image_size unreadable check seed",
    things="examples", partition=Partition | None,
)  # fmt: skip
def chat_records(how: ChatOptions, files: Sequence[str] = ()) -> FederatedDataset:
    """Conversations shared out among clients. Owners and test sets are the same for all seeds.

    Where every one is a single question about a single picture, the data are plain questions for any model; others need
    ``task.name = "chat"``.

    Raises ``ValueError``: a file is missing or faulty (names file and row), too many pictures cannot be read, a
    partition lacks its column, or an option is out of range.

    Options:
        partition: one client per "client", "place" or "type" of the lines, or per "cluster" of pictures that look
            alike; equal random shares; "dirichlet", skewed by ``skew``; or "quantity", of different sizes. None:
            "client" where lines have one, otherwise "iid".
        files: names of the files; default: all in the folder.
    """
    folder, account, records = how.folder, Account(), list[ChatRecord]()
    check_columns(how.columns or {})
    for file in _files(folder, files):
        of_file = read_records(file, how.columns, how.question, account, how.fold_case)
        role = {"split": file.stem} if file.stem.casefold() in ROLES else {}
        records += [replace(record, columns={**role, **record.columns}) for record in of_file] if role else of_file
    records, pictures, index = shown_files(records, partial(picture_place, folder), account, how)
    origin = {"origin": "conversations of a folder"}
    return share_conversations("chat_records", records, pictures, index, how, origin, account)


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Files of conversations: those named, else those of JSON, else tables."""
    listed = visible(folder) if folder.is_dir() else []
    files = [folder / name for name in names]
    for endings in ((".jsonl", ".json"), ENDINGS):
        files = files or [file for file in listed if file.suffix.lower() in endings]
    if not files:
        refuse(
            "chat_records",
            f"files of conversations (.jsonl or .json; .csv, .tsv or .parquet) in {folder}",
            found="none",
        )
    return files


def picture_place(folder: Path, name: str) -> Path:
    """A picture below the folder, or below its folder of pictures."""
    place = find_picture(folder, name)
    return folder / name.lstrip("/")[:200] if place is None else place
