"""Records of caption files: pictures with captions, and documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from confed.data.refusals import check_inside, refuse


@dataclass(frozen=True, slots=True)
class Captioned:
    """A picture with its captions.

    Attributes:
        row: its row there, from 1.
        name: identifier, distinct within the file.
        picture: a path below the dataset's folder of pictures.
        split: empty if the file has no splits.
    """

    file: Path
    row: int
    name: str
    picture: str
    captions: tuple[str, ...]
    split: str = ""

    def __post_init__(self) -> None:
        check_inside(self.picture, self.where)
        check_captions(self.captions, self.where)

    @property
    def where(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, row {self.row}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document: a picture, or a text.

    Attributes:
        picture: a path below the dataset's folder of pictures; empty for a text.
        text: empty for a picture.
    """

    picture: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """A document of pictures and texts in the order in which they stand.

    Attributes:
        row: its row there, from 1.
    """

    file: Path
    row: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not any(piece.text.strip() for piece in self.pieces):
            refuse(f"{self.file}, row {self.row}", "a document with a text at least", found="none")
        for piece in self.pieces:
            path = PurePosixPath(piece.picture)
            if piece.picture and (path.is_absolute() or ".." in path.parts or not path.name):
                refuse(
                    f"{self.file}, row {self.row}", "a picture's name, without a way out of its folder", piece.picture
                )


def check_captions(captions: Sequence[str], where: str) -> None:
    """Check that there are captions and that none is empty."""
    if not captions:
        refuse(where, "a caption at least", found="none")
    for caption in captions:
        if not caption.strip():
            refuse(where, "captions that are not empty", caption)
