"""Text clues to digits, such as "two less than nine", with misheard words.

The digit's own word would give it away, and reading alone would do. So a clue says the digit by another one, and in
some clues one number word is another than it should be, or is not there. What can be known from clues of which all
others are right is the share of those, and somewhat more, as a misheard clue may be right by chance.
"""

from collections.abc import Mapping

import numpy as np

__all__ = ["DIGITS", "clue", "clue_words"]

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
    """A clue to a digit.

    Args:
        digit: 0 to 9.
        noise: probability that one of the clue's number words is another digit's, or "something", both as often.
        rng: chooses the words.
    """
    said = [("after", (digit - 1,)), ("before", (digit + 1,))]
    said += [("more", (step, digit - step)) for step in (2, 3)]
    said += [("less", (step, digit + step)) for step in (2, 3)]
    possible = [(kind, numbers) for kind, numbers in said if 0 <= numbers[-1] <= 9]
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
