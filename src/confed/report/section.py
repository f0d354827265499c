"""What a module of :mod:`confed.report.sections` declares: sections of the page, and words for a kind of data.

Its ``SECTIONS`` are in the page, and their figures among those of ``confed report --figures``, without a line
elsewhere. What only one method or paper has stands in a module of its own.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from confed.report.comparison import Comparison
from confed.report.figures.style import Drawing
from confed.report.html.media import ImageStore
from confed.report.html.page import Tabs
from confed.results.runs import StudyResults


@dataclass(frozen=True)
class Page:
    """A page in the making: the study that it is about, and what its sections share."""

    study: StudyResults
    comparison: Comparison | None = None
    tabs: Tabs = field(default_factory=Tabs)
    store: ImageStore = field(default_factory=ImageStore)


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    anchor: str  # name of links to it
    title: str
    place: int  # sections stand in the order of these numbers
    html: Callable[[Page], str] = lambda page: ""  # its content; a section without any is left out
    wants: Callable[[StudyResults], bool] = lambda study: True  # whether a study has what it shows
    # Name of a file of `confed report --figures` -> what draws it.
    figures: Mapping[str, Callable[[StudyResults], Drawing | None]] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Kind:
    """Words for a kind of data."""

    wants: Callable[[StudyResults], bool]  # whether a study has such data
    things: Callable[[StudyResults], str]  # what its examples are called, in the plural
    measured: Callable[[StudyResults], str]  # what is measured after the last round, in sentences
    model: str = "vision-language model"  # what is trained
    stays: str = "Pictures and "  # what never leaves a client beside the things
    metric: str = ""  # the headline metric; empty for that of the runs
    # Anchor of a section -> its title, where that is another.
    titles: Mapping[str, str] = field(default_factory=dict[str, str])
    glossary: Mapping[str, str] = field(default_factory=dict[str, str])  # further terms
    not_in_glossary: tuple[str, ...] = ()  # terms of other data
    default: bool = False  # whether it is for data that no other kind wants


def _declared(name: str) -> Iterator[Any]:
    """Everything of that name that modules of :mod:`confed.report.sections` declare."""
    package = importlib.import_module("confed.report.sections")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        yield from getattr(importlib.import_module(f"{package.__name__}.{module.name}"), name, ())


@cache
def sections() -> tuple[Section, ...]:
    """All sections in their order."""
    return tuple(sorted(_declared("SECTIONS"), key=lambda section: section.place))


def kind_of(study: StudyResults) -> Kind:
    """The kind of a study's data."""
    kinds = sorted(_declared("KINDS"), key=lambda kind: kind.default)
    return next(kind for kind in kinds if kind.wants(study))
