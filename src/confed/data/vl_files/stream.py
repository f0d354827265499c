"""JSON files too large to hold in memory, read value by value; and JSON lines."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["json_items", "json_lines"]

_CHUNK = 1 << 20
_LONGEST = 1 << 24
"""Characters of one value above which the file is taken to be damaged."""


def json_items(file: Path, key: str | None = None) -> Iterator[tuple[int, Any]]:
    """The items of a list in a JSON file, with their numbers from 0.

    Args:
        file: one JSON value.
        key: where the file is an object: under which of its keys the list stands; by default the file is the list.
            Other keys are read and dropped.

    Raises:
        ValueError: the file is missing, cut off, no JSON, or has no such list.
    """
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    with file.open("rb") as stream:
        text = _Window(file, stream)
        if key is None:
            if text.take() != "[":
                raise ValueError(f"{file}: expected a list")
            yield from _list(text)
        else:
            yield from _under(text, key)
        text.finish()


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """The values of a file with one JSON value a line, with their numbers from 0; empty lines count and are left out.

    Raises:
        ValueError: the file is missing, no UTF-8, or a line is no JSON (names it).
    """
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    with file.open(encoding="utf-8") as lines:
        number = -1
        try:
            for number, line in enumerate(lines):
                if line.strip():
                    yield number, json.loads(line)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8 text, got: {error}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{file}, row {number}: expected one JSON value, got: {error}; is it cut off?") from error


def _list(text: "_Window") -> Iterator[tuple[int, Any]]:
    """Items behind the opening bracket."""
    number = 0
    separator = text.take() if text.peek() == "]" else ","
    while separator == ",":
        text.peek()
        yield number, text.value()
        number += 1
        separator = text.take()
    if separator != "]":
        raise ValueError(f"{text.file}: expected ',' or ']' after row {number - 1}, got {separator!r}")


def _under(text: "_Window", wanted: str) -> Iterator[tuple[int, Any]]:
    if text.take() != "{":
        raise ValueError(f"{text.file}: expected an object with the key {wanted!r}")
    found = False
    separator = text.take() if text.peek() == "}" else ","
    while separator == ",":
        text.peek()
        name = text.value()
        if text.take() != ":":
            raise ValueError(f"{text.file}: expected ':' behind the key {name!r:.40}")
        if name == wanted and not found:
            found = True
            if text.take() != "[":
                raise ValueError(f"{text.file}: expected a list under {wanted!r}")
            yield from _list(text)
        else:
            text.peek()
            text.value()
        separator = text.take()
    if separator != "}":
        raise ValueError(f"{text.file}: expected ',' or '}}' between keys, got {separator!r}")
    if not found:
        raise ValueError(f"{text.file}: expected an object with the key {wanted!r}")


class _Window:
    """A text file of which only a window is in memory."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.file, self._stream = file, stream
        self._utf8, self._json = codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
        self._bytes, self._text, self._at = 0, "", 0

    def peek(self) -> str:
        """The next character that is no white space; it stays unread."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise ValueError(f"{self.file}: ends too early, after {self._bytes} bytes; is it cut off?")

    def take(self) -> str:
        """The same, and goes behind it."""
        character = self.peek()
        self._at += 1
        return character

    def value(self) -> Any:
        """The JSON value that starts here."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise ValueError(f"{self.file}: values nested too deeply near byte {self._bytes}") from error
            except ValueError as error:
                if len(self._text) - self._at > _LONGEST:
                    raise ValueError(f"{self.file}: no JSON near byte {self._bytes}: {error}") from error
                if not self._more():
                    raise ValueError(
                        f"{self.file}: the last value is incomplete or no JSON (the file has {self._bytes} bytes): "
                        f"{error}; is it cut off?"
                    ) from error
            else:
                length = end - self._at
                # A number near the window's end may go on behind it, as "1" does before ".5" and "e+3".
                if isinstance(value, int | float) and len(self._text) - end <= len("e+") and self._more():
                    continue
                self._at += length
                return value

    def finish(self) -> None:
        """Raises ValueError if anything follows."""
        while not self._text[self._at :].strip():
            if not self._more():
                return
        raise ValueError(f"{self.file}: expected nothing behind the last value")

    def _more(self) -> bool:
        chunk = self._stream.read(_CHUNK)
        self._bytes += len(chunk)
        try:
            self._text, self._at = self._text[self._at :] + self._utf8.decode(chunk), 0
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.file}: expected UTF-8 text, got: {error}") from error
        return bool(chunk)
