"""Conversations and questions about pictures of one's own: JSON lines, JSON, CSV or Parquet, and pictures by path.

A folder holds one or several ``.jsonl`` files, or ``.json`` files with one list, in any of the layouts of
:mod:`confed.data.chat_files`, and the pictures below it or below its folder ``images/``. Where there are none of these,
``.csv``, ``.tsv`` and ``.parquet`` files are read. A file named ``train``, ``validation`` or ``test`` gives its rows
that split where they have none of their own. Columns of other names are mapped in the recipe, such as ``data.columns =
{image = "file", question = "query", answer = "label", client = "hospital"}``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from confed.data.chat_federate import Partition, Turns, share_conversations, shown_files
from confed.data.chat_files import ChatRecord
from confed.data.chat_files import chat_records as read_records
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import ENDINGS, check_columns
from confed.data.intake.values import find_picture
from confed.data.intake.walk import ROLES, visible
from confed.data.options import Options
from confed.data.picture_files import Check
from confed.registry import register_dataset


@register_dataset
def chat_records(
    root: Path | str,
    partition: Partition | None = None,
    *,
    files: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    question: str = "",
    clients: int = 4,
    alpha: float = 0.5,
    skew: str = "answer",
    unseen: Sequence[str] = (),
    validation: float = 0.1,
    test_share: float = 0.2,
    max_train: int | None = None,
    max_test: int | None = None,
    turns: Turns = "each",
    fold_case: bool = False,
    image_size: int = 224,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """Conversations shared out among clients. Owners and test sets are the same for all seeds.

    Where every one is a single question about a single picture, the data are plain questions for any model; others need
    ``task.name = "chat"``.

    Raises ``ValueError``: a file is missing or faulty (names file and row), too many pictures cannot be read, a
    partition lacks its column, or an option is out of range.

    Args:
        root: see the module.
        partition: one client per "client", "place" or "type" of the lines, or per "cluster" of pictures that look
            alike; equal random shares; "dirichlet", skewed by ``skew``; or "quantity", of different sizes. None:
            "client" where lines have one, otherwise "iid".
        files: names of the files; default: all in the folder.
        columns: what a column is here -> its name in the files.
        question: what is asked where rows have only pictures and an answer.
        clients: number of clients, where no column says who they are, and of clusters.
        alpha: concentration of "dirichlet".
        skew: what "dirichlet" skews by: "answer", "type", "place", "client", or "cluster".
        unseen: places that no client trains on.
        validation: share of a client's training pictures held out, where no line is of the split "validation".
        test_share: share of each client's pictures held out as its test, where no line is of the split "test".
        max_train: most training examples per client.
        max_test: most test examples per client and unseen place.
        turns: "each" answer of a conversation is an example, with what was said before it as its prompt; or the "last".
        fold_case: whether answers, clients, places and types that differ in case alone are one, spelled as most are.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses validation examples and, under ``max_train``, training examples.
    """
    folder = Path(root)
    check_columns(columns or {})
    account, records = Account(), list[ChatRecord]()
    for file in _files(folder, files):
        of_file = read_records(file, columns, question, account, fold_case)
        role = {"split": file.stem} if file.stem.casefold() in ROLES else {}
        records += [replace(record, columns={**role, **record.columns}) for record in of_file] if role else of_file
    records, pictures, index = shown_files(
        records, partial(picture_place, folder), account, size=image_size, unreadable=unreadable, check=check
    )
    options = Options(
        folder, partition, tuple(unseen), clients, alpha, validation=validation, test_share=test_share,
        max_train=max_train, max_test=max_test, seed=seed,
    )  # fmt: skip
    origin = {"origin": "conversations of a folder"}
    return share_conversations(
        "chat_records", records, pictures, index, options, origin, account, skew=skew, turns=turns
    )


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Files of conversations: those named, else those of JSON, else tables."""
    listed = visible(folder) if folder.is_dir() else []
    files = [folder / name for name in names]
    for endings in ((".jsonl", ".json"), ENDINGS):
        files = files or [file for file in listed if file.suffix.lower() in endings]
    if not files:
        raise ValueError(
            f"chat_records: expected files of conversations (.jsonl or .json; .csv, .tsv or .parquet) in {folder}, "
            "found none"
        )
    return files


def picture_place(folder: Path, name: str) -> Path:
    """A picture below the folder, or below its folder of pictures."""
    place = find_picture(folder, name)
    return folder / name.lstrip("/")[:200] if place is None else place
