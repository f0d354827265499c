"""Reader of VCR (Zellers et al., 2019), question to answer: choice among four answers.

Questions and answers refer to detected objects by their position. Here they become the object's class and its number
from 1, as in "person 1". Boxes are not drawn into the pictures (CLiMB draws them and gives people invented names), so
a model has to guess which person is meant.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confed.data.json_lines import read_jsonl
from confed.data.vl_files.records import Distinct, Record, check_split, find, number, text, texts

__all__ = ["CHOICES", "vcr_records"]

CHOICES = 4
"""Answers offered with every question."""


def vcr_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of a split with their four answers.

    Args:
        folder: with ``{split}.jsonl``, itself or in ``annotation``.
        split: train or val; the test split has no answers.

    Raises:
        ValueError: an unknown split, a missing or damaged file, a question twice, not four answers, or a reference to
            an object that is not there.
    """
    check_split(split, ("train", "val"), "vcr")
    file = find(folder, [f"annotation/{split}.jsonl", f"{split}.jsonl"], "vcr")
    distinct = Distinct("annot_id")
    for row, entry in read_jsonl(file):
        key = text(entry, "annot_id", file, row)
        distinct.add(key, file, row)
        objects = texts(entry, "objects", file, row)
        offered = entry.get("answer_choices")
        if not isinstance(offered, list) or len(offered) != CHOICES:
            count = len(offered) if isinstance(offered, list) else offered
            raise ValueError(f"{file}, row {row}: expected {CHOICES} answers as 'answer_choices', got {count}")
        yield Record(
            file,
            row,
            f"vcr-{key}",
            (text(entry, "img_fn", file, row),),
            _words(entry.get("question"), objects, "question", file, row),
            str(number(entry, "answer_label", file, row, below=CHOICES)),
            "choice",
            choices=tuple(_words(tokens, objects, "answer_choices", file, row) for tokens in offered),
        )


def _words(tokens: Any, objects: list[str], key: str, file: Path, row: int) -> str:
    """Tokens as one text; a list of positions becomes the names of those objects."""
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{file}, row {row}: expected a list of tokens as {key!r}, got {tokens!r:.80}")
    words: list[str] = []
    for token in tokens:
        if isinstance(token, str):
            words.append(token)
            continue
        positions = token if isinstance(token, list) else [token]
        for position in positions:
            if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < len(objects):
                raise ValueError(
                    f"{file}, row {row}: expected in {key!r} words or lists of positions among the {len(objects)} "
                    f"objects, got {token!r:.40}"
                )
        words.append(" and ".join(f"{objects[position]} {position + 1}" for position in positions))
    return " ".join(words)
