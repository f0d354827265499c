"""Reader of SNLI-VE (Xie et al., 2019): visual entailment of a sentence by a photograph."""

from collections.abc import Iterator
from pathlib import Path

from confed.data.intake.account import Account
from confed.data.intake.tables import read_jsonl
from confed.data.refusals import Distinct, refuse
from confed.data.vl_files.records import Record, check_split, find, text

LABELS = ("entailment", "contradiction", "neutral")
"""Answers in the order of their labels 0, 1 and 2, which is CLiMB's (ALBEF's is another)."""


def snli_ve_records(folder: Path, split: str, account: Account | None = None) -> Iterator[Record]:
    """The hypotheses (``sentence2``) of a split; a model sees the picture instead of the premise.

    Rows on which the annotators did not agree (``gold_label`` "-") are left out, and noted in the account.
    """
    check_split(split, ("train", "dev", "test"), "snli_ve")
    file = find(folder, [f"snli_ve_{split}.jsonl"], "snli_ve")
    distinct = Distinct("pairID")
    for row, entry in read_jsonl(file):
        label = text(entry, "gold_label", file, row)
        if label == "-":
            if account is not None:
                account.rows[str(file)] = account.rows.get(str(file), 0) + 1
                account.leave("annotators do not agree", f"{file}, row {row}")
            continue
        if label not in LABELS:
            refuse(f"{file}, row {row}", f"a gold_label out of {', '.join(LABELS)} or -", label)
        key = text(entry, "pairID", file, row)
        distinct.add(key, file, row)
        picture = f"{text(entry, 'Flickr30K_ID', file, row)}.jpg"
        question = text(entry, "sentence2", file, row)
        yield Record(file, row, f"snli_ve-{key}", (picture,), question, label, "entailment")
