"""Streaming readers of large JSON files."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

_CHUNK = 1 << 20
_LONGEST = 1 << 24
"""Characters of one value above which the file is taken to be damaged."""


def json_items(file: Path, key: str | None = None) -> Iterator[tuple[int, Any]]:
    """The items of a list in a JSON file, with their numbers from 0."""
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    with file.open("rb") as stream:
        text = Window(file, stream)
        if key is None:
            if text.peek() != "[":
                raise ValueError(f"{file}: expected a list")
            yield from text.items()
        else:
            yield from _under(text, key)
        text.finish()


def json_text(file: Path, key: str, until: str) -> str:
    """A text that stands in a JSON object before a long list; empty if there is none."""
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    with file.open("rb") as stream:
        text = Window(file, stream)
        if text.peek() != "{":
            return ""
        for member in text.members():
            if member == until:
                break
            value = text.value()
            if member == key:
                return value if isinstance(value, str) else ""
    return ""


def _under(text: "Window", wanted: str) -> Iterator[tuple[int, Any]]:
    """Items of the list under one key of an object."""
    if text.peek() != "{":
        raise ValueError(f"{text.file}: expected an object with the key {wanted!r}")
    reached = False
    for key in text.members():
        if key != wanted or reached:
            text.value()
            continue
        reached = True
        if text.peek() != "[":
            raise ValueError(f"{text.file}: expected a list under {wanted!r}")
        yield from text.items()
    if not reached:
        raise ValueError(f"{text.file}: expected an object with the key {wanted!r}")


class Readable(Protocol):
    """Protocol of sources: an open binary file, or a wrapper that counts or hashes one."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most so many; none at the end."""
        ...


class Window:
    """A JSON file of which only a window is in memory."""

    def __init__(self, file: Path, stream: Readable) -> None:
        self.file, self._stream = file, stream
        self._utf8, self._json = codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
        self._bytes, self._text, self._at = 0, "", 0

    def items(self) -> Iterator[tuple[int, Any]]:
        """The items of the list that starts here, with their numbers from 0."""
        self.take()
        number = 0
        separator = self.take() if self.peek() == "]" else ","
        while separator == ",":
            yield number, self.value(f", row {number}")
            number += 1
            separator = self.take()
        if separator != "]":
            raise ValueError(f"{self.file}: expected ',' or ']' after row {number - 1}, got {separator!r}")

    def members(self) -> Iterator[str]:
        """The keys of the object that starts here; the caller reads the value of each before the next."""
        self.take()
        key: Any = None
        separator = self.take() if self.peek() == "}" else ","
        while separator == ",":
            key = self.value()
            if not isinstance(key, str) or self.take() != ":":
                raise ValueError(f"{self.file}: expected a key and ':', near {key!r:.40}")
            self.peek()
            yield key
            separator = self.take()
        if separator != "}":
            raise ValueError(f"{self.file}: expected ',' or '}}' behind the value of {key!r:.40}, got {separator!r}")

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
        raise ValueError(f"{self.file}: expected nothing behind the last value")

    def _more(self) -> bool:
        chunk = self._stream.read(_CHUNK)
        self._bytes += len(chunk)
        try:
            self._text, self._at = self._text[self._at :] + self._utf8.decode(chunk), 0
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.file}: expected UTF-8 text, got: {error}") from error
        return bool(chunk)
