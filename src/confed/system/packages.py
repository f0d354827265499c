"""Installed packages that a run computes with, and digests of them and of this package's own code.

Errors name the command of a checkout, ``pip install '.[EXTRA]' -c constraints.txt``. Who installed a wheel has neither
that folder nor the file, so that what is shown goes through :func:`for_this_installation`.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from confed.system.release import DISTRIBUTION

# The command that adds an extra to this installation ----------------------------------------------------------

_COMMAND = re.compile(r"pip install '\.\[(?P<extra>[\w,-]+)\]' -c constraints\.txt")
_CONSTRAINTS = re.compile(r"(pip install [\w.-]+) -c constraints\.txt")


def for_this_installation(text: str) -> str:
    """A message whose commands of pip fit how confed was installed."""
    if "constraints.txt" not in text or (source := _source()) is None:
        return text
    constraints = shlex.quote(str(Path(__file__).parents[1] / "constraints.txt"))
    command = _COMMAND.sub(lambda m: f"pip install {_quoted(source, m['extra'])} -c {constraints}", text)
    return _CONSTRAINTS.sub(lambda m: f"{m[1]} -c {constraints}", command)


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


# pandas, which is optional ------------------------------------------------------------------------------------


def pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        text = "data frames need pandas, which is not installed: pip install '.[notebook]' -c constraints.txt"
        raise ValueError(for_this_installation(text)) from None
    return pandas


# Installed packages that a run computes with ------------------------------------------------------------------


version = cache(metadata.version)
"""Version of an installed library, whose description is read once."""


@cache
def packages() -> dict[str, str]:
    """Name -> version of confed and of everything that it requires, directly or not, without extras, by name."""
    versions: dict[str, str] = {}
    todo = [DISTRIBUTION]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in versions:
            continue
        try:
            here = distribution(name)
        except PackageNotFoundError:
            continue
        versions[name] = here.version
        for line in here.requires or ():
            requirement, _, marker = line.partition(";")
            if "extra" not in marker and (named := re.match(r"[\w.-]+", requirement.strip())):
                todo.append(named[0])
    return dict(sorted(versions.items()))


def digest_of(versions: Mapping[str, str]) -> str:
    """SHA-256 of the lines "name==version", in order of names, as hexadecimal digits."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@cache
def code_digest() -> str:
    """SHA-256 over the paths and contents of this package's Python files, as hexadecimal digits.

    Unlike the version it also tells a changed source tree from the release.
    """
    root, hasher = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        hasher.update(f"{file.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        hasher.update(content)
    return hasher.hexdigest()
