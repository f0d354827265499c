"""Streaming readers of texts and documents in JSON lines, plain or compressed with Zstandard.

The layouts are those of the Pile and of Common Crawl's cleaned texts (``text``), of OBELICS (Laurençon et al., NeurIPS
2023: ``images`` and ``texts`` side by side) and of MMC4 (Zhu et al., NeurIPS 2023: ``text_list`` and ``image_info``).

Broder, "On the resemblance and containment of documents", 1997, by the library datasketch: texts are sets of runs of
words, their Jaccard similarity is estimated from minima of random hashes, and locality-sensitive hashing finds the few
earlier texts to compare with. Memory grows with the texts that are kept, by some kilobytes each.
"""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from confed.data.caption_files.records import Piece, Story
from confed.data.intake.tables import read_jsonl
from confed.data.vl_files.records import text

# Removal of near-duplicate texts ------------------------------------------------------------------------------

_INDEXED = 0.9
"""The largest similarity that the index is set to."""


class NearDuplicates:
    """Filter of near-duplicate texts that keeps the first one of its kind.

    Attributes:
        dropped: how many were near duplicates so far.
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


# Streaming readers of texts and documents in JSON lines -------------------------------------------------------


def text_lines(file: Path, key: str = "text") -> Iterator[tuple[int, str]]:
    """The texts of a file ``.jsonl`` or ``.jsonl.zst`` with their rows; empty lines count and are left out.

    Raises ``ValueError``: the file is missing, cut off or damaged, a line is no JSON object with such a text, or
    zstandard is not installed.
    """
    for row, entry in read_jsonl(file):
        yield row, text(entry, key, file, row).strip()


def story_lines(file: Path) -> Iterator[Story]:
    """The documents of a file ``.jsonl`` or ``.jsonl.zst``.

    Either ``images`` and ``texts``, equally long lists of which one has null at each place; or ``text_list``, and
    ``image_info`` with ``image_name`` and ``matched_text_index``, the text that the picture stands in front of.
    """
    for row, entry in read_jsonl(file):
        where = f"{file}, row {row}"
        if "texts" in entry:
            images, texts = entry.get("images"), entry["texts"]
            if not isinstance(images, list) or not isinstance(texts, list) or len(images) != len(texts):
                raise ValueError(f"{where}: expected images and texts as lists of one length, got {entry!r:.80}")
            pieces = [_piece(image, words, where) for image, words in zip(images, texts, strict=True)]
        elif "text_list" in entry:
            pieces = _matched(entry, where)
        else:
            raise ValueError(f"{where}: expected images and texts, or text_list and image_info, got {sorted(entry)}")
        yield Story(file, row, tuple(pieces))


def chunks(words: str, most: int) -> list[str]:
    """A long text in pieces of up to so many words."""
    if most < 1:
        raise ValueError(f"a piece of a text must have at least 1 word, got {most}")
    every = words.split()
    return [" ".join(every[first : first + most]) for first in range(0, len(every), most)]


def _piece(image: object, words: object, where: str) -> Piece:
    if isinstance(image, str) and image and words is None:
        return Piece(picture=image)
    if isinstance(words, str) and image is None:
        return Piece(text=words.strip())
    raise ValueError(f"{where}: expected a picture or a text at each place, got {image!r:.40} and {words!r:.40}")


def _matched(entry: dict[str, Any], where: str) -> list[Piece]:
    texts, images = entry["text_list"], entry.get("image_info", [])
    if not isinstance(texts, list) or not all(isinstance(words, str) for words in texts):
        raise ValueError(f"{where}: expected text_list as a list of texts, got {texts!r:.80}")
    before: dict[int, list[str]] = {}
    for image in images if isinstance(images, list) else [images]:
        name = image.get("image_name") if isinstance(image, dict) else None
        place = image.get("matched_text_index") if isinstance(image, dict) else None
        if not isinstance(name, str) or not isinstance(place, int) or not 0 <= place < len(texts):
            raise ValueError(
                f"{where}: expected image_info with image_name and matched_text_index below {len(texts)}, got "
                f"{image!r:.80}"
            )
        before.setdefault(place, []).append(name)
    pieces: list[Piece] = []
    for place, words in enumerate(texts):
        pieces += [Piece(picture=name) for name in before.get(place, ())]
        pieces.append(Piece(text=words.strip()))
    return pieces
