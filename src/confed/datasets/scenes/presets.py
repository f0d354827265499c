"""Presets of the built-in benchmark: the clients and their data.

They stand in for the four datasets of FedDAT's benchmark Task: "vqa" for VQA-v2, "pairs" for NLVR2 (a statement about
two pictures), "entailment" for SNLI-VE (a statement about a picture, of which a cell is hidden here), "choice" for VCR
(four answers to choose from).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.refusals import refuse
from confed.data.seeding import generator
from confed.datasets.scenes.domains import DOMAIN_WORDS, DOMAINS, make_domain
from confed.datasets.scenes.graph import (
    CELLS,
    COLOURS,
    GRID,
    NOUNS,
    SCENES,
    Object,
    Tags,
    colour_prior,
    objects,
    sample,
)
from confed.datasets.scenes.making import (
    ROLES,
    UNIFORM,
    Clients,
    Knobs,
    Made,
    World,
    make,
    make_neutral,
    make_scene,
    own_answers,
    scene_answers,
)
from confed.datasets.scenes.questions import (
    ANSWERS,
    FAMILIES,
    NUMBERS,
    QUADRANTS,
    TYPE_NAMES,
    WORDING_SHIFT,
    WORDS,
    Program,
    Templates,
    oracle,
    parse,
    phrase,
    quadrant,
    skeletons,
    total,
    words_of,
)
from confed.datasets.scenes.render import render_neutral

# Statements about two pictures, or about one of which a cell is hidden ----------------------------------------

VERDICTS = ("entailed", "contradicted", "neutral")
PAIRS: Templates = {
    "both": ("both pictures show a N", "each of the pictures shows a N"),
    "one": ("only one of the pictures shows a N", "one picture shows a N and the other does not"),
    "more": ("more C things are on the left than on the right", "the left picture shows more C things"),
    "total": ("the two pictures together show K C things", "there are K C things in the two pictures"),
}
ENTAILMENT: Templates = {
    "noun_at": ("there is a N in the Q", "a N is in the Q"),
    "color_at": ("there is a C thing in the Q", "a C thing is in the Q"),
    "at_least": ("at least K things are C", "there are at least K C things"),
    "at_most": ("at most K things are C", "there are at most K C things"),
}
_PAIR_FAMILIES, _ENTAILMENT_FAMILIES = skeletons(PAIRS), skeletons(ENTAILMENT)
ATTEMPTS = 12


def holds(statement: Program, left: Sequence[Object], right: Sequence[Object]) -> bool:
    """Whether a statement about two pictures is true."""
    family, arguments = statement
    if family in ("both", "one"):
        nouns = [o.noun for o in left], [o.noun for o in right]
        return sum(arguments[0] in shown for shown in nouns) == (2 if family == "both" else 1)
    colour = arguments[-1]
    a, b = total(left, colour), total(right, colour)
    return a > b if family == "more" else a + b == int(arguments[0])


def entails(statement: Program, visible: Sequence[Object], hidden: int) -> str:
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
) -> Program:
    """A random statement about two pictures that mentions something in one of them."""
    one = (left, right)[int(rng.integers(2))]
    thing = one[int(rng.integers(len(one)))]
    if family in ("both", "one"):
        return Program(family, (thing.noun,))
    if family == "more":
        return Program(family, (thing.colour,))
    both = total((*left, *right), thing.colour)
    number = max(1, both + int(rng.integers(-1, 2)) * int(rng.integers(2)))
    return Program(family, (str(min(number, 5)), thing.colour))


def propose_about_one(family: str, whole: Sequence[Object], hidden: int, rng: np.random.Generator) -> Program:
    """A random statement about a picture with a hidden cell that mentions something in it, hidden or not."""
    thing = whole[int(rng.integers(len(whole)))]
    if family.endswith("_at"):
        cells = (thing.cell, hidden, int(rng.integers(GRID * GRID)))
        word = thing.noun if family == "noun_at" else thing.colour
        return Program(family, (word, quadrant(cells[int(rng.integers(3))])))
    number = int(rng.integers(2, 4)) if family == "at_least" else int(rng.integers(1, 3))
    return Program(family, (str(number), thing.colour))


class Even:
    """Balance of answers in a family: none exceeds its share by more than one, per argument by two."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.families: Counter[str] = Counter()
        self._of: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)

    def accepts(self, statement: Program, answer: str) -> bool:
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
    *sorted((words_of(PAIRS) | words_of(ENTAILMENT) | {"true", "false", *VERDICTS}) - set(WORDS)),
)
# What may be offered beside the right answer.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "qcolor": COLOURS, "rel": COLOURS, "qnoun": NOUNS, "qpos": QUADRANTS, "count": NUMBERS
}  # fmt: skip


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
    rows: list[tuple[tuple[int, int], Program, str]] = []
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


def _verdict(statement: Program, left: Sequence[Object], right: Sequence[Object]) -> str:
    return str(holds(statement, left, right)).lower()


def _true(examples: Examples, tags: Tags) -> list[str | None]:
    return [
        _verdict(parse(text, _PAIR_FAMILIES), objects(tags, int(left)), objects(tags, int(right)))
        for text, (left, right) in zip(examples.questions, examples.image_index, strict=True)
    ]


def _entailment(client: str, role: str, number: int, knobs: Knobs) -> Made:
    """Statements about pictures with a hidden cell, in which half of the time something stands."""
    seed, even = knobs.seed_of(role), Even(3)
    graphs = sample(role, NOUNS, UNIFORM, generator(seed, "graphs", role, "task entailment"))
    rng = generator(seed, "questions", role, "task entailment")
    used: list[Tags] = []
    cells: list[int] = []
    rows: list[tuple[int, Program, str]] = []
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
            entails(parse(text, _ENTAILMENT_FAMILIES), objects(tags, picture), int(where[picture]))
            for text, picture in zip(examples.questions, index, strict=True)
        ]

    return Made(_examples(client, role, pictures, rows, ENTAILMENT, rng), tags, oracle)


def _ask(
    forms: Templates,
    even: Even,
    wanted: int,
    rng: np.random.Generator,
    propose: Callable[[str], Program],
    judge: Callable[[Program], str],
) -> list[tuple[Program, str]]:
    """Up to ``wanted`` different statements with their verdicts; families asked least so far come first."""
    luck = rng.random(len(forms))
    turn = {family: even.families[family] + 2 * chance for family, chance in zip(forms, luck, strict=True)}
    verdicts: dict[Program, str] = {}
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
    rows: "list[tuple[int, Program, str]] | list[tuple[tuple[int, int], Program, str]]",
    forms: Templates,
    rng: np.random.Generator,
) -> Examples:
    texts: list[str] = []
    for _, statement, _ in rows:
        texts.append(phrase(statement, int(rng.integers(len(forms[statement.family]))), templates=forms))
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


# The preset "function": plain pictures, and one kind of question per client -----------------------------------

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "object": ("qnoun",),
    "attribute": ("qcolor", "qsize"),
    "relation": ("qpos", "rel"),
    "logic": ("exist", "same", "morethan"),
    "number": ("count",),
}
"""Client -> the families of its questions."""
# With all colours alike, hardly anything would be there more than once; half of the colours make counting worth while.
_FEW = np.where(np.arange(len(COLOURS)) % 2 == 0, 0.22, 0.03)


def make_function(function: str, role: str, number: int, knobs: Knobs, label: str, stream: str, seen: set[int]) -> Made:
    """``number`` questions of a function's families about plain pictures."""
    world = World(prior=_FEW if function == "number" else UNIFORM, families=FUNCTIONS[function])
    return make(world, role, number, knobs, label, stream=f"function {stream}", seen=seen)


# Presets of the built-in benchmark: the clients and their data ------------------------------------------------

UNSEEN_SIZE = 1000
UNSEEN = ("home", "commercial")
MIN_QUANTITY = 64
POOL = 100


def _scene(knobs: Knobs) -> Clients:
    """A client per scene, or several: one style, but each with its own colours and with pictures of its own."""
    taking_part = [scene for scene in SCENES if scene not in knobs.unseen]
    if knobs.clients_per_scene == 1:
        return _sharded(taking_part, _shard_of_scene, knobs)
    made: Clients = {}
    for scene in taking_part:
        names = [f"{scene}-{number}" for number in range(1, knobs.clients_per_scene + 1)]
        used: dict[str, set[int]] = {role: set() for role in ROLES}  # clients of a scene never share a graph
        for name in names:
            made[name] = {role: make_scene(scene, role, knobs.size(role), knobs, name, used[role]) for role in ROLES}
    return made


def _shard_of_scene(scene: str, role: str, number: int, knobs: Knobs, label: str, stream: str, seen: set[int]) -> Made:
    return make_scene(scene, role, number, knobs, label, seen, stream, colour_prior(scene, knobs.test_seed))


def _dirichlet(knobs: Knobs) -> Clients:
    """Answers per client from q ~ Dirichlet(alpha p), p the pooled answer shares (Hsu et al. 2019)."""
    pools = {role: make_neutral(role, knobs.clients * knobs.size(role), knobs) for role in ROLES}
    share = Counter(pools["test"].examples.answers)
    p = np.array([share[answer] for answer in ANSWERS], dtype=float)
    p = np.maximum(p / p.sum(), 1e-3)
    rng = generator(knobs.test_seed, "dirichlet")
    q = [rng.dirichlet(np.maximum(knobs.alpha * p / p.sum(), 1e-3)) for _ in range(knobs.clients)]
    rows = {role: _draw(pools[role].examples, q, knobs.size(role), knobs.seed_of(role), role) for role in ROLES}
    return _deal(pools, rows)


def _draw(pool: Examples, q: Sequence[np.ndarray], number: int, seed: int, role: str) -> list[list[int]]:
    """Rows per client, without replacement; clients draw in random turns, so no client gets leftovers only."""
    rng = generator(seed, "partition", role)
    stock: dict[str, list[int]] = defaultdict(list)
    for row in map(int, rng.permutation(len(pool))):
        stock[pool.answers[row]].append(row)
    left = np.array([len(stock[answer]) > 0 for answer in ANSWERS])
    rows: list[list[int]] = [[] for _ in q]
    for client in rng.permutation(np.repeat(np.arange(len(q)), number)):
        weights = np.where(left, q[client] + 1e-9, 0)
        position = int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right"))
        position = min(position, int(np.flatnonzero(left)[-1]))
        answer = ANSWERS[position]
        rows[client].append(stock[answer].pop())
        left[position] = len(stock[answer]) > 0
    return rows


def _quantity(knobs: Knobs) -> Clients:
    """Log-normal training sizes around the setting's, at least 64; validation and test sets of equal size."""
    weight = generator(knobs.test_seed, "quantity").lognormal(0.0, 1.0, knobs.clients)
    sizes = np.maximum(weight / weight.sum() * knobs.clients * knobs.train, MIN_QUANTITY).astype(int)
    want = {role: sizes if role == "train" else np.full(knobs.clients, knobs.size(role)) for role in ROLES}
    pools = {role: make_neutral(role, int(want[role].sum()), knobs) for role in ROLES}
    rows = {}
    for role in ROLES:
        order = generator(knobs.seed_of(role), "partition", role).permutation(len(pools[role].examples))
        rows[role] = [client_rows.tolist() for client_rows in np.split(order, np.cumsum(want[role])[:-1])]
    return _deal(pools, rows)


def _random(knobs: Knobs) -> Clients:
    """As many questions for every client, dealt at random picture by picture, so that no picture has two clients."""
    each = knobs.questions_per_picture
    pools: dict[str, Made] = {}
    rows: dict[str, list[list[int]]] = {}
    for role in ROLES:
        size = knobs.size(role)
        client_pictures = -(-size // each)  # of which the last may have questions that are not asked
        pools[role] = make_neutral(role, knobs.clients * client_pictures * each, knobs)
        order = generator(knobs.seed_of(role), "partition", role).permutation(knobs.clients * client_pictures)
        dealt = (order[:, None] * each + np.arange(each)).reshape(knobs.clients, -1)
        rows[role] = dealt[:, :size].tolist()
    return _deal(pools, rows)


def _deal(pools: Mapping[str, Made], rows: Mapping[str, list[list[int]]]) -> Clients:
    clients = len(rows["train"])
    width = max(2, len(str(clients)))
    dealt: Clients = {}
    for k in range(clients):
        client = f"client-{k + 1:0{width}d}"
        dealt[client] = {}
        for role in ROLES:
            mixed = pools[role].examples.take(rows[role][k])
            used, index = np.unique(mixed.image_index, return_inverse=True)  # a client holds only its own pictures
            names = [f"{client}/{role}/{i:06d}" for i in range(len(mixed))]
            examples = replace(mixed, images=mixed.images[used], image_index=index, names=names)
            dealt[client][role] = Made(examples, pools[role].tags.take(used))
    return dealt


Maker = Callable[[str, str, int, Knobs, str, str, set[int]], Made]
"""Unit (scene, function, domain), role, how many, options, names of examples and streams, graphs used -> examples."""


def _sharded(units: Sequence[str], make: Maker, knobs: Knobs) -> Clients:
    """Some shards of each unit (scene, function, domain) as clients of their own."""
    made: Clients = {}
    for unit in units:
        used: dict[str, set[int]] = {role: set() for role in ROLES}  # shards never share a graph
        for number in range(1, knobs.shards + 1):
            name = unit if knobs.shards == 1 else f"{unit}-{number}"
            stream = unit if number == 1 else f"{unit}-{number}"
            made[name] = {role: make(unit, role, knobs.size(role), knobs, name, stream, used[role]) for role in ROLES}
    return made


def _task(knobs: Knobs) -> Clients:
    made: Clients = {}
    for name in TASK_CLIENTS:
        made[name] = {role: _MAKERS[name](name, role, knobs.size(role), knobs) for role in ROLES}
    return made


@dataclass(frozen=True)
class Preset:
    """A way in which clients differ; ``pools``, ``unseen`` and ``wording`` are defaults."""

    make: Callable[[Knobs], Clients]
    pools: int = 0
    unseen: tuple[str, ...] = ()
    styled: bool = True
    divisible: bool = False
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    words: tuple[str, ...] = WORDS
    wording: bool | None = None


PRESETS: Mapping[str, Preset] = {
    "scene": Preset(_scene, unseen=UNSEEN, divisible=True),
    "dirichlet": Preset(_dirichlet, unseen=UNSEEN),
    "quantity": Preset(_quantity, unseen=UNSEEN),
    "random": Preset(_random, styled=False, wording=False),
    "domain": Preset(partial(_sharded, tuple(DOMAINS), make_domain), POOL, divisible=True, words=DOMAIN_WORDS),
    "function": Preset(partial(_sharded, tuple(FUNCTIONS), make_function), POOL, styled=False, divisible=True),
    "task": Preset(_task, POOL, styled=False, tasks=TASKS, fixed=TASK_ANSWERS, words=TASK_WORDS),
}


def assemble(preset: str, knobs: Knobs) -> FederatedDataset:
    """The dataset of a preset, with its facts."""
    kind = PRESETS[preset]
    clients, pools = kind.make(knobs), {}
    size = kind.pools if knobs.pools is None else knobs.pools
    if size:
        pools = {name: kind.fixed.get(name) or _pool(made["train"].examples, size) for name, made in clients.items()}
        clients = {name: _inside(name, made, pools[name]) for name, made in clients.items()}
    vocabulary = _vocabulary(kind, knobs, clients, pools)
    if kind.pools and not size:
        clients = {name: _inside(name, made, vocabulary) for name, made in clients.items()}
    unseen = {s: make_scene(s, "test", UNSEEN_SIZE, knobs) for s in SCENES if s in knobs.unseen}
    facts = {**_shifts(knobs, kind), **describe(clients, unseen)}
    if pools:
        facts["pools"] = ", ".join(f"{name} {len(pool)} answers" for name, pool in pools.items())
    typed = _by_answer if knobs.types == "answers" else _as_made
    splits: dict[str, Split] = {}
    for name, made in clients.items():
        splits[name] = Split(*(typed(made[role].examples) for role in ROLES))
    return FederatedDataset(
        name="scenes",
        answers=vocabulary,
        clients=splits,
        unseen={scene: typed(made.examples) for scene, made in unseen.items()},
        words=kind.words,
        facts=facts,
        answer_sets=pools,
        tasks=kind.tasks,
        type_names=TYPE_NAMES,
        ceilings=_ceilings({**{name: made["test"] for name, made in clients.items()}, **unseen}),
    )


def _ceilings(tests: Mapping[str, Made]) -> dict[str, float]:
    """Place -> share of its test answers that follow from question and scene graph; not where several people answer."""
    plain = {place: made for place, made in tests.items() if made.examples.annotations is None}
    return {place: float(np.mean(made.right())) for place, made in plain.items()}


def _vocabulary(kind: Preset, knobs: Knobs, clients: Clients, pools: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """All answers: of the clients' answer sets, of all training answers where these stand for them, or plain ones."""
    if pools:
        return tuple(dict.fromkeys(chain.from_iterable(pools.values())))
    if kind.pools:
        return tuple(sorted(set(chain.from_iterable(made["train"].examples.answers for made in clients.values()))))
    if not knobs.own_answers:
        return ANSWERS
    answers_of_scene = {scene: own_answers(scene, knobs.own_answers, knobs.test_seed) for scene in SCENES}
    plain: set[str] = set()
    for scene, renamed in answers_of_scene.items():
        plain |= {*scene_answers(scene)} - renamed.keys()
    others = chain.from_iterable(renamed.values() for renamed in answers_of_scene.values())
    return (*(answer for answer in ANSWERS if answer in plain), *others)


def _as_made(examples: Examples) -> Examples:
    return examples


def _by_answer(examples: Examples) -> Examples:
    """The same questions with VQA's answer types as question types."""
    kinds = {"yes": "yes/no", "no": "yes/no"}
    types = [kinds.get(answer, "number" if answer.isdigit() else "other") for answer in examples.answers]
    return replace(examples, types=types)


def _pool(train: Examples, size: int) -> tuple[str, ...]:
    """The most frequent training answers, most frequent first, then by the alphabet."""
    counts = Counter(train.answers)
    return tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:size])


def _inside(client: str, made: Mapping[str, Made], answers: Sequence[str]) -> dict[str, Made]:
    """A client's examples whose answer is in its answer set; the others are left out, as FedDAT's loader does."""
    inside: dict[str, Made] = {}
    for role, role_examples in made.items():
        rows = [row for row, answer in enumerate(role_examples.examples.answers) if answer in answers]
        if not rows:
            expected = f"an answer out of {', '.join(answers)} to a {role} question"
            refuse(f"client {client!r}", expected, found="none", remedy="raise data.pools, or the number of examples")
        whole = len(rows) == len(role_examples.examples)
        inside[role] = role_examples if whole else replace(role_examples, examples=role_examples.examples.take(rows))
    return inside


def _shifts(knobs: Knobs, kind: Preset) -> dict[str, str]:
    """Notes for readers of the questions and pictures."""
    facts: dict[str, str] = {}
    if knobs.wording:
        examples = ", ".join(f"{old} is {new}" for old, new in list(WORDING_SHIFT.items())[:4])
        facts["wording"] = (
            f"ten words of every client's questions are put into Scots ({examples}); the backbone has never read them"
        )
    if knobs.own_answers:
        facts["answers"] = (
            f"each scene gives {100 * knobs.own_answers:.0f} % of its answers, but yes and no, in words of its own"
        )
    if knobs.conflict and kind.styled:
        facts["colours"] = (
            f"each scene turns the colour wheel its own way (severity {knobs.conflict:g}): clients disagree about names"
        )
    return facts


def describe(clients: Mapping[str, Mapping[str, Made]], unseen: Mapping[str, Made]) -> dict[str, str]:
    """Counts, floors and ceiling in words.

    The majority floor answers with the most frequent training answer of the question's family, the blind
    floor with that of the very same question (of its family where training never asked it); an unseen scene
    is answered from all clients' training questions. The ceiling runs the programs on the scene graphs.
    """
    facts: dict[str, str] = {}
    for client, made in clients.items():
        sizes = ", ".join(f"{len(made[role].examples)} {role}" for role in ROLES)
        facts[client] = f"{sizes}; {_floors([made['train'].examples], made['test'].examples)}"
    everybody = [made["train"].examples for made in clients.values()]
    for scene, made in unseen.items():
        facts[f"{scene} (unseen)"] = f"{len(made.examples)} test; {_floors(everybody, made.examples)}"
    right: list[bool] = []
    everything = chain.from_iterable(made.values() for made in clients.values())
    for made in chain(everything, unseen.values()):
        right += made.right()
    share = sum(right) / len(right)
    facts["oracle"] = f"{100 * share:.1f} % of {len(right)} answers follow from question and scene graph"
    return facts


def _floors(train: Sequence[Examples], test: Examples) -> str:
    family: dict[str, Counter[str]] = defaultdict(Counter)
    exact: dict[str, Counter[str]] = defaultdict(Counter)
    for examples in train:
        for question, answer, kind in zip(examples.questions, examples.answers, examples.types, strict=True):
            family[kind][answer] += 1
            exact[question][answer] += 1
    majority = {kind: counts.most_common(1)[0][0] for kind, counts in family.items()}
    best = {question: counts.most_common(1)[0][0] for question, counts in exact.items()}
    rows = list(zip(test.questions, test.answers, test.types, strict=True))
    by_family = sum(majority.get(kind) == answer for _, answer, kind in rows) / len(rows)
    blind = sum(best.get(q, majority.get(kind)) == answer for q, answer, kind in rows) / len(rows)
    return f"majority by family {100 * by_family:.1f} %, blind {100 * blind:.1f} %"
