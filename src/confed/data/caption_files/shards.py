"""Sharded pictures with captions: tar archives in WebDataset's layout, and Parquet files.

In a tar archive a picture ``KEY.jpg`` (``.jpeg``, ``.png``, ``.webp``) and its caption ``KEY.txt``, or ``KEY.json``
with "caption" or "text", have one key. A Parquet file has columns of pictures (bytes, or a struct with "bytes") and of
captions. Captions are read in one pass; pictures stay where they are until a batch asks for them.

The layouts are those of the Pile and of Common Crawl's cleaned texts (``text``), of OBELICS (Laurençon et al., NeurIPS
2023: ``images`` and ``texts`` side by side) and of MMC4 (Zhu et al., NeurIPS 2023: ``text_list`` and ``image_info``).

Broder, "On the resemblance and containment of documents", 1997, by the library datasketch: texts are sets of runs of
words, their Jaccard similarity is estimated from minima of random hashes, and locality-sensitive hashing finds the few
earlier texts to compare with. Memory grows with the texts that are kept, by some kilobytes each.
"""

import json
import re
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

import numpy as np

from confed.data.bounded_files import PLAIN_TAR, tar_members
from confed.data.caption_files.captions import Piece, Story, check_captions
from confed.data.intake.opening import read_picture
from confed.data.intake.tables import opened_parquet, read_jsonl
from confed.data.intake.walk import is_litter
from confed.data.picture_files import NamedPictures
from confed.data.pictures import resize
from confed.data.ragged import PackedTexts
from confed.data.refusals import check_choice, existing, expecting, library, refuse
from confed.data.vl_files.records import rows_of

# Removal of near-duplicate texts ------------------------------------------------------------------------------

SIMILAR = 0.8
"""The similarity from which on two texts are nearly the same."""
_WORDS, _HASHES = 3, 128
"""Words of a run, and hashes of which the minima are compared."""


class NearDuplicates:
    """Filter of near-duplicate texts that keeps the first one of its kind."""

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


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file ``.jsonl`` or ``.jsonl.zst`` with their rows; empty lines count and are left out."""
    for entry in rows_of(file, read_jsonl(file)):
        yield entry.row, entry.text("text").strip()


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


# Sharded pictures with captions: tar archives in WebDataset's layout, and Parquet files ---------------------

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
_PICTURES = ("image", "jpg", "png", "image_bytes")
_CAPTIONS = ("caption", "text", "txt", "TEXT")
_END = 2 * tarfile.BLOCKSIZE
"""Bytes of zeros behind the last file of a tar archive, at least."""
_SIDE_BY_SIDE = 64
"""Rows of a Parquet file that are in memory at once while captions are read."""


class Place(NamedTuple):
    """Where a picture's bytes are: first byte and size in a tar archive or a file; row and -1 in a Parquet file."""

    file: Path
    first: int
    size: int


class Shown(NamedTuple):
    """A picture of a shard with its caption."""

    name: str
    place: Place
    caption: str


def shard_pairs(file: Path) -> Iterator[Shown]:
    """The pictures of a shard, ``.tar`` or ``.parquet``, with their captions."""
    readers = {".tar": tar_pairs, ".parquet": parquet_pairs}
    check_choice(f"the ending of {file.name}, a shard,", file.suffix.lower(), readers)
    yield from readers[file.suffix.lower()](file)


def tar_pairs(file: Path) -> Iterator[Shown]:
    """The pictures of an uncompressed tar archive whose files of one key stand together."""
    existing(file)
    size = file.stat().st_size
    key, picture, caption = "", None, None
    with expecting(file, PLAIN_TAR, tarfile.TarError), tarfile.open(file, "r:") as archive:
        for member in tar_members(archive, file):
            path = PurePosixPath(member.name)
            if any(map(is_litter, path.parts)):
                continue
            # The key is what stands in front of the first dot of the file's name.
            stem = str(path.parent / path.name.partition(".")[0])
            if stem != key:
                if key:
                    yield _shown(file, key, picture, caption)
                key, picture, caption = stem, None, None
            ending = path.suffix.lower()
            if ending in _ENDINGS:
                picture = Place(file, member.offset_data, member.size)
            elif ending == ".txt" or (ending == ".json" and caption is None):
                handle = archive.extractfile(member)
                content = b"" if handle is None else handle.read()
                caption = _read_caption(content, ending, f"{file}:{member.name}")
    if key:
        yield _shown(file, key, picture, caption)
    with file.open("rb") as stream:
        stream.seek(max(0, size - _END))
        ends = size >= _END and not any(stream.read(_END))
    if not ends:
        refuse(file, "the end mark of a tar archive", found="none", remedy="is it cut off?")


def parquet_pairs(file: Path) -> Iterator[Shown]:
    """The pictures of a Parquet file, whose column of captions alone is read, part by part."""
    parquet = _opened(file, _state(file))
    names = parquet.schema_arrow.names
    caption = next((name for name in _CAPTIONS if name in names), None)
    if caption is None or _picture_column(names) is None:
        refuse(
            file,
            f"a column of pictures ({', '.join(_PICTURES)}) and one of captions ({', '.join(_CAPTIONS)})",
            found=", ".join(names),
        )
    row = 0
    for record_batch in parquet.iter_batches(batch_size=_SIDE_BY_SIDE, columns=[caption], use_threads=False):
        for words in record_batch.column(0).to_pylist():
            where = f"{file}, row {row + 1}"
            if not isinstance(words, str):
                refuse(where, f"a text as {caption!r}", words)
            check_captions([words], where)
            yield Shown(f"{file.stem}/{row:08d}", Place(file, row, -1), words.strip())
            row += 1


class ShardPictures(NamedPictures):
    """Pictures of shards, or in files of their own; nothing is kept but the last part of a Parquet file."""

    def __init__(self, places: Sequence[Place], names: PackedTexts, size: int) -> None:
        super().__init__(places[0].file.parent if places else Path(), names, size)
        self.files = tuple(dict.fromkeys(place.file for place in places))
        number = {file: i for i, file in enumerate(self.files)}
        rows = [(number[place.file], place.first, place.size) for place in places]
        self._places = np.array(rows, dtype=np.int64).reshape(-1, 3)

    def take(self, rows: np.ndarray) -> Self:
        fewer = super().take(rows)
        fewer._places = self._places[rows]
        return fewer

    def present(self, row: int) -> bool:
        number, first, size = self._places[row].tolist()
        if size >= 0:
            return size > 0
        try:
            return bool(_parquet_picture(self.files[number], first))
        except ValueError:
            return False

    def version(self, row: int) -> tuple[int, ...]:
        """The shard's time of change and size, and where the picture is in it."""
        number, first, size = self._places[row].tolist()
        return (*_state(self.files[number]), first, size)

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        pictures = np.empty((len(rows), *self.shape[1:]), dtype=np.uint8)
        # Neighbours in a shard are read behind each other.
        for i in sorted(range(len(rows)), key=lambda i: tuple(self._places[rows[i]].tolist())):
            pictures[i] = self._one(rows[i])
        return pictures

    def _one(self, row: int) -> np.ndarray:
        number, first, size = self._places[row].tolist()
        file = self.files[number]
        if size < 0:
            content, name = _parquet_picture(file, first), f"{file}, row {first + 1}"
        else:
            try:
                with file.open("rb") as archive:
                    archive.seek(first)
                    content, name = archive.read(size), f"{file}, byte {first}"
            except OSError as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
        return resize(read_picture(content, name=name), self.size, self.fit)


def _shown(file: Path, key: str, picture: Place | None, caption: str | None) -> Shown:
    if picture is None or caption is None:
        lacks = "a picture" if picture is None else "a caption (.txt or .json)"
        refuse(file, f"{lacks} of {key!r}", found="none", remedy="the files of one key must stand together")
    check_captions([caption], f"{file}:{key}")
    return Shown(key, picture, caption)


def _read_caption(content: bytes, ending: str, where: str) -> str | None:
    with expecting(where, "a caption in UTF-8", ValueError):
        words = content.decode("utf-8")
        if ending == ".txt":
            return words.strip()
        entry: Any = json.loads(words)
    entry_fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    return next((str(entry_fields[key]).strip() for key in _CAPTIONS if isinstance(entry_fields.get(key), str)), None)


def _picture_column(names: Sequence[str]) -> str | None:
    return next((name for name in _PICTURES if name in names), None)


def _parquet_picture(file: Path, row: int) -> bytes:
    """The bytes of one picture of a Parquet file."""
    parquet = _opened(file, _state(file))
    group, first = 0, 0
    while row >= first + parquet.metadata.row_group(group).num_rows:
        first += parquet.metadata.row_group(group).num_rows
        group += 1
    with _reading:
        value: Any = _group(file, _state(file), group)[row - first].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes) or not content:
        refuse(f"{file}, row {row + 1}", "the bytes of a picture", value)
    return content


_reading = threading.Lock()
"""Pictures are checked in threads, and a Parquet file is read by one at a time."""


@lru_cache(maxsize=1)
def _group(file: Path, state: tuple[int, int], group: int) -> Any:
    """The pictures of one group of rows; the last one is kept, as neighbours are asked for."""
    parquet = _opened(file, state)
    column = _picture_column(parquet.schema_arrow.names)
    return parquet.read_row_group(group, columns=[column], use_threads=False).column(0)


@lru_cache(maxsize=8)
def _opened(file: Path, state: tuple[int, int]) -> Any:
    """A Parquet file's description; its content stays on disk."""
    del state  # tells one state of the file from another
    return opened_parquet(existing(file))


def _state(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
