"""Streaming reader of GQA's question files (Hudson and Manning, 2019)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from confed.data.intake.stream import opened_json
from confed.data.refusals import check_choice, existing_folder, refuse

Questions = Literal["balanced", "all"]
"""GQA's balanced question files, or all questions (the training file then comes in parts)."""


@dataclass(frozen=True)
class Question:
    """One entry with its one right answer and GQA's structural type, "other" where none is given."""

    id: str
    image: str
    question: str
    answer: str
    type: str


def questions_of(file: Path) -> Iterator[Question]:
    """The entries of a question file in its order, read one by one."""
    with opened_json(file, "{", "one object, question id -> question, as GQA has it") as window:
        for key in window.places():
            yield _question(key, window.value(f": question {key!r}"), f"{file}: question {key!r}")


def _question(key: str, entry: Any, where: str) -> Question:
    if not isinstance(entry, dict):
        refuse(where, "an object", entry)
    values = [entry.get(name) for name in ("imageId", "question", "answer")]
    for name, value in zip(("imageId", "question", "answer"), values, strict=True):
        if not isinstance(value, str) or not value.strip():
            hint = "; GQA's test and challenge files have no answers" if name == "answer" and value is None else ""
            refuse(where, f"a text as {name!r}", found=f"{value!r:.80}{hint}")
    types = entry.get("types")
    kind = types.get("structural") if isinstance(types, dict) else None
    image, question, answer = (str(value) for value in values)
    return Question(key, image, question, answer, kind if isinstance(kind, str) and kind else "other")


def question_files(folder: Path, kind: Questions = "balanced") -> dict[str, list[Path]]:
    """The official files "train" and "val" of a GQA folder, also in its subfolder ``questions1.2`` or ``questions``."""
    check_choice("questions", kind, get_args(Questions))
    existing_folder(folder)
    sources: dict[str, list[Path]] = {}
    for role in ("train", "val"):
        stem = f"{role}_{kind}_questions"
        for base in (folder, folder / "questions1.2", folder / "questions"):
            parts = sorted((base / stem).glob("*.json"), key=_number) if (base / stem).is_dir() else []
            if files := [base / f"{stem}.json"] if (base / f"{stem}.json").is_file() else parts:
                sources[role] = files
                break
        else:
            files_here = _question_files_in(folder)
            expected = f"{stem}.json, or its parts in a folder {stem}"
            refuse(folder, expected, found=", ".join(files_here) or "no question file")
    return sources


def _question_files_in(folder: Path) -> list[str]:
    """Files of GQA's questions that exist, by name."""
    bases = (folder, folder / "questions1.2", folder / "questions")
    items: list[str] = []
    for base in bases:
        for entry in base.glob("*_questions*"):
            if entry.is_dir() or entry.suffix == ".json":
                items.append(str(entry.relative_to(folder)))
    return sorted(items)


def _number(file: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", file.stem)
    return (int(digits[-1]) if digits else -1, file.name)
