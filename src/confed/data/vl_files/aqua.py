"""AQUA (Garcia et al., 2020): questions about paintings of SemArt, made from the picture or from a comment on it."""

from collections.abc import Iterator
from pathlib import Path

from confed.data.vl_files.records import Record, check_split, find, text
from confed.data.vl_files.stream import json_items

__all__ = ["aqua_records"]


def aqua_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of ``train.json``, ``val.json`` or ``test.json``.

    Types are "visual" and, where the answer needs the comment (external knowledge), "knowledge".

    Raises:
        ValueError: an unknown split, a missing or damaged file, or a faulty row.
    """
    check_split(split, ("train", "val", "test"), "aqua")
    file = find(folder, [f"{split}.json", f"AQUA/{split}.json"], "aqua")
    for row, entry in json_items(file):
        knowledge = entry.get("need_external_knowledge") if isinstance(entry, dict) else None
        if not isinstance(knowledge, bool):
            raise ValueError(
                f"{file}, row {row}: expected true or false as 'need_external_knowledge', got {knowledge!r}"
            )
        yield Record(
            file,
            row,
            f"aqua-{split}-{row}",
            (text(entry, "image", file, row),),
            text(entry, "question", file, row),
            text(entry, "answer", file, row),
            "knowledge" if knowledge else "visual",
        )
