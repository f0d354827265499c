"""Synthetic dataset of pictures, sounds and captions, each of which is least reliable about one fact.

An example is one or two red or blue balls or boxes; its answer says all three, such as "two red box". A *picture* shows
the things. A *sound* is a beep for each: low for red, high for blue, a pure tone for a ball and one with overtones for
a box. A *caption* says it in words. Each gets things wrong at random, and one of the three facts most often: a picture
the number, a caption the colour, a sound the kind. So one modality alone is right in some 60 % of cases, and all three
together in some 90 %. A fourth and a fifth fact, the size (a sound is short for a small thing) and the pattern (it
rises for a striped one), are told well by all. Nothing is read from files.

With ``distortion`` every client sees, hears and reads in a fixed way of its own, which an invertible linear map of
picture patches, or of word vectors, undoes, and of spectrum frames nearly so: colours are turned in the space of red,
green and blue, pitches are shifted, and words stand for other words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, product
from typing import Annotated, Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import floors
from confed.data.modalities import SIX_CLIENTS, SUBSETS, showing
from confed.data.options import DrawnOptions
from confed.data.partitions import label_counts, label_shares
from confed.data.picture_tables import NoPictures
from confed.data.pictures import empty_table
from confed.data.ragged import end_to_end
from confed.data.seeding import generator
from confed.data.sounds import Sounds
from confed.datasets.reader import reader
from confed.federation.ranges import SHARE, Range

# Bayes accuracy of readers that see each fact of an example through -------------------------------------------


def bayes_ceilings(
    errors: Mapping[str, np.ndarray], owned: Mapping[str, Sequence[str]], shares: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Accuracy of the most probable answer at each place, by enumeration of all that can be told.

    A picture or a sound tells each of F binary facts wrongly with its error rate e; a caption leaves its word out with
    rate 2e. With P the places' probabilities of the 2^F answers a and o what is told of all facts, the accuracy is

        sum over o of max over a of P(a) p(o | a),    p(o | a) = product over facts f of p(o_f | a_f).
    """
    result: dict[str, float] = {}
    for place in owned:
        result[place] = _ceiling([_told(name, errors[name]) for name in owned[place]], shares[place])
    return result


def _told(modality: str, errors: np.ndarray) -> np.ndarray:
    """Probability of what one modality tells, by fact and its value, (F, 2, outcomes)."""
    right, none = 1 - errors, np.zeros_like(errors)
    if modality == "text":
        right = 1 - 2 * errors
        values = [[right, none, 2 * errors], [none, right, 2 * errors]]
    else:
        values = [[right, errors], [errors, right]]
    return np.moveaxis(np.array(values), 2, 0)


def _ceiling(told: Sequence[np.ndarray], shares: np.ndarray) -> float:
    """The sum of the formula above for one place."""
    facts = len(told[0])
    # What all modalities tell of one fact together, (2, outcomes); outcomes with equal ratios are one.
    joint = []
    for fact in range(facts):
        joint.append(_merged(reduce(_both, (each[fact] for each in told))))
    # p(o | a) for all pairs of answers and outcomes, built fact by fact: (2^F, outcomes).
    likelihood = reduce(np.kron, joint)
    return float((np.asarray(shares, np.float64)[:, None] * likelihood).max(axis=0).sum())


def _both(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Probabilities of pairs of independent outcomes, (2, outcomes of the one times those of the other)."""
    return (one[:, :, None] * other[:, None, :]).reshape(2, -1)


def _merged(outcomes: np.ndarray) -> np.ndarray:
    """Outcomes that say the same about a fact as one, so that there are few; impossible ones left out."""
    total = outcomes.sum(axis=0)
    possible = outcomes[:, total > 0]
    ratio = np.round(possible[0] / possible.sum(axis=0), 12)
    return np.stack([possible[:, ratio == value].sum(axis=1) for value in np.unique(ratio)], axis=1)


# Synthetic dataset of pictures, sounds and captions -----------------------------------------------------------

FACTS = (("one", "two"), ("red", "blue"), ("ball", "box"), ("big", "small"), ("plain", "striped"))
"""What there is to know: number, colour, kind, size and pattern, each one of two; the first three or more are asked."""
USUAL_FACTS = 3
UP_TO_A_GUESS = Range(0, 0.5)

SIZE = 32
"""Pixels per side of pictures."""
RATE = 8000
"""Samples of sound per second."""

_WORST = {"image": 0, "text": 1, "audio": 2}
"""Which of the facts each modality tells badly."""
_SAID = (("single", "pair of"), ("crimson", "navy"), ("sphere", "cube"), ("large", "tiny"), ("even", "banded"))
"""Other words for the facts, for clients who prefer these."""
_RGB = np.array([[205.0, 60.0, 50.0], [50.0, 75.0, 205.0]])
_MIDDLE = 127.5
"""The grey about which a distortion turns colours."""
_OCTAVES = (0.0, 0.0, -0.6, 0.0, 0.6, 0.2, -0.2)
"""How far a distortion of 1 shifts each client's pitches; those without sounds are not heard."""
_PITCH = (400.0, 800.0)
"""Hz of red and of blue."""
_BEEP, _STEP, _PAUSE = 0.12, 0.18, 0.05
"""Seconds: of a beep, from one to the next, and of the longest silence before the first."""
_PIXEL_NOISE = 12.0
"""Standard deviation, in levels of 0 to 255."""
_SOUND_NOISE = 0.1
"""Standard deviation; a beep's amplitude is 0.3 to 0.6."""
_PLACE = "new"


@dataclass(frozen=True)
class _Style:
    """A client's own way."""

    level: float
    pitch: float
    other: float
    colours: np.ndarray | None = None
    words: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class _Signals:
    """What is told, and how well."""

    facts: int
    clear: float
    blurred: float

    @property
    def answers(self) -> tuple[str, ...]:
        """One for every combination of the facts."""
        return tuple(" ".join(words) for words in product(*FACTS[: self.facts]))

    def errors(self, modality: str) -> np.ndarray:
        """How often a modality is wrong about each fact, (facts,)."""
        return np.where(np.arange(self.facts) == _WORST[modality], self.blurred, self.clear)


@reader(
    "split * alpha facts clear blurred distortion train validation test seed",
    things="examples", train=600, validation=200, test=500,
)  # fmt: skip
def modalities(
    options: DrawnOptions,
    split: Literal["clients", "iid", "dirichlet", "both"] = "clients",
    facts: Annotated[int, Range(USUAL_FACTS, len(FACTS))] = USUAL_FACTS,
    clear: Annotated[float, UP_TO_A_GUESS] = 0.04,
    blurred: Annotated[float, UP_TO_A_GUESS] = 0.3,
    distortion: Annotated[float, SHARE] = 0.0,
) -> FederatedDataset:
    """Six clients with pictures, texts, sound, or several of them, and a place for every set of modalities.

    The unseen places show the same examples, in a style that no client has, each place one set of modalities. Test
    examples are the same for all seeds.

    Raises ``ValueError``: an option is out of range.

    Options:
        split: "clients": each client has a style of its own, which is brightness, pitch and words, and all answers
            equally often; "iid": all have one style; "dirichlet": this, and each client has its own frequencies of
            the answers; "both": styles and frequencies of each client's own. Every client has the modalities that it
            has in all of them.
        alpha: concentration of "dirichlet" and "both".
        facts: number of facts that are asked, 3 to 5; there are two to the power of so many answers.
        clear: how often a modality is wrong about a fact that it tells well.
        blurred: how often it is wrong about the one that it tells badly.
        distortion: how far each client's fixed distortion goes, from 0 (none) to 1.
    """
    signals = _Signals(facts, clear, blurred)
    skewed, styled = split in ("dirichlet", "both"), split in ("clients", "both")
    count = len(signals.answers)
    shares = label_shares(len(SIX_CLIENTS), count, options.alpha if skewed else None, generator(0, "senses"))
    splits: dict[str, Split] = {}
    for number, (name, owned) in enumerate(SIX_CLIENTS.items()):
        style = _distorted(_style(number if styled else None), number, distortion, facts)
        parts: dict[str, Examples] = {}
        for role in ("train", "validation", "test"):
            size = options.size(role)
            drawn = _draw(name, role, label_counts(size, shares[number]), owned, style, signals, options.seed_of(role))
            parts[role] = showing(drawn, owned, [f"{name}/{role}/{row:05d}" for row in range(size)])
        splits[name] = Split(**parts)
    counts, last = label_counts(options.test, np.ones(count)), len(SIX_CLIENTS)
    style = _distorted(_style(last if styled else None), last, distortion, facts)
    new = _draw(_PLACE, "test", counts, SUBSETS[-1], style, signals, 0)
    places = {f"{_PLACE}_{'_'.join(shown)}": shown for shown in SUBSETS}
    tests: dict[str, Examples] = {}
    for place, shown in places.items():
        tests[place] = showing(new, shown, [f"{place}/test/{row:05d}" for row in range(options.test)])
    errors = {modality: signals.errors(modality) for modality in _WORST}
    ceilings = bayes_ceilings(errors, SIX_CLIENTS, dict(zip(SIX_CLIENTS, shares, strict=True)))
    ceilings |= bayes_ceilings(errors, places, dict.fromkeys(places, np.full(count, 1 / count)))
    notes = {
        "origin": "made up; pictures, sounds and captions that are each wrong at random, most often about the number, "
        "the kind and the colour",
        **floors(splits),
        "ceilings": f"of a perfect reader, which knows how often each answer is asked: {_listed(ceilings)}",
        "unseen": "the same examples at all places, in a style that no client has",
    }
    texts = chain.from_iterable((*FACTS[:facts], *_SAID[:facts]))
    return FederatedDataset(
        "modalities",
        signals.answers,
        splits,
        tests,
        tuple(sorted({"there", "was", *" ".join(texts).split()})),
        notes,
        modalities=dict(SIX_CLIENTS),
        ceilings=ceilings,
    )


def _style(number: int | None) -> _Style:
    """A client's style; None for what all have in common."""
    if number is None:
        return _Style(125.0, 1.0, 0.0)
    levels, pitches, others = (
        (60, 170, 90, 190, 120, 150, 105),
        (0, 3, -3, 1, 2, -2, -1),
        (0, 1, 0.5, 0.2, 0.8, 0.4, 0.6),
    )
    return _Style(levels[number], 2.0 ** (pitches[number] / 8), others[number])


def _distorted(style: _Style, number: int, strength: float, facts: int) -> _Style:
    """A client's style with its distortion of colours, pitches and words, the same for all seeds."""
    if not strength:
        return style
    rng = generator(0, "senses", "distortion", str(number))
    axis, angle = rng.normal(size=3), strength * np.pi * rng.uniform(0.5, 1) * rng.choice([-1, 1])
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    turned = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross  # Rodrigues' rotation
    words = list(chain.from_iterable((*FACTS[:facts], *_SAID[:facts])))
    changed = rng.permutation(len(words))[: round(strength * len(words))]
    # Each stands for the next one, the last for the first, so that nothing is lost.
    others = {words[k]: words[after] for k, after in zip(changed, np.roll(changed, -1), strict=True)}
    return replace(style, pitch=style.pitch * 2.0 ** (strength * _OCTAVES[number]), colours=turned, words=others)


def _draw(
    name: str, role: str, counts: np.ndarray, owned: tuple[str, ...], style: _Style, signals: _Signals, seed: int
) -> Examples:
    """Examples of one client and role with everything that it owns."""
    rng = generator(seed, "senses", name, role)
    label = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    truth = label[:, None] >> np.arange(signals.facts)[::-1] & 1
    error = {modality: signals.errors(modality) for modality in _WORST}
    told = {m: np.where(rng.random(truth.shape) < error[m], 1 - truth, truth) for m in ("image", "audio")}
    dropped = rng.random(truth.shape) < 2 * error["text"]
    number = np.arange(len(label))
    pictures = _pictures(told["image"], style, rng) if "image" in owned else NoPictures(len(label))
    sounds = _sounds(told["audio"], style, rng) if "audio" in owned else None
    captions = [""] * len(label)
    if "text" in owned:
        captions = [_caption(fact, gone, style, rng) for fact, gone in zip(truth, dropped, strict=True)]
    answers = [signals.answers[row] for row in label.tolist()]
    return Examples(
        pictures, number, captions, answers, captions, captions, sounds=sounds,
        sound_index=None if sounds is None else number, present={"text": np.full(len(label), "text" in owned)},
    )  # fmt: skip


def _pictures(told: np.ndarray, style: _Style, rng: np.random.Generator) -> np.ndarray:
    """Things on a plain background, uint8, shape (N, SIZE, SIZE, 3)."""
    table = empty_table(len(told), SIZE)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for picture, (number, colour, kind, *more) in zip(table, told.tolist(), strict=True):
        small, striped = (*more, 0, 0)[:2]
        radius = 4 if small else 6
        canvas = np.full((SIZE, SIZE, 3), style.level, np.float64)
        for side in range(number + 1):
            x, y = int(rng.integers(7, 10)) + 15 * side, int(rng.integers(12, 21))
            far = np.hypot(rows - y, columns - x) if kind == 0 else np.maximum(abs(rows - y), abs(columns - x))
            canvas[far <= radius] = _RGB[colour]
            if striped:
                canvas[(far <= radius) & (rows % 4 < 2)] /= 2
            if kind:  # a box is open
                canvas[far <= radius // 2] = style.level
        if style.colours is not None:
            canvas = _MIDDLE + (canvas - _MIDDLE) @ style.colours.T
        canvas += rng.normal(0, _PIXEL_NOISE, canvas.shape)
        picture[:] = canvas.clip(0, 255).astype(np.uint8)
    return table


def _sounds(told: np.ndarray, style: _Style, rng: np.random.Generator) -> Sounds:
    """A beep for each thing in noise."""
    parts: list[np.ndarray] = []
    time = np.arange(int(_BEEP * RATE)) / RATE
    envelope = np.hanning(len(time))
    for number, colour, kind, *more in told.tolist():
        small, striped = (*more, 0, 0)[:2]
        pitch = _PITCH[colour] * style.pitch * rng.uniform(0.94, 1.06)
        overtones = (1, 3, 5) if kind else (1,)
        # The three of a box have together the power of a ball's one.
        scale = np.sqrt(sum(1 / k for k in overtones))
        # A striped thing's pitch rises by a half in the course of the beep.
        phase = 2 * np.pi * pitch * (time + 0.25 * time * time / _BEEP if striped else time)
        beep = sum(np.sin(k * phase + rng.uniform(0, 6)) / np.sqrt(k) for k in overtones) / scale
        if small:
            beep = beep * (time < _BEEP / 2)
        first = int(rng.integers(0, int(_PAUSE * RATE) + 1))
        wave = np.zeros(int((_PAUSE + _STEP + _BEEP) * RATE))
        for start in (first, first + int(_STEP * RATE))[: number + 1]:
            wave[start : start + len(time)] += beep * envelope
        wave = rng.uniform(0.3, 0.6) * wave + rng.normal(0, _SOUND_NOISE, len(wave))
        parts.append(np.rint(wave.clip(-1, 1) * 32767).astype(np.int16))
    return Sounds(*end_to_end(parts), RATE)


def _caption(fact: np.ndarray, gone: np.ndarray, style: _Style, rng: np.random.Generator) -> str:
    """Caption of the example, without the words that are left out."""
    caption_words = ["there", "was"]
    pairs = zip(FACTS, _SAID, strict=True)
    for (value_if_true, other), value, left_out in zip(pairs, fact.tolist(), gone.tolist(), strict=False):
        word = (other if rng.random() < style.other else value_if_true)[value]
        caption_words += [] if left_out else [style.words.get(word, word)]
    return " ".join(caption_words)


def _listed(ceilings: Mapping[str, float]) -> str:
    """Ceilings in one line."""
    return ", ".join(f"{place} {value:.3f}" for place, value in ceilings.items())
