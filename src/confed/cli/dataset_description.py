"""Description of a dataset: counts, answers, facts, and a sheet of sample pictures."""

import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from confed import registry

if TYPE_CHECKING:
    from confed.data.examples import Examples, FederatedDataset
    from confed.data.labelled import LabelDataset, LabelExamples


_SHEET_COLUMNS, _SHEET_CELL, _SHEET_ROWS = 6, 148, 24

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
    from confed.data.faults import faults
    from confed.data.imputation import drop_modalities, missing_of
    from confed.data.labelled import LabelDataset
    from confed.data.readable import leave_out_unreadable
    from confed.recipes.recipe import load_recipe
    from confed.recipes.schema import validate

    if out is not None and out.suffix.lower() != ".png":
        raise ValueError(f"out must be a file with the ending .png, got {out}")
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"html must be a file with the ending .html, got {html}")
    if answers is not None and answers.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"answers must be a file with the ending .svg or .png, got {answers}")
    given: dict[str, Any] = {}
    if name.endswith(".toml"):
        given = dict(load_recipe(name).sections["data"])
        name = given.pop("name")
    given |= dict(_option(text) for text in options)
    constructor = registry.datasets[name]
    missing = missing_of(given.pop("missing", {}))
    card = given.pop("card", None)
    values = validate(constructor, {key: value for key, value in given.items() if value is not None}, "data", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dataset: FederatedDataset | LabelDataset = constructor(**values)
        if not isinstance(dataset, LabelDataset):
            dataset = drop_modalities(leave_out_unreadable(dataset), missing, int(values.get("seed", 0)))
    for warning in told:
        warnings.warn(warning.message, stacklevel=2)
    warnings_found = [" ".join(str(warning.message).split()) for warning in told] + faults(dataset)
    if card is not None:
        warnings_found.append(f"the terms of the card {card} are not applied here")
    figure = {} if answers is None else {"figure": str(_draw_answers(dataset, answers))}
    description = {**_described(name, dataset, out), "faults": warnings_found, **figure}
    source = " ".join([f"data.name = {name}", *(f"{k}={v}" for k, v in _public(constructor, given).items())])
    if croissant is not None:
        from confed.data.croissant import write_croissant

        description["files"] = [str(path) for path in write_croissant(dataset, croissant, source)]
    if html is not None:
        from confed.report.html.dataset_page import dataset_page

        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(dataset_page(dataset, description["rows"], warnings_found, source), encoding="utf-8")
        description["page"] = str(html)
    return description


def _draw_answers(dataset: "FederatedDataset | LabelDataset", out: Path) -> Path:
    """The figure of each place's answers, as SVG or PNG by the file's ending."""
    from confed.report.figures.answers import answers_of

    drawing = answers_of(dataset)
    if drawing is None:
        raise ValueError(f"answers: {dataset.name} has fewer than two places with answers, nothing to compare")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(drawing.svg() if out.suffix.lower() == ".svg" else drawing.png())
    return out


def _described(name: str, dataset: "FederatedDataset | LabelDataset", out: Path | None) -> dict[str, Any]:
    """Counts, answers and facts, and the sheet."""
    from confed.data.labelled import LabelDataset
    from confed.data.modalities import is_modal

    if isinstance(dataset, LabelDataset):
        return _describe_labels(dataset, out)
    modal = is_modal(dataset)
    parts = list(_parts(dataset))
    description = {
        "name": name,
        "answers": len(dataset.answers),
        "words": len(dataset.words),
        "rows": [{**_row(*entry), **(_modal_row(entry[2]) if modal else {})} for entry in parts],
        "facts": dict(dataset.facts),
    }
    if out is not None:
        _sheet([(place, e) for place, role, e in parts if role in ("train", "unseen")], out)
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


def _parts(dataset: "FederatedDataset") -> "Iterable[tuple[str, str, Examples]]":
    for name, split in dataset.clients.items():
        for role, examples in split.roles.items():
            yield name, role, examples
    for name, examples in dataset.unseen.items():
        yield name, "unseen", examples


def _modal_row(examples: "Examples") -> dict[str, Any]:
    """Modalities of examples, and the number of different recordings and series."""
    from confed.data.examples import presence
    from confed.data.modalities import MODALITIES
    from confed.data.modality_names import set_names

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


def _row(place: str, role: str, examples: "Examples") -> dict[str, Any]:
    from confed.data.examples import presence

    counts = Counter(examples.answers)
    answer, count = counts.most_common(1)[0] if counts else ("none", 0)
    return {
        "place": place,
        "role": role,
        "questions": len(examples),
        "pictures": len(set(np.ravel(examples.image_index[presence(examples)[:, 0]]).tolist())),
        "answers": len(counts),
        "most_frequent": f"{answer} ({count / max(len(examples), 1):.1%})",
    }


def _describe_labels(dataset: "LabelDataset", out: Path | None) -> dict[str, Any]:
    parts: list[tuple[str, str, LabelExamples]] = []
    for name, _ in zip(dataset.clients, range(LISTED), strict=False):
        parts += [(name, role, examples) for role, examples in dataset.clients[name].roles.items()]
    parts += [(name, "unseen", examples) for name, examples in dataset.unseen.items()]
    facts = {"clients": str(len(dataset.clients)), **dataset.facts}
    if len(dataset.clients) > LISTED:
        facts["clients"] += f", of which the first {LISTED} are listed"
    if dataset.coarse:
        facts["coarse labels"] = str(len(set(dataset.coarse.values())))
    description = {
        "name": dataset.name,
        "answers": len(dataset.labels),
        "words": len(dataset.words),
        "rows": [_label_row(dataset, *entry) for entry in parts],
        "facts": facts,
    }
    if out is not None:
        shown = [(place, e) for place, role, e in parts if role in ("train", "unseen") and e.pictures is not None]
        if not shown:
            raise ValueError(f"dataset {dataset.name!r} has texts: there are no pictures to draw on a sheet")
        _label_sheet(shown[:_SHEET_ROWS], out)
        description["sheet"] = str(out)
    return description


def _label_row(dataset: "LabelDataset", place: str, role: str, examples: "LabelExamples") -> dict[str, Any]:
    counts = examples.counts()
    most = int(counts.argmax())
    return {
        "place": place,
        "role": role,
        "questions": len(examples),
        "pictures": len(set(examples.rows.tolist())) if examples.pictures is not None else 0,
        "answers": int((counts > 0).sum()),
        "most_frequent": f"{dataset.labels[most]} ({counts[most] / len(examples):.1%})" if counts[most] else "none",
    }


def _label_sheet(parts: "Sequence[tuple[str, LabelExamples]]", out: Path) -> None:
    """A row of pictures per place, each with its labels."""
    lines: list[tuple[str, list[tuple[Any, str]]]] = []
    for place, examples in parts:
        if examples.pictures is None:
            continue
        cells: list[tuple[Any, str]] = []
        for row in examples.rows[:_SHEET_COLUMNS].tolist():
            cells.append((examples.pictures[row], ", ".join(examples.table.labels_of(row)) or "none"))
        lines.append((place, cells))
    _draw_sheet(lines, out)


def _sheet(parts: "Sequence[tuple[str, Examples]]", out: Path) -> None:
    """A row of pictures per place, each with one question and its answer; nothing of places without pictures."""
    from confed.data.examples import presence

    rows: list[tuple[str, list[tuple[np.ndarray, str]]]] = []
    for place, examples in parts:
        first = np.reshape(examples.image_index, (len(examples), -1))[:, 0]  # of pairs
        with_picture = np.flatnonzero(presence(examples)[:, 0])
        each = {int(first[row]): int(row) for row in with_picture[::-1]}
        shown = sorted(each.values())[:_SHEET_COLUMNS]
        texts = [f"{examples.questions[row]} {examples.answers[row]}" for row in shown]
        pictures = [examples.images[int(first[row])] for row in shown]
        if pictures:
            rows.append((place, list(zip(pictures, texts, strict=True))))
    _draw_sheet(rows, out)


def _draw_sheet(parts: Sequence[tuple[str, Sequence[tuple[np.ndarray, str]]]], out: Path) -> None:
    """A row per place: pictures with a text each."""
    import textwrap

    from PIL import Image, ImageDraw

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
