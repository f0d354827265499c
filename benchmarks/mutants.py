"""One-line mutants of the source, each of which a test must notice.

Every file of benchmarks/mutants is a list of {"file", "old", "new", "tests"}: "old" occurs once in src/<file>
(or <file>), and with "new" in its place the named tests (paths or node ids, separated by blanks) fail. A mutant is made
in a copy of src, never in place.

    python benchmarks/mutants.py
    python benchmarks/mutants.py --only protect

The tests are run without a mutant first: what fails then proves nothing. The command ends with 1 if a mutant survives.
"""

import argparse
import compileall
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT = 1800  # seconds for the tests of one mutant, on a busy machine too; one that hangs counts as killed


class Mutant(NamedTuple):
    """A change of one line, and the tests that should notice it."""

    group: str
    file: str
    old: str
    new: str
    tests: str

    def problem(self) -> str:
        """Why it cannot be made; "" if it can."""
        path = ROOT / "src" / self.file
        count = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        return "" if count == 1 else f"'old' occurs {count} times in src/{self.file}, and must once: {self.old!r}"


def read_mutants(folder: Path, only: Sequence[str] = ()) -> list[Mutant]:
    """The mutants of a folder's files, or of those with the given names."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.json")):
        if not only or path.stem in only:
            entries = json.loads(path.read_text(encoding="utf-8"))
            for entry in entries:
                file = entry["file"].removeprefix("src/")
                mutants.append(Mutant(path.stem, file, entry["old"], entry["new"], entry["tests"]))
    return mutants


def split_tests(tests: str) -> list[str]:
    """Paths and node ids, in whose brackets there may be blanks."""
    return re.split(r" +(?=tests/)", tests.strip())


def tests_pass(source: Path, tests: Sequence[str]) -> bool:
    """Whether tests pass with a copy of src; one that takes too long does not."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-n0", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):  # no tests, a misspelt node id, a usage error: nothing was tested
        raise SystemExit(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def killed(mutant: Mutant, source: Path) -> bool:
    """Whether the tests notice a mutant, which is made in a copy of src and taken back."""
    path = source / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return not tests_pass(source, split_tests(mutant.tests))
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Check that tests notice one-line mutants of the source.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="file of benchmarks/mutants")
    only = parser.parse_args().only
    mutants = read_mutants(ROOT / "benchmarks" / "mutants", only)
    if not mutants:
        raise SystemExit(f"no mutants in benchmarks/mutants with the name {', '.join(only) or '*.json'}")
    if problems := [f"{mutant.group}: {mutant.problem()}" for mutant in mutants if mutant.problem()]:
        print("\n".join(problems))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        if not tests_pass(source, sorted({test for mutant in mutants for test in split_tests(mutant.tests)})):
            print("the tests fail without a mutant")
            return 1
        survivors = 0
        for number, mutant in enumerate(mutants, 1):
            dead = killed(mutant, source)
            survivors += not dead
            change = f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}"
            print(f"{number}/{len(mutants)} {'killed' if dead else 'SURVIVED'} {mutant.file}: {change}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants killed")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
