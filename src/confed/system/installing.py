"""The command that adds an extra to this installation: from the wheel that it came from, or from a checkout.

Errors name the command of a checkout, ``pip install '.[EXTRA]' -c constraints.txt``. Who installed a wheel has neither
that folder nor the file, so that what is shown goes through :func:`for_this_installation`.
"""

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from confed.system.release import DISTRIBUTION

__all__ = ["for_this_installation"]

_COMMAND = re.compile(r"pip install '\.\[(?P<extra>[\w,-]+)\]' -c constraints\.txt")
_CONSTRAINTS = re.compile(r"(pip install [\w.-]+) -c constraints\.txt")


def for_this_installation(text: str) -> str:
    """A message whose commands of pip fit how confed was installed.

    Args:
        text: with commands of a checkout, or without any.
    """
    if "constraints.txt" not in text or (source := _source()) is None:
        return text
    constraints = shlex.quote(str(Path(__file__).parents[1] / "constraints.txt"))
    found = _COMMAND.sub(lambda m: f"pip install {_quoted(source, m['extra'])} -c {constraints}", text)
    return _CONSTRAINTS.sub(lambda m: f"{m[1]} -c {constraints}", found)


def _source() -> str | None:
    """The wheel that is installed, or its name on the index that it came from; None for a checkout."""
    try:
        content = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return None  # the source tree on the path alone
    if content is None:
        return DISTRIBUTION
    origin = json.loads(content)
    if "dir_info" in origin or "vcs_info" in origin:
        return None
    address = str(origin.get("url", ""))
    return unquote(urlsplit(address).path) if address.startswith("file:") else address


def _quoted(source: str, extra: str) -> str:
    """A requirement with an extra, for a shell."""
    web = "://" in source
    return f"'{DISTRIBUTION}[{extra}] @ {source}'" if web else shlex.quote(f"{source}[{extra}]")
