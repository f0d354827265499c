"""Generation of questions about new pictures, common to all presets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Literal, NamedTuple

import numpy as np

from confed.data.examples import Examples
from confed.data.options import DrawnOptions
from confed.data.seeding import generator
from confed.datasets.scenes.graph import COLOURS, GENERAL_NOUNS, NOUNS, OWN_NOUNS, Tags, colour_prior, objects, sample
from confed.datasets.scenes.questions import ANSWERS, FAMILIES, TEMPLATES, Balance, Templates, ask, oracle
from confed.datasets.scenes.render import render_neutral, render_public, render_scene
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, Range

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
class Knobs(DrawnOptions):
    """Options of :func:`confed.datasets.scenes.scenes`, resolved.

    Attributes:
        clients_per_scene: clients of the preset "scene" in each scene that takes part. With more than one they are
            called "transport-1" and so on, share the scene's style and things, and have colour frequencies and
            pictures of their own.
        shards: clients of the presets "scene", "domain" and "function" per scene, domain or function, alike but for
            their pictures and each of full size; more of them do not change the first ones.
        pools: answers of a client's own answer set: its most frequent training answers, at most so many. Examples
            with another answer are left out. 0: all clients share one vocabulary. None takes the preset's: 100 for
            "domain", "function" and "task", else 0. For "domain" and "function" 0 takes all clients' training answers,
            of which a client sees its own alone, so that centralised training has a row.
        annotators: simulated people who answer each question of the domains "blurred" and "abstract"; 0 for none.
        types: what counts as a question's type: its family, or VQA's type of its answer: "yes/no", "number", "other".
        own_answers: of the preset "scene": share of the answers, but "yes" and "no", that each scene gives in words of
            its own, from 0 to 1. A client then knows many answers that nobody else gives, and training elsewhere
            forgets them. Above 0 all six scenes take part, as nobody knows the words of a scene without a client.
        questions_per_picture: questions that share a picture.
    """

    train: Annotated[int, AT_LEAST_ONE] = 400
    validation: Annotated[int, AT_LEAST_ONE] = 400
    test: Annotated[int, AT_LEAST_ONE] = 1000
    wording: bool = False
    clients_per_scene: Annotated[int, AT_LEAST_ONE] = 1
    shards: Annotated[int, AT_LEAST_ONE] = 1
    pools: Annotated[int | None, NOT_NEGATIVE] = None
    annotators: Literal[0, 10] = 10
    types: Literal["families", "answers"] = "families"
    own_answers: Annotated[float, SHARE] = 0.0
    questions_per_picture: Annotated[int, Range(1, len(FAMILIES))] = 4


@dataclass(frozen=True)
class Made:
    """Generated questions with the scene graphs of their pictures; ``oracle`` answers from texts and graphs alone."""

    examples: Examples
    tags: Tags
    oracle: Callable[[Examples, Tags], list[str | None]] | None = None

    def truth(self) -> list[str | None]:
        """Answers of the programs."""
        if self.oracle is None:
            return oracle(self.examples.questions, self.examples.image_index, self.tags)
        return self.oracle(self.examples, self.tags)

    def right(self) -> list[bool]:
        """Whether each answer is that of the programs."""
        return [a == b for a, b in zip(self.truth(), self.examples.answers, strict=True)]


Clients = dict[str, dict[str, Made]]
"""Client -> role -> its examples."""


class World(NamedTuple):
    """What stands in pictures, how they are drawn, and what is asked about them."""

    nouns: Sequence[str] = NOUNS
    prior: np.ndarray = UNIFORM
    render: Callable[[Tags, np.random.Generator], np.ndarray] = render_neutral
    families: Sequence[str] = FAMILIES
    templates: Templates = TEMPLATES


def make(
    world: World,
    role: str,
    number: int,
    knobs: Knobs,
    label: str,
    *,
    stream: str | None = None,
    seen: set[int] | None = None,
) -> Made:
    """``number`` questions of one role about new pictures; random streams go by the label unless one is named."""
    purpose, seed = (role, label if stream is None else stream), knobs.seed_of(role)
    graphs = sample(role, world.nouns, world.prior, generator(seed, "graphs", *purpose), seen)
    rng = generator(seed, "questions", *purpose)
    per_picture = min(knobs.questions_per_picture, 2 * len(world.families))
    balance = Balance()
    used: list[Tags] = []
    rows: list[tuple[int, str, str, str]] = []
    while len(rows) < number:
        tags = next(graphs)
        questions = ask(
            objects(tags, 0), min(per_picture, number - len(rows)), balance, nouns=world.nouns, prior=world.prior,
            shifted=knobs.wording, rng=rng, families=world.families, templates=world.templates,
        )  # fmt: skip
        if questions is not None:
            rows += [(len(used), one.question, one.answer, one.program.family) for one in questions]
            used.append(tags)
    tags = Tags.join(used)
    index, questions, answers, types = zip(*rows, strict=True)
    names = [f"{label}/{role}/{i:06d}" for i in range(number)]
    pictures = world.render(tags, generator(seed, "pixels", *purpose))
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
    prior = colour_prior(client, knobs.test_seed) if prior is None else prior

    def render(tags: Tags, rng: np.random.Generator) -> np.ndarray:
        return render_scene(tags, scene, knobs.conflict, rng)

    world = World(GENERAL_NOUNS + OWN_NOUNS[scene], prior, render)
    made = make(world, role, number, knobs, client, stream=stream, seen=seen)
    renamed = own_answers(scene, knobs.own_answers, knobs.test_seed)
    return _answered(made, renamed) if renamed else made


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


def _answered(made: Made, renamed: Mapping[str, str]) -> Made:
    """The same questions with some answers in other words."""

    def truth(examples: Examples, tags: Tags) -> list[str | None]:
        plain = oracle(examples.questions, examples.image_index, tags)
        return [None if answer is None else renamed.get(answer, answer) for answer in plain]

    given = [renamed.get(answer, answer) for answer in made.examples.answers]
    return Made(replace(made.examples, answers=given), made.tags, truth)


def make_neutral(role: str, number: int, knobs: Knobs) -> Made:
    """``number`` questions with all nouns and uniform colours on plain grey."""
    return make(World(), role, number, knobs, "neutral")


def make_public(questions: int, seed: int, per_picture: int = 4) -> Made:
    """Questions for pre-training: all nouns, uniform colours, randomised styles, plain wording."""
    knobs = Knobs(seed=seed, questions_per_picture=per_picture)
    return make(World(render=render_public), "public", questions, knobs, "public")
