"""Encodings of text files, and streaming readers of large JSON files."""

import codecs
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from xml.etree import ElementTree

from confed.data.refusals import existing, expecting, read_text, refuse

_CHUNK = 1 << 20
_LONGEST = 1 << 24
"""Characters of one value above which the file is taken to be damaged."""


# Encodings ----------------------------------------------------------------------------------------------------

_MARKS = {
    codecs.BOM_UTF8: ("utf-8-sig", "UTF-8 with a byte-order mark"),
    codecs.BOM_UTF32_LE: ("utf-32", "UTF-32"),
    codecs.BOM_UTF16_LE: ("utf-16", "UTF-16"),
    codecs.BOM_UTF16_BE: ("utf-16", "UTF-16"),
}
_SCANNED = 1 << 26
"""Bytes of a file that are looked at to find its encoding."""


@dataclass(frozen=True)
class Encoding:
    """How a file's bytes are read as text; ``how_read`` is empty for plain UTF-8."""

    name: str = "utf-8"
    errors: str = "strict"
    how_read: str = ""


def _windows(error: UnicodeError) -> tuple[str, int]:
    """Bytes that are no UTF-8 as Windows has them, so that one such byte changes nothing else."""
    assert isinstance(error, UnicodeDecodeError)
    byte = error.object[error.start : error.start + 1]
    try:
        return byte.decode("cp1252"), error.start + 1
    except UnicodeDecodeError:
        return byte.decode("latin-1"), error.start + 1


codecs.register_error("confed.windows", _windows)


def encoding_of(file: Path, *, strict: bool = False) -> Encoding:
    """The encoding of a text file: by its mark, else UTF-16 where every other byte is zero, else UTF-8.

    Unless it is strict, bytes that are no UTF-8 are taken for those of Windows.
    """
    with existing(file).open("rb") as stream:
        head = stream.read(1024)
        for mark, (name, how_read) in _MARKS.items():
            if head.startswith(mark):
                return Encoding(name, how_read=how_read)
        for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
            if len(head) > 3 and head[first::2].count(0) > len(head) // 4:
                return Encoding(name, how_read="UTF-16")
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace" if strict else "strict")
        try:
            decoder.decode(head)
            while not strict and stream.tell() < _SCANNED and (chunk := stream.read(1 << 20)):
                decoder.decode(chunk)
        except UnicodeDecodeError:
            return Encoding(errors="confed.windows", how_read="Windows-1252 where it is no UTF-8")
    return Encoding()


@contextmanager
def opened_text(file: Path, *, strict: bool = False) -> Iterator[TextIO]:
    """A text file in its encoding."""
    encoding = encoding_of(file, strict=strict)
    with file.open(encoding=encoding.name, errors=encoding.errors) as lines:
        yield lines


def text_of(file: Path) -> str:
    """All of a text file in its encoding."""
    with opened_text(file) as lines:
        return lines.read()


def read_xml(file: Path) -> ElementTree.Element:
    """The root of an XML file."""
    with expecting(file, "an XML file", ElementTree.ParseError, ValueError, LookupError):
        return ElementTree.fromstring(file.read_bytes())


def json_object(file: Path, keys: Collection[str] = ()) -> dict[str, Any]:
    """A small JSON file that must be an object with some keys."""
    written = read_text(file)
    with expecting(file, "a JSON file", ValueError, RecursionError):
        content: Any = json.loads(written)
    if not isinstance(content, dict) or not set(keys) <= content.keys():
        refuse(file, f"an object with {', '.join(keys)}", content)
    return content


# JSON, value by value ------------------------------------------------------------------------------------------


def json_items(file: Path, key: str | None = None, *, strict: bool = True) -> Iterator[tuple[int, Any]]:
    """The items of a list in a JSON file, or of that under one key of an object, with their numbers from 1."""
    if key is not None:
        for _, number, item in json_lists(file, (key,)):
            yield number, item
        return
    with opened_json(file, "[", "a list", strict=strict) as window:
        yield from window.items()


def json_lists(file: Path, keys: Sequence[str]) -> Iterator[tuple[str, int, Any]]:
    """The items of the lists under some keys of an object, in the order of the file, with their numbers from 1."""
    expected, left = f"an object with a list under {' and '.join(map(repr, keys))}", list(keys)
    with opened_json(file, "{", expected) as window:
        for key in window.places():
            if key not in left:
                window.value()
                continue
            left.remove(key)
            if window.peek() != "[":
                refuse(file, expected, found=f"no list under {key!r}")
            for number, item in window.items():
                yield key, number, item
    if left:
        refuse(file, expected, found=f"no {left[0]!r}")


def json_text(file: Path, key: str, until: str) -> str:
    """A text that stands in a JSON object before a long list; empty if there is none."""
    with existing(file).open("rb") as stream:
        window = Window(file, stream)
        places = window.places() if window.peek() == "{" else ()
        for place in takewhile(lambda place: place != until, places):
            value = window.value()
            if place == key and isinstance(value, str):
                return value
    return ""


@contextmanager
def opened_json(file: Path, begins: str, expected: str, *, strict: bool = True) -> Iterator["Window"]:
    """A JSON file that begins with "[" or "{", and that is read to its end."""
    with existing(file).open("rb") as stream:
        window = Window(file, stream, strict)
        if window.peek() != begins:
            refuse(file, expected, found="none")
        yield window
        window.finish()


class Window:
    """A JSON file of which only a window is in memory."""

    def __init__(self, file: Path, stream: BinaryIO, strict: bool = True) -> None:
        self.file, self._stream = file, stream
        encoding = encoding_of(file, strict=strict)
        self._decoder, self._json = codecs.getincrementaldecoder(encoding.name)(encoding.errors), json.JSONDecoder()
        self._bytes, self._text, self._at = 0, "", 0

    def items(self) -> Iterator[tuple[int, Any]]:
        """The items of the list that starts here, with their numbers from 1."""
        for number in self.places():
            yield int(number), self.value(f", row {number}")

    def places(self) -> Iterator[str]:
        """The keys of the object, or numbers of the list, that starts here; the caller reads the value of each."""
        end = "]" if self.take() == "[" else "}"
        place, number = "", 0
        separator = self.take() if self.peek() == end else ","
        while separator == ",":
            number += 1
            key = number if end == "]" else self.value()
            if end == "}" and (not isinstance(key, str) or self.take() != ":"):
                refuse(self.file, "a key and ':'", key)
            self.peek()
            yield str(key)
            place = f"after row {key}" if end == "]" else f"behind the value of {key!r:.40}"
            separator = self.take()
        if separator != end:
            refuse(self.file, f"',' or '{end}' {place}", separator)

    def peek(self) -> str:
        """The next character that is no white space; it stays unread."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                refuse(self.file, "more", found=f"an end after {self._bytes} bytes", remedy="is it cut off?")

    def take(self) -> str:
        """The same, and goes behind it."""
        character = self.peek()
        self._at += 1
        return character

    def value(self, where: str = "") -> Any:
        """The JSON value that starts here."""
        self.peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise ValueError(f"{self.file}{where}: values nested too deeply near byte {self._bytes}") from error
            except ValueError as error:
                if len(self._text) - self._at > _LONGEST:
                    raise ValueError(f"{self.file}{where}: no JSON near byte {self._bytes}: {error}") from error
                if not self._more():
                    raise ValueError(
                        f"{self.file}{where}: the last value is incomplete or no JSON (the file has {self._bytes} "
                        f"bytes): {error}; is it cut off?"
                    ) from error
            else:
                length = end - self._at
                # A number near the window's end may go on behind it, as "1" does before ".5" and "e+3".
                if isinstance(value, int | float) and len(self._text) - end <= len("e+") and self._more():
                    continue
                self._at += length
                return value

    def finish(self) -> None:
        """Check that nothing follows the last value."""
        while not self._text[self._at :].strip():
            if not self._more():
                return
        refuse(self.file, "nothing behind the last value", found="more")

    def _more(self) -> bool:
        chunk = self._stream.read(_CHUNK)
        self._bytes += len(chunk)
        with expecting(self.file, "UTF-8 text", UnicodeDecodeError):
            self._text, self._at = self._text[self._at :] + self._decoder.decode(chunk), 0
        return bool(chunk)
