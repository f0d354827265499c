"""Programs that questions stand for, and their exact execution on scene graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from confed.data.refusals import check_choice
from confed.datasets.scenes.graph import GRID, Object

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = tuple(str(n) for n in range(6))


class Program(NamedTuple):
    """A question family and its arguments (colours or nouns, in the order of the question)."""

    family: str
    arguments: tuple[str, ...]


def execute(program: Program, graph: Sequence[Object]) -> str | None:
    """The program's answer on a scene graph, or None where it has none."""
    family, arguments = program
    check_choice("a question family", family, _PROGRAMS)
    return _PROGRAMS[family](graph, *arguments)


def _exist(graph: Sequence[Object], colour: str, noun: str) -> str:
    return _yes(any(o.colour == colour and o.noun == noun for o in graph))


def _count(graph: Sequence[Object], colour: str) -> str | None:
    number = str(total(graph, colour))
    return number if number in NUMBERS else None


def _qcolor(graph: Sequence[Object], noun: str) -> str | None:
    thing = _only(graph, noun)
    return thing and thing.colour


def _qsize(graph: Sequence[Object], noun: str) -> str | None:
    thing = _only(graph, noun)
    return thing and thing.size


def _qnoun(graph: Sequence[Object], colour: str) -> str | None:
    nouns = [o.noun for o in graph if o.colour == colour]
    return nouns[0] if len(nouns) == 1 else None


def _qpos(graph: Sequence[Object], noun: str) -> str | None:
    thing = _only(graph, noun)
    return thing and quadrant(thing.cell)


def _morethan(graph: Sequence[Object], first: str, second: str) -> str:
    return _yes(total(graph, first) > total(graph, second))


def _same(graph: Sequence[Object], first: str, second: str) -> str | None:
    a, b = _only(graph, first), _only(graph, second)
    return None if a is None or b is None else _yes(a.colour == b.colour)


def _rel(graph: Sequence[Object], noun: str) -> str | None:
    thing = _only(graph, noun)
    if thing is None or thing.cell % GRID == GRID - 1:
        return None
    return next((o.colour for o in graph if o.cell == thing.cell + 1), None)


_PROGRAMS: Mapping[str, Callable[..., str | None]] = {
    "exist": _exist,
    "count": _count,
    "qcolor": _qcolor,
    "qsize": _qsize,
    "qnoun": _qnoun,
    "qpos": _qpos,
    "morethan": _morethan,
    "same": _same,
    "rel": _rel,
}


def _only(graph: Sequence[Object], noun: str) -> Object | None:
    things = [o for o in graph if o.noun == noun]
    return things[0] if len(things) == 1 else None


def total(graph: Sequence[Object], colour: str) -> int:
    """Number of things of a colour."""
    return sum(o.colour == colour for o in graph)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def quadrant(cell: int) -> str:
    """Quarter of the picture in which a cell lies."""
    row, column = divmod(cell, GRID)
    return QUADRANTS[2 * (row >= GRID // 2) + (column >= GRID // 2)]
