"""PathVQA (He et al., 2020): questions about pictures of pathology, from captions in textbooks.

Below ``root``, as it is on the hub (flaviagiammarino/path-vqa): ``train-*.parquet``, ``validation-*.parquet`` and
``test-*.parquet``, also in ``data/``, with the columns ``image`` (bytes), ``question`` and ``answer``. The first
release has the questions as pickled objects (``qas/train/train_qa.pkl``), which could run code and are not read;
instead, ``qas/{train,val,test}.jsonl`` with ``image`` ("train_0422"), ``question`` and ``answer`` are read with the
pictures in ``images/{train,val,test}``.
"""

from pathlib import Path
from typing import Annotated, Any

from confed.data.chat_federate import ChatOptions, Partition, share_conversations
from confed.data.chat_files import ChatRecord, records_of
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.tables import parquet_rows, read_jsonl
from confed.data.refusals import refuse
from confed.datasets.hub import PictureTable
from confed.datasets.reader import reader

_SPLITS = {"train": "train", "validation": "val", "test": "test"}
"""Names of the splits in Parquet, and in the first release."""
_COLUMNS = ("image", "question", "answer")
_PUBLISHED = {32_632, 32_795, 32_799}
_FACTS = {
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
        for file in _files(folder, split, short):
            of_hub = file.suffix == ".parquet"
            for row, given in parquet_rows(file, _COLUMNS) if of_hub else read_jsonl(file):
                where = f"{file}, row {row}"
                account.rows[str(file)] = account.rows.get(str(file), 0) + 1
                shown = given.get("image")
                shown = f"images/{short}/{shown}.jpg" if isinstance(shown, str) else shown
                kind = "closed" if given.get("answer") in ("yes", "no") else "open"
                texts = {key: given[key] for key in _COLUMNS[1:] if key in given}
                entries.append((where, {**texts, "images": [table.add(shown, where)], "type": kind, "split": split}))
        records += records_of(entries, "", f"path_vqa-{split}", account)
    records = table.readable(records, f"in {folder}", how.unreadable, account)
    count = sum(account.rows.values())
    facts = _FACTS if count in _PUBLISHED else {"origin": f"{count} questions in PathVQA's format"}
    return share_conversations("path_vqa", records, table.pictures(), table.index, how, facts, account)


def _files(folder: Path, split: str, short: str) -> list[Path]:
    """The files of a split, those of the hub or those of the first release as JSON lines."""
    files = [*sorted(folder.glob(f"{split}-*.parquet")), *sorted(folder.glob(f"data/{split}-*.parquet"))]
    lines = folder / "qas" / f"{short}.jsonl"
    if files or lines.is_file():
        return files or [lines]
    pickled = next(iter(sorted(folder.rglob("*.pkl"))), None)
    why = f"; {pickled.name} is of pickled objects, which could run code: take the hub's files" if pickled else ""
    refuse("path_vqa", f"{split}-*.parquet in {folder} or its data/", found=f"none{why}")
