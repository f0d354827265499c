"""VizWiz-VQA (Gurari et al., 2018): photographs and questions of blind people, ten annotators each."""

from collections.abc import Iterator
from pathlib import Path

from confed.data.vl_files.records import Distinct, Record, annotated, check_split, find, text
from confed.data.vl_files.stream import json_items

__all__ = ["vizwiz_records"]


def vizwiz_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of ``train.json`` or ``val.json``, one per picture; "unanswerable" is an answer like others.

    Raises ``ValueError``: an unknown split, a missing or damaged file, a picture twice, or not ten annotators.

    Args:
        folder: where the file lies, itself or in its subfolder ``Annotations``.
        split: train or val; the test split has no answers.
    """
    check_split(split, ("train", "val"), "vizwiz")
    file = find(folder, [f"{split}.json", f"Annotations/{split}.json"], "vizwiz")
    distinct = Distinct("image")
    for row, entry in json_items(file):
        picture = text(entry, "image", file, row)
        distinct.add(picture, file, row)
        answer, annotations = annotated(entry, file, row)
        name = f"vizwiz-{split}-{Path(picture).stem}"
        question, kind = text(entry, "question", file, row), text(entry, "answer_type", file, row)
        yield Record(file, row, name, (picture,), question, answer, kind, annotations)
