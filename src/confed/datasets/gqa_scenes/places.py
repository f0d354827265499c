"""The 365 categories of Places365 as six scenes, and files of scene predictions.

``places365_scenes.csv`` gives every category, in the official order, one of the six scenes or none. FedVQA
names some twenty of them (Table 8.1), which are kept; all others are this package's judgment, after the
groups of the database's own scene hierarchy (Zhou et al., TPAMI 2018): shopping and dining are commercial;
schools, laboratories, studios, museums and offices educational; vehicles, stations, roads and harbours
transport; water, ice, mountains, woods, fields and farms natural; sport, play and dancing sports; rooms,
houses and yards home. What fits none well (churches, castles, hospitals, towers, parks) has no scene.
"""

import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from confed.data.intake.tables import read_cells, read_jsonl
from confed.data.refusals import existing, expecting, refuse

FORMAT = "confed gqa-scenes 1"


def digest(file: Path) -> dict[str, Any]:
    """A file's size and SHA-256."""
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


# The 365 categories of Places365 as six scenes, and files of scene predictions ------------------------------

SCENES = ("commercial", "educational", "transport", "natural", "sports", "home")
"""In the order of Table 8.1."""

PUBLISHED: Mapping[str, tuple[int, int]] = {
    "commercial": (19573, 6473),
    "educational": (13472, 4225),
    "transport": (12384, 4160),
    "natural": (14820, 4512),
    "sports": (14784, 5120),
    "home": (14498, 4353),
}
"""Training and test questions of each scene (Table 8.1)."""

_COLUMNS = {
    "image": ("image", "image_id", "imageId"),
    "category": ("category", "label"),
    "confidence": ("confidence", "probability"),
}


class Prediction(NamedTuple):
    """Scene classifier's prediction for one picture; a category is one of the 365, such as "forest/broadleaf"."""

    category: str
    confidence: float


@lru_cache(maxsize=1)
def scene_of() -> Mapping[str, str | None]:
    """Category -> scene, or None; all 365 in the order of the classifier's outputs."""
    text = (files("confed.datasets.gqa_scenes") / "places365_scenes.csv").read_text(encoding="utf-8")
    return {row["category"]: row["scene"] or None for row in csv.DictReader(text.splitlines())}


def category_name(name: str, where: str = "a scene") -> str:
    """The category that a name means: ``/a/airfield`` and ``airfield`` are the same."""
    plain = name.strip()
    if len(plain) > 3 and plain[0] == plain[2] == "/":
        plain = plain[3:]
    if plain not in scene_of():
        refuse(where, f"one of the {len(scene_of())} categories of Places365", name)
    return plain


def read_predictions(file: Path) -> dict[str, Prediction]:
    """Image id -> prediction, from CSV with a header line or from JSON lines.

    Columns or keys: ``image`` (or ``image_id``, ``imageId``; an ending such as .jpg is dropped), ``category``
    (or ``label``) and ``confidence`` (or ``probability``), one line per image.
    """
    predictions: dict[str, Prediction] = {}
    for where, row in _rows(existing(file)):
        image = Path(str(_cell(row, "image", where))).stem
        given, category = _cell(row, "confidence", where), category_name(str(_cell(row, "category", where)), where)
        with expecting(where, "a confidence", TypeError, ValueError):
            confidence = float(given)
        if not 0 <= confidence <= 1:
            refuse(where, "a confidence in [0, 1]", found=confidence)
        if image in predictions:
            refuse(where, "one line per image", found=f"{image!r} again")
        predictions[image] = Prediction(category, confidence)
    if not predictions:
        refuse(file, "scene predictions", found="none")
    return predictions


def write_predictions(file: Path, predictions: Iterable[tuple[str, Prediction]], *, append: bool = False) -> None:
    """Writing of predictions for :func:`read_predictions`, with probabilities of six digits."""
    with file.open("a" if append else "w", encoding="utf-8", newline="\n") as text:
        if not append:
            text.write("image,category,confidence\n")
        text.writelines(f"{image},{p.category},{p.confidence:.6f}\n" for image, p in predictions)


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file as mappings, each with where it stands."""
    for number, row in read_cells(file)[0] if file.suffix.lower() == ".csv" else read_jsonl(file):
        yield f"{file}, row {number}", row


def _cell(row: Mapping[str, Any], column: str, where: str) -> Any:
    for name in _COLUMNS[column]:
        if row.get(name) not in (None, ""):
            return row[name]
    refuse(where, f"a value for {' or '.join(_COLUMNS[column])}", dict(row))
