"""Removal of near-duplicate texts.

Broder, "On the resemblance and containment of documents", 1997, by the library datasketch: texts are sets of runs of
words, their Jaccard similarity is estimated from minima of random hashes, and locality-sensitive hashing finds the few
earlier texts to compare with. Memory grows with the texts that are kept, by some kilobytes each.
"""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

__all__ = ["NearDuplicates"]

_INDEXED = 0.9
"""The largest similarity that the index is set to."""


class NearDuplicates:
    """Filter of near-duplicate texts that keeps the first one of its kind.

    Args:
        threshold: Jaccard similarity from which on a text is a near duplicate, in (0, 1].
        words: length of the runs; shorter texts count as one run.
        hashes: random hashes per text.

    Attributes:
        dropped: how many were near duplicates so far.

    Raises:
        ValueError: an option is out of range, or datasketch is not installed.
    """

    def __init__(self, threshold: float = 0.8, words: int = 3, hashes: int = 128) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"the similarity of near duplicates must lie in (0, 1], got {threshold}")
        if words < 1 or hashes < 2:
            raise ValueError(f"near duplicates need runs of at least 1 word and 2 hashes, got {words} and {hashes}")
        try:
            self._library: Any = import_module("datasketch")
        except ImportError as error:
            raise ValueError(
                "near duplicates are found by the package datasketch: pip install '.[captions]' -c constraints.txt"
            ) from error
        self.threshold, self.words, self.hashes, self.dropped = threshold, words, hashes, 0
        # Candidates are compared, so that the index may be less exact than they are; it has no setting near 1.
        self._index: Any = self._library.MinHashLSH(threshold=min(threshold, _INDEXED), num_perm=hashes)
        self._sketches: list[Any] = []

    def is_new(self, text: str) -> bool:
        """Whether no earlier text resembles this one; it is remembered if so."""
        sketch = self._library.MinHash(num_perm=self.hashes, seed=1)
        sketch.update_batch([run.encode() for run in self._runs(text)])
        near = self._index.query(sketch)
        if any(self._sketches[number].jaccard(sketch) >= self.threshold for number in near):
            self.dropped += 1
            return False
        self._index.insert(len(self._sketches), sketch)
        self._sketches.append(sketch)
        return True

    def keep(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts that are new, one after the other."""
        return (text for text in texts if self.is_new(text))

    def _runs(self, text: str) -> set[str]:
        every = re.findall(r"\w+", text.lower())
        size = min(self.words, len(every))
        return {" ".join(every[first : first + size]) for first in range(len(every) - size + 1)} or {""}
