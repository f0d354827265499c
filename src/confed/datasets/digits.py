"""Digits as pictures, speech and text clues: six clients with different modalities.

The folder holds ``audio.npz`` (``waveform`` int16, all recordings one behind the other; ``offsets`` int64 (n + 1);
``digit``, ``speaker`` and ``take`` (n)), ``images.npz`` (``images`` uint8 (m, 28, 28), ``digit`` (m)) and ``meta.json``
(``sample_rate``; ``speakers``, of which each has a ``name``, in the order of their numbers).

A sample is a digit with what its client has of it: a picture, a recording, a clue. Pictures and recordings are paired
by digit. No picture and no recording is at two clients or in two roles. There are few recordings, so each serves
several samples, with other pictures and clues and behind a pause of another length; ``facts`` count them.

In place of the written digits there may be photographs of ten classes, each class in the place of a digit.

The digit's own word would give it away, and reading alone would do. So a clue says the digit by another one, and in
some clues one number word is another than it should be, or is not there. What can be known from clues of which all
others are right is the share of those, and somewhat more, as a misheard clue may be right by chance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from confed.data.bounded_files import npz_arrays
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import floors
from confed.data.intake.account import Account
from confed.data.intake.stream import json_object
from confed.data.modalities import SIX_CLIENTS, SUBSETS, showing
from confed.data.options import DrawnOptions
from confed.data.partitions import label_counts, label_shares
from confed.data.picture_files import NamedPictures, open_pictures
from confed.data.pictures import empty_table, fill_table
from confed.data.ragged import PackedTexts, end_to_end
from confed.data.refusals import check_choice, check_length, check_rows, existing_folder, expecting, refuse
from confed.data.seeding import generator
from confed.data.sounds import Sounds, sounds_of
from confed.datasets.labelled_folders import Layout
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, SHARE, Range

# Files of digits as pictures and recordings; digits describes them --------------------------------------------

_LAYOUT = "expected audio.npz, images.npz and meta.json"
_AUDIO = {
    "digit": (None, "N"), "speaker": (None, "N"), "take": (None, "N"), "offsets": (None, "N + 1"),
    "waveform": (np.int16, "T"),
}  # fmt: skip
_IMAGES = {"digit": (None, "M"), "images": (np.uint8, "M", "H", "W")}


@dataclass(frozen=True)
class DigitFiles:
    """The files' content: M pictures (M, 28, 28) and N recordings, with their digits, speakers and takes."""

    images: np.ndarray | NamedPictures
    image_digit: np.ndarray
    clips: tuple[np.ndarray, ...]
    clip_digit: np.ndarray
    speaker: np.ndarray
    take: np.ndarray
    speakers: tuple[str, ...]
    rate: int


def read_digits(root: Path, photographs: Path | None = None, size: int = 28) -> DigitFiles:
    """The files, checked; photographs, where there are some, in this size in place of the written digits."""
    existing_folder(root, _LAYOUT)
    audio = npz_arrays(root / "audio.npz", _AUDIO)
    if photographs is None:
        written = npz_arrays(root / "images.npz", _IMAGES)
        pictures, picture_digit = written["images"], written["digit"]
        check_rows(f"{root / 'images.npz'}: digits", picture_digit, len(DIGITS))
    else:
        pictures, picture_digit = _photographs(photographs, size)
    meta = root / "meta.json"
    content = json_object(meta, ("sample_rate", "speakers"))
    with expecting(meta, "sample_rate and speakers with names", ValueError, KeyError, TypeError):
        rate, speakers = int(content["sample_rate"]), tuple(str(entry["name"]) for entry in content["speakers"])
    check_length("offsets", audio["offsets"], len(audio["digit"]) + 1, "recording and one more")
    check_rows(f"{root / 'audio.npz'}: digits", audio["digit"], len(DIGITS))
    check_rows(f"{root / 'audio.npz'}: speakers", audio["speaker"], len(speakers))
    offsets = audio["offsets"].astype(np.int64)
    return DigitFiles(
        pictures,
        picture_digit.astype(np.int64),
        tuple(audio["waveform"][first:last] for first, last in pairwise(offsets)),
        audio["digit"].astype(np.int64),
        audio["speaker"].astype(np.int64),
        audio["take"].astype(np.int64),
        speakers,
        rate,
    )


def _photographs(folder: Path, size: int) -> tuple[NamedPictures, np.ndarray]:
    """Photographs of ten classes, and the digits in whose place these are, in the order of their names."""
    source, rows = Layout(folder).rows(Account())
    kinds = sorted({row.label for row in rows})
    if len(kinds) != len(DIGITS):
        refuse(folder, f"{len(DIGITS)} classes, one for each digit", str(len(kinds)))
    pictures = open_pictures(source, PackedTexts.of(row.path for row in rows), size)
    return pictures, np.array([kinds.index(row.label) for row in rows])


# Text clues to digits, such as "two less than nine", with misheard words --------------------------------------

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The words of the digits, by their values; also the answers."""

_HIDDEN = "something"
"""What stands for a word that was not understood."""

_PATTERNS: Mapping[str, str] = {
    "after": "the one after {0}",
    "before": "the one before {0}",
    "more": "{0} more than {1}",
    "less": "{0} less than {1}",
}


def clue(digit: int, noise: float, rng: np.random.Generator) -> str:
    """A clue to a digit."""
    clues = [("after", (digit - 1,)), ("before", (digit + 1,))]
    clues += [("more", (step, digit - step)) for step in (2, 3)]
    clues += [("less", (step, digit + step)) for step in (2, 3)]
    possible = [(kind, numbers) for kind, numbers in clues if 0 <= numbers[-1] <= 9]
    kind, numbers = possible[int(rng.integers(len(possible)))]
    words = [DIGITS[number] for number in numbers]
    draw, place, other = rng.random(), int(rng.integers(len(words))), int(rng.integers(1, len(DIGITS)))
    if draw < noise / 2:
        words[place] = _HIDDEN
    elif draw < noise:
        words[place] = DIGITS[(numbers[place] + other) % len(DIGITS)]
    return _PATTERNS[kind].format(*words)


def clue_words() -> tuple[str, ...]:
    """All words that clues may have, sorted."""
    texts = " ".join(pattern.format("", "") for pattern in _PATTERNS.values())
    return tuple(sorted({*texts.split(), *DIGITS, _HIDDEN}))


# Digits as pictures, speech and text clues --------------------------------------------------------------------

_PLACE = "new"

_PUBLISHED = frozenset({"george", "jackson", "lucas", "nicolas", "theo", "yweweler"})
"""The speakers of the Free Spoken Digit Dataset."""

ANSWERS = tuple(map(str, range(10)))
TEST_TAKES = 5
"""The recordings numbered 0 to 4 of each digit and speaker are the official test recordings of the source."""
HELD_OUT = 0.1
"""Share of a client's other recordings that only its validation samples have."""
_ROLES = ("train", "validation", "test")
_FACTS = {
    "origin": "recordings of the Free Spoken Digit Dataset and pictures of MNIST's test set, paired by digit; clues in "
    "words are made up",
    "licence": "recordings: CC BY-SA 4.0; pictures: CC BY-SA 3.0",
    "citation": 'Z. Jackson et al., "Free Spoken Digit Dataset: v1.0.8", Zenodo 2018; Y. LeCun et al., "Gradient-based '
    'learning applied to document recognition", Proc. IEEE 86(11), 1998',
}


@reader(
    "root split * photographs alpha train validation test unseen noise pause image_size rate seed",
    things="samples", train=800, validation=200, test=500,
)  # fmt: skip
def digits(
    options: DrawnOptions,
    root: Path | str,
    split: Literal["clients", "iid", "dirichlet"] = "clients",
    photographs: Path | str | None = None,
    unseen: str | None = None,
    noise: Annotated[float, SHARE] = 0.35,
    pause: Annotated[float, Range(0, 10)] = 0.2,
    image_size: Annotated[int, AT_LEAST_ONE] = 28,
    rate: Annotated[int, AT_LEAST_ONE] = 8000,
) -> FederatedDataset:
    """Six clients with pictures, texts, sound, or several of them, and a place for every set of modalities.

    The unseen places show the same samples: pictures that no client has, of a speaker whom no client trains on, each
    place one set of modalities. Test samples are the same for all seeds.

    Raises ``ValueError``: a file is missing or damaged, there is no such speaker, there are too few pictures for the
    samples asked for, or an option is out of range.

    Options:
        root: the data set's folder.
        split: "clients": each client with sound has a speaker of its own (of more speakers, every third one, so that
            no speaker is at two clients), and all digits equally often; "iid": the
            speakers' recordings are dealt out among those clients; "dirichlet": this, and each client has its own
            frequencies of the digits. Every client has the modalities that it has in all three.
        photographs: a folder as ``labelled_folders`` reads it, of ten classes, which take the place of the written
            digits in the order of their names; None: the written digits.
        validation: validation samples per client, of recordings of their own.
        unseen: the speaker of the unseen places; by default "theo", or the last one where no speaker has that name.
        noise: probability that a number word of a clue is a wrong one, or none.
        pause: longest silence before a recording, in seconds.
        image_size: pixels per side.
        rate: samples per second; recordings of another rate are resampled.
        seed: chooses training and validation samples, which recordings validation has, and their clues and pauses.
    """
    test, seed = options.test, options.seed
    source = read_digits(Path(root), None if photographs is None else Path(photographs), image_size)
    if unseen is None:
        unseen = "theo" if "theo" in source.speakers else source.speakers[-1]
    check_choice("unseen", unseen, source.speakers)
    sizes = {role: options.size(role) for role in _ROLES}
    counts = _counts(sizes, options.alpha if split == "dirichlet" else None)
    pictures = _deal_pictures(source, counts, label_counts(test, np.ones(10)), seed)
    clips = _deal_clips(source, unseen, seed, together=split == "clients")
    owned = {**SIX_CLIENTS, _PLACE: SUBSETS[-1]}
    drawn: dict[tuple[str, str], _Drawn] = {}
    for name, role in [*product(SIX_CLIENTS, _ROLES), (_PLACE, "test")]:
        rng = generator(options.seed_of(role), "digits", name, role)
        label_count = counts[name, role] if name in SIX_CLIENTS else label_counts(test, np.ones(10))
        drawn[name, role] = _draw(
            label_count, owned[name], pictures.get((name, role)), clips.get((name, role)), noise, rng
        )
    sounds, starts = _sounds(source, drawn, pause, rate, seed)
    table, row_of = _pictures(source, drawn, image_size)

    def examples(name: str, role: str, shown: tuple[str, ...], place: str) -> Examples:
        samples, first = drawn[name, role], starts.get((name, role), 0)
        count = len(samples.digit)
        whole = Examples(
            table, row_of[samples.picture], samples.clues, [ANSWERS[digit] for digit in samples.digit.tolist()],
            [""] * count, [""] * count, sounds=sounds, sound_index=first + np.arange(count),
            present={"text": np.array([bool(clue) for clue in samples.clues])},
        )  # fmt: skip
        return showing(whole, shown, [f"{place}/{role}/{row:05d}" for row in range(count)])

    splits: dict[str, Split] = {}
    for name, shown in SIX_CLIENTS.items():
        splits[name] = Split(*(examples(name, role, shown, name) for role in _ROLES))
    tests: dict[str, Examples] = {}
    for shown in SUBSETS:
        place = f"new_{'_'.join(shown)}"
        tests[place] = examples(_PLACE, "test", shown, place)
    # Other recordings in this layout have an origin and a licence of their own.
    published = set(source.speakers) <= _PUBLISHED and photographs is None
    origin = str(root) if photographs is None else f"{root}, photographs of {photographs}"
    facts = {**(_FACTS if published else {"origin": origin}), **floors(splits), **_told(source, drawn, unseen)}
    return FederatedDataset("digits", ANSWERS, splits, tests, clue_words(), facts, modalities=dict(SIX_CLIENTS))


@dataclass(frozen=True)
class _Drawn:
    """Samples of one client and role: digits, rows of pictures and of recordings (-1 for none), and clues."""

    digit: np.ndarray
    picture: np.ndarray
    clip: np.ndarray
    clues: list[str]


_Dealt = dict[tuple[str, str], list[np.ndarray]]
"""Client and role -> for each digit, the rows that are its own."""


def _counts(sizes: Mapping[str, int], alpha: float | None) -> dict[tuple[str, str], np.ndarray]:
    """Client and role -> how many samples of each digit. The generator is fixed: clients do not depend on a seed."""
    rng = generator(0, "digits", "shares")
    # Pictures are the scarce thing, so that those who have them are balanced among themselves.
    seeing = [name for name, owned in SIX_CLIENTS.items() if "image" in owned]
    others = [name for name in SIX_CLIENTS if name not in seeing]
    shares: dict[str, np.ndarray] = {}
    for names in (seeing, others):
        shares |= zip(names, label_shares(len(names), 10, alpha, rng), strict=True)
    return {(name, role): label_counts(sizes[role], shares[name]) for name, role in product(SIX_CLIENTS, sizes)}


def _deal_pictures(
    source: DigitFiles, counts: Mapping[tuple[str, str], np.ndarray], unseen: np.ndarray, seed: int
) -> _Dealt:
    """Each picture to one client and role, or to the unseen places; test pictures first, for all seeds the same."""
    seeing = [name for name, owned in SIX_CLIENTS.items() if "image" in owned]
    fixed = [(_PLACE, "test"), *((name, "test") for name in seeing)]
    free = list(product(seeing, ("train", "validation")))
    wanted = {**counts, (_PLACE, "test"): unseen}
    dealt: _Dealt = {key: [] for key in (*fixed, *free)}
    for digit in range(10):
        rows = generator(0, "digits", "pictures", str(digit)).permutation(np.flatnonzero(source.image_digit == digit))
        need = sum(int(wanted[key][digit]) for key in dealt)
        if need > len(rows):
            raise ValueError(
                f"the sizes ask for {need} pictures of the digit {digit}, and there are {len(rows)}: make train, "
                "validation or test smaller"
            )
        taken = sum(int(wanted[key][digit]) for key in fixed)
        rows[taken:] = generator(seed, "digits", "training pictures", str(digit)).permutation(rows[taken:])
        first = 0
        for key in dealt:
            count = int(wanted[key][digit])
            dealt[key].append(rows[first : first + count])
            first += count
    return dealt


def _deal_clips(source: DigitFiles, unseen: str, seed: int, *, together: bool) -> _Dealt:
    """Each recording to one client and role: by speaker (``together``), or each speaker's dealt out in turns."""
    hearing = [name for name, owned in SIX_CLIENTS.items() if "audio" in owned]
    training_speakers = [number for number, name in enumerate(source.speakers) if name != unseen]
    least = len(hearing) if together else 1
    if len(training_speakers) < least:
        raise ValueError(
            f"there must be at least {least} speakers beside {unseen!r}, got {len(training_speakers)}"
            + ("; take split = 'iid', which deals each speaker's recordings out" if training_speakers else "")
        )
    place = np.array([training_speakers.index(s) if s in training_speakers else -1 for s in source.speaker.tolist()])
    owner = np.where(place < 0, -1, (place if together else place + source.take) % len(hearing))
    dealt: _Dealt = {(_PLACE, "test"): [np.flatnonzero((place < 0) & (source.clip_digit == d)) for d in range(10)]}
    for number, name in enumerate(hearing):
        roles: dict[str, list[np.ndarray]] = {role: [] for role in _ROLES}
        for digit in range(10):
            is_candidate = (owner == number) & (source.clip_digit == digit)
            rows = np.flatnonzero(is_candidate & (source.take >= TEST_TAKES))
            held = max(1, round(HELD_OUT * len(rows)))
            mixed = generator(seed, "digits", "recordings", name, str(digit)).permutation(rows)
            parts = {"train": mixed[held:], "validation": mixed[:held]}
            parts["test"] = np.flatnonzero(is_candidate & (source.take < TEST_TAKES))
            for role in _ROLES:
                if not len(parts[role]):
                    raise ValueError(f"client {name!r} has no {role} recording of the digit {digit}")
                roles[role].append(parts[role])
        dealt |= {(name, role): rows for role, rows in roles.items()}
    return dealt


def _draw(
    counts: np.ndarray,
    owned: tuple[str, ...],
    pictures: list[np.ndarray] | None,
    clips: list[np.ndarray] | None,
    noise: float,
    rng: np.random.Generator,
) -> _Drawn:
    """The samples of one client and role, in a random order."""
    digit = rng.permutation(np.repeat(np.arange(10), counts))
    picture, clip = (np.full(len(digit), -1, dtype=np.int64) for _ in range(2))
    for value in range(10):
        rows = np.flatnonzero(digit == value)
        if pictures is not None:
            picture[rows] = pictures[value]
        if clips is not None:
            # Every recording serves as often as any other, or once more.
            clip[rows] = np.resize(rng.permutation(clips[value]), len(rows))
    clues = [clue(value, noise, rng) for value in digit.tolist()] if "text" in owned else [""] * len(digit)
    return _Drawn(digit, picture, clip, clues)


def _sounds(
    source: DigitFiles, drawn: Mapping[tuple[str, str], _Drawn], pause: float, rate: int, seed: int
) -> tuple[Sounds, dict[tuple[str, str], int]]:
    """All samples' recordings behind their pauses, and where those of each client and role begin."""
    names = [f"recording {number}" for number in range(len(source.clips))]
    clips = sounds_of(source.clips, source.rate, rate, names)
    parts: list[np.ndarray] = []
    origin: list[int] = []
    starts: dict[tuple[str, str], int] = {}
    for (name, role), drawn_examples in drawn.items():
        if (drawn_examples.clip < 0).any():
            continue
        starts[name, role] = len(parts)
        rng = generator(0 if role == "test" else seed, "digits", "pauses", name, role)
        silent = rng.integers(0, int(pause * rate) + 1, len(drawn_examples.clip))
        for row, length in zip(drawn_examples.clip.tolist(), silent.tolist(), strict=True):
            parts.append(np.concatenate([np.zeros(length, np.int16), clips.row(row)]))
            origin.append(row)
    return Sounds(*end_to_end(parts), rate, np.array(origin, dtype=np.int64)), starts


def _pictures(source: DigitFiles, drawn: Mapping[tuple[str, str], _Drawn], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pictures that are used, uint8 (M, size, size, 3), and the row there of every picture of the source."""
    used = np.unique(np.concatenate([drawn_examples.picture for drawn_examples in drawn.values()]))
    used = used[used >= 0]
    table = empty_table(len(used), size)
    fill_table(table, (_in_colour(source.images[row]) for row in used))
    row_of = np.zeros(len(source.images), np.int64)
    row_of[used] = np.arange(len(used))
    return table, row_of


def _in_colour(picture: np.ndarray) -> np.ndarray:
    return picture if picture.ndim == 3 else np.repeat(picture[:, :, None], 3, axis=2)


def _told(source: DigitFiles, drawn: Mapping[tuple[str, str], _Drawn], unseen: str) -> dict[str, str]:
    """Description of the recordings: number and speakers."""
    lines: dict[str, list[str]] = {}
    for (name, role), drawn_examples in drawn.items():
        if (drawn_examples.clip >= 0).all():
            who = sorted({source.speakers[number] for number in source.speaker[drawn_examples.clip].tolist()})
            line = lines.setdefault(name, [", ".join(who) + ":"])
            line.append(f"{len(set(drawn_examples.clip.tolist()))} in {len(drawn_examples.clip)} {role} samples,")
    told = {name: " ".join(line).rstrip(",") for name, line in lines.items()}
    return {
        "independent recordings": "; ".join(f"{name}: {line}" for name, line in told.items() if name != _PLACE),
        "unseen": f"the same samples at all places; recordings of {told[_PLACE]}",
    }
