"""What a recipe asks for beyond its own folder, network and disk, and what a recipe that came from elsewhere gets.

A recipe of one's own gets what it asks for, and ``confed run`` prints it. A recipe that came from elsewhere, a
published result's, a federation's, or an export's on the hub, gets nothing that was not granted: with ``--grant
network`` or ``--grant disk``, ``CONFED_GRANT`` in the environment, or by giving the setting oneself. Code is granted
apart, module by module (:mod:`confed.registry`).
"""

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from confed.models.hub_names import hub_name
from confed.recipes.overrides import NAMED, Overrides
from confed.recipes.recipe import Recipe
from confed.registry import granted

PATHS = frozenset(
    ["root", "file", "images", "patch", "regions", "glove", "pretrained", "language", "vocabulary", "pieces", "source",
     "embeddings", "card", "photographs"]
)  # fmt: skip
"""Keys whose texts are files, folders or names on a hub."""


class Ask(NamedTuple):
    """A value of a recipe that leads out of its folder."""

    kind: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.key} = {self.value[:200]!a})"


def asks_of(recipe: Recipe, *folders: Path) -> tuple[Ask, ...]:
    """What a recipe asks for beyond its own folders and the one that the command is given in."""
    inside = [folder.resolve() for folder in (*folders, Path())]
    asks = dict[Ask, None]()
    variants = [recipe, *(recipe.method(row) for row in recipe.methods), *map(recipe.with_model, recipe.models)]
    for variant in variants:
        for section in NAMED:
            values = dict(variant.sections[section])
            for key, value in _leaves(section, values):
                ask = _ask(key, value, inside)
                if ask is not None and (ask.kind == "network" or not _is_default(section, values, ask)):
                    asks[ask] = None
    if recipe.run.address:
        asks[Ask("network", "run.address", recipe.run.address)] = None
    return tuple(asks)


def check_grants(recipe: Recipe, what: str, *folders: Path, given: Overrides = ()) -> None:
    """Refusal of what a recipe that came from elsewhere asks for and was not granted."""
    named = list(given) if isinstance(given, Mapping) else [text.partition("=")[0].strip() for text in given]
    for ask in asks_of(recipe, *folders):
        if ask.kind not in granted() and not any(ask.key == key or ask.key.startswith(f"{key}.") for key in named):
            raise ValueError(
                f"{what} came from elsewhere and asks for {ask}, which was not granted: where you trust it, add "
                f"--grant {ask.kind}, or give the setting yourself, {ask.key}=VALUE"
            )


def local_paths(recipe: Recipe) -> list[str]:
    """The paths of this machine that a single-run recipe names, the longest first."""
    paths = set[str]()
    for section in NAMED:
        for key, value in _leaves(section, recipe.sections[section]):
            named = key.rpartition(".")[2] in PATHS and len(Path(value).parts) > 1 and hub_name(value) is None
            if "://" not in str(value) and (named or isinstance(value, Path) or _leads_out(str(value))):
                paths.add(str(value))
    return sorted(paths, key=len, reverse=True)


def _leads_out(text: str) -> bool:
    """Whether a text is a path that is absolute, of a home folder, or upwards, as any system writes it."""
    windows = PureWindowsPath(text)
    absolute = PurePosixPath(text).is_absolute() or bool(windows.drive or windows.root)
    return absolute or text.startswith("~") or ".." in windows.parts


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str | Path]]:
    """The texts and paths of a section with their keys, at any depth."""
    if isinstance(value, str | Path):
        yield key, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _leaves(f"{key}.{name}", entry)
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _leaves(key, entry)


def _ask(key: str, value: str | Path, inside: Sequence[Path]) -> Ask | None:
    text, named = str(value), key.rpartition(".")[2] in PATHS
    if "://" in text or hub_name(value, short=key.endswith("vocabulary")) is not None:
        return Ask("network", key, text)
    if not text or not (named or isinstance(value, Path) or _leads_out(text)):
        return None
    try:
        place = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no such user, a circle of links, or a null character
        return Ask("disk", key, text)
    return None if any(place.is_relative_to(folder) for folder in inside) else Ask("disk", key, text)


def _is_default(section: str, values: Mapping[str, Any], ask: Ask) -> bool:
    """Whether a path is the one that the constructor itself takes."""
    parameter = signature(NAMED[section][str(values["name"])]).parameters.get(ask.key.rpartition(".")[2])
    default = None if parameter is None else parameter.default
    return isinstance(default, str | Path) and Path(default).expanduser().resolve() == Path(ask.value).resolve()
