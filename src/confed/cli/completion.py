"""Shell completion: names of methods, models, datasets, tasks, recipes, keys of recipes, and runs.

Names are kept in a file of the user's cache, because looking them up imports torch, which takes seconds.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path

from confed.cli.app import KIND_OF

Known = dict[str, list[str]]


def _known() -> Known:
    """Kind -> names, and "keys" -> keys of recipes; from the cache where it is as new as the package."""
    from confed.system.release import VERSION

    home = Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for path in home.glob("*/") if path.is_dir())
    stamp = f"{VERSION} {home} {newest}"
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "confed" / "names.json"
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("stamp") == stamp:
            return content["names"]
    names = _looked_up()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = file.with_suffix(f".{os.getpid()}.part")
        partial_file.write_text(json.dumps({"stamp": stamp, "names": names}), encoding="utf-8")
        partial_file.replace(file)
    return names


def _looked_up() -> Known:
    from confed.cli.description import describe_name, names

    names_of_kind = names()
    keys = [f"{section}.name=" for section in KIND_OF]
    for kind in (*KIND_OF.values(), "section"):
        for name in names_of_kind[kind]:
            (description,) = describe_name(name, kind)
            keys += [f"{description.section}.{setting.name}=" for setting in description.settings]
    return {**names_of_kind, "keys": sorted(dict.fromkeys(keys))}


def _those(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in _known()[kind] if name.startswith(incomplete)]

    return complete


def complete_anything(incomplete: str) -> list[str]:
    """Names of methods, models, datasets, tasks, recipes and sections."""
    every = chain.from_iterable(names for kind, names in _known().items() if kind != "keys")
    return sorted({name for name in every if name.startswith(incomplete)})


def complete_recipe(incomplete: str) -> list[str]:
    """Packaged recipes, and recipe files."""
    from glob import glob

    files = sorted(glob(f"{incomplete}*.toml"))
    return [*_those("recipe")(incomplete), *files]


complete_dataset = _those("dataset")
complete_task = _those("task")


def complete_key(incomplete: str) -> list[str]:
    """Keys of a recipe with an equals sign; the values of "name" after it."""
    section, _, value = incomplete.partition(".name=")
    if section in KIND_OF and ".name=" in incomplete:
        return [f"{section}.name={name}" for name in _those(KIND_OF[section])(value)]
    return [key for key in _known()["keys"] if key.startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """Methods in a list with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _those("method")(last)]


def complete_kind(incomplete: str) -> list[str]:
    """Kinds of things that ``confed list`` has."""
    kinds = ("methods", "models", "tasks", "datasets", "recipes", "runs")
    return [kind for kind in kinds if kind.startswith(incomplete)]


def complete_folder(incomplete: str) -> list[str]:
    """Runs, studies and sweeps under ``runs/``, and below the folder that is written."""
    parent = Path(incomplete.rpartition("/")[0] or "/") if "/" in incomplete else Path("runs")
    marks = ("recipe.toml", "summary.json", "sweep.json", "models.json")
    folders: list[str] = []
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            is_run = any((path / mark).is_file() for mark in marks) or any(path.glob("*/recipe.toml"))
            if is_run and str(path).startswith(incomplete):
                folders.append(str(path))
    return folders
