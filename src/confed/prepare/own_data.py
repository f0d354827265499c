"""Recognition of a folder of the user's own data: which dataset reads it, with which keys."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from confed.data.json_lines import read_jsonl
from confed.data.ml_files.coco import COCO_GROUPS, coco_categories
from confed.data.owners import by_likelihood, notes_on_owners, says_owners
from confed.datasets.labelled_folders import ENDINGS as PICTURES
from confed.datasets.labelled_folders import ROLES
from confed.prepare.own_questions import cells_of, not_taken, questions_in, saved_datasets

__all__ = ["FORMS", "Found", "recognise"]

FORMS = (
    "pictures in a folder per class (or per domain and class), labels.jsonl with images/, question files (.json, "
    ".jsonl, .csv, .tsv, .parquet), COCO's instances_*.json or captions_*.json, VQA v2's questions and annotations, "
    "texts.jsonl, examples.csv with series/, or a folder that the library datasets has written"
)
"""What is recognised, for messages."""
MOST_FILES = 500_000
"""Files that are looked at."""
DEALT = ("partition", "clients", "alpha")
"""Keys of :func:`dealt`."""
FEW = 100
"""Examples per client below which equal shares are proposed in place of skewed ones."""


@dataclass(frozen=True)
class Found:
    """A way of reading a folder.

    Attributes:
        form: "classes", "labels", "questions", "conversations", "objects", "captions", "vqa", "texts" or "sensors".
        dataset: name of the dataset that reads it.
        options: keys of a recipe's section ``[data]``.
        saw: what is there, a line each.
        uses: files and folders of the upper level that are read.
        asks: what is not known and was assumed, a line each.
    """

    form: str
    dataset: str
    options: Mapping[str, Any]
    saw: Sequence[str]
    uses: frozenset[str] = frozenset()
    asks: Sequence[str] = field(default_factory=tuple)


def recognise(folder: Path, clients: int = 4) -> tuple[list[Found], list[str]]:
    """All ways of reading a folder, the most specific first, and what the first of them leaves.

    Args:
        folder: the user's.
        clients: among how many clients examples are shared out where nothing says whose they are.

    Raises:
        ValueError: there is no such folder, it is empty, none of the forms fits, or a file of one is faulty.
    """
    if not folder.is_dir():
        raise ValueError(f"expected a folder with data at {folder}, found {'a file' if folder.exists() else 'none'}")
    forms: Sequence[Callable[[Path, int], Found | None]] = (
        _saved, _vqa, _objects, _captions, _labels, _texts, _sensors, _questions, _classes
    )  # fmt: skip
    found, faults = list[Found](), list[ValueError]()
    for form in forms:
        try:
            found += [one] if (one := form(folder, clients)) is not None else []
        except ValueError as error:  # other forms may fit
            faults.append(error)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if not found and faults:
        raise faults[0]
    if not found:
        there = f"holds {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}" if names else "is empty"
        raise ValueError(f"{folder} {there}, which is none of the forms that are recognised: {FORMS}")
    return found, [name for name in names if name not in found[0].uses]


def dealt(count: int, clients: int, groups: int | None = None) -> dict[str, Any]:
    """Keys that share examples out among clients: skewed where there are enough, otherwise equal random shares.

    Args:
        count: number of examples.
        clients: how many clients are wanted.
        groups: number of pictures, each of which stays at one client.
    """
    clients = max(min(clients, (count if groups is None else groups) // 4), 1)
    if count < FEW * clients:
        return {"partition": "iid", "clients": clients}
    return {"partition": "dirichlet", "clients": clients, "alpha": 1.0}


def _saved(folder: Path, clients: int) -> Found | None:
    """A folder that the library ``datasets`` has written."""
    said = saved_datasets(folder)
    if said is None:
        return None
    options = {"source": str(folder.resolve()), **said.options}
    if said.owner not in said.options.get("columns", {}) and "client" not in said.names:
        options |= dealt(said.count, clients) if said.count else {"partition": "iid", "clients": clients}
    return Found(said.form, "hub", {**options, "image_size": 64}, said.saw, frozenset(p.name for p in folder.iterdir()))


def _questions(folder: Path, clients: int) -> Found | None:
    """Question files and conversations."""
    said = questions_in(folder)
    if said is None:
        return None
    options = {"root": str(folder.resolve()), **said.options}
    if not said.owner:
        options |= dealt(said.count, clients, said.pictures)
    return Found(said.form, "chat_records", {**options, "image_size": 64}, said.saw, said.uses)


def _vqa(folder: Path, clients: int) -> Found | None:
    """VQA v2's four official files, with COCO's pictures or with regions."""
    stems = ("{}OpenEnded_mscoco_{}_questions.json", "{}mscoco_{}_annotations.json")
    files = [
        next((name for version in ("v2_", "") if (folder / (name := stem.format(version, split))).is_file()), "")
        for split in ("train2014", "val2014")
        for stem in stems
    ]
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
        raise ValueError(
            f"{folder} has VQA v2's questions, but neither pictures (train2014/ and val2014/, or images/) nor "
            "regions.safetensors, which `confed data prepare vqa-v2` writes"
        )
    rows = _in_json(folder / files[1], "annotations")
    options |= {"clients": max(min(clients, rows // 40), 1), "validation": 0.1}
    if rows < 10_000:
        options["min_answers"] = 1
        saw.append(f"{rows} training questions, fewer than were published: all answers are kept")
    uses = frozenset([*files, *(path.name for path in places)])
    return Found("vqa" if places else "regions", "vqa_v2", options, saw, uses)


def _in_json(file: Path, key: str) -> int:
    from confed.data.vl_files.stream import json_items

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
    places = {split: _coco_pictures(folder, split) for split in (train, test) if split}
    if missing := [split for split, place in places.items() if place is None]:
        raise ValueError(
            f"{splits[missing[0]]}: expected the pictures of the split {missing[0]!r} in {folder / missing[0]}, "
            "images/ or images.tar, found none"
        )
    own = coco_categories(splits[train])
    options = {
        "root": str(folder.resolve()), "train": train, "test": test, "image_size": 64, "validation": 0.1,
        "categories": "coco80" if set(own) <= set(COCO_GROUPS) else "file",
    }  # fmt: skip
    count = _in_json(splits[train], "images")
    shares = dealt(count, clients)
    saw = [f"COCO's objects: {count} pictures of the split {train}, {len(own)} categories"]
    saw += (
        [f"the split {test} is the test"] if test else ["no test split: a share of each client's pictures is its test"]
    )
    uses = {path.relative_to(folder).parts[0] for path in [splits[train], *([splits[test]] if test else [])]}
    uses |= {place.name for place in places.values() if place is not None}
    return Found("objects", "coco", {**options, **shares, "minimum": 2}, saw, frozenset(uses))


def _coco_pictures(folder: Path, split: str) -> Path | None:
    return next((place for place in (folder / split, folder / "images", folder / "images.tar") if place.exists()), None)


def _captions(folder: Path, clients: int) -> Found | None:
    """COCO's captions, or those of a split file of Karpathy's."""
    files = [*_splits(folder, "captions").values()]
    karpathy = folder / "dataset_coco.json"
    if not files and not karpathy.is_file():
        return None
    file = karpathy if karpathy.is_file() else next((f for f in files if "train" in f.name), files[0])
    count = _in_json(file, "images")
    options = {
        "root": str(folder.resolve()), "captions": file.name, "clients": min(clients, max(count // 4, 1)),
        "validation": 0.1, "min_count": 2 if count < 1000 else 5, "image_size": 64,
    }  # fmt: skip
    uses = {file.relative_to(folder).parts[0], "images", "images.tar", "train2014", "val2014"}
    return Found(
        "captions", "coco_captions", options, [f"captions of {count} pictures in {file.name}"], frozenset(uses)
    )


def _labels(folder: Path, clients: int) -> Found | None:
    """``labels.jsonl`` with one class, or several labels, a picture."""
    file = folder / "labels.jsonl"
    pictures = next((place for place in (folder / "images", folder / "images.tar") if place.exists()), None)
    if not file.is_file() or pictures is None:
        return None
    entries = [entry for _, entry in read_jsonl(file)]
    if not entries:
        raise ValueError(f"{file}: expected a picture a line, got an empty file")
    uses = frozenset({file.name, pictures.name, "labels.txt"})
    if all("labels" in entry for entry in entries):
        labels = Counter(
            str(label) for entry in entries for label in entry["labels"] if isinstance(entry["labels"], list)
        )
        saw = [f"labels.jsonl: {len(entries)} pictures with {len(labels)} labels, {_most(labels)}"]
        shares = _by_owner(entries, "user", saw) or {**dealt(len(entries), clients), "minimum": 2}
        options = {"root": str(folder.resolve()), **shares, "image_size": 64}
        return Found("labels", "labelled_pictures", options, saw, uses)
    if not all("label" in entry for entry in entries):
        return None
    classes = Counter(str(entry["label"]) for entry in entries)
    owners: list[str] = []
    shares = _by_owner(entries, "domain", owners)
    roles = {ROLES.get(str(entry.get("split", "")), "") for entry in entries}
    found = _of_classes(folder, classes, set(), roles, clients, "labels.jsonl", uses)
    kept = {key: value for key, value in found.options.items() if not shares or key not in DEALT}
    return replace(found, options={**kept, **shares}, saw=[*found.saw, *owners])


def _by_owner(entries: Sequence[Mapping[str, Any]], usual: str, saw: list[str]) -> dict[str, Any]:
    """Keys that make a client of each name in a column of owners; none where there is no such column.

    Args:
        entries: the rows.
        usual: the column that the dataset takes by default, after which it calls such clients.
        saw: lines on what is there, to which those on the column are added.
    """
    names = {name: None for entry in entries for name in entry}
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
    parts = [path for path in _pictures(folder) if len(path) >= 2]
    if not parts:
        return None
    roles = {ROLES[path[0].lower()] for path in parts if len(path) > 2 and path[0].lower() in ROLES}
    below = [path[1:] if len(path) > 2 and path[0].lower() in ROLES else path for path in parts]
    deep = [path for path in below if len(path) >= 3]
    inner: dict[str, set[str]] = {}
    for path in deep:
        inner.setdefault(path[0], set()).add(path[1])
    shared = set.intersection(*inner.values()) if len(inner) > 1 else set[str]()
    domains = set(inner) if len(deep) == len(below) and len(shared) > 1 else set[str]()
    classes = Counter(path[1] if domains else path[0] for path in below)
    if len(classes) < 2:
        return None
    uses = frozenset(path[0] for path in parts)
    return _of_classes(folder, classes, domains, roles, clients, "folders", uses)


def _of_classes(
    folder: Path,
    classes: Counter[str],
    domains: set[str],
    roles: set[str],
    clients: int,
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
        options |= dealt(count, min(clients, max(len(classes), count // 15)))
    options |= {"shots": 0, "new": "none", "image_size": 64, "validation": 0.1}
    saw = [f"{where}: {count} pictures of {len(classes)} classes, {_most(classes)}"]
    saw += [f"{len(domains)} domains, each a client: {', '.join(sorted(domains)[:6])}"] if len(domains) > 1 else []
    saw += ["splits are given"] if "test" in roles else ["no test split: 20 % of each class are its test"]
    if low := [name for name, number in classes.items() if number < 5]:
        saw.append(f"{len(low)} classes have fewer than 5 pictures, such as {low[0]!r}")
    return Found("classes", "labelled_folders", options, saw, uses)


def _texts(folder: Path, clients: int) -> Found | None:
    """Texts with several labels each."""
    file = folder / "texts.jsonl"
    if not file.is_file():
        return None
    entries = [entry for _, entry in read_jsonl(file, ("text", "labels"))]
    saw = [f"texts.jsonl: {len(entries)} texts"]
    shares = _by_owner(entries, "user", saw) or {**dealt(len(entries), clients), "minimum": 2}
    return Found(
        "texts", "tagged_texts", {"root": str(folder.resolve()), **shares}, saw, frozenset({file.name, "labels.txt"})
    )


def _sensors(folder: Path, clients: int) -> Found | None:
    """Series of sensors, notes, or both."""
    del clients
    if not ((folder / "examples.csv").is_file() and (folder / "series").is_dir()):
        return None
    count = sum(1 for _ in (folder / "series").iterdir())
    saw = [f"examples.csv with {count} series of sensors"]
    return Found(
        "sensors", "sensor_series", {"root": str(folder.resolve())}, saw, frozenset({"examples.csv", "series"})
    )


def _most(counts: Counter[str]) -> str:
    listed = ", ".join(f"{name} {count}" for name, count in counts.most_common(4))
    return f"most often {listed}" if len(counts) > 4 else listed


def _pictures(folder: Path) -> Iterator[tuple[str, ...]]:
    """Paths of pictures below a folder, as their parts; hidden folders are left out."""

    def walk() -> Iterator[tuple[str, ...]]:
        for place, inside, files in os.walk(folder):
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            parts = Path(place).relative_to(folder).parts
            yield from ((*parts, name) for name in sorted(files) if Path(name).suffix.lower() in PICTURES)

    return islice(walk(), MOST_FILES)


def stated(value: Any) -> str:
    """A value as TOML has it on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {stated(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(stated, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
