#!/usr/bin/env python3
"""Size and density of the code, beside the figures of the commit from which the rules of AGENTS.md count.

python scripts/count.py           prints a table
python scripts/count.py --json    the same as JSON, for scripts/count_start.json
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "scripts" / "count_start.json"
AREAS = {
    "src": "src/*",
    "tests": "tests/*.py",
    "benchmarks": "benchmarks/*.py",
    "docs": "docs/*.py",
    "scripts": "scripts/*",
}
TEXTS = {".py", ".toml", ".html", ".jinja", ".css", ".js", ".md", ".txt", ".json", ""}
NOT_WRITTEN = re.compile(r"(models/weights|prepare/pretraining|datasets/.*\.json)")
"""Tables of numbers and vocabularies: made by commands, not lines that anybody reads."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
VAGUE = {"found", "own", "part", "there", "known", "said"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_nested(node: ast.AST) -> bool:
    """Whether a comprehension has another one inside of it."""
    return any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)


def is_chained(node: ast.IfExp) -> bool:
    """Whether a conditional expression has another one as one of its two values."""
    return isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)


def names_assigned(tree: ast.AST) -> Iterator[str]:
    """Names of local variables and of loop variables, once for each assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take, those of attributes included."""
    lines = set[int]()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def count_module(source: str) -> Counter[str]:
    """Counts of one Python file."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
    docstrings = docstring_lines(tree)
    code = {line for token in tokens if token.type not in layout for line in range(token.start[0], token.end[0] + 1)}
    counts = Counter[str]()
    counts["lines"] = source.count("\n")
    counts["lines of code"] = len(code - docstrings)
    counts["lines of docstrings"] = len(docstrings)
    counts["statements"] = sum(isinstance(node, ast.stmt) for node in nodes)
    counts["tokens"] = sum(token.type not in layout for token in tokens)
    counts["raise"] = sum(isinstance(node, ast.Raise) for node in nodes)
    counts["options"] = sum(is_call(node, "Option") for node in nodes)
    counts["isinstance"] = sum(is_call(node, "isinstance") for node in nodes)
    counts["functions"] = sum(isinstance(node, FUNCTIONS) for node in nodes)
    counts["functions over 60 lines"] = sum(is_long(node) for node in nodes)
    comprehensions = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    counts["comprehensions"] = len(comprehensions)
    counts["nested comprehensions"] = sum(is_nested(node) for node in comprehensions)
    counts["comprehensions over two loops"] = sum(len(node.generators) > 1 for node in comprehensions)
    counts["comprehensions with two conditions"] = sum(
        any(len(generator.ifs) > 1 for generator in node.generators) for node in comprehensions
    )
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]
    counts["conditional expressions"] = len(conditionals)
    counts["chained conditionals"] = sum(is_chained(node) for node in conditionals)
    names = list(names_assigned(tree))
    counts["assigned names"] = len(names)
    counts["vague names"] = sum(name.strip("_") in VAGUE for name in names)
    return counts


def is_call(node: ast.AST, name: str) -> bool:
    """Whether a node calls a function of that name, under whatever module."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == name


def is_long(node: ast.AST) -> bool:
    """Whether a node is a function of more than 60 lines."""
    return isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= 60


def is_python(path: Path) -> bool:
    """Whether a file holds Python."""
    return path.suffix == ".py"


def count_area(pattern: str) -> dict[str, int]:
    """Counts of the committed files that a pattern of git names, with the other text below them."""
    listed = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    modules = [path for path in paths if is_python(path)]
    total = Counter(files=len(modules))
    for path in modules:
        total += count_module(path.read_text(encoding="utf-8"))
    texts = [p for p in paths if p.suffix in TEXTS and not is_python(p) and not NOT_WRITTEN.search(p.as_posix())]
    total["lines of other text"] = sum(path.read_text(encoding="utf-8").count("\n") for path in texts)
    return dict(total)


def main() -> None:
    """Prints the table, or the counts as JSON."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print JSON")
    counts = {area: count_area(pattern) for area, pattern in AREAS.items()}
    if arguments.parse_args().json:
        json.dump(counts, sys.stdout, indent=1, sort_keys=True)
        return
    start = json.loads(START.read_text(encoding="utf-8"))
    print(f"{'(at the start -> now)':36}" + "".join(f"{area:>20}" for area in AREAS))
    for row in sorted({row for area in counts.values() for row in area}, key=list(counts["src"]).index):
        cells = (f"{start['counts'][area].get(row, 0):,} -> {counts[area].get(row, 0):,}" for area in AREAS)
        print(f"{row:36}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"start: commit {start['commit']}")


if __name__ == "__main__":
    main()
