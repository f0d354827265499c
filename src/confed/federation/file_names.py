"""Names that texts of others may give, and reversible file names for those of clients, rows and servers.

What a recipe, a hub or a results file calls a recipe, a row or a site becomes a :class:`Name`, and what it says for
readers a :class:`Title`: other texts are refused where they enter.

The supplier of the data chooses the names of clients, and a name such as ``../../x`` must stay inside the folder that
it is used in. What not every file system takes is written as ``%`` and two hexadecimal digits per byte of UTF-8, as in
addresses, so that the name can be read back from the file's.
"""

import unicodedata
from itertools import product
from pathlib import Path
from urllib.parse import quote, unquote

LONGEST = 200  # bytes of a file name; file systems have 255, of which endings and temporary names take some
_KEPT = frozenset("-_.+,=@() ")
_PORTS = frozenset(map("".join, product(("com", "lpt"), "0123456789¹²³")))
_DEVICES = _PORTS | {"con", "prn", "aux", "nul"}  # names that Windows gives to devices, with any ending


_MOST = 100  # characters of a name or a title
_INVISIBLE = frozenset(["Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"])
"""Unicode's control characters, marks of direction and other formats, no characters, surrogates, line separators."""
_RESERVED = frozenset('/\\:*?"<>|')  # characters that separate parts of paths, or that Windows keeps for itself
_JOINERS = "\u200c\u200d"  # formats that spelling needs


class Title:
    """A text for readers, such as a row's label: one line without control characters and marks of direction.

    ``Title(text)`` is the text itself, a plain ``str``, as libraries that write YAML and the like know no other.

    Args:
        text: what a recipe or a file of others says.
        what: what it is, for the error message.

    Raises:
        ValueError: it is no text, empty, longer than 100 characters, or has such characters.
    """

    def __new__(cls, text: object, what: str = "") -> str:
        """The text, if it is sound; else a ValueError."""
        if fault := cls.fault(text):
            raise ValueError(f"{what or f'a {cls.__name__.lower()}'} must {fault}, got {ascii(text)[:60]}")
        return str(text)

    @classmethod
    def fault(cls, text: object) -> str:
        """What a text lacks, after "must"; empty where it is sound."""
        if not isinstance(text, str):
            return "be a text"
        if not 0 < len(text) <= _MOST or text != text.strip():
            return f"have 1 to {_MOST} characters, none of them a blank at an end"
        if any(unicodedata.category(sign) in _INVISIBLE and sign not in _JOINERS for sign in text):
            return "have no control characters, line ends, marks of direction or unknown characters"
        return ""


class Name(Title):
    """A title that may become a folder, a file or a job as well: no path, no option and no device of Windows."""

    @classmethod
    def fault(cls, text: object) -> str:
        """What a text lacks, after "must"; empty where it is sound."""
        fault = super().fault(text)
        if fault or not isinstance(text, str):
            return fault
        if not _RESERVED.isdisjoint(text):
            return f"be no path, without any of {' '.join(sorted(_RESERVED))}"
        if text.startswith(("-", ".")):
            return "begin with neither - nor ."
        return "be no device of Windows" if text.partition(".")[0].strip().lower() in _DEVICES else ""


def file_name(name: str) -> str:
    """A name as a file or folder name, valid on the file systems of Linux, macOS and Windows.

    Letters and digits of every script stay as they are, so ordinary names are their own file names. Different names
    have different file names, but where a file system does not tell capitals apart.

    Returns:
        One path component, neither hidden nor ``.`` or ``..``; :func:`name_of_file` gives the name back.

    Raises:
        ValueError: the file name would be longer than file systems allow.
    """
    if not name:
        return "%"  # what no other name becomes
    escaped = "".join(_escape(sign, at, len(name)) for at, sign in enumerate(name))
    if escaped.partition(".")[0].strip().lower() in _DEVICES:
        escaped = f"%{ord(escaped[0]):02X}{escaped[1:]}"
    if len(escaped.encode()) > LONGEST:
        raise ValueError(
            f"the name {name[:40]!r}... is too long for a file: at most {LONGEST} bytes, got {len(escaped)}"
        )
    return escaped


def name_of_file(file: str) -> str:
    """The name whose :func:`file_name` (or percent-encoding of another kind) this is."""
    return "" if file == "%" else unquote(file, errors="surrogatepass")


def path_of(parent: Path, name: str) -> Path:
    """Where the file or folder of a name lies, or is to lie; one that was written under the plain name is found too."""
    safe = file_name(name)
    for old in dict.fromkeys((quote(name, safe="", errors="surrogatepass"), name)):
        # Earlier versions wrote the name as it is, or percent-encoded; only a single plain component is looked at.
        plain = old not in ("", ".", "..", safe) and not set(old) & set("/\\\0")
        if plain and not (parent / safe).exists() and (parent / old).exists():
            return parent / old
    return parent / safe


def _escape(sign: str, at: int, length: int) -> str:
    hidden = at == 0 and sign in ". "
    trailing = at == length - 1 and sign in ". "  # Windows takes them off
    if (sign.isalnum() or sign in _KEPT) and not hidden and not trailing:
        return sign
    return "".join(f"%{byte:02X}" for byte in sign.encode(errors="surrogatepass"))
