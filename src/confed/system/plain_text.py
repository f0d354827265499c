"""Control characters made visible, spreadsheet formulas made text, and passwords left out of addresses.

Names of clients, files and answers come from data of others. An escape code among them would move a terminal's cursor
or hide a line, a control character makes an SVG no XML, and a spreadsheet takes a cell that begins with ``=`` for a
formula.
"""

import re

# C0 but for tab and line feed, DEL and C1; marks that reorder what is read; halves of surrogate pairs; no characters.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def visible(text: str) -> str:
    r"""The text with control characters as ``\u001b``, as JSON writes them; tabs and line feeds stay."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def cell_text(text: str) -> str:
    """Text for a cell of a spreadsheet, never a formula: an apostrophe is put in front of one; numbers stay numbers."""
    text = visible(text)
    if not text.startswith(_FORMULA) or _is_number(text):
        return text
    return f"'{text}"


def without_password(text: str) -> str:
    """The text with every address in it without user name and password: ``https://ann:secret@host`` as ``https://host``."""
    return _CREDENTIALS.sub("", text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
