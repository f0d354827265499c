"""Readers of caption annotations: COCO's, Karpathy's splits, and Flickr30k's list of tokens.

Chen et al., "Microsoft COCO captions", arXiv:1504.00325; Young et al., "From image descriptions to visual denotations",
TACL 2014; splits: Karpathy and Fei-Fei, "Deep visual-semantic alignments", CVPR 2015.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from confed.data.intake.account import Account
from confed.data.intake.stream import Window, json_items, json_lists, opened_text
from confed.data.intake.tables import read_cells, read_jsonl
from confed.data.intake.values import plain_path
from confed.data.refusals import Distinct, check_inside, existing, expecting, refuse
from confed.data.vl_files.records import InFile, Row, rows_of


@dataclass(frozen=True, slots=True)
class Captioned(InFile):
    """A picture with its captions; ``picture`` is a path below the folder of pictures."""

    name: str
    picture: str
    captions: tuple[str, ...]
    split: str = ""

    def __post_init__(self) -> None:
        check_inside(self.picture, self)
        check_captions(self.captions, self.where)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document: a picture, by its path below the folder of pictures, or a text; the other is empty."""

    picture: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Story(InFile):
    """A document of pictures and texts in the order in which they stand."""

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not any(piece.text.strip() for piece in self.pieces):
            refuse(self.where, "a document with a text at least", found="none")
        for piece in self.pieces:
            if piece.picture:
                check_inside(piece.picture, self)


def check_captions(captions: Sequence[str], where: str) -> None:
    """Check that there are captions and that none is empty."""
    if not captions:
        refuse(where, "a caption at least", found="none")
    for caption in captions:
        if not caption.strip():
            refuse(where, "captions that are not empty", caption)


_IMAGES, _CAPTIONS = ("image", "image_name", "filename", "file_name", "file"), ("caption", "comment", "text")
"""Columns of tables with a caption a row, as Flickr8k and Flickr30k are passed on."""
_LAYOUTS = "an object with a list under 'images' (and 'annotations'), as COCO and Karpathy have it"
_ONE = "captions of one picture"


def caption_records(file: Path, account: Account | None = None) -> Iterator[Captioned]:
    """The pictures of a captions file of any of the known layouts, told apart by what is in it."""
    account = Account() if account is None else account
    existing(file)
    if file.suffix.lower() == ".jsonl":
        return table_records(file, account)
    if file.suffix.lower() in (".token", ".txt", ".tsv", ".csv"):
        with opened_text(file) as lines:
            first_line = next(lines, "").lower()
        if "#" not in first_line and any(name in first_line for name in _CAPTIONS):
            return table_records(file, account)
        return token_records(file, account)
    with file.open("rb") as stream:
        window = Window(file, stream)
        if window.peek() != "{":
            refuse(file, _LAYOUTS, found="no object")
        for key in window.places():
            if key == "annotations":
                return coco_caption_records(file, account)
            if key != "images":
                window.value()
                continue
            if window.peek() == "[":
                first: Any = next(window.items(), (0, None))[1]
                split = isinstance(first, dict) and "sentences" in first
                return karpathy_records(file, account) if split else coco_caption_records(file, account)
            break
    refuse(file, _LAYOUTS, found="an object without such a list")


def coco_caption_records(file: Path, account: Account | None = None) -> Iterator[Captioned]:
    """The pictures of an official ``captions_*.json`` in its order; those without a caption are left out."""
    account, distinct, images = Account() if account is None else account, Distinct("id"), Distinct("id of images")
    names, rows, captions = dict[int, str](), dict[int, int](), dict[int, list[str]]()
    for key, number, given in json_lists(file, ("images", "annotations")):
        entry = Row(file, number, given)
        entry_id = entry.number("id")
        if key == "annotations":
            distinct.add(entry_id, file, number)
            captions.setdefault(entry.number("image_id"), []).append(entry.text("caption").strip())
            continue
        images.add(entry_id, file, number)
        names[entry_id], rows[entry_id] = plain_path(entry.text("file_name")), number
    strange = next((image for image in captions if image not in names), None)
    if strange is not None:
        refuse(file, "captions about its images", found=f"one about the picture {strange}")
    account.rows[str(file)] = len(names)
    for image, name in names.items():
        if image not in captions:
            account.leave("no caption", f"{file}, row {rows[image]}")
        else:
            yield Captioned(file, rows[image], f"coco-{image}", name, tuple(captions[image]))


def karpathy_records(file: Path, account: Account | None = None) -> Iterator[Captioned]:
    """The pictures of a split file of Karpathy, ``dataset_coco.json`` or ``dataset_flickr30k.json``, one by one."""
    account = Account() if account is None else account
    for entry in rows_of(file, json_items(file, "images"), "filename"):
        account.rows[str(file)] = entry.row
        name, split, sentences = entry.text("filename"), entry.text("split"), entry.get("sentences")
        if not isinstance(sentences, list) or not sentences:
            refuse(entry, "a list of sentences", sentences)
        folder = entry.get("filepath") or ""
        picture = f"{folder}/{name}" if folder else name
        captions = tuple(Row(file, entry.row, sentence).text("raw").strip() for sentence in sentences)
        yield Captioned(file, entry.row, Path(name).stem, picture, captions, split)


def token_records(file: Path, account: Account | None = None) -> Iterator[Captioned]:
    """The pictures of Flickr30k's list "file.jpg#n<TAB>caption", whose captions of a picture stand together."""
    account = Account() if account is None else account
    distinct = Distinct("picture")
    picture, first, captions = "", 0, list[str]()
    with opened_text(existing(file)) as lines, expecting(file, "UTF-8 text", UnicodeDecodeError):
        for row, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            account.rows[str(file)] = account.rows.get(str(file), 0) + 1
            key, tab, caption = line.rstrip("\n").partition("\t")
            name, sign, place = key.rpartition("#")
            if tab and sign and not caption.strip():
                account.leave("no caption", f"{file}, row {row}")
                continue
            if not tab or not sign or not place.isdigit():
                refuse(f"{file}, row {row}", "'file.jpg#n<TAB>caption'", line.rstrip())
            if name == picture:
                account.merge(_ONE)
            if name != picture:
                if captions:
                    yield Captioned(file, first, Path(picture).stem, picture, tuple(captions))
                distinct.add(name, file, row)
                picture, first, captions = name, row, []
            captions.append(caption.strip())
    if captions:
        yield Captioned(file, first, Path(picture).stem, picture, tuple(captions))


def table_records(file: Path, account: Account) -> Iterator[Captioned]:
    """The pictures of a table with a column of pictures and one of captions, a caption a row."""
    cells, reading = (list(read_jsonl(file)), "") if file.suffix.lower() == ".jsonl" else read_cells(file)
    account.rows[str(file)] = len(cells)
    account.note(reading and f"{file.name} is read as {reading}")
    columns = dict.fromkeys(chain.from_iterable(row for _, row in cells))
    image = next((name for name in columns if name.lower() in _IMAGES), "")
    caption = next((name for name in columns if name.lower() in _CAPTIONS), "")
    rows, captions = dict[str, int](), dict[str, list[str]]()
    for row, entry in cells:
        if not entry.get(image) or not entry.get(caption):
            account.leave("no caption" if entry.get(image) else "no picture", f"{file}, row {row}")
            continue
        picture = plain_path(str(entry[image])).partition("#")[0]
        if picture in rows:
            account.merge(_ONE)
        rows.setdefault(picture, row)
        captions.setdefault(picture, []).append(str(entry[caption]).strip())
    for picture, row in rows.items():
        yield Captioned(file, row, Path(picture).stem, picture, tuple(captions[picture]))
