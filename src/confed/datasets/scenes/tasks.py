"""The preset "task": four clients with a task each, on plain pictures.

They stand in for the four datasets of FedDAT's benchmark Task: "vqa" for VQA-v2, "pairs" for NLVR2 (a statement about
two pictures), "entailment" for SNLI-VE (a statement about a picture, of which a cell is hidden here), "choice" for VCR
(four answers to choose from).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from confed.data.examples import Examples
from confed.data.refusals import refuse
from confed.data.seeding import generator
from confed.datasets.scenes.graph import CELLS, COLOURS, GRID, NOUNS, Object, Tags, objects, sample
from confed.datasets.scenes.making import UNIFORM, Knobs, Made, World, make
from confed.datasets.scenes.programs import NUMBERS, QUADRANTS, quadrant, total
from confed.datasets.scenes.questions import FAMILIES, WORDS, oracle
from confed.datasets.scenes.render import render_neutral

# Statements about two pictures, or about one of which a cell is hidden ----------------------------------------

VERDICTS = ("entailed", "contradicted", "neutral")
Forms = Mapping[str, tuple[str, ...]]

# C is a colour, N a noun, K a number, Q a quadrant; the order of the arguments is the order in the statement.
PAIRS: Forms = {
    "both": ("both pictures show a N", "each of the pictures shows a N"),
    "one": ("only one of the pictures shows a N", "one picture shows a N and the other does not"),
    "more": ("more C things are on the left than on the right", "the left picture shows more C things"),
    "total": ("the two pictures together show K C things", "there are K C things in the two pictures"),
}
ENTAILMENT: Forms = {
    "noun_at": ("there is a N in the Q", "a N is in the Q"),
    "color_at": ("there is a C thing in the Q", "a C thing is in the Q"),
    "at_least": ("at least K things are C", "there are at least K C things"),
    "at_most": ("at most K things are C", "there are at most K C things"),
}
ATTEMPTS = 12


class Statement(NamedTuple):
    """A family of statements and its arguments, in the order of the statement."""

    family: str
    arguments: tuple[str, ...]


def statement_words(*forms: Forms) -> set[str]:
    """The words of some statements, without what stands for an argument."""
    words: set[str] = set()
    for texts in chain.from_iterable(form.values() for form in forms):
        words.update(" ".join(texts).split())
    return words - set("CNKQ")


def say(statement: Statement, forms: Forms, paraphrase: int) -> str:
    """The statement as a sentence."""
    rest = list(statement.arguments)
    words = forms[statement.family][paraphrase].split()
    return " ".join(rest.pop(0) if word in set("CNKQ") else word for word in words)


def read(text: str, forms: Forms) -> Statement:
    """The statement that a sentence makes."""
    for words in QUADRANTS:
        text = text.replace(words, words.replace(" ", "-"))
    skeleton, arguments = [], []
    for word in text.split():
        letter = ""
        if word in COLOURS:
            letter = "C"
        elif word in NOUNS:
            letter = "N"
        elif word.isdigit():
            letter = "K"
        elif word.replace("-", " ") in QUADRANTS:
            letter = "Q"
        skeleton.append(letter or word)
        arguments += [word.replace("-", " ")] if letter else []
    shape = " ".join(skeleton)
    for family, texts in forms.items():
        if shape in texts:
            return Statement(family, tuple(arguments))
    refuse("a statement", "a form of the scenes benchmark", text)


def holds(statement: Statement, left: Sequence[Object], right: Sequence[Object]) -> bool:
    """Whether a statement about two pictures is true."""
    family, arguments = statement
    if family in ("both", "one"):
        nouns = [o.noun for o in left], [o.noun for o in right]
        return sum(arguments[0] in shown for shown in nouns) == (2 if family == "both" else 1)
    colour = arguments[-1]
    a, b = total(left, colour), total(right, colour)
    return a > b if family == "more" else a + b == int(arguments[0])


def entails(statement: Statement, visible: Sequence[Object], hidden: int) -> str:
    """Verdict of a picture with a hidden cell on a statement.

    In the hidden cell there may be nothing or any one thing: a verdict is "neutral" where that would decide.
    """
    family, arguments = statement
    if family.endswith("_at"):
        word, where = arguments
        if any(word in (o.noun, o.colour) and quadrant(o.cell) == where for o in visible):
            return "entailed"
        return "neutral" if quadrant(hidden) == where else "contradicted"
    number, colour = int(arguments[0]), arguments[1]
    count = total(visible, colour)  # the whole picture has as many, or one more
    if family == "at_least":
        if count >= number:
            return "entailed"
        return "neutral" if count + 1 >= number else "contradicted"
    if count > number:
        return "contradicted"
    return "neutral" if count + 1 > number else "entailed"


def propose_about_two(
    family: str, left: Sequence[Object], right: Sequence[Object], rng: np.random.Generator
) -> Statement:
    """A random statement about two pictures that mentions something in one of them."""
    one = (left, right)[int(rng.integers(2))]
    thing = one[int(rng.integers(len(one)))]
    if family in ("both", "one"):
        return Statement(family, (thing.noun,))
    if family == "more":
        return Statement(family, (thing.colour,))
    both = total((*left, *right), thing.colour)
    number = max(1, both + int(rng.integers(-1, 2)) * int(rng.integers(2)))
    return Statement(family, (str(min(number, 5)), thing.colour))


def propose_about_one(family: str, whole: Sequence[Object], hidden: int, rng: np.random.Generator) -> Statement:
    """A random statement about a picture with a hidden cell that mentions something in it, hidden or not."""
    thing = whole[int(rng.integers(len(whole)))]
    if family.endswith("_at"):
        cells = (thing.cell, hidden, int(rng.integers(GRID * GRID)))
        word = thing.noun if family == "noun_at" else thing.colour
        return Statement(family, (word, quadrant(cells[int(rng.integers(3))])))
    number = int(rng.integers(2, 4)) if family == "at_least" else int(rng.integers(1, 3))
    return Statement(family, (str(number), thing.colour))


class Even:
    """Balance of answers in a family: none exceeds its share by more than one, per argument by two."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.families: Counter[str] = Counter()
        self._of: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)

    def accepts(self, statement: Statement, answer: str) -> bool:
        """Whether one more statement with this answer keeps the family even; it is then counted."""
        family, arguments = statement
        whole = self._of[family,]
        parts = [self._of[family, str(position), word] for position, word in enumerate(arguments)]
        if self.answers * whole[answer] > whole.total():
            return False
        if any(self.answers * counts[answer] - counts.total() > 2 * self.answers for counts in parts):
            return False
        self.families[family] += 1
        for counts in (whole, *parts):
            counts[answer] += 1
        return True


# The preset "task": four clients with a task each, on plain pictures ------------------------------------------

CHOICES = 4
TASKS: Mapping[str, str] = {"pairs": "nlvr2", "entailment": "entailment", "choice": "choice"}
TASK_ANSWERS: Mapping[str, tuple[str, ...]] = {
    "pairs": ("false", "true"),
    "entailment": VERDICTS,
    "choice": tuple(str(k) for k in range(CHOICES)),
}
TASK_WORDS: tuple[str, ...] = (
    *WORDS,
    *sorted((statement_words(PAIRS, ENTAILMENT) | {"true", "false", *VERDICTS}) - set(WORDS)),
)
# What may be offered beside the right answer.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "qcolor": COLOURS, "rel": COLOURS, "qnoun": NOUNS, "qpos": QUADRANTS, "count": NUMBERS
}  # fmt: skip


def make_task(client: str, role: str, number: int, knobs: Knobs) -> Made:
    """``number`` examples of one client's task."""
    return _MAKERS[client](client, role, number, knobs)


def _vqa(client: str, role: str, number: int, knobs: Knobs, families: tuple[str, ...] = FAMILIES) -> Made:
    return make(World(families=families), role, number, knobs, client, stream=f"task {client}")


def _choice(client: str, role: str, number: int, knobs: Knobs) -> Made:
    """Questions with four answers each, of which those wrong are about other things in the picture where possible."""
    made = _vqa(client, role, number, knobs, tuple(_ALIKE))
    rng = generator(knobs.seed_of(role), "choices", role, client)
    examples = made.examples
    offered: list[tuple[str, ...]] = []
    places: list[str] = []
    rows = zip(examples.answers, examples.types, map(int, examples.image_index), strict=True)
    for row, (truth, family, picture) in enumerate(rows):
        graph = objects(made.tags, picture)
        wrong = [answer for answer in _ALIKE[family] if answer != truth]
        near = set(chain.from_iterable((o.colour, o.noun) for o in graph))
        luck = rng.random(len(wrong)) - np.array([0.5 * (answer in near) for answer in wrong])
        chosen = [wrong[i] for i in np.argsort(luck)[: CHOICES - 1]]
        place = row % CHOICES if row % (2 * CHOICES) < CHOICES else CHOICES - 1 - row % CHOICES
        chosen.insert(place, truth)
        offered.append(tuple(chosen))
        places.append(str(place))
    order = rng.permutation(len(examples))  # so that the place does not follow from the example's number
    return Made(replace(examples, answers=places, choices=offered).take(order), made.tags, _chosen)


def _chosen(examples: Examples, tags: Tags) -> list[str | None]:
    assert examples.choices is not None
    answers = oracle(examples.questions, examples.image_index, tags)
    pairs = zip(answers, examples.choices, strict=True)
    return [str(offered.index(answer)) if answer in offered else None for answer, offered in pairs]


def _pairs(client: str, role: str, number: int, knobs: Knobs) -> Made:
    """Statements about two pictures, two pictures for every few statements."""
    seed, even = knobs.seed_of(role), Even(2)
    graphs = sample(role, NOUNS, UNIFORM, generator(seed, "graphs", role, "task pairs"))
    rng = generator(seed, "questions", role, "task pairs")
    used: list[Tags] = []
    rows: list[tuple[tuple[int, int], Statement, str]] = []
    while len(rows) < number:
        both = [next(graphs), next(graphs)]
        left, right = (objects(tags, 0) for tags in both)
        verdicts = _ask(
            PAIRS, even, min(knobs.questions_per_picture, number - len(rows)), rng,
            partial(propose_about_two, left=left, right=right, rng=rng), partial(_verdict, left=left, right=right),
        )  # fmt: skip
        rows += [((len(used), len(used) + 1), statement, answer) for statement, answer in verdicts]
        used += both if verdicts else []
    tags = Tags.join(used)
    pictures = render_neutral(tags, generator(seed, "pixels", role, "task pairs"))
    return Made(_examples(client, role, pictures, rows, PAIRS, rng), tags, _true)


def _verdict(statement: Statement, left: Sequence[Object], right: Sequence[Object]) -> str:
    return str(holds(statement, left, right)).lower()


def _true(examples: Examples, tags: Tags) -> list[str | None]:
    return [
        _verdict(read(text, PAIRS), objects(tags, int(left)), objects(tags, int(right)))
        for text, (left, right) in zip(examples.questions, examples.image_index, strict=True)
    ]


def _entailment(client: str, role: str, number: int, knobs: Knobs) -> Made:
    """Statements about pictures with a hidden cell, in which half of the time something stands."""
    seed, even = knobs.seed_of(role), Even(3)
    graphs = sample(role, NOUNS, UNIFORM, generator(seed, "graphs", role, "task entailment"))
    rng = generator(seed, "questions", role, "task entailment")
    used: list[Tags] = []
    cells: list[int] = []
    rows: list[tuple[int, Statement, str]] = []
    while len(rows) < number:
        tags = next(graphs)
        whole = objects(tags, 0)
        hidden = whole[int(rng.integers(len(whole)))].cell if rng.random() < 0.5 else int(rng.integers(CELLS))
        visible = [o for o in whole if o.cell != hidden]
        verdicts = _ask(
            ENTAILMENT, even, min(knobs.questions_per_picture, number - len(rows)), rng,
            partial(propose_about_one, whole=whole, hidden=hidden, rng=rng),
            partial(entails, visible=visible, hidden=hidden),
        )  # fmt: skip
        if verdicts:
            rows += [(len(used), statement, answer) for statement, answer in verdicts]
            used.append(tags)
            cells.append(hidden)
    where = np.array(cells, dtype=np.int64)
    tags = _without(Tags.join(used), where)
    pictures = hide(render_neutral(tags, generator(seed, "pixels", role, "task entailment")), where)

    def oracle(examples: Examples, tags: Tags) -> list[str | None]:
        index = map(int, examples.image_index)
        return [
            entails(read(text, ENTAILMENT), objects(tags, picture), int(where[picture]))
            for text, picture in zip(examples.questions, index, strict=True)
        ]

    return Made(_examples(client, role, pictures, rows, ENTAILMENT, rng), tags, oracle)


def _ask(
    forms: Mapping[str, tuple[str, ...]],
    even: Even,
    wanted: int,
    rng: np.random.Generator,
    propose: Callable[[str], Statement],
    judge: Callable[[Statement], str],
) -> list[tuple[Statement, str]]:
    """Up to ``wanted`` different statements with their verdicts; families asked least so far come first."""
    luck = rng.random(len(forms))
    turn = {family: even.families[family] + 2 * chance for family, chance in zip(forms, luck, strict=True)}
    verdicts: dict[Statement, str] = {}
    for family in sorted(forms, key=turn.__getitem__):
        for _ in range(ATTEMPTS if len(verdicts) < wanted else 0):
            statement = propose(family)
            answer = judge(statement)
            if statement not in verdicts and even.accepts(statement, answer):
                verdicts[statement] = answer
                break
    return list(verdicts.items())


def _examples(
    client: str,
    role: str,
    pictures: np.ndarray,
    rows: "list[tuple[int, Statement, str]] | list[tuple[tuple[int, int], Statement, str]]",
    forms: Mapping[str, tuple[str, ...]],
    rng: np.random.Generator,
) -> Examples:
    texts = [say(statement, forms, int(rng.integers(len(forms[statement.family])))) for _, statement, _ in rows]
    return Examples(
        pictures,
        np.array([index for index, _, _ in rows], dtype=np.int64),
        texts,
        [answer for _, _, answer in rows],
        [statement.family for _, statement, _ in rows],
        [f"{client}/{role}/{i:06d}" for i in range(len(rows))],
    )


def _without(tags: Tags, cells: np.ndarray) -> Tags:
    """The pictures without what stands in one cell of each."""
    keep = np.arange(CELLS) != cells[:, None]
    return Tags(tags.noun * keep, tags.colour * keep, tags.size * keep)


def hide(pictures: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Pictures with a dark, crossed square over one cell each."""
    side = pictures.shape[1] // GRID
    y, x = np.mgrid[0:side, 0:side]
    cross = (np.abs(x - y) < 1.5) | (np.abs(x + y - side + 1) < 1.5)
    square = np.where(cross[..., None], 90, 20).astype(np.uint8)
    hidden = pictures.copy()
    for picture, cell in enumerate(map(int, cells)):
        row, column = side * (cell // GRID), side * (cell % GRID)
        hidden[picture, row : row + side, column : column + side] = square
    return hidden


_MAKERS: Mapping[str, Callable[[str, str, int, Knobs], Made]] = {
    "vqa": _vqa,
    "pairs": _pairs,
    "entailment": _entailment,
    "choice": _choice,
}
TASK_CLIENTS = tuple(_MAKERS)
