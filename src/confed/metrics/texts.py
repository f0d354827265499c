"""Scores of written answers against the answers of people: ANLS and token F1.

ANLS: Biten et al., "Scene text visual question answering", ICCV 2019. Token F1: Rajpurkar et al., "SQuAD: 100,000+
questions for machine comprehension of text", EMNLP 2016, with the normal form of its official evaluation. Scores are
fractions in [0, 1]; of several right answers the nearest counts.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_MARKS = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def anls(written: str, references: Sequence[str], threshold: float = 0.5) -> float:
    """Average normalised Levenshtein similarity of one answer: max over references of 1 - d, 0 where d >= threshold.

    d is the number of edits divided by the length of the longer text; case and surrounding spaces do not count.

    Raises ``ValueError``: no reference.
    """
    _some(references)
    distances = [_distance(_lowered(written), _lowered(reference)) for reference in references]
    return max(1 - distance if distance < threshold else 0.0 for distance in distances)


def token_f1(written: str, references: Sequence[str]) -> float:
    """F1 of the words of one answer: max over references of the harmonic mean of precision and recall.

    Where the answer or a reference has no words, 1 if neither has any and else 0.

    Raises ``ValueError``: no reference.
    """
    _some(references)
    return max(_f1(squad_words(written), squad_words(reference)) for reference in references)


def squad_words(text: str) -> list[str]:
    """Words in SQuAD's normal form: lower case, without punctuation marks and articles.

    Only a blank text has none: where nothing else is left, articles stay, and so do marks.
    """
    without_marks = text.lower().translate(_MARKS)
    return _ARTICLES.sub(" ", without_marks).split() or without_marks.split() or text.lower().split()


def edits(one: str, other: str) -> int:
    """Levenshtein distance: fewest insertions, deletions and replacements of letters between two texts."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def _distance(one: str, other: str) -> float:
    longest = max(len(one), len(other))
    return edits(one, other) / longest if longest else 0.0


def _lowered(text: str) -> str:
    return " ".join(text.lower().split())


def _f1(written: list[str], reference: list[str]) -> float:
    if not written or not reference:
        return float(written == reference)
    shared = sum((Counter(written) & Counter(reference)).values())
    return 2 * shared / (len(written) + len(reference))


def _some(references: Sequence[str]) -> None:
    if not references:
        raise ValueError("a written answer needs a reference at least to be compared with, got none")
