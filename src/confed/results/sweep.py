"""Record of a sweep: one study per value of a setting, and the order of the values."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["INDEX", "Point", "Sweep", "number_of", "read_sweep"]


INDEX = "sweep.json"


@dataclass(frozen=True)
class Point:
    """One value of the swept setting.

    Attributes:
        settings: key -> value as TOML; first the swept one, then those that go with it, then the line's.
        folder: of its grid, within the sweep's folder.
    """

    settings: Mapping[str, str]
    folder: str

    @property
    def overrides(self) -> list[str]:
        """The settings as a recipe's overrides."""
        return [f"{key}={value}" for key, value in self.settings.items()]


@dataclass(frozen=True)
class Sweep:
    """What a sweep consists of; the content of its index.

    Attributes:
        recipe: name of the recipe.
        key: the swept setting.
        points: one per value, in the order given.
        references: the methods that the others are compared with; empty for the usual ones.
        margin: differences smaller than this are taken not to matter, a fraction.
        by: the setting that tells lines of one figure apart; "" where there is one line per method.
    """

    recipe: str
    key: str
    points: tuple[Point, ...]
    references: tuple[str, ...] = ()
    margin: float = 0.01
    by: str = ""


def read_sweep(root: Path) -> Sweep:
    """A sweep's index.

    Raises:
        ValueError: it is faulty, or names folders that lie elsewhere.
    """
    try:
        content = json.loads((root / INDEX).read_text(encoding="utf-8"))
        points = tuple(
            Point({str(k): str(v) for k, v in p["settings"].items()}, str(p["folder"])) for p in content["points"]
        )
        sweep = Sweep(
            str(content["recipe"]),
            str(content["over"]),
            points,
            tuple(map(str, content["references"])),
            float(content["margin"]),
            str(content.get("by", "")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{root / INDEX} is no index of a sweep: {type(error).__name__}: {error}") from error
    for point in points:
        if not re.fullmatch(r"[\w+-][\w.+-]*", point.folder):
            raise ValueError(f"{root / INDEX}: a grid must lie in the sweep's folder, got {point.folder!r}")
    return sweep


def number_of(text: str) -> float | None:
    """A TOML value as a number; None if it is something else."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
