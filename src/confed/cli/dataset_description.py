"""Description of a dataset: counts, answers, facts, and a sheet of sample pictures."""

import textwrap
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, get_args

import numpy as np
from PIL import Image, ImageDraw

from confed import registry
from confed.data.croissant import write_croissant
from confed.data.examples import Examples, FederatedDataset, presence
from confed.data.faults import faults, survey
from confed.data.imputation import drop_modalities, missing_of
from confed.data.lazy import Lazy
from confed.data.modalities import MODALITIES, is_modal
from confed.data.modality_names import set_names
from confed.data.pictures import fitted
from confed.data.readable import leave_out_unreadable
from confed.recipes.recipe import load_recipe, pictures_of
from confed.recipes.schema import validate
from confed.report.figures.answers import answers_of
from confed.report.html.dataset_page import dataset_page

_SHEET_COLUMNS, _SHEET_CELL, _SHEET_ROWS = 6, 148, 24
TWELVE = 12

LISTED = 100  # clients of multi-label data that a description lists; the others are one line


def describe(
    name: str,
    options: Sequence[str] = (),
    out: Path | None = None,
    html: Path | None = None,
    croissant: Path | None = None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Counts, answers, faults and facts of a dataset, a sheet of sample pictures, and a page."""
    _check_endings(out, html, answers)
    given, of_model = dict[str, Any](), dict[str, Any]()
    if name.endswith(".toml"):
        sections = load_recipe(name).sections
        given = dict(sections["data"])
        name = given.pop("name")
        of_model = pictures_of(sections["model"])
    given |= dict(_option(text) for text in options)
    constructor = registry.datasets[name]
    missing = missing_of(given.pop("missing", {}))
    card, fit = given.pop("card", None), given.pop("fit", "squeeze")
    values = validate(constructor, {key: value for key, value in given.items() if value is not None}, "data", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with fitted(fit):
            dataset: FederatedDataset = constructor(**values)
        dataset = drop_modalities(leave_out_unreadable(dataset), missing, int(values.get("seed", 0)))
    for warning in told:
        warnings.warn(warning.message, stacklevel=2)
    told_once = list(dict.fromkeys(" ".join(str(warning.message).split()) for warning in told))
    files, of_files = _of_files(values, fit, of_model)
    warnings_found = [*told_once, *of_files, *faults(dataset)]
    if card is not None:
        warnings_found.append(f"the terms of the card {card} are not applied here")
    figure = {} if answers is None else {"figure": str(_draw_answers(dataset, answers))}
    shown = _shown(dataset)
    how = f"as the model reads them: {shown[0][0].shape[1]} x {shown[0][0].shape[0]}" if shown else ""
    description = {**_described(name, dataset, out, shown, how), "faults": warnings_found, **figure}
    description["facts"] |= {"files": files} if files else {}
    description["shown"] = shown
    source = " ".join([f"data.name = {name}", *(f"{k}={v}" for k, v in _public(constructor, given).items())])
    if croissant is not None:
        description["files"] = [str(path) for path in write_croissant(dataset, croissant, source)]
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        page = dataset_page(dataset, description["rows"], warnings_found, source, shown, how)
        html.write_text(page, encoding="utf-8")
        description["page"] = str(html)
    return description


def _draw_answers(dataset: FederatedDataset, out: Path) -> Path:
    """The figure of each place's answers, as SVG or PNG by the file's ending."""
    drawing = answers_of(dataset)
    if drawing is None:
        raise ValueError(f"answers: {dataset.name} has fewer than two places with answers, nothing to compare")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(drawing.svg() if out.suffix.lower() == ".svg" else drawing.png())
    return out


def _check_endings(out: Path | None, html: Path | None, answers: Path | None) -> None:
    if out is not None and out.suffix.lower() != ".png":
        raise ValueError(f"out must be a file with the ending .png, got {out}")
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"html must be a file with the ending .html, got {html}")
    if answers is not None and answers.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"answers must be a file with the ending .svg or .png, got {answers}")


def _of_files(values: Mapping[str, Any], fit: str, of_model: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Sizes of the pictures in a dataset's folder, and warnings of what a model gets of them."""
    side, root = values.get("image_size"), values.get("root")
    if not side or root is None or not Path(root).is_dir():
        return "", []
    told, warnings_found = survey(Path(root), side, fit)
    own_side, own_fit = of_model.get("image_size", side), of_model.get("fit", fit)
    if told and side < own_side:
        warnings_found.append(f"data.image_size is {side}, the model reads {own_side} x {own_side}: details are lost")
    if told and fit != own_fit:
        warnings_found.append(f"data.fit is {fit!r}, and the model's own processor does as {own_fit!r} does")
    return told, warnings_found


Shown = Sequence[tuple[np.ndarray, str]]  # pictures with a text each


def _shown(dataset: FederatedDataset) -> Shown:
    """Twelve pictures from training examples, client by client, evenly over each one's."""
    names = list(dataset.clients)
    of_clients: list[Shown] = []
    for name in names[:: -(-len(names) // TWELVE) or 1]:
        of_clients.append(_cells(dataset.clients[name].train, -(-TWELVE // len(names)), spread=True))
    return list(filter(None, chain.from_iterable(zip_longest(*of_clients))))[:TWELVE]


def _described(name: str, dataset: FederatedDataset, out: Path | None, shown: Shown, how: str) -> dict[str, Any]:
    """Counts, answers and facts, and the sheet, which begins with pictures as a model reads them."""
    labelled, modal, facts = dataset.kind == "labels", is_modal(dataset), dict(dataset.facts)
    few = LISTED if labelled or isinstance(dataset.clients, Lazy) else None
    rows: list[dict[str, Any]] = []
    places: list[tuple[str, Shown]] = []
    for place, role, examples in dataset.placed(few):
        rows.append({**_row(place, role, examples), **(_modal_row(examples) if modal else {})})
        if out is not None and role in ("train", "unseen") and (cells := _cells(examples, _SHEET_COLUMNS)):
            places.append((place, cells))
    if labelled:
        name = dataset.name
        listed = f", of which the first {LISTED} are listed" if len(dataset.clients) > LISTED else ""
        facts = {"clients": f"{len(dataset.clients)}{listed}", **facts}
        facts |= {"coarse labels": str(len(set(dataset.coarse.values())))} if dataset.coarse else {}
        places = places[:_SHEET_ROWS]
        if out is not None and not any(examples.tables["image"] for examples in dataset.everything):
            raise ValueError(f"dataset {dataset.name!r} has texts: there are no pictures to draw on a sheet")
    description = {
        "name": name, "answers": len(dataset.answers), "words": len(dataset.words), "rows": rows, "facts": facts,
    }  # fmt: skip
    if out is not None:
        starts = range(0, len(shown), _SHEET_COLUMNS)
        first = [("" if start else how, shown[start : start + _SHEET_COLUMNS]) for start in starts]
        _draw_sheet([*first, *places], out)
        description["sheet"] = str(out)
    return description


def _public(constructor: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a page or metadata may tell: without files and folders of this machine."""
    parameters = signature(constructor, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in parameters.items()}
    private = {"root", "file"} | {name for name, hint in hints.items() if hint is Path or Path in get_args(hint)}
    return {key: value for key, value in given.items() if key not in private and not _has_path(value)}


def _has_path(value: object) -> bool:
    if isinstance(value, Mapping):
        return "root" in value or any(map(_has_path, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_path, value))
    text = str(value)
    return text.startswith("~") or PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def _option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"an option must be key=value, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _modal_row(examples: Examples) -> dict[str, Any]:
    """Modalities of examples, and the number of different recordings and series."""
    present = presence(examples)
    sets = Counter(set_names(present))
    most = ", ".join(name if len(sets) == 1 else f"{name} {count}" for name, count in sets.most_common())
    sounds, series = (present[:, MODALITIES.index(name)] for name in ("audio", "series"))
    return {
        "modalities": most,
        "sounds": 0
        if examples.sounds is None or examples.sound_index is None
        else examples.sounds.independent(examples.sound_index[sounds]),
        "series": 0 if examples.series_index is None else len(np.unique(examples.series_index[series])),
    }


def _row(place: str, role: str, examples: Examples) -> dict[str, Any]:
    counts = examples.counted_answers()
    answer, count = max(counts.items(), key=itemgetter(1), default=("none", 0))
    most = f"{answer} ({count / max(len(examples), 1):.1%})"
    return {
        "place": place,
        "role": role,
        "questions": len(examples),
        "pictures": len(set(np.ravel(examples.image_index[presence(examples)[:, 0]]).tolist())),
        "answers": sum(number > 0 for number in counts.values()),
        "most_frequent": most if count or examples.labels is None else "none",
    }


def _cells(examples: Examples, most: int, *, spread: bool = False) -> Shown:
    """Different pictures of some examples, each with one question and its answer."""
    if 0 in examples.images.shape:
        return []
    first = np.reshape(examples.image_index, (len(examples), -1))[:, 0]  # of pairs
    with_picture = np.flatnonzero(presence(examples)[:, 0])
    each = sorted({int(first[row]): int(row) for row in with_picture[::-1]}.values())
    cells: list[tuple[np.ndarray, str]] = []
    count = min(len(each), most)
    for row in [each[number * len(each) // count] for number in range(count)] if spread else each[:most]:
        answer = examples.answers[row] if examples.labels is None else examples.right_answer(row) or "none"
        cells.append((examples.images[int(first[row])], f"{examples.questions[row]} {answer}".lstrip()))
    return cells


def _draw_sheet(parts: Sequence[tuple[str, Shown]], out: Path) -> None:
    """A row per place: pictures with a text each."""
    text_height, cell = 48, _SHEET_CELL
    row_height = cell + text_height + 18
    sheet = Image.new("RGB", (_SHEET_COLUMNS * (cell + 6) + 6, len(parts) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (place, shown) in enumerate(parts):
        top = number * row_height
        draw.text((6, top + 3), place.encode("ascii", "replace").decode(), fill="black")
        for column, (pixels, words) in enumerate(shown):
            left = 6 + column * (cell + 6)
            picture = Image.fromarray(pixels)
            sheet.paste(picture.resize((cell, cell), Image.Resampling.NEAREST), (left, top + 18))
            lines = textwrap.wrap(words.encode("ascii", "replace").decode(), 24, max_lines=3, placeholder=" ...")
            draw.multiline_text((left, top + 20 + cell), "\n".join(lines), fill="black", spacing=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out, format="PNG")
