"""Word vectors from the text files of GloVe (Pennington, Socher and Manning, EMNLP 2014).

One word a line, then its d numbers, separated by single spaces; no header. A few words of the large files have spaces
in them.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confed.data.refusals import existing, refuse

MISSING = 0.2
"""Share of a vocabulary that a file of word vectors may lack by default: names and misspelt words."""

_LEAST = 2
"""Dimensions below which a first line is taken for something else, such as the header of another format."""


_PUBLISHED = (
    "Stanford's NLP group publishes the vectors as glove.6B.zip (Wikipedia and newswire, 50 to 300 dimensions) and "
    "glove.840B.300d.zip (Common Crawl); unpack one and name the text file, or leave it out for embeddings that are "
    "learned"
)


def load_glove(path: Path | str, words: Sequence[str]) -> Tensor:
    """GloVe vectors of the given words."""
    path = Path(path)
    existing(path, _PUBLISHED)
    wanted: dict[bytes, list[int]] = {}
    for row, word in enumerate(words):
        wanted.setdefault(word.encode(), []).append(row)
    vector_of: dict[bytes, np.ndarray] = {}
    width = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            width = width or _width(line, path)
            gaps = line.count(b" ") - line.endswith(b" \n")
            if gaps < width:
                raise ValueError(
                    f"{path}, line {number}: expected a word and {width} numbers, got {gaps}"
                    + ("" if line.endswith(b"\n") else "; is the file cut off?")
                )
            if gaps > width:
                _check_spaced(line, width, path, number)
                continue
            word = line[: line.index(b" ")]
            if word in wanted and word not in vector_of:
                vector_of[word] = _numbers(line.split()[-width:], width, path, number)
                if len(vector_of) == len(wanted):
                    break
    if not width:
        raise ValueError(f"{path} must be a text file of GloVe, got an empty file")
    vectors = np.zeros((len(words), width), dtype=np.float32)
    for word, vector in vector_of.items():
        vectors[wanted[word]] = vector
    return torch.from_numpy(vectors)


def check_known(path: Path, words: Sequence[str], vectors: Tensor, at_most: float) -> None:
    """Check of the share of words without vectors, with a message that counts them."""
    lacking = [word for word, has_vector in zip(words, vectors.any(dim=1).tolist(), strict=True) if not has_vector]
    text = f"{len(words) - len(lacking):,} of {len(words):,} words have vectors in {path}"
    say_missing(text, tuple(lacking), len(words), at_most, "model.glove_missing")


def say_missing(text: str, lacking: Sequence[str], total: int, at_most: float, option: str) -> None:
    """Warning of missing items, once per process, and an error if there are too many."""
    if not lacking:
        return
    first = ", ".join(map(repr, lacking[:5])) + (", ..." if len(lacking) > 5 else "")
    if len(lacking) > at_most * total:
        raise ValueError(
            f"{text}; {len(lacking):,} have none ({first}), more than {option} = {at_most:g} allows; is it the right "
            "file, in the language and spelling of the data?"
        )
    _say_once(f"{text}; the others start as zeros: {first}")


@lru_cache(maxsize=64)
def _say_once(text: str) -> None:
    # Every worker builds the model; they are forked after the first one was built, with what was said.
    warnings.warn(text, stacklevel=4)


def _width(line: bytes, path: Path) -> int:
    """The number of dimensions, from the first line."""
    width = len(line.split()) - 1
    if width < _LEAST or b" " not in line:
        refuse(f"{path}, line 1", "a word and its numbers, as in GloVe's text files", line.strip()[:40])
    return width


def _check_spaced(line: bytes, width: int, path: Path, number: int) -> None:
    """Check that a line with too many parts is one whose word has spaces."""
    for extra in line.split()[1:-width]:
        try:
            float(extra)
        except ValueError:
            return
    refuse(f"{path}, line {number}", f"a word and {width} numbers", found=len(line.split()) - 1)


def _numbers(parts: Sequence[bytes], width: int, path: Path, number: int) -> np.ndarray:
    try:
        vector = np.array([float(text) for text in parts], dtype=np.float32)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: expected {width} numbers behind the word, got: {error}") from error
    if len(vector) != width or not np.isfinite(vector).all():
        raise ValueError(f"{path}, line {number}: expected {width} finite numbers behind the word")
    return vector
