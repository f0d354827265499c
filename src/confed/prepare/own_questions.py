"""Recognition of question files and of saved datasets: layouts, columns under other names, owners."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from confed.data.chat_files import ChatRecord, asking, chat_record
from confed.data.owners import by_likelihood, notes_on_owners, owner_text, says_owners
from confed.data.record_files import COLUMNS, ENDINGS, read_records

__all__ = ["Questions", "questions_in", "saved_datasets"]

QUESTION = "what is this?"
"""Asked where rows have pictures and labels but no question."""
LOOKED_AT = 1000
"""Rows in which columns are looked for: cells of the first one may be blank."""
MOST = 20_000
"""Rows of each file that are looked at."""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("img", "picture", "photo", "file", "filename", "file_name", "image_path", "image_file", "path"),
    "question": ("query", "q", "instruction", "problem", "input"),
    "answer": ("label", "a", "target", "class", "response", "output", "caption"),
    "place": ("domain", "scene", "location"),
    "type": ("question_type", "category", "answer_type"),
    "split": ("partition", "fold", "set", "subset"),
}
"""What columns are called elsewhere, in the order in which they are taken; for clients: :mod:`confed.data.owners`."""

_LAYOUTS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"question", "answer"}, {"question", "answers"})


@dataclass(frozen=True)
class Questions:
    """What question files hold.

    Attributes:
        form: "questions", one about one picture each, or "conversations".
        options: keys of ``[data]``: columns, question, partition, files.
        saw: a line each.
        count: number of rows; 0 where that is not known.
        pictures: number of pictures.
        owner: column that says whose rows are; empty for none.
        names: of the columns.
        uses: files and folders that are read.
    """

    form: str
    options: Mapping[str, Any]
    saw: Sequence[str]
    count: int = 0
    pictures: int | None = None
    owner: str = ""
    names: Collection[str] = ()
    uses: frozenset[str] = field(default_factory=frozenset[str])


def questions_in(folder: Path) -> Questions | None:
    """Question files of a folder; None where there are none.

    A file with a faulty row, and questions without pictures, are a ``ValueError``.
    """
    there = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in ENDINGS)
    for endings in ((".jsonl", ".json"), (".csv", ".tsv", ".parquet")):
        files = [path for path in there if path.suffix.lower() in endings]
        read = {path: found for path in files if (found := _columns_of(path)) is not None}
        if read:
            return _described(folder, read, skipped=len(read) < len([p for p in there if p.suffix.lower() in endings]))
    return None


def mapped(names: Collection[str]) -> dict[str, str] | None:
    """What columns are here -> their names; None where they are no questions.

    Args:
        names: of the columns of a file.
    """
    low = {name.casefold(): name for name in names}
    found = {key: low[key] for key in COLUMNS if key in low}
    for key, others in OTHER_NAMES.items():
        if key == "answer" and ("answers" in found or any(layout <= set(found) for layout in _LAYOUTS)):
            continue
        if key not in found and not (key == "image" and "images" in found):
            name = next((low[other] for other in others if other in low and low[other] not in found.values()), None)
            if name is not None:
                found[key] = name
    asked = any(layout <= set(found) for layout in _LAYOUTS)
    shown = "image" in found or "images" in found
    if not asked and not (shown and {"answer", "answers"} & set(found)):
        return None
    return {key: name for key, name in found.items() if key != name}


def _columns_of(file: Path) -> dict[str, str] | None:
    """Mapped columns of a file with questions; None for a file of another kind."""
    if file.suffix.lower() == ".json" and not file.read_text(encoding="utf-8", errors="replace").lstrip().startswith(
        "["
    ):
        return None  # an object, such as somebody's settings
    rows = [entry for _, entry in islice(read_records(file), LOOKED_AT)]
    names = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    return mapped(names) if names else None


def _described(folder: Path, files: Mapping[Path, dict[str, str]], skipped: bool) -> Questions:
    """What files with questions hold."""
    columns = dict(next(iter(files.values())))
    if other := next((file for file, own in files.items() if own != columns), None):
        first = next(iter(files))
        raise ValueError(f"{other} names its columns in another way than {first.name}; put one of them elsewhere")
    question, records, entries = "", list[ChatRecord](), list[Mapping[str, Any]]()
    for file in files:
        for row, entry in islice(read_records(file, columns), MOST):
            entries.append(entry)
            question = question or ("" if asking(entry, QUESTION) is entry else QUESTION)
            records.append(chat_record(asking(entry, question), f"{file}, row {row}", f"{file.stem}/{row}"))
    shown = list(dict.fromkeys(picture for record in records for picture in record.pictures))
    there = [_place(folder, name) for name in shown]
    absent = [name for name, place in zip(shown, there, strict=True) if place is None]
    if len(absent) == len(shown):
        what = f"the first is {absent[0]!r}" if absent else "no row has one"
        raise ValueError(
            f"{next(iter(files))}: expected pictures below {folder} or its folder images/, found none; {what}"
        )
    single = all(len(r.turns) == 2 and len(r.turns[0].parts) == 2 and r.turns[0].parts[0] is None for r in records)
    names = {name for entry in entries for name in entry}
    called = by_likelihood(names)
    cells = {name: cells_of(entries, name) for name in (*called, *(["place"] if "place" in names else []))}
    taken = next((name for name in cells if says_owners(cells[name])), "")
    owner = taken if taken in ("", "place") else "client"
    columns |= {"client": taken} if owner == "client" != taken else {}
    options: dict[str, Any] = {"columns": columns} if columns else {}
    options |= {"question": question} if question else {}
    options |= {"partition": owner} if owner else {}
    options |= {"files": [file.name for file in files]} if skipped else {}
    options |= {"unreadable": 0.05} if absent else {}
    answers = Counter(record.turns[-1].parts[-1] or "" for record in records)
    kind = "questions" if single else "conversations"
    listed = ", ".join(file.name for file in files)
    saw = [f"{listed}: {len(records)} {kind} about {len(shown)} pictures, {len(answers)} different answers"]
    saw += [f"columns: {', '.join(f'{name} is the {key}' for key, name in columns.items())}"] if columns else []
    saw += [f"rows have no question: {question!r} is asked of all"] if question else []
    if owner:
        saw.append(f"one client per {columns.get(owner, owner)}: {_listed(filter(None, map(str.strip, cells[taken])))}")
        saw += notes_on_owners(cells[taken], columns.get(owner, owner))
    saw += not_taken([name for name in called if name != taken], "columns.client")
    saw += [f"{len(absent)} pictures are not there, such as {absent[0]!r}"] if absent else []
    uses = {file.name for file in files} | {p.relative_to(folder).parts[0] for p in there if p is not None}
    form = "questions" if single and len(answers) <= max(len(records) // 2, 2) else "conversations"
    return Questions(form, options, saw, len(records), len(shown), owner, names, frozenset(uses))


def _place(folder: Path, name: str) -> Path | None:
    try:
        return next((place for place in (folder / name, folder / "images" / name) if place.is_file()), None)
    except OSError:  # no name of a file
        return None


def cells_of(entries: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """A column as texts; of one with lists or objects nothing."""
    try:
        return [owner_text(entry, name) for entry in entries]
    except ValueError:
        return []


def not_taken(names: Iterable[str], key: str) -> list[str]:
    """What is said of columns that are called like owners and are none, or come behind another one.

    Args:
        names: of the columns.
        key: of ``[data]``, by which one of them is taken.
    """
    return [f"the column {name!r} is not taken as that of the clients; data.{key} = {name!r} does so" for name in names]


def _listed(values: Iterable[str]) -> str:
    counts = Counter(values)
    listed = ", ".join(f"{name} {count}" for name, count in counts.most_common(5))
    return listed + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")


def saved_datasets(folder: Path) -> Questions | None:
    """A dataset that ``save_to_disk`` of the library ``datasets`` wrote; None for any other folder.

    Columns that are no questions about pictures are a ``ValueError``.
    """
    parts = [folder] if (folder / "state.json").is_file() else []
    if (folder / "dataset_dict.json").is_file():
        listed = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        parts = [folder / str(name) for name in listed]
    told = [part / "dataset_info.json" for part in parts if (part / "dataset_info.json").is_file()]
    if not told:
        return _parquet_with_pictures(folder)
    infos = [json.loads(file.read_text(encoding="utf-8")) for file in told]
    features: dict[str, Any] = infos[0].get("features") or {}
    counts = {name: part.get("num_examples", 0) for info in infos for name, part in (info.get("splits") or {}).items()}
    shown = next(
        (name for name, kind in features.items() if isinstance(kind, dict) and kind.get("_type") == "Image"), ""
    )
    splits = [part.name for part in parts] if len(parts) > 1 else []
    return _of_columns(folder, list(features), shown, splits, sum(counts.values()))


def _of_columns(folder: Path, names: Sequence[str], shown: str, splits: Sequence[str], count: int = 0) -> Questions:
    """What columns of a dataset mean."""
    columns = mapped(names)
    if columns is None:
        raise ValueError(f"{folder}: expected columns with pictures and answers, got {', '.join(names)}")
    if shown and shown not in ("image", "images"):
        columns["image"] = shown
    columns.pop("split", None)
    called = by_likelihood(names)
    columns |= {"client": called[0]} if called[:1] not in ([], ["client"]) else {}
    there = {key for key in COLUMNS if key in names} | set(columns)
    question = "" if there & {"question", "messages", "conversations", "prompt"} else QUESTION
    owner = next((key for key in ("client", "place") if key in there), "")
    options: dict[str, Any] = {"columns": columns} if columns else {}
    options |= {"question": question} if question else {}
    options |= {"partition": owner} if owner else {}
    saw = [f"a dataset with the columns {', '.join(names)}" + (f" in the splits {', '.join(splits)}" if splits else "")]
    saw += [f"columns: {', '.join(f'{name} is the {key}' for key, name in columns.items())}"] if columns else []
    saw += [f"rows have no question: {question!r} is asked of all"] if question else []
    saw += [f"one client per {columns.get(owner, owner)}"] if owner else []
    saw += not_taken(called[1:], "columns.client")
    form = "conversations" if there & {"messages", "conversations", "prompt"} else "questions"
    return Questions(form, options, saw, count, None, owner, there)


def _parquet_with_pictures(folder: Path) -> Questions | None:
    """Parquet files whose pictures are bytes in a column, as the hub has them."""
    files = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")])
    if not files:
        return None
    count, names, shown = 0, list[str](), ""
    for file in files:
        rows = read_records(file)
        first = next(rows, None)
        if first is None:
            continue
        shown = next((key for key, value in first[1].items() if isinstance(value, dict) and "bytes" in value), "")
        names = list(first[1])
        count += 1 + sum(1 for _ in rows)
    return _of_columns(folder, names, shown, [], count) if shown else None
