"""Streaming readers of texts and documents in JSON lines, plain or compressed with Zstandard.

The layouts are those of the Pile and of Common Crawl's cleaned texts (``text``), of OBELICS (Laurençon et al., NeurIPS
2023: ``images`` and ``texts`` side by side) and of MMC4 (Zhu et al., NeurIPS 2023: ``text_list`` and ``image_info``).

Broder, "On the resemblance and containment of documents", 1997, by the library datasketch: texts are sets of runs of
words, their Jaccard similarity is estimated from minima of random hashes, and locality-sensitive hashing finds the few
earlier texts to compare with. Memory grows with the texts that are kept, by some kilobytes each.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confed.data.caption_files.records import Piece, Story
from confed.data.intake.tables import read_jsonl
from confed.data.refusals import library, refuse
from confed.data.vl_files.records import text

# Removal of near-duplicate texts ------------------------------------------------------------------------------

SIMILAR = 0.8
"""The similarity from which on two texts are nearly the same."""
_WORDS, _HASHES = 3, 128
"""Words of a run, and hashes of which the minima are compared."""


class NearDuplicates:
    """Filter of near-duplicate texts that keeps the first one of its kind.

    Attributes:
        dropped: how many were near duplicates so far.
    """

    def __init__(self) -> None:
        self._library = library("datasketch", "finding near duplicates", "captions")
        self.dropped = 0
        self._index: Any = self._library.MinHashLSH(threshold=SIMILAR, num_perm=_HASHES)
        self._sketches: list[Any] = []

    def is_new(self, text: str) -> bool:
        """Whether no earlier text resembles this one; it is remembered if so."""
        sketch = self._library.MinHash(num_perm=_HASHES, seed=1)
        sketch.update_batch([run.encode() for run in _runs(text)])
        near = self._index.query(sketch)
        if any(self._sketches[number].jaccard(sketch) >= SIMILAR for number in near):
            self.dropped += 1
            return False
        self._index.insert(len(self._sketches), sketch)
        self._sketches.append(sketch)
        return True


def _runs(text: str) -> set[str]:
    every = re.findall(r"\w+", text.lower())
    size = min(_WORDS, len(every))
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
                refuse(where, "images and texts as lists of one length", entry)
            pieces = [_piece(image, words, where) for image, words in zip(images, texts, strict=True)]
        elif "text_list" in entry:
            pieces = _matched(entry, where)
        else:
            refuse(where, "images and texts, or text_list and image_info", found=sorted(entry))
        yield Story(file, row, tuple(pieces))


def chunks(words: str, most: int) -> list[str]:
    """A long text in pieces of up to so many words."""
    every = words.split()
    return [" ".join(every[first : first + most]) for first in range(0, len(every), most)]


def _piece(image: object, words: object, where: str) -> Piece:
    if isinstance(image, str) and image and words is None:
        return Piece(picture=image)
    if isinstance(words, str) and image is None:
        return Piece(text=words.strip())
    refuse(where, "a picture or a text at each place", found=f"{image!r:.40} and {words!r:.40}")


def _matched(entry: dict[str, Any], where: str) -> list[Piece]:
    texts, images = entry["text_list"], entry.get("image_info", [])
    if not isinstance(texts, list) or not all(isinstance(words, str) for words in texts):
        refuse(where, "text_list as a list of texts", texts)
    before: dict[int, list[str]] = {}
    for image in images if isinstance(images, list) else [images]:
        name = image.get("image_name") if isinstance(image, dict) else None
        place = image.get("matched_text_index") if isinstance(image, dict) else None
        if not isinstance(name, str) or not isinstance(place, int) or not 0 <= place < len(texts):
            refuse(where, f"image_info with image_name and matched_text_index below {len(texts)}", image)
        before.setdefault(place, []).append(name)
    pieces: list[Piece] = []
    for place, words in enumerate(texts):
        pieces += [Piece(picture=name) for name in before.get(place, ())]
        pieces.append(Piece(text=words.strip()))
    return pieces
