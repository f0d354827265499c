"""Tables that name the class of each file, and whose it is, as a federation: patients stay on one side of a split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from confed.data.chat_federate import ChatOptions
from confed.data.examples import Examples, FederatedDataset
from confed.data.federate import Pool, federate, floors, tests_held_out, words
from confed.data.few_shot import QUESTION
from confed.data.intake.identity import warn_of_sides
from confed.data.intake.tables import check_columns, read_records
from confed.data.intake.walk import role_of, visible
from confed.data.owners import owner_text, with_owner
from confed.data.picture_files import HELD, PictureFiles
from confed.data.readable import leave_out_unreadable, with_held_pictures
from confed.data.refusals import refuse

ClassPartition = Literal["client", "iid", "dirichlet"]
_TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_KEYS = ("image", "label", "patient", "client", "split")


@dataclass(frozen=True)
class ClassOptions(ChatOptions):
    """Options of datasets whose table names the class of each file.

    Attributes:
        partition: a client per value of the column, equal random shares, or skew of classes; None: "client" where the
            table has such a column, otherwise "iid".
        table: name of the table; default: the only one in the folder.
        columns: what a column is here -> its name in the table.
        window: centre and width in the file's units, such as (40, 400) in HU; None: the file's own limits, or else
            those of its values (of volumes their percentiles 0.5 and 99.5).
        validation: share of a client's patients held out, where no row is of that split.
    """

    partition: ClassPartition | None = None
    table: str = ""
    window: tuple[float, float] | None = None


class NumberedPictures(PictureFiles):
    """Several pictures of each file; names have a picture's number behind "#"."""

    window: tuple[float, float] | None = None

    def file(self, row: int) -> Path:
        return self.source / self.names[row].rpartition("#")[0]

    def number(self, row: int) -> int:
        """A picture's number in its file."""
        return int(self.names[row].rpartition("#")[2])


class ClassRow(NamedTuple):
    """A row: a file below the table's folder, its class, whose it is, and its role."""

    where: str
    image: str
    label: str
    patient: str
    client: str
    split: str


def class_rows(folder: Path, table: str = "", columns: Mapping[str, str] | None = None) -> list[ClassRow]:
    """The rows of a table with ``image`` and ``label``; if wanted ``patient``, ``client`` and ``split``."""
    check_columns(columns or {}, _KEYS)
    files = [folder / table] if table else []
    if not table and folder.is_dir():
        files = visible(folder, *_TABLES)
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        refuse(
            folder, f"one table of files and labels ({', '.join(_TABLES)})", found=f"{names}: name it with data.table"
        )
    rows: list[ClassRow] = []
    for number, entry in read_records(files[0], columns).rows:
        where = f"{files[0]}, row {number}"
        cells = {key: owner_text(entry, key, where).strip() for key in _KEYS}
        for key in ("image", "label"):
            if not cells[key]:
                refuse(
                    where,
                    f"a cell {key!r}",
                    found=f"""the columns {", ".join(entry)}: name it with data.columns = {{ {key} = "..." }}""",
                )
        cells["split"] = role_of(cells["split"], where) or "train"
        rows.append(ClassRow(where, *(cells[key] for key in _KEYS)))
    if not rows:
        refuse(files[0], "a row for each file", found="none")
    return rows


def federate_classes(
    name: str, rows: Sequence[ClassRow], pictures: PictureFiles, options: ClassOptions, facts: Mapping[str, str]
) -> FederatedDataset:
    """One question about each picture, whose answer is its class; ``pictures`` has one picture a row.

    Owners and test sets are the same for all seeds. Rows of one patient, or of one file without a patient, have one
    client and one role.
    """
    partition = options.partition or ("client" if any(row.client for row in rows) else "iid")
    table_rows = list(range(len(rows)))  # a file with several pictures has as many equal rows
    if partition == "client":
        table_rows = with_owner(table_rows, [row.client for row in rows], "client")
    if not table_rows:
        refuse(rows[0].where, "a column client for the partition 'client'", found="no row with one")
    owned_rows = [rows[number] for number in table_rows]
    answers = [row.label for row in owned_rows]
    clients = np.array([row.client for row in owned_rows])
    _, together = np.unique([f"p{r.patient}" if r.patient else f"f{r.image}" for r in owned_rows], return_inverse=True)
    roles = np.array([row.split for row in owned_rows], dtype="<U5")
    warn_of_sides(
        together, roles.tolist(), [f"patient {r.patient!r}" if r.patient else f"{r.image}" for r in owned_rows]
    )
    roles = tests_held_out(roles, clients, together, options.test_share)
    names = [pictures.names[row] for row in table_rows]
    examples = Examples(
        pictures, np.array(table_rows), [QUESTION] * len(owned_rows), answers, ["class"] * len(owned_rows), names
    )
    pool = Pool(examples, roles, clients, {"client": clients} if partition == "client" else {}, together)
    splits, _ = federate(pool, replace(options, partition=partition, test_share=0.0))
    counts = {"patients": str(len({row.patient for row in owned_rows if row.patient}) or "not told")}
    facts = {**facts, **counts, "partition": partition, **floors(splits)}
    dataset = FederatedDataset(name, tuple(sorted(set(answers))), splits, {}, words([QUESTION]), facts)
    return with_held_pictures(leave_out_unreadable(dataset)) if prod(pictures.shape) <= HELD else dataset
