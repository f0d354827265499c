"""Conversations and questions about pictures of one's own: JSON lines, JSON, CSV or Parquet, and pictures by path.

A folder holds one or several ``.jsonl`` files, or ``.json`` files with one list, in any of the layouts of
:mod:`confed.data.chat_files`, and the pictures below it or below its folder ``images/``. Where there are none of these,
``.csv``, ``.tsv`` and ``.parquet`` files are read; where there are none either, those in the folders in it, each with
its pictures: the names of several such folders are the clients of their rows. A file or a folder named ``train``,
``validation`` or ``test`` gives its rows that split. What a row says itself counts first. Columns of other names are
mapped in the recipe, such as ``data.columns = {image = "file", question = "query", answer = "label", client =
"hospital"}``.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from confed.data.chat_federate import ChatOptions, Partition, share_conversations, shown_files
from confed.data.chat_files import folder_records, record_files
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import check_columns
from confed.data.intake.values import find_picture
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
    folder, account = how.folder, Account()
    check_columns(how.columns or {})
    records = folder_records(folder, _files(folder, files), how.columns, how.question, account, how.fold_case)
    records, pictures, index = shown_files(records, partial(picture_place, folder), account, how)
    origin = {"origin": "conversations of a folder"}
    return share_conversations("chat_records", records, pictures, index, how, origin, account)


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Files of conversations: those named, else those of JSON, else tables; else those in the folders in the folder."""
    files = [folder / name for name in names]
    if not files and folder.is_dir():
        files = next(filter(None, record_files(folder)), [])
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
