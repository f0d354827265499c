"""Installed packages that a run computes with, and digests of them and of this package's own code."""

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from confed.system.release import DISTRIBUTION

__all__ = ["code_digest", "digest_of", "packages"]


@cache
def packages() -> dict[str, str]:
    """Name -> version of confed and of everything that it requires, directly or not, without extras, by name.

    Requirements that are not installed, such as those of other systems, are left out; without an installed distribution
    (the source tree on the path alone) it is empty.
    """
    found: dict[str, str] = {}
    todo = [DISTRIBUTION]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            here = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = here.version
        for line in here.requires or ():
            requirement, _, marker = line.partition(";")
            if "extra" not in marker and (named := re.match(r"[\w.-]+", requirement.strip())):
                todo.append(named[0])
    return dict(sorted(found.items()))


def digest_of(versions: Mapping[str, str]) -> str:
    """SHA-256 of the lines "name==version", in order of names, as hexadecimal digits."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@cache
def code_digest() -> str:
    """SHA-256 over the paths and contents of this package's Python files, as hexadecimal digits.

    Unlike the version it also tells a changed source tree from the release.
    """
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()
