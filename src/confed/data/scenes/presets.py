"""Settings and presets: which clients there are, and whose questions are whose."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.scenes.graph import (
    COLOURS,
    GENERAL_NOUNS,
    NOUNS,
    OWN_NOUNS,
    SCENES,
    Tags,
    colour_prior,
    generator,
    objects,
    sample,
)
from confed.data.scenes.questions import ANSWERS, WORDING_SHIFT, WORDS, Balance, ask, oracle
from confed.data.scenes.render import render_neutral, render_public, render_scene

__all__ = [
    "PRESETS",
    "SETTINGS",
    "Knobs",
    "Made",
    "Setting",
    "assemble",
    "describe",
    "make_neutral",
    "make_public",
    "make_scene",
]

UNIFORM = np.full(len(COLOURS), 1 / len(COLOURS))
UNSEEN_SIZE = 1000
MIN_QUANTITY = 64
ROLES = ("train", "validation", "test")


@dataclass(frozen=True)
class Setting:
    """A named difficulty: severity of the colour conflict, wording shift, training questions per client."""

    conflict: float
    wording: bool
    train: int


SETTINGS: Mapping[str, Setting] = {
    "A": Setting(conflict=1.0, wording=False, train=1500),
    "B": Setting(conflict=0.5, wording=False, train=800),
    "C": Setting(conflict=0.5, wording=True, train=400),
}


@dataclass(frozen=True)
class Knobs:
    """The resolved options of :func:`confed.data.scenes.scenes`; sizes are questions per client."""

    conflict: float
    wording: bool
    train: int
    validation: int
    test: int
    unseen: tuple[str, ...]
    clients: int
    alpha: float
    questions_per_picture: int
    test_seed: int
    seed: int
    clients_per_scene: int = 1

    def size(self, role: str) -> int:
        """Questions per client in a role."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[role]

    def seed_of(self, role: str) -> int:
        """The seed that a role's examples depend on."""
        return self.test_seed if role == "test" else self.seed


@dataclass(frozen=True)
class Made:
    """Generated questions together with what stands in their pictures."""

    examples: Examples
    tags: Tags


def _make(
    *,
    role: str,
    number: int,
    label: str,
    nouns: Sequence[str],
    prior: np.ndarray,
    per_picture: int,
    shifted: bool,
    render: Callable[[Tags, np.random.Generator], np.ndarray],
    seed: int,
    seen: set[int] | None = None,
) -> Made:
    """``number`` questions of one role about new pictures; ``label`` names the examples and the streams."""
    purpose = (role, label)
    graphs = sample(role, nouns, prior, generator(seed, "graphs", *purpose), seen)
    rng = generator(seed, "questions", *purpose)
    balance = Balance()
    kept: list[Tags] = []
    rows: list[tuple[int, str, str, str]] = []
    while len(rows) < number:
        tags = next(graphs)
        wanted = min(per_picture, number - len(rows))
        asked = ask(objects(tags, 0), wanted, balance, nouns=nouns, prior=prior, shifted=shifted, rng=rng)
        if asked is None:
            continue
        rows += [(len(kept), a.question, a.answer, a.program.family) for a in asked]
        kept.append(tags)
    tags = Tags.join(kept)
    index, questions, answers, types = zip(*rows, strict=True)
    names = [f"{label}/{role}/{i:06d}" for i in range(number)]
    pictures = render(tags, generator(seed, "pixels", *purpose))
    index = np.array(index, dtype=np.int64)
    return Made(Examples(pictures, index, list(questions), list(answers), list(types), names), tags)


def make_scene(
    scene: str, role: str, number: int, knobs: Knobs, client: str | None = None, seen: set[int] | None = None
) -> Made:
    """``number`` questions about pictures of one scene.

    Args:
        scene: which place: background, palette and things.
        role: what the questions are for.
        number: how many.
        knobs: the resolved options.
        client: whose questions they are, where several clients share the scene; it names the examples, and has
            colour frequencies and random streams of its own. The scene itself by default.
        seen: fingerprints of graphs that must not come again; those that are tried are added.
    """
    client = scene if client is None else client
    return _make(
        role=role,
        number=number,
        label=client,
        nouns=GENERAL_NOUNS + OWN_NOUNS[scene],
        prior=colour_prior(client, knobs.test_seed),
        per_picture=knobs.questions_per_picture,
        shifted=knobs.wording,
        render=lambda tags, rng: render_scene(tags, scene, knobs.conflict, rng),
        seed=knobs.seed_of(role),
        seen=seen,
    )


def make_neutral(role: str, number: int, knobs: Knobs) -> Made:
    """``number`` questions with all nouns and uniform colours on plain grey."""
    return _make(
        role=role,
        number=number,
        label="neutral",
        nouns=NOUNS,
        prior=UNIFORM,
        per_picture=knobs.questions_per_picture,
        shifted=knobs.wording,
        render=render_neutral,
        seed=knobs.seed_of(role),
    )


def make_public(questions: int, seed: int, per_picture: int = 4) -> Made:
    """Questions for pre-training: all nouns, uniform colours, randomised styles, plain wording."""
    return _make(
        role="public",
        number=questions,
        label="public",
        nouns=NOUNS,
        prior=UNIFORM,
        per_picture=per_picture,
        shifted=False,
        render=render_public,
        seed=seed,
    )


def _scene(knobs: Knobs) -> dict[str, dict[str, Made]]:
    """A client per scene, or several: one style, but each with its own colours and with pictures of its own."""
    made: dict[str, dict[str, Made]] = {}
    for scene in (scene for scene in SCENES if scene not in knobs.unseen):
        if knobs.clients_per_scene == 1:
            made[scene] = {role: make_scene(scene, role, knobs.size(role), knobs) for role in ROLES}
            continue
        names = [f"{scene}-{number}" for number in range(1, knobs.clients_per_scene + 1)]
        used: dict[str, set[int]] = {role: set() for role in ROLES}  # clients of a scene never share a graph
        for name in names:
            made[name] = {role: make_scene(scene, role, knobs.size(role), knobs, name, used[role]) for role in ROLES}
    return made


def _dirichlet(knobs: Knobs) -> dict[str, dict[str, Made]]:
    """Answers per client from q ~ Dirichlet(alpha p), p the pool's answer shares (Hsu et al. 2019)."""
    pools = {role: make_neutral(role, knobs.clients * knobs.size(role), knobs) for role in ROLES}
    share = Counter(pools["test"].examples.answers)
    p = np.array([share[answer] for answer in ANSWERS], dtype=float)
    p = np.maximum(p / p.sum(), 1e-3)
    rng = generator(knobs.test_seed, "dirichlet")
    q = [rng.dirichlet(np.maximum(knobs.alpha * p / p.sum(), 1e-3)) for _ in range(knobs.clients)]
    rows = {role: _draw(pools[role].examples, q, knobs.size(role), knobs.seed_of(role), role) for role in ROLES}
    return _deal(pools, rows)


def _draw(pool: Examples, q: Sequence[np.ndarray], number: int, seed: int, role: str) -> list[list[int]]:
    """Rows per client, without replacement; clients draw in random turns, so nobody gets leftovers only."""
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


def _quantity(knobs: Knobs) -> dict[str, dict[str, Made]]:
    """Log-normal training sizes around the setting's, at least 64; validation and test sets of equal size."""
    weight = generator(knobs.test_seed, "quantity").lognormal(0.0, 1.0, knobs.clients)
    sizes = np.maximum(weight / weight.sum() * knobs.clients * knobs.train, MIN_QUANTITY).astype(int)
    want = {role: sizes if role == "train" else np.full(knobs.clients, knobs.size(role)) for role in ROLES}
    pools = {role: make_neutral(role, int(want[role].sum()), knobs) for role in ROLES}
    rows = {}
    for role in ROLES:
        order = generator(knobs.seed_of(role), "partition", role).permutation(len(pools[role].examples))
        rows[role] = [part.tolist() for part in np.split(order, np.cumsum(want[role])[:-1])]
    return _deal(pools, rows)


def _deal(pools: Mapping[str, Made], rows: Mapping[str, list[list[int]]]) -> dict[str, dict[str, Made]]:
    clients = len(rows["train"])
    width = max(2, len(str(clients)))
    dealt: dict[str, dict[str, Made]] = {}
    for k in range(clients):
        client = f"client-{k + 1:0{width}d}"
        dealt[client] = {}
        for role in ROLES:
            part = pools[role].examples.take(rows[role][k])
            used, index = np.unique(part.image_index, return_inverse=True)  # a client holds only its own pictures
            names = [f"{client}/{role}/{i:06d}" for i in range(len(part))]
            own = Examples(part.images[used], index, part.questions, part.answers, part.types, names)
            dealt[client][role] = Made(own, pools[role].tags.take(used))
    return dealt


# Further presets (domain, function, task, multi-label, modality, captions) are further rows of this table.
PRESETS: Mapping[str, Callable[[Knobs], dict[str, dict[str, Made]]]] = {
    "scene": _scene,
    "dirichlet": _dirichlet,
    "quantity": _quantity,
}


def assemble(preset: str, knobs: Knobs) -> FederatedDataset:
    """The dataset of a preset, with its facts."""
    clients = PRESETS[preset](knobs)
    unseen = {s: make_scene(s, "test", UNSEEN_SIZE, knobs) for s in SCENES if s in knobs.unseen}
    return FederatedDataset(
        name="scenes",
        answers=ANSWERS,
        clients={c: Split(*(made[role].examples for role in ROLES)) for c, made in clients.items()},
        unseen={scene: made.examples for scene, made in unseen.items()},
        words=WORDS,
        facts={**_shifts(knobs), **describe(clients, unseen)},
    )


def _shifts(knobs: Knobs) -> dict[str, str]:
    """What a reader of the questions and pictures must know, in words."""
    facts: dict[str, str] = {}
    if knobs.wording:
        examples = ", ".join(f"{old} is {new}" for old, new in list(WORDING_SHIFT.items())[:4])
        facts["wording"] = (
            f"ten words of every client's questions are put into Scots ({examples}); the backbone has never read them"
        )
    if knobs.conflict:
        facts["colours"] = (
            f"each scene turns the colour wheel its own way (severity {knobs.conflict:g}): clients disagree about names"
        )
    return facts


def describe(clients: Mapping[str, Mapping[str, Made]], unseen: Mapping[str, Made]) -> dict[str, str]:
    """Counts, floors and ceiling in words.

    The majority floor answers with the most frequent training answer of the question's family, the blind
    floor with that of the very same question (of its family where training never asked it); an unseen scene
    is answered from everybody's training questions. The ceiling runs the programs on the scene graphs.
    """
    facts: dict[str, str] = {}
    for client, made in clients.items():
        sizes = ", ".join(f"{len(made[role].examples)} {role}" for role in ROLES)
        facts[client] = f"{sizes}; {_floors([made['train'].examples], made['test'].examples)}"
    everybody = [made["train"].examples for made in clients.values()]
    for scene, made in unseen.items():
        facts[f"{scene} (unseen)"] = f"{len(made.examples)} test; {_floors(everybody, made.examples)}"
    right = total = 0
    for made in [*(m[role] for m in clients.values() for role in ROLES), *unseen.values()]:
        answers = oracle(made.examples.questions, made.examples.image_index, made.tags)
        right += sum(a == b for a, b in zip(answers, made.examples.answers, strict=True))
        total += len(answers)
    facts["oracle"] = f"{100 * right / total:.1f} % of {total} answers follow from question and scene graph"
    return facts


def _floors(train: Sequence[Examples], test: Examples) -> str:
    family: dict[str, Counter[str]] = defaultdict(Counter)
    exact: dict[str, Counter[str]] = defaultdict(Counter)
    for part in train:
        for question, answer, kind in zip(part.questions, part.answers, part.types, strict=True):
            family[kind][answer] += 1
            exact[question][answer] += 1
    majority = {kind: counts.most_common(1)[0][0] for kind, counts in family.items()}
    best = {question: counts.most_common(1)[0][0] for question, counts in exact.items()}
    rows = list(zip(test.questions, test.answers, test.types, strict=True))
    by_family = sum(majority.get(kind) == answer for _, answer, kind in rows) / len(rows)
    blind = sum(best.get(q, majority.get(kind)) == answer for q, answer, kind in rows) / len(rows)
    return f"majority by family {100 * by_family:.1f} %, blind {100 * blind:.1f} %"
