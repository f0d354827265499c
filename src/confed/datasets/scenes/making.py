"""Generation of questions about new pictures, common to all presets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from confed.data.examples import Examples
from confed.data.seeding import generator
from confed.datasets.scenes.graph import COLOURS, GENERAL_NOUNS, NOUNS, OWN_NOUNS, Tags, colour_prior, objects, sample
from confed.datasets.scenes.questions import ANSWERS, FAMILIES, TEMPLATES, Balance, Templates, ask, oracle
from confed.datasets.scenes.render import render_neutral, render_public, render_scene

UNIFORM = np.full(len(COLOURS), 1 / len(COLOURS))
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
    """The resolved options of :func:`confed.datasets.scenes.scenes`; sizes are questions per client."""

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
    shards: int = 1
    pools: int | None = None
    annotators: int = 10
    types: str = "families"
    own_answers: float = 0.0

    def size(self, role: str) -> int:
        """Questions per client in a role."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[role]

    def seed_of(self, role: str) -> int:
        """The seed that a role's examples depend on."""
        return self.test_seed if role == "test" else self.seed


@dataclass(frozen=True)
class Made:
    """Generated questions with the scene graphs of their pictures.

    Attributes:
        tags: what stands where in their pictures.
        oracle: the right answers from (the texts of) the examples and the tags alone; None takes that of plain
            questions.
    """

    examples: Examples
    tags: Tags
    oracle: Callable[[Examples, Tags], list[str | None]] | None = None

    def truth(self) -> list[str | None]:
        """Answers of the programs."""
        if self.oracle is None:
            return oracle(self.examples.questions, self.examples.image_index, self.tags)
        return self.oracle(self.examples, self.tags)


Clients = dict[str, dict[str, Made]]
"""Client -> role -> its examples."""


def make(
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
    stream: str | None = None,
    families: Sequence[str] = FAMILIES,
    templates: Templates = TEMPLATES,
) -> Made:
    """``number`` questions of one role about new pictures."""
    purpose = (role, label if stream is None else stream)
    graphs = sample(role, nouns, prior, generator(seed, "graphs", *purpose), seen)
    rng = generator(seed, "questions", *purpose)
    balance = Balance()
    kept: list[Tags] = []
    rows: list[tuple[int, str, str, str]] = []
    while len(rows) < number:
        tags = next(graphs)
        wanted = min(per_picture, number - len(rows))
        asked = ask(
            objects(tags, 0), wanted, balance, nouns=nouns, prior=prior, shifted=shifted, rng=rng,
            families=families, templates=templates,
        )  # fmt: skip
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
    scene: str,
    role: str,
    number: int,
    knobs: Knobs,
    client: str | None = None,
    seen: set[int] | None = None,
    stream: str | None = None,
    prior: np.ndarray | None = None,
) -> Made:
    """``number`` questions about pictures of one scene."""
    client = scene if client is None else client
    made = make(
        role=role,
        number=number,
        label=client,
        nouns=GENERAL_NOUNS + OWN_NOUNS[scene],
        prior=colour_prior(client, knobs.test_seed) if prior is None else prior,
        per_picture=knobs.questions_per_picture,
        shifted=knobs.wording,
        render=lambda tags, rng: render_scene(tags, scene, knobs.conflict, rng),
        seed=knobs.seed_of(role),
        seen=seen,
        stream=stream,
    )
    own = own_answers(scene, knobs.own_answers, knobs.test_seed)
    return _answered(made, own) if own else made


def scene_answers(scene: str) -> tuple[str, ...]:
    """The answers that questions about a scene's pictures can have."""
    foreign = set(chain.from_iterable(OWN_NOUNS.values())) - {*OWN_NOUNS[scene]}
    return tuple(answer for answer in ANSWERS if answer not in foreign)


def own_answers(scene: str, share: float, seed: int) -> dict[str, str]:
    """Answers that a scene gives in words of its own -> those words; never "yes" and "no"."""
    others = [answer for answer in scene_answers(scene) if answer not in ("yes", "no")]
    order = generator(seed, "own answers", scene).permutation(len(others))
    chosen = {others[i] for i in order[: round(share * len(others))].tolist()}
    return {answer: f"{scene} {answer}" for answer in others if answer in chosen}


def _answered(made: Made, own: Mapping[str, str]) -> Made:
    """The same questions with some answers in other words."""

    def truth(examples: Examples, tags: Tags) -> list[str | None]:
        plain = oracle(examples.questions, examples.image_index, tags)
        return [None if answer is None else own.get(answer, answer) for answer in plain]

    given = [own.get(answer, answer) for answer in made.examples.answers]
    return Made(replace(made.examples, answers=given), made.tags, truth)


def make_neutral(role: str, number: int, knobs: Knobs) -> Made:
    """``number`` questions with all nouns and uniform colours on plain grey."""
    return make(
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
    return make(
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
