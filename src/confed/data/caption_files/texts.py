"""Streaming readers of texts and documents in JSON lines, plain or compressed with Zstandard.

The layouts are those of the Pile and of Common Crawl's cleaned texts (``text``), of OBELICS (Laurençon et al., NeurIPS
2023: ``images`` and ``texts`` side by side) and of MMC4 (Zhu et al., NeurIPS 2023: ``text_list`` and ``image_info``).
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from confed.data.caption_files.records import Piece, Story
from confed.data.vl_files.records import text

__all__ = ["chunks", "story_lines", "text_lines"]


def text_lines(file: Path, key: str = "text") -> Iterator[tuple[int, str]]:
    """The texts of a file ``.jsonl`` or ``.jsonl.zst`` with their rows; empty lines count and are left out.

    Raises ``ValueError``: the file is missing, cut off or damaged, a line is no JSON object with such a text, or
    zstandard is not installed.

    Args:
        file: one JSON object a line.
        key: where the text stands.
    """
    for row, entry in _objects(file):
        yield row, text(entry, key, file, row).strip()


def story_lines(file: Path) -> Iterator[Story]:
    """The documents of a file ``.jsonl`` or ``.jsonl.zst``.

    Either ``images`` and ``texts``, equally long lists of which one has null at each place; or ``text_list``, and
    ``image_info`` with ``image_name`` and ``matched_text_index``, the text that the picture stands in front of.

    Raises:
        ValueError: as :func:`text_lines`, or a line has neither layout, or no text.
    """
    for row, entry in _objects(file):
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
    """A long text in pieces of up to so many words.

    Raises:
        ValueError: fewer than one word.
    """
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
    return [
        piece
        for place, words in enumerate(texts)
        for piece in (*(Piece(picture=name) for name in before.get(place, ())), Piece(text=words.strip()))
    ]


def _objects(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the lines with their rows.

    Raises:
        ValueError: the file is missing, is not UTF-8, or a line is no JSON object.
    """
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    row = -1
    with _opened(file) as lines:
        try:
            for row, line in enumerate(lines):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError(f"{file}, row {row}: expected an object, got {entry!r:.80}")
                yield row, entry
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8 text, got: {error}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{file}, row {row}: expected one JSON object, got: {error}; is it cut off?") from error


@contextmanager
def _opened(file: Path) -> Iterator[io.TextIOBase]:
    """The file's lines, decompressed where they are compressed.

    Raises:
        ValueError: the compressed file is damaged or cut off.
    """
    if file.suffix.lower() not in (".zst", ".zstd"):
        with file.open(encoding="utf-8") as lines:
            yield lines
        return
    library = _zstandard(file)
    try:
        with library.open(file, "rt", encoding="utf-8") as lines:
            yield lines
    except (library.ZstdError, EOFError) as error:
        raise ValueError(f"{file}: expected a complete Zstandard file, got: {error}; is it cut off?") from error


def _zstandard(file: Path) -> Any:
    """Python's own module where it has one, or the same for older Pythons.

    Raises:
        ValueError: no package for Zstandard is installed.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ValueError(f"reading {file} needs the package backports.zstd: pip install '.[captions]' -c constraints.txt")
