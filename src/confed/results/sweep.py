"""Record of a sweep: a study for each value of a setting, or for each of several models, and their order."""

import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import Name
from confed.federation.reading import FAULTS, read_bounded
from confed.results.folder import SWEEPS

MODELS = "models"  # key of models as an axis of a sweep
ROWS = "study.methods"
"""Key of methods as an axis of a sweep; each has a study of its own, such as of the configurations tried by tuning."""


@dataclass(frozen=True)
class Point:
    """One value of the swept setting, or one model."""

    # Key -> value as TOML; first the swept one, then those that go with it, then the line's.
    settings: Mapping[str, str]
    folder: str  # of its study, within the sweep's folder
    label: str = ""  # how tables write a model

    @property
    def overrides(self) -> list[str]:
        """The settings as a recipe's overrides, a model apart."""
        return [f"{key}={value}" for key, value in self.settings.items() if key != MODELS]

    @property
    def title(self) -> str:
        """Its name in progress displays."""
        return self.label or ", ".join(f"{key}={value}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Sweep:
    """What a sweep consists of; the content of its index."""

    recipe: str  # name of the recipe
    over: str  # the swept setting, or MODELS
    points: tuple[Point, ...]  # one per value or model, in the order given
    references: tuple[str, ...] = ()  # the methods that the others are compared with; empty for the usual ones
    margin: float = 0.01  # differences smaller than this are taken not to matter, a fraction
    # The setting that tells lines of one figure apart, or MODELS; "" where there is one line per method.
    by: str = ""

    def present(self, methods: Collection[str]) -> tuple[str, ...] | None:
        """The references that have runs; None, for the usual ones, if none has."""
        return tuple(name for name in self.references if name in methods) or None

    @property
    def models(self) -> dict[str, str]:
        """Folder of a model's study -> how tables write the model; empty for other sweeps."""
        return {point.folder: point.label for point in self.points} if self.over == MODELS else {}


def write_sweep_index(root: Path, sweep: Sweep) -> None:
    """Write a sweep's index, in place of one of version 0.1."""
    root.mkdir(parents=True, exist_ok=True)
    write_atomically(root / SWEEPS[0], json.dumps(asdict(sweep), indent=1, ensure_ascii=False).encode())
    (root / SWEEPS[1]).unlink(missing_ok=True)


def read_sweep(root: Path) -> Sweep:
    """A sweep's index; a fault is a ValueError."""
    file = next((root / name for name in SWEEPS if (root / name).is_file()), root / SWEEPS[0])
    try:
        content = json.loads(read_bounded(file).decode())
        sweep = Sweep(
            str(content["recipe"]),
            str(content.get("over", MODELS)),
            tuple(_points(content)),
            tuple(map(str, content["references"])),
            float(content["margin"]),
            str(content.get("by", "")),
        )
    except FAULTS as error:
        raise ValueError(f"{file} is no index of a sweep: {type(error).__name__}: {error}") from error
    for point in sweep.points:
        if not re.fullmatch(r"[\w.+%-]+", Name(point.folder, f"{file}: a study's folder")):
            raise ValueError(f"{file}: a study must lie in the sweep's folder, got {point.folder!r}")
    return sweep


def _points(content: Mapping[str, Any]) -> Iterator[Point]:
    """Points of an index; one of several models of version 0.1 has a mapping of rows to labels."""
    for row, label in content.get("models", {}).items():
        yield Point({MODELS: str(row)}, str(row), str(label))
    for point in () if "models" in content else content["points"]:
        settings = {str(key): str(value) for key, value in point["settings"].items()}
        yield Point(settings, str(point["folder"]), str(point.get("label", "")))


def number_of(text: str) -> float | None:
    """A TOML value as a number; None if it is something else."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
