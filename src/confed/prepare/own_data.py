"""Recognition of a folder of the user's own data: which dataset reads it, with which keys."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from confed.data.caption_files.captions import caption_records
from confed.data.chat_files import as_list, asking, folder_records, record_files
from confed.data.intake.account import Account
from confed.data.intake.identity import UNITING
from confed.data.intake.layouts import layout_of, layout_records
from confed.data.intake.tables import COLUMNS, ENDINGS, holds_records, parquet_rows, read_jsonl, read_records
from confed.data.intake.values import find_picture, plain_text
from confed.data.intake.walk import ROLES, in_classes, said_by_folders, visible, walk
from confed.data.ml_files.coco import COCO_GROUPS, coco_categories
from confed.data.ml_files.records import label_rows, labels_files
from confed.data.owners import by_likelihood, notes_on_owners, owner_text, says_owners
from confed.data.refusals import refuse

# Recognition of question files and of saved datasets: layouts -------------------------------------------------

QUESTION = "what is this?"
"""Asked where rows have pictures and labels but no question."""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("img", "picture", "photo", "file", "filename", "file_name", "image_path", "image_file", "path"),
    "question": ("query", "q", "instruction", "problem", "input"),
    "answer": ("label", "a", "target", "class", "response", "output", "caption"),
    "place": ("domain", "scene", "location"),
    "type": ("question_type", "category", "answer_type"),
    "split": ("partition", "fold", "set", "subset"),
    "patient": ("patient_id", "patientid", "subject", "subject_id", "subject id", "patient id"),
    "document": ("document_id", "doc", "doc_id", "report_id", "study_id"),
}
"""What columns are called elsewhere, in the order in which they are taken; for clients: :mod:`confed.data.owners`."""

_LAYOUTS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"question", "answer"}, {"question", "answers"})


def mapped(names: Collection[str]) -> dict[str, str] | None:
    """What columns are here -> their names; None where they are no questions."""
    low = {name.casefold(): name for name in names}
    mapping = {key: low[key] for key in COLUMNS if key in low}
    for key, others in OTHER_NAMES.items():
        if key == "answer" and ("answers" in mapping or any(layout <= set(mapping) for layout in _LAYOUTS)):
            continue
        if key not in mapping and not (key == "image" and "images" in mapping):
            name = next((low[other] for other in others if other in low and low[other] not in mapping.values()), None)
            if name is not None:
                mapping[key] = name
    has_questions = any(layout <= set(mapping) for layout in _LAYOUTS)
    shown = "image" in mapping or "images" in mapping
    if not has_questions and not (shown and {"answer", "answers"} & set(mapping)):
        return None
    return {key: name for key, name in mapping.items() if key != name}


def _columns_of(file: Path) -> dict[str, str] | None:
    """Mapped columns of a file with questions; None for a file of another kind."""
    if not holds_records(file):
        return None  # an object, such as somebody's settings
    rows = [entry for _, entry in read_records(file).rows]
    names = dict.fromkeys(chain.from_iterable(row for row in rows if isinstance(row, dict)))
    columns = mapped(names) if names else None
    if names and columns is None and (others := mapped(["image", *list(names)[1:]])) is not None:
        first = next(iter(names))  # of the pictures' names, as tables of competitions have it
        cells = [plain_text(row.get(first)) or "" for row in rows[:20] if isinstance(row, dict)]
        columns = {**others, "image": first} if all(find_picture(file.parent, cell) for cell in cells) else None
    return columns


def _options(columns: Mapping[str, str], question: str, owner: str) -> dict[str, Any]:
    """Keys of ``[data]``, without those that say nothing."""
    return {key: value for key, value in (("columns", columns), ("question", question), ("partition", owner)) if value}


def _columns_said(columns: Mapping[str, str], question: str) -> list[str]:
    lines = [f"columns: {', '.join(f'{name} is the {key}' for key, name in columns.items())}"] if columns else []
    return lines + ([f"rows have no question: {question!r} is asked of all"] if question else [])


def cells_of(entries: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """A column as texts; of one with lists or objects nothing."""
    try:
        return [owner_text(entry, name) for entry in entries]
    except ValueError:
        return []


def not_taken(names: Iterable[str], key: str) -> list[str]:
    """What is said of columns that are called like owners and are none, or come behind another one."""
    return [f"the column {name!r} is not taken as that of the clients; data.{key} = {name!r} does so" for name in names]


def _listed(values: Iterable[str]) -> str:
    counts = Counter(values)
    listed = ", ".join(f"{name} {count}" for name, count in counts.most_common(5))
    return listed + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")


# Recognition of a folder of the user's own data: which dataset reads it ---------------------------------------

FORMS = (
    "pictures in a folder per class (or per domain and class), labels.jsonl or labels.csv with several labels a "
    "picture, question files (.json, .jsonl, .csv, .tsv, .parquet) in one folder or in a folder per client, COCO's "
    "instances_*.json or captions_*.json, VQA v2's questions and annotations, texts.jsonl, examples.csv with series/, "
    "or a folder that the library datasets has written; DICOM and NIfTI files with a table are read by data.name = "
    "dicom_folders and nifti_slices"
)
"""What is recognised, for messages."""
_CAPTION_TABLES = r"captions\.(txt|csv|tsv)|results\.csv|.*\.token|.*\.token\.txt|metadata\.(csv|jsonl)"
"""Names of Flickr8k's and Flickr30k's captions, as they are passed on, and of the hub's tables beside pictures."""
DEALT = ("partition", "clients", "alpha")
"""Keys of :func:`dealt`."""
_ADVICE: Mapping[str, str] = {
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), "a spreadsheet; save it as CSV"),
    **dict.fromkeys((".zip", ".gz", ".7z", ".rar", ".tgz"), "an archive; unpack it"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".joblib"), "objects that could run code; save them as JSON lines"),
    **dict.fromkeys((".feather", ".arrow", ".db", ".sqlite", ".sav", ".dta"), "not read; save it as Parquet or CSV"),
}
"""What to do about files that are not read, by their endings."""
_NO_CLASSES = {"images", "image", "imgs", "img", "pictures", "masks", "mask", "labels", "annotations", "gt", *ROLES}
"""Folders of pictures that are named after what they are for."""
FEW = 100
"""Examples per client below which equal shares are proposed in place of skewed ones."""


@dataclass(frozen=True)
class Found:
    """A way of reading a folder: dataset, keys of ``[data]``, what was seen, which files are read, what was assumed."""

    form: str
    dataset: str
    options: Mapping[str, Any]
    saw: Sequence[str]
    uses: frozenset[str] = frozenset()
    asks: Sequence[str] = field(default_factory=tuple)


def recognise(folder: Path, clients: int = 4) -> tuple[list[Found], list[str]]:
    """All ways of reading a folder, the most specific first, and what the first of them leaves."""
    if not folder.is_dir():
        refuse(folder, "a folder with data", found="a file" if folder.exists() else "none")
    forms: Sequence[Callable[[Path, int], Found | None]] = (
        _saved, _vqa, _objects, _captions, _labels, _tools, _texts, _sensors, _questions, _classes
    )  # fmt: skip
    proposals, faults = list[Found](), list[ValueError]()
    for form in forms:
        try:
            proposals += [one] if (one := form(folder, clients)) is not None else []
        except ValueError as error:  # other forms may fit
            faults.append(error)
    names = [path.name for path in visible(folder)]
    if not proposals and faults:
        raise faults[0]
    if not proposals:
        content = f"holds {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}" if names else "is empty"
        advice = [f"{name}: {_ADVICE[ending]}" for name in names if (ending := Path(name).suffix.lower()) in _ADVICE]
        advice += [f"{name} has {listed}" for name in names if (listed := _header(folder / name))]
        if pictures := walk(folder).pictures:
            advice.append(f"nothing says what its {len(pictures)} pictures, such as {'/'.join(pictures[0])}, show")
        told = f" ({'; '.join(advice[:3])})" if advice else ""
        raise ValueError(f"{folder} {content}, which is none of the forms that are recognised{told}: {FORMS}")
    return proposals, [name for name in names if name not in proposals[0].uses]


def _header(file: Path) -> str:
    """The columns of a table that is recognised as nothing, for a message."""
    if file.suffix.lower() not in ENDINGS or not file.is_file():
        return ""
    if not holds_records(file):
        return "no list of objects and no object a line, or is no JSON"
    rows = [entry for _, entry in read_records(file).rows if isinstance(entry, dict)]
    if not rows:
        return "no rows"
    return f"the columns {', '.join(map(str, list(rows[0])[:8]))}, no picture with a question, an answer or a label"


def dealt(count: int, clients: int, groups: int | None = None) -> dict[str, Any]:
    """Keys that share examples out among clients: skewed where there are enough, otherwise equal random shares."""
    clients = max(min(clients, (count if groups is None else groups) // 4), 1)
    if count < FEW * clients:
        return {"partition": "iid", "clients": clients}
    return {"partition": "dirichlet", "clients": clients, "alpha": 1.0}


def _saved(folder: Path, clients: int) -> Found | None:
    """A folder that ``save_to_disk`` of the library ``datasets`` has written, or Parquet files as the hub has them."""
    parts = [folder] if (folder / "state.json").is_file() else []
    if (folder / "dataset_dict.json").is_file():
        listed = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        parts = [folder / str(name) for name in listed]
    told = [folder_part / "dataset_info.json" for folder_part in parts if (folder_part / "dataset_info.json").is_file()]
    if not told:
        return _parquet_with_pictures(folder, clients)
    infos = [json.loads(file.read_text(encoding="utf-8")) for file in told]
    features: dict[str, Any] = infos[0].get("features") or {}
    counts = {}
    for info in infos:
        for name, folder_part in (info.get("splits") or {}).items():
            counts[name] = folder_part.get("num_examples", 0)
    shown = next(
        (name for name, kind in features.items() if isinstance(kind, dict) and kind.get("_type") == "Image"), ""
    )
    splits = [folder_part.name for folder_part in parts] if len(parts) > 1 else []
    return _of_columns(folder, list(features), shown, splits, sum(counts.values()), clients)


def _of_columns(
    folder: Path, names: Sequence[str], shown: str, splits: Sequence[str], count: int, clients: int
) -> Found:
    """What columns of a dataset mean."""
    columns = mapped(names)
    if columns is None:
        refuse(folder, "columns with pictures and answers", found=", ".join(names))
    if shown and shown not in ("image", "images"):
        columns["image"] = shown
    columns.pop("split", None)
    called = by_likelihood(names)
    columns |= {"client": called[0]} if called[:1] not in ([], ["client"]) else {}
    columns_used = {key for key in COLUMNS if key in names} | set(columns)
    question = "" if columns_used & {"question", "messages", "conversations", "prompt"} else QUESTION
    owner = next((key for key in ("client", "place") if key in columns_used), "")
    options = {"source": str(folder.resolve()), **_options(columns, question, owner)}
    if owner not in columns and "client" not in columns_used:
        options |= dealt(count, clients) if count else {"partition": "iid", "clients": clients}
    saw = [f"a dataset with the columns {', '.join(names)}" + (f" in the splits {', '.join(splits)}" if splits else "")]
    saw += _columns_said(columns, question)
    saw += [f"one client per {columns.get(owner, owner)}"] if owner else []
    saw += not_taken(called[1:], "columns.client")
    form = "conversations" if columns_used & {"messages", "conversations", "prompt"} else "questions"
    return Found(form, "hub", {**options, "image_size": 64}, saw, frozenset(path.name for path in visible(folder)))


def _parquet_with_pictures(folder: Path, clients: int) -> Found | None:
    """Parquet files whose pictures are bytes in a column, as the hub has them."""
    files = visible(folder, ".parquet")
    files += visible(folder / "data", ".parquet") if (folder / "data").is_dir() else []
    if not files:
        return None
    count, names, shown = 0, list[str](), ""
    for file in files:
        rows = parquet_rows(file)
        first = next(rows, None)
        if first is None:
            continue
        shown = next((key for key, value in first[1].items() if isinstance(value, dict) and "bytes" in value), "")
        names = list(first[1])
        count += 1 + sum(1 for _ in rows)
    return _of_columns(folder, names, shown, [], count, clients) if shown else None


def _described(folder: Path, files: Mapping[Path, dict[str, str]], skipped: bool, clients: int) -> Found:
    """What files with questions hold."""
    columns = dict(next(iter(files.values())))
    if other := next((file for file, file_columns in files.items() if file_columns != columns), None):
        first = next(iter(files))
        refuse(other, f"columns named as in {first.name}", found="others", remedy="put one of them elsewhere")
    entries = list[Mapping[str, Any]]()
    inside_folders = said_by_folders(folder, [*files])
    for file, told in zip(files, inside_folders, strict=True):
        entries += [{**told, **entry} for _, entry in read_records(file, columns).rows]
    question = "" if any(asking(entry, QUESTION) is entry for entry in entries) else QUESTION
    records = folder_records(folder, [*files], columns, question)
    if not records:
        refuse(next(iter(files)), "a row with a question and an answer", found=f"none of {len(entries)}")
    shown = list(dict.fromkeys(chain.from_iterable(record.pictures for record in records)))
    picture_places = [find_picture(folder, name) for name in shown]
    absent = [name for name, place in zip(shown, picture_places, strict=True) if place is None]
    if len(absent) == len(shown):
        what = f"the first is {absent[0]!r}" if absent else "no row has one"
        pictures = walk(folder).pictures
        what += f"; there are {len(pictures)} others, such as {'/'.join(pictures[0])}" if pictures else ""
        refuse(next(iter(files)), f"pictures below {folder} or its folder images/", found="none", remedy=f"{what}")
    single = all(len(r.turns) == 2 and len(r.turns[0].parts) == 2 and r.turns[0].parts[0] is None for r in records)
    names = list(dict.fromkeys(chain.from_iterable(entries)))
    called = sorted(by_likelihood(names), key=UNITING.__contains__)  # a patient is a client where nothing else is
    cells = {name: cells_of(entries, name) for name in (*called, *(["place"] if "place" in names else []))}
    taken = next((name for name in cells if says_owners(cells[name])), "")
    if taken in UNITING and taken in columns:
        name_here, taken = taken, columns.pop(taken)
        cells[taken] = cells[name_here]
    owner = taken if taken in ("", "place") else "client"
    columns |= {"client": taken} if owner == "client" != taken else {}
    options = {"root": str(folder.resolve()), **_options(columns, question, owner)}
    names_of_files = [file.relative_to(folder).as_posix() for file in files]
    options |= {"files": names_of_files} if skipped else {}
    options |= {"unreadable": 0.05} if absent else {}
    options |= {} if owner else dealt(len(records), clients, len(shown))
    answers = Counter(record.turns[-1].parts[-1] or "" for record in records)
    kind = "questions" if single else "conversations"
    listed = ", ".join(names_of_files)
    saw = [f"{listed}: {len(records)} {kind} about {len(shown)} pictures, {len(answers)} different answers"]
    saw += _columns_said(columns, question)
    if owner:
        column = "folder" if any("client" in told for told in inside_folders) else columns.get(owner, owner)
        saw.append(f"one client per {column}: {_listed(filter(None, map(str.strip, cells[taken])))}")
        saw += notes_on_owners(cells[taken], column)
    saw += not_taken([name for name in called if name not in (taken, *UNITING)], "columns.client")
    saw += [f"{len(absent)} pictures are not there, such as {absent[0]!r}"] if absent else []
    used_files = [*files, *(place for place in picture_places if place is not None)]
    uses = {file.relative_to(folder).parts[0] for file in used_files}
    form = "questions" if single and len(answers) <= max(len(records) // 2, 2) else "conversations"
    return Found(form, "chat_records", {**options, "image_size": 64}, saw, frozenset(uses))


def _questions(folder: Path, clients: int) -> Found | None:
    """Question files and conversations; a file with a faulty row, and questions without pictures, are refused."""
    for files in record_files(folder):
        read = {path: columns for path in files if (columns := _columns_of(path)) is not None}
        if read:
            return _described(folder, read, len(read) < len(files), clients)
    return None


def _vqa(folder: Path, clients: int) -> Found | None:
    """VQA v2's four official files, with COCO's pictures or with regions."""
    stems = ("{}OpenEnded_mscoco_{}_questions.json", "{}mscoco_{}_annotations.json")
    files: list[str] = []
    for split, stem in product(("train2014", "val2014"), stems):
        names = (stem.format(version, split) for version in ("v2_", ""))
        files.append(next((name for name in names if (folder / name).is_file()), ""))
    if not all(files):
        return None
    options: dict[str, Any] = {"root": str(folder.resolve())}
    places = [path for path in (folder / "train2014", folder / "val2014", folder / "images") if path.is_dir()]
    if (folder / "regions.safetensors").is_file():
        files.append("regions.safetensors")
        saw = ["VQA v2's questions and answers, with region features"]
    elif places:
        options |= {"images": [str(path.resolve()) for path in places], "image_size": 64}
        saw = [f"VQA v2's questions and answers, with pictures in {', '.join(path.name for path in places)}"]
    else:
        expected = "pictures (train2014/ and val2014/, or images/) or regions.safetensors for VQA v2's questions"
        refuse(folder, expected, found="neither", remedy="`confed data prepare vqa-v2` writes the latter")
    rows = _in_json(folder / files[1], "annotations")
    options |= {"clients": max(min(clients, rows // 40), 1), "validation": 0.1}
    if rows < 10_000:
        options["min_answers"] = 1
        saw.append(f"{rows} training questions, fewer than were published: all answers are kept")
    uses = frozenset([*files, *(path.name for path in places)])
    return Found("vqa" if places else "regions", "vqa_v2", options, saw, uses)


def _in_json(file: Path, key: str) -> int:
    from confed.data.intake.stream import json_items

    return sum(1 for _ in json_items(file, key))


def _splits(folder: Path, stem: str) -> dict[str, Path]:
    """Split -> annotation file of COCO's layout."""
    places = [*sorted(folder.glob(f"{stem}_*.json")), *sorted((folder / "annotations").glob(f"{stem}_*.json"))]
    return {path.stem.removeprefix(f"{stem}_"): path for path in places}


def _objects(folder: Path, clients: int) -> Found | None:
    """COCO's objects as labels of pictures."""
    splits = _splits(folder, "instances")
    if not splits:
        return None
    train = next((name for name in splits if name.startswith("train")), next(iter(splits)))
    test = next((name for name in splits if name != train and name.startswith(("val", "test"))), "")
    places = {split: _first_of(folder, split, "images", "images.tar") for split in (train, test) if split}
    if missing := [split for split, place in places.items() if place is None]:
        refuse(
            splits[missing[0]],
            f"the pictures of the split {missing[0]!r} in {folder / missing[0]}, images/ or images.tar",
            found="none",
        )
    categories = coco_categories(splits[train])
    options = {
        "root": str(folder.resolve()), "train": train, "test": test, "image_size": 64, "validation": 0.1,
        "categories": "coco80" if set(categories) == set(COCO_GROUPS) else "file",
    }  # fmt: skip
    count = _in_json(splits[train], "images")
    shares = dealt(count, clients)
    saw = [f"COCO's objects: {count} pictures of the split {train}, {len(categories)} categories"]
    saw += (
        [f"the split {test} is the test"] if test else ["no test split: a share of each client's pictures is its test"]
    )
    uses = {path.relative_to(folder).parts[0] for path in [splits[train], *([splits[test]] if test else [])]}
    uses |= {place.name for place in places.values() if place is not None}
    return Found("objects", "coco", {**options, **shares, "minimum": 2}, saw, frozenset(uses))


def _first_of(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)


def _captions(folder: Path, clients: int) -> Found | None:
    """COCO's captions, or those of a split file of Karpathy's."""
    files = [*_splits(folder, "captions").values()]
    files += [file for file in sorted(folder.iterdir()) if re.fullmatch(_CAPTION_TABLES, file.name, re.IGNORECASE)]
    karpathy = folder / "dataset_coco.json"
    if not files and not karpathy.is_file():
        return None
    file = karpathy if karpathy.is_file() else next((f for f in files if "train" in f.name), files[0])
    count = _in_json(file, "images") if file.suffix == ".json" else sum(1 for _ in caption_records(file))
    if not count:
        return None  # a table of other things
    options = {
        "root": str(folder.resolve()), "captions": file.name, "clients": min(clients, max(count // 4, 1)),
        "validation": 0.1, "min_count": 2 if count < 1000 else 5, "image_size": 64,
    }  # fmt: skip
    uses = {file.relative_to(folder).parts[0], "images", "images.tar", "train2014", "val2014"}
    uses |= {path[0] for path in walk(folder).pictures if len(path) == 1}
    return Found(
        "captions", "coco_captions", options, [f"captions of {count} pictures in {file.name}"], frozenset(uses)
    )


def _labels(folder: Path, clients: int) -> Found | None:
    """``labels.jsonl`` with one class a picture; it, or a table, with several labels a picture."""
    files, entries = labels_files(folder), list[Mapping[str, Any]]()
    file = files[0]
    if not file.is_file():
        return None
    for one, told in zip(files, said_by_folders(folder, files), strict=True):
        owned = {"user": told["client"]} if "client" in told else {}
        entries += [{**owned, **entry} for _, entry in label_rows(one, strict=False)]
    pictures = _first_of(folder, "images", "images.tar") or folder
    if not entries:
        refuse(file, "a picture a line", found="an empty file")
    # One row without a value changes nothing about the others.
    several = sum("labels" in entry for entry in entries)
    single = sum("label" in entry for entry in entries)
    beside = {path[0] for path in walk(folder).pictures} if pictures == folder else {pictures.name}
    uses = frozenset({"labels.txt", *beside, *(one.relative_to(folder).parts[0] for one in files)})
    if several > len(entries) / 2:
        given = [entry["labels"] for entry in entries if isinstance(entry.get("labels"), list | dict)]
        labels = Counter(filter(None, map(plain_text, chain.from_iterable(given))))
        listed = ", ".join(one.relative_to(folder).as_posix() for one in files)
        saw = [f"{listed}: {len(entries)} pictures with {len(labels)} labels, {_most(labels)}"]
        shares = _by_owner(entries, "user", saw) or {**dealt(len(entries), clients), "minimum": 2}
        options = {"root": str(folder.resolve()), **shares, "image_size": 64}
        return Found("labels", "labelled_pictures", options, saw, uses)
    if single <= len(entries) / 2 or pictures == folder or file.suffix != ".jsonl":
        return None
    given = chain.from_iterable(as_list(entry.get("label")) for entry in entries)
    classes = Counter(filter(None, map(plain_text, given)))
    owners: list[str] = []
    shares = _by_owner(entries, "domain", owners)
    roles = {ROLES.get(str(entry.get("split", "")), "") for entry in entries}
    trained = sum(ROLES.get(str(entry.get("split", "")), "") in ("", "train") for entry in entries)
    proposal = _of_classes(folder, classes, set(), roles, clients, trained, "labels.jsonl", uses)
    options = {key: value for key, value in proposal.options.items() if not shares or key not in DEALT}
    return replace(proposal, options={**options, **shares}, saw=[*proposal.saw, *owners])


def _by_owner(entries: Sequence[Mapping[str, Any]], usual: str, saw: list[str]) -> dict[str, Any]:
    """Keys that make a client of each name in a column of owners; none where there is no such column."""
    names: dict[str, None] = {}
    for entry in entries:
        for name in entry:
            names[name] = None
    called = [*([usual] if usual in names else []), *(name for name in by_likelihood(names) if name != usual)]
    cells = {name: cells_of(entries, name) for name in called}
    taken = next((name for name in called if says_owners(cells[name])), "")
    if taken:
        counts = Counter(filter(None, map(str.strip, cells[taken])))
        saw += [f"one client per {taken}: {_most(counts)}", *notes_on_owners(cells[taken], taken)]
    saw += not_taken([name for name in called if name != taken], f"{usual}_key")
    keys = {f"{usual}_key": taken} if taken and taken != usual else {}
    return {"partition": usual, **keys} if taken else {}


def _classes(folder: Path, clients: int) -> Found | None:
    """Pictures in a folder per class, or per domain and class."""
    paths, walked = in_classes(folder)
    roles = {path.role for path in paths if path.role}
    below = [path.below for path in paths]
    deep = [path for path in below if len(path) >= 3]
    tops_of: dict[str, set[str]] = {}
    for path in deep:
        tops_of.setdefault(path[1], set()).add(path[0])
    # Classes that several domains have; folders like images/ in every class are none.
    shared = [name for name, tops in tops_of.items() if len(tops) > 1 and name.casefold() not in _NO_CLASSES]
    domains = {path[0] for path in deep} if len(deep) == len(below) and shared and len(tops_of) > 1 else set[str]()
    classes = Counter(plain_text(path[1] if domains else path[0]) or "" for path in below)
    if len(classes) == 1 and len(deep) == len(paths):
        top = paths[0].parts[0]
        refuse(folder, "folders of classes", found=f"{top}/ alone", remedy=f"name that folder, {folder / top}")
    if len(classes) < 2:
        return None
    if {name.casefold() for name in classes} <= _NO_CLASSES:
        listed = ", ".join(sorted(classes))
        remedy = "put them into a folder per class, or write labels.jsonl with a line per picture"
        refuse(folder, "folders of classes", found=f"pictures in {listed}, which are no classes", remedy=remedy)
    uses = frozenset(path.parts[0] for path in paths)
    trained = sum(path.role in ("", "train") for path in paths)
    proposal = _of_classes(folder, classes, domains, roles, clients, trained, "folders", uses)
    notes = [f"left out: {note}" for note in walked.notes()]
    for place in filter(Path.is_dir, visible(folder)):
        tables = visible(place, *ENDINGS, *_ADVICE)
        notes += [f"not read: {place.name}/{tables[0].name}, beside the pictures of {place.name!r}"] if tables else []
    return replace(proposal, saw=[*proposal.saw, *notes])


def _of_classes(
    folder: Path,
    classes: Counter[str],
    domains: set[str],
    roles: set[str],
    clients: int,
    trained: int,
    where: str,
    uses: frozenset[str],
) -> Found:
    count = sum(classes.values())
    options: dict[str, Any] = {"root": str(folder.resolve())}
    if len(domains) > 1:
        options |= {"domains": True} if where == "folders" else {}
        options |= {"partition": "domain"}
    else:
        # A validation example of each class, at least, is shared out too.
        options |= dealt(count, min(clients, max(len(classes), trained // 15)))
    options |= {"shots": 0, "new": "none", "image_size": 64, "validation": 0.1}
    saw = [f"{where}: {count} pictures of {len(classes)} classes, {_most(classes)}"]
    saw += [f"{len(domains)} domains, each a client: {', '.join(sorted(domains)[:6])}"] if len(domains) > 1 else []
    saw += ["splits are given"] if "test" in roles else ["no test split: 20 % of each class are its test"]
    if low := [name for name, number in classes.items() if number < 5]:
        saw.append(f"{len(low)} classes have fewer than 5 pictures, such as {low[0]!r}")
    return Found("classes", "labelled_folders", options, saw, uses)


def _tools(folder: Path, clients: int) -> Found | None:
    """Labels as another tool has written them."""
    layout = layout_of(folder)
    if layout is None:
        return None
    account = Account()
    records = layout_records(folder, layout, account)
    labels = Counter(chain.from_iterable(record.labels for record in records))
    if not labels:
        refuse(folder, f"labels in the layout {layout!r}", found=f"none of {account.counts['rows']} pictures")
    saw = [f"the layout {layout}: {len(records)} pictures with {len(labels)} labels, {_most(labels)}"]
    options = {"root": str(folder.resolve()), "layout": layout, **dealt(len(records), clients), "minimum": 2}
    uses = {record.picture.split("/")[0] for record in records}
    uses |= {Path(file).relative_to(folder).parts[0] for file in account.rows} | {"labels"}
    return Found("labels", "labelled_pictures", {**options, "image_size": 64}, saw, frozenset(uses))


def _texts(folder: Path, clients: int) -> Found | None:
    """Texts with several labels each."""
    file = folder / "texts.jsonl"
    if not file.is_file():
        return None
    entries = [entry for _, entry in read_jsonl(file, strict=False)]
    saw = [f"texts.jsonl: {len(entries)} texts"]
    shares = _by_owner(entries, "user", saw) or {**dealt(len(entries), clients), "minimum": 2}
    options = {"root": str(folder.resolve()), **shares}
    return Found("texts", "tagged_texts", options, saw, frozenset({file.name, "labels.txt"}))


def _sensors(folder: Path, clients: int) -> Found | None:
    """Series of sensors, notes, or both."""
    del clients
    if not ((folder / "examples.csv").is_file() and (folder / "series").is_dir()):
        return None
    count = len(visible(folder / "series"))
    saw = [f"examples.csv with {count} series of sensors"]
    uses = frozenset({"examples.csv", "series"})
    return Found("sensors", "sensor_series", {"root": str(folder.resolve())}, saw, uses)


def _most(counts: Counter[str]) -> str:
    listed = ", ".join(f"{name} {count}" for name, count in counts.most_common(4))
    return f"most often {listed}" if len(counts) > 4 else listed


def stated(value: Any) -> str:
    """A value as TOML has it on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {stated(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(stated, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
