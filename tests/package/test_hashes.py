"""Constraints with hashes: the versions of constraints.txt, complete for a server or a site, and no address in them."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from repository import ROOT

FILES = ["constraints-hashes.txt", "packaging/torch-cpu.txt", "packaging/torch-cuda.txt"]
EXTRAS = ("flower", "privacy", "watch")
ENTRY = re.compile(r"([\w.-]+(?:\[[\w,]+\])?)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def versions(file: str) -> dict[str, str]:
    """Version of each package that a file names."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    entries = [re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==(\S+)(?: \\)?", line) for line in lines]
    return {canonicalize_name(entry[1]): entry[2] for entry in entries if entry is not None}


@pytest.mark.parametrize("file", FILES)
def test_entries_are_versions_with_hashes_alone(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    entries = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert versions(file)
    assert ENTRY.sub("", entries) == ""


def test_versions_are_those_of_the_constraints() -> None:
    tested, hashed = versions("constraints.txt"), versions("constraints-hashes.txt")
    assert hashed.items() <= tested.items()
    cpu, cuda = versions("packaging/torch-cpu.txt"), versions("packaging/torch-cuda.txt")
    assert cpu == {"torch": tested["torch"] + "+cpu"}
    assert cuda["torch"] == tested["torch"]
    assert "torch" not in hashed
    strange = {name for name in cuda if not re.fullmatch(r"torch|triton|(nvidia|cuda)-.*", name)}
    assert strange == set(), "these belong into constraints.txt"


def test_hashes_are_complete_for_server_and_site() -> None:
    """Everything that the installed packages ask for, by their own metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    for extra in EXTRAS:
        waiting += [Requirement(line) for line in project["optional-dependencies"][extra]]
    hashed, seen = versions("constraints-hashes.txt"), set[tuple[str, frozenset[str]]]()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name != "torch":
            assert name in hashed, requirement
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        for inner in map(Requirement, lines):
            environments = [{"extra": extra} for extra in ("", *extras)]
            if inner.marker is None or any(inner.marker.evaluate(environment) for environment in environments):
                waiting.append(inner)
    assert len(seen) > 50
