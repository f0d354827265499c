"""Questions as functional programs: templates, exact executor, random instantiation under balance rules.

A program is a family and its arguments; :func:`execute` runs it on a scene graph and returns the answer, or
None where the question has none (its object is missing or not unique). Asking only questions with an
answer, and balancing answers by rejection, follows CLEVR (Johnson et al., CVPR 2017, section 3 and
supplement).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from confed.data.refusals import check_choice, refuse
from confed.datasets.scenes.graph import COLOURS, GRID, NOUNS, SIZES, Object, Tags, objects

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = tuple(str(n) for n in range(6))


class Program(NamedTuple):
    """A family of questions or statements and its arguments, in the order of the text."""

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


# Questions as functional programs: templates, exact executor, random instantiation under balance rule --------

ANSWERS: tuple[str, ...] = ("yes", "no", *NUMBERS, *COLOURS, *SIZES, *QUADRANTS, *NOUNS)

# C and D stand for colours, N and M for nouns; in statements K for a number and Q for a quadrant. The order of the
# arguments is the order in the text.
_LETTERS = frozenset("CDNMKQ")
_LETTER_OF: Mapping[str, str] = {
    **dict.fromkeys(COLOURS, "C"), **dict.fromkeys(NOUNS, "N"), **dict.fromkeys(NUMBERS, "K"),
    **dict.fromkeys(QUADRANTS, "Q"),
}  # fmt: skip
Templates = Mapping[str, tuple[str, ...]]
"""Family -> its wordings."""
TEMPLATES: Templates = {
    "exist": ("is there a C N?", "is there a C N in the picture?", "can you see a C N?"),
    "count": ("how many things are C?", "how many C things are there?", "how many C things can you see?"),
    "qcolor": ("what color is the N?", "what is the color of the N?", "which color does the N have?"),
    "qsize": ("what size is the N?", "what is the size of the N?", "how large is the N?"),
    "qnoun": ("what is the C thing?", "what thing is C?", "what is the name of the C thing?"),
    "qpos": ("where is the N?", "where can you see the N?", "in what part of the picture is the N?"),
    "morethan": ("are there more C things than D things?", "can you see more C things than D things?"),
    "same": ("is the N the same color as the M?", "are the N and the M the same color?",
             "do the N and the M have the same color?"),
    "rel": ("what color is the thing right of the N?", "what is the color of the thing right of the N?",
            "what color is the thing to the right of the N?"),
}  # fmt: skip
FAMILIES = tuple(TEMPLATES)
TYPE_NAMES: Mapping[str, str] = {
    "exist": "is it there",
    "count": "how many",
    "qcolor": "which color",
    "qsize": "which size",
    "qnoun": "which thing",
    "qpos": "where",
    "morethan": "more of which",
    "same": "the same color",
    "rel": "color of the thing beside it",
}
"""Family -> what it asks, for reports."""
BINARY = ("exist", "qsize", "morethan", "same")
COUNT_CAP = 0.36

# Ten words as a Scots speaker writes them: none of them occurs in the public split.
WORDING_SHIFT: Mapping[str, str] = {
    "what": "whit",
    "which": "whilk",
    "how": "hoo",
    "many": "mony",
    "where": "whaur",
    "there": "thare",
    "more": "mair",
    "same": "samin",
    "right": "richt",
    "color": "colour",
}
_PLAIN = {dialect: word for word, dialect in WORDING_SHIFT.items()}


def words_of(templates: Templates) -> set[str]:
    """The words of some templates, without what stands for an argument."""
    forms = chain.from_iterable(templates.values())
    return set(" ".join(form.rstrip("?") for form in forms).split()) - _LETTERS


def _words() -> tuple[str, ...]:
    plain = words_of(TEMPLATES)
    answers = set(chain.from_iterable(answer.split() for answer in ANSWERS))
    return tuple(sorted(plain | answers)) + tuple(sorted(WORDING_SHIFT.values()))


WORDS: tuple[str, ...] = _words()


def phrase(program: Program, paraphrase: int, shifted: bool = False, templates: Templates = TEMPLATES) -> str:
    """The program as a question, or as a statement."""
    rest, template = list(program.arguments), templates[program.family][paraphrase]
    words = []
    for word in template.rstrip("?").split():
        plain = rest.pop(0) if word in _LETTERS else word
        words.append(WORDING_SHIFT.get(plain, plain) if shifted else plain)
    return " ".join(words) + ("?" if template.endswith("?") else "")


def skeletons(templates: Templates) -> dict[str, str]:
    """Template whose letters do not tell two arguments of a kind apart -> its family."""
    table: dict[str, str] = {}
    for family, forms in templates.items():
        for template in forms:
            table[template.replace("D", "C").replace("M", "N")] = family
    return table


_FAMILY_OF = skeletons(TEMPLATES)


def parse(text: str, family_of: Mapping[str, str] = _FAMILY_OF) -> Program:
    """The program that a question (in either wording) or a statement stands for."""
    joined = text.rstrip("?")
    for words in QUADRANTS:
        joined = joined.replace(words, words.replace(" ", "-"))
    skeleton, arguments = [], []
    for word in joined.split():
        plain = _PLAIN.get(word, word).replace("-", " ")
        letter = _LETTER_OF.get(plain)
        skeleton.append(letter or plain)
        arguments += [plain] if letter else []
    family = family_of.get(" ".join(skeleton) + ("?" if text.endswith("?") else ""))
    if family is None:
        refuse("a text", "a template of the scenes benchmark", text)
    return Program(family, tuple(arguments))


def oracle(
    questions: Sequence[str], image_index: np.ndarray, tags: Tags, templates: Templates = TEMPLATES
) -> list[str | None]:
    """Answers from question text and scene graphs alone: the ceiling of every model."""
    family_of = _FAMILY_OF if templates is TEMPLATES else skeletons(templates)
    graphs: dict[int, tuple[Object, ...]] = {}
    answers = []
    for question, picture in zip(questions, map(int, image_index), strict=True):
        if picture not in graphs:
            graphs[picture] = objects(tags, picture)
        answers.append(execute(parse(question, family_of), graphs[picture]))
    return answers


class Balance:
    """Balance of answers within each family of questions."""

    def __init__(self) -> None:
        self.families: Counter[str] = Counter()
        self._answers: dict[str, Counter[str]] = defaultdict(Counter)
        self._arguments: dict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)

    def accepts(self, program: Program, answer: str) -> bool:
        """Whether one more question with this answer keeps the family balanced."""
        family, arguments = program
        counts, total = self._answers[family], self.families[family]
        if family == "count":
            early = 1 if total < 3 else 2
            return counts[answer] + 1 <= max(COUNT_CAP * (total + 1), early if total < 6 else 0)
        if family not in BINARY:
            return True
        if 2 * counts[answer] > total:
            return False
        for position, word in enumerate(arguments):
            seen = self._arguments[family, position, word]
            if 2 * seen[answer] - seen.total() > 2:
                return False
        return True

    def add(self, program: Program, answer: str, times: int = 1) -> None:
        """Count of a question that was asked; ``times=-1`` removes it."""
        self.families[program.family] += times
        self._answers[program.family][answer] += times
        for position, word in enumerate(program.arguments):
            self._arguments[program.family, position, word][answer] += times


class Asked(NamedTuple):
    """One question of a picture, with its program."""

    program: Program
    answer: str
    question: str


ATTEMPTS = 8
Option = TypeVar("Option")


def ask(
    graph: Sequence[Object],
    number: int,
    balance: Balance,
    *,
    nouns: Sequence[str],
    prior: np.ndarray,
    shifted: bool,
    rng: np.random.Generator,
    families: Sequence[str] = FAMILIES,
    templates: Templates = TEMPLATES,
) -> list[Asked] | None:
    """``number`` different questions about one picture, or None where the balance rules leave too few."""
    luck = rng.random(len(families))
    turn = {family: balance.families[family] + 4 * chance for family, chance in zip(families, luck, strict=True)}
    chosen: dict[Program, Asked] = {}
    for family in sorted(families, key=turn.__getitem__) * 2:  # a second pass where one of each is not enough
        for _ in range(ATTEMPTS):
            if len(chosen) == number:
                break
            program = _propose(family, graph, nouns, prior, rng)
            answer = None if program is None else execute(program, graph)
            if program is None or answer is None or program in chosen or not balance.accepts(program, answer):
                continue
            question = phrase(program, int(rng.integers(len(templates[family]))), shifted, templates)
            chosen[program] = Asked(program, answer, question)
            balance.add(program, answer)
            break
    if len(chosen) == number:
        return list(chosen.values())
    for program, answer, _ in chosen.values():
        balance.add(program, answer, -1)
    return None


def _propose(
    family: str, graph: Sequence[Object], nouns: Sequence[str], prior: np.ndarray, rng: np.random.Generator
) -> Program | None:
    """A random program that is likely to have an answer; its colours follow the scene's prior."""
    chosen, other = _choose(graph, rng), _choose(graph, rng)
    if family == "exist":
        return Program(family, _described(chosen, other, nouns, prior, rng))
    if family == "count":
        return Program(family, (_colour(chosen, prior, rng),))
    if family == "qnoun":
        return Program(family, (chosen.colour,))
    if family in {"morethan", "same"}:
        both = (chosen.noun, other.noun)
        if family == "morethan":
            both = (_colour(chosen, prior, rng), _colour(other, prior, rng))
        return Program(family, both) if both[0] != both[1] else None
    return Program(family, (chosen.noun,))


def _described(
    chosen: Object, other: Object, nouns: Sequence[str], prior: np.ndarray, rng: np.random.Generator
) -> tuple[str, str]:
    if rng.random() < 0.5:
        return chosen.colour, chosen.noun
    # A colour and a noun that are both there, but on different things, are the hard negatives.
    noun = other.noun if rng.random() < 0.5 else _choose(nouns, rng)
    return _colour(chosen, prior, rng), noun


def _choose(options: Sequence[Option], rng: np.random.Generator) -> Option:
    return options[int(rng.integers(len(options)))]


def _colour(chosen: Object, prior: np.ndarray, rng: np.random.Generator) -> str:
    if rng.random() < 0.75:
        return chosen.colour
    return COLOURS[min(int(np.searchsorted(np.cumsum(prior), rng.random(), side="right")), len(COLOURS) - 1)]
