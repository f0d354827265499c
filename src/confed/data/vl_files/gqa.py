"""Reader of GQA's balanced questions (Hudson and Manning, 2019).

For GQA by scene see :mod:`confed.datasets.gqa_scenes`.
"""

from collections.abc import Iterator
from pathlib import Path

from confed.data.vl_files.gqa_questions import question_files
from confed.data.vl_files.records import Distinct, Record, check_split

__all__ = ["gqa_records"]


def gqa_records(folder: Path, split: str) -> Iterator[Record]:
    """The balanced questions of a split; types are the structural ones, pictures ``<image id>.jpg``.

    Raises ``ValueError``: an unknown split, a missing or damaged file, a question twice, or an entry without an answer.

    Args:
        folder: with the question files, themselves or in ``questions1.2`` or ``questions``.
        split: train or val.
    """
    check_split(split, ("train", "val"), "gqa")
    distinct = Distinct("question id")
    row = 0
    for source in question_files(folder)[split]:
        for question in source:
            distinct.add(question.id, source.file, row)
            name, picture = f"gqa-{question.id}", (f"{question.image}.jpg",)
            yield Record(source.file, row, name, picture, question.question, question.answer, question.type)
            row += 1
