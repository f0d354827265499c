"""Caption metrics: CIDEr-D and BLEU-4.

CIDEr-D: Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based image description evaluation", CVPR 2015, as the official
evaluation of COCO captions computes it. BLEU: Papineni et al., ACL 2002, by the library sacrebleu.

Words are runs of letters and digits in lower case. The official evaluation splits words by its own Java program
(PTBTokenizer), so that published numbers are near these and not equal to them.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any

BLEU = "bleu/"
"""What the names of BLEU's counts in a tally begin with."""

ORDER = 4
"""The longest n-grams that count."""
SIGMA = 6.0
"""Of CIDEr-D's penalty on another length, in words."""

Gram = tuple[str, ...]


def caption_words(caption: str) -> list[str]:
    """The words of a caption that are compared."""
    return re.findall(r"[^\W_]+", caption.lower())


@dataclass(frozen=True)
class Cider:
    """CIDEr-D with the weights that follow from a corpus of references.

    With n-grams weighted by how often they occur and by the logarithm of the number of pictures over that of pictures
    whose references have them, the score of a caption is

        10 / R sum_r 1/4 sum_n exp(-(l - l_r)^2 / (2 sigma^2)) <min(g_n, g_n^r), g_n^r> / (|g_n| |g_n^r|)

    over its R references, with sigma = 6 and lengths l counted in bigrams, as the official code has it.
    """

    pictures: int  # of the corpus
    document_counts: Mapping[Gram, int]  # n-gram -> in how many pictures' references it is

    @staticmethod
    def of(references: Iterable[Sequence[str]]) -> "Cider":
        """The weights of a corpus."""
        document_counts: Counter[Gram] = Counter()
        pictures = 0
        for captions in references:
            if not captions:
                raise ValueError("every picture of the corpus must have a reference caption at least, one has none")
            document_counts.update(set(chain.from_iterable(_grams(caption) for caption in captions)))
            pictures += 1
        if not pictures:
            raise ValueError("CIDEr needs a corpus of at least one picture with captions, got none")
        return Cider(pictures, document_counts)

    def score(self, caption: str, references: Sequence[str]) -> float:
        """CIDEr-D of one caption, from 0 to 10."""
        if not references:
            raise ValueError("a caption needs a reference at least to be compared with, got none")
        candidate_vectors = self._vectors(caption)
        return (
            10
            * sum(_likeness(candidate_vectors, self._vectors(reference)) for reference in references)
            / len(references)
        )

    def _vectors(self, caption: str) -> tuple[list[dict[Gram, float]], int]:
        """The weighted n-grams of a caption by n, and its number of bigrams."""
        vectors: list[dict[Gram, float]] = [{} for _ in range(ORDER)]
        counts = _grams(caption)
        for gram, count in counts.items():
            rarity = math.log(self.pictures) - math.log(max(1, self.document_counts.get(gram, 0)))
            vectors[len(gram) - 1][gram] = count * rarity
        return vectors, sum(count for gram, count in counts.items() if len(gram) == 2)


def bleu_tally(captions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, tuple[float, float]]:
    """Counts for BLEU-4 of captions, which add up over batches, clients and processes."""
    if len(captions) != len(references) or not all(references):
        raise ValueError(
            f"each of {len(captions)} captions needs a reference at least, got references of {len(references)}, "
            f"{sum(not some for some in references)} of them empty"
        )
    if not captions:
        return {}
    deepest = max(map(len, references))
    streams: list[list[str | None]] = []
    for k in range(deepest):
        streams.append([" ".join(caption_words(r[k])) if k < len(r) else None for r in references])
    metric = load_sacrebleu().BLEU(tokenize="none", smooth_method="none", max_ngram_order=ORDER)
    score = metric.corpus_score([" ".join(caption_words(caption)) for caption in captions], streams)
    pairs = zip(score.counts, score.totals, strict=True)
    grams = {f"{BLEU}{n}": (float(right), float(total)) for n, (right, total) in enumerate(pairs, 1)}
    return {**grams, f"{BLEU}length": (float(score.sys_len), float(score.ref_len))}


def bleu4(tally: Mapping[str, tuple[float, float]]) -> float | None:
    """BLEU-4 in [0, 1] of an added tally; None of one without its counts."""
    if f"{BLEU}length" not in tally:
        return None
    counts = [tally[f"{BLEU}{n}"] for n in range(1, ORDER + 1)]
    written, wanted = tally[f"{BLEU}length"]
    score = load_sacrebleu().BLEU.compute_bleu(
        [int(right) for right, _ in counts],
        [int(total) for _, total in counts],
        int(written),
        int(wanted),
        smooth_method="none",
        max_ngram_order=ORDER,
    )
    return score.score / 100


def load_sacrebleu() -> Any:
    """The library that counts for BLEU."""
    try:
        return import_module("sacrebleu.metrics")
    except ImportError as error:
        raise ValueError(
            "BLEU-4 of captions needs the package sacrebleu: pip install '.[captions]' -c constraints.txt"
        ) from error


def _grams(caption: str) -> Counter[Gram]:
    words, counts = caption_words(caption), Counter[Gram]()
    for n in range(1, ORDER + 1):
        counts.update(zip(*(words[start:] for start in range(n)), strict=False))
    return counts


def _likeness(caption: tuple[list[dict[Gram, float]], int], other: tuple[list[dict[Gram, float]], int]) -> float:
    """The sum over n of a caption's clipped cosines with one reference, over their number, with the penalty."""
    (mine, length), (theirs, their_length) = caption, other
    total = 0.0
    for a, b in zip(mine, theirs, strict=True):
        norms = math.sqrt(sum(x * x for x in a.values())) * math.sqrt(sum(x * x for x in b.values()))
        shared = sum(min(weight, b[gram]) * b[gram] for gram, weight in a.items() if gram in b)
        total += shared / norms if norms else 0.0
    return math.exp(-((length - their_length) ** 2) / (2 * SIGMA**2)) * total / ORDER


# Written answers and references: F1 of words, edit distance ---------------------------------------------------

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
