"""The preset "domain": five clients whose pictures, things, questions and answers all differ.

They stand in for the five datasets of FedDAT's benchmark Domain: "blurred" for VizWiz (poor photographs, spoken
questions, some of which cannot be answered), "photos" for COCO-QA (generated questions, one-word answers), "art" for
AQUA (paintings), "relations" for GQA (questions with several steps), "abstract" for VQA's abstract scenes (clip art,
mostly yes, no and numbers). Two of the originals have ten annotators, and so have "blurred" and "abstract".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np

from confed.data.examples import Examples
from confed.data.seeding import generator
from confed.datasets.scenes.backgrounds import PICTURE, STYLES, Style, place
from confed.datasets.scenes.graph import GENERAL_NOUNS, OWN_NOUNS, Tags, colour_prior, objects
from confed.datasets.scenes.making import Knobs, Made, World, make
from confed.datasets.scenes.questions import WORDS, Program, Templates, execute, oracle, phrase, words_of
from confed.datasets.scenes.render import render_over

UNANSWERABLE = "unanswerable"
UNANSWERABLE_SHARE = 0.25
ANNOTATORS = 10
MOST_WRONG = 4


def blur(pictures: np.ndarray) -> np.ndarray:
    """The mean of every pixel's 3 x 3 neighbourhood, uint8, shape (M, 64, 64, 3)."""
    padded = np.pad(pictures.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    total = 0
    for y in range(3):
        for x in range(3):
            total += padded[:, y : y + PICTURE, x : x + PICTURE]
    return (np.asarray(total) / 9 + 0.5).astype(np.uint8)


def paint(pictures: np.ndarray) -> np.ndarray:
    """Short horizontal brush strokes of a limited palette: two pixels wide, 8 shades, shape (M, 64, 64, 3)."""
    strokes = pictures.reshape(len(pictures), PICTURE, PICTURE // 2, 2, 3).mean(axis=3)
    shades = np.floor(strokes / 32) * 32 + 16
    return shades.repeat(2, axis=2).astype(np.uint8)


def _as_drawn(pictures: np.ndarray) -> np.ndarray:
    return pictures


@cache
def _paper() -> np.ndarray:
    """Clip art's ground: pale sky over pale grass, float32, shape (1, 64, 64, 3)."""
    ground = np.full((1, PICTURE, PICTURE, 3), (0.84, 0.90, 0.96), dtype=np.float32)
    ground[:, 40:] = (0.80, 0.90, 0.76)
    return ground


@dataclass(frozen=True)
class Domain:
    """Settings of a domain: style of its pictures and kinds of questions."""

    scene: str
    ground: Callable[[], np.ndarray]
    style: Style
    finish: Callable[[np.ndarray], np.ndarray]
    templates: Templates
    unanswerable: bool = False
    mistakes: float | None = None


DOMAINS: Mapping[str, Domain] = {
    "blurred": Domain(
        "home", lambda: place("home"), Style(-0.5, 0.8, 0.08), blur,
        {
            "qnoun": ("what is this C thing?", "can you please tell me what this C thing is?"),
            "qcolor": ("what color is this N?", "can you please tell me what color this N is?"),
            "qsize": ("how large is this N please?", "is this N small or large?"),
            "exist": ("is there a C N in front of me?", "do i have a C N here?"),
        },
        unanswerable=True, mistakes=0.25,
    ),
    "photos": Domain(
        "transport", lambda: place("transport"), STYLES["transport"], _as_drawn,
        {
            "qnoun": ("what is shown in C?", "what is the C object?"),
            "qcolor": ("what is the color of the N in the photo?", "what is the color of the photographed N?"),
            "count": ("how many C objects are shown?", "how many objects in the photo are C?"),
        },
    ),
    "art": Domain(
        "educational", lambda: place("educational"), Style(1.0, 0.9, 0.03), paint,
        {
            "qnoun": ("what did the artist paint in C?", "which C thing does this painting show?"),
            "qcolor": ("in which color did the artist paint the N?", "which color has the painted N?"),
            "qpos": ("where in this painting is the N?", "in which part did the artist paint the N?"),
            "exist": ("did the artist paint a C N?", "does this painting show a C N?"),
        },
    ),
    "relations": Domain(
        "natural", lambda: place("natural"), STYLES["natural"], _as_drawn,
        {
            "rel": ("which color is the thing on the right side of the N?",
                    "of what color is the thing next to the N on its right?"),
            "same": ("does the N have the same color as the M?", "have both the N and the M the same color?"),
            "qpos": ("on which side of the image is the N?", "what is the position of the N?"),
            "qsize": ("which size does the N have?", "is the N in the image small or large?"),
            "morethan": ("does the image have more C things than D things?",
                         "are the C things more than the D things?"),
        },
    ),
    "abstract": Domain(
        "commercial", _paper, Style(0.0, 1.0, 0.0), _as_drawn,
        {
            "exist": ("does this cartoon have a C N?", "is a C N in this cartoon?"),
            "count": ("how many C things does this cartoon have?", "what number of things is C?"),
            "morethan": ("does this cartoon have more C things than D things?",
                         "is the number of C things above that of D things?"),
            "qcolor": ("what color was the N given?", "the N in this cartoon is of what color?"),
        },
        mistakes=0.15,
    ),
}  # fmt: skip

_OWN_WORDS = set(chain.from_iterable(words_of(domain.templates) for domain in DOMAINS.values()))
DOMAIN_WORDS: tuple[str, ...] = (*WORDS, *sorted((_OWN_WORDS | {UNANSWERABLE}) - set(WORDS)))


def make_domain(domain: str, role: str, number: int, knobs: Knobs, label: str, stream: str, seen: set[int]) -> Made:
    """``number`` questions about pictures of one domain."""
    kind, seed = DOMAINS[domain], knobs.seed_of(role)
    nouns = GENERAL_NOUNS + OWN_NOUNS[kind.scene]

    def render(tags: Tags, rng: np.random.Generator) -> np.ndarray:
        return kind.finish(render_over(tags, kind.ground(), kind.style, knobs.conflict, rng))

    prior = colour_prior(f"domain {domain}", knobs.test_seed, concentration=1.0)
    world = World(nouns, prior, render, tuple(kind.templates), kind.templates)
    made = make(world, role, number, knobs, label, stream=f"domain {stream}", seen=seen)
    examples = made.examples
    if kind.unanswerable:
        rng = generator(seed, "unanswerable", role, stream)
        examples = _unanswerable(examples, made.tags, nouns, kind.templates, knobs.wording, rng)
    if kind.mistakes is not None and knobs.annotators:
        rng = generator(seed, "annotators", role, stream)
        examples = replace(examples, annotations=annotate(examples, kind.mistakes, rng))
    return Made(examples, made.tags, lambda e, t: _oracle(e, t, kind.templates))


def _oracle(examples: Examples, tags: Tags, templates: Templates) -> list[str | None]:
    answers = oracle(examples.questions, examples.image_index, tags, templates)
    return [UNANSWERABLE if answer is None else answer for answer in answers]


def _unanswerable(
    examples: Examples,
    tags: Tags,
    nouns: Sequence[str],
    templates: Templates,
    shifted: bool,
    rng: np.random.Generator,
) -> Examples:
    """A part of the questions after a colour or a size asks about a thing that is not there, or there twice."""
    questions, answers = list(examples.questions), list(examples.answers)
    for row, family in enumerate(examples.types):
        if family not in ("qcolor", "qsize") or rng.random() >= UNANSWERABLE_SHARE:
            continue
        graph = objects(tags, int(examples.image_index[row]))
        programs = [Program(family, (noun,)) for noun in nouns]
        wrong = [program for program in programs if execute(program, graph) is None]
        program = wrong[int(rng.integers(len(wrong)))]
        questions[row] = phrase(program, int(rng.integers(len(templates[family]))), shifted, templates)
        answers[row] = UNANSWERABLE
    return replace(examples, questions=questions, answers=answers)


def annotate(examples: Examples, mistakes: float, rng: np.random.Generator) -> list[tuple[str, ...]]:
    """Simulated answers of ten annotators: most of them the truth, at most four something else."""
    answers: dict[str, list[str]] = {}
    for kind, answer in sorted(set(zip(examples.types, examples.answers, strict=True))):
        answers.setdefault(kind, []).append(answer)
    given: list[tuple[str, ...]] = []
    for kind, truth in zip(examples.types, examples.answers, strict=True):
        others = [answer for answer in answers[kind] if answer != truth] or [truth]
        usual = others[int(rng.integers(len(others)))]
        wrong = min(int(rng.binomial(ANNOTATORS, mistakes)), MOST_WRONG)
        annotations = [usual if rng.random() < 0.5 else others[int(rng.integers(len(others)))] for _ in range(wrong)]
        everybody = [truth] * (ANNOTATORS - wrong) + annotations
        given.append(tuple(everybody[i] for i in rng.permutation(ANNOTATORS)))
    return given
