"""The picture of the architecture page, drawn from the imports.

``python docs/draw_architecture.py`` writes ``docs/architecture.svg``; with ``--check`` it writes nothing and fails if
the picture is out of date. Layers are those of ``LAYERS`` in the tests of the package. An arrow goes from a package to
one that it imports; arrows to the same package run together, and their width grows with the number of imports
(log2). Left out, to keep the picture readable: arrows of fewer than ``SHOWN`` imports, and all arrows to ``system`` and
``registry``.
"""

import ast
import html
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "confed"
PICTURE = ROOT / "docs" / "architecture.svg"

SHOWN = 5
UTILITIES = frozenset({"system", "registry"})
TOLERANCE = 0.3
"""Share by which numbers of imports and lines may change before the picture is out of date."""

WIDTH, MARGIN, LABEL = 1200, 12, 84
BOX, HEIGHT, PITCH = (104, 164), 50, 104
TRUNK = 22
COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa3377", "#7fb800", "#66a0cc", "#a0522d", "#777777")
COLOURS += (
    "#009988",
    "#8a5fbf",
    "#d4a000",
    "#2f4f9f",
    "#ee7733",
    "#c71585",
    "#00a0c0",
    "#997700",
    "#556b2f",
    "#b03030",
)

PURPOSE = {
    "cli": "the confed command",
    "analysis": "attacks on finished runs",
    "studies": "methods × seeds, tuning",
    "inference": "predict, evaluate, export",
    "deployment": "server and site processes",
    "unlearning": "removing a client",
    "runs": "recipe → run folder",
    "prepare": "weights and features",
    "testing": "the contract of methods",
    "tasks": "losses and tallies",
    "report": "tables, figures, pages",
    "algorithms": "a method a file",
    "models": "backbones",
    "datasets": "a dataset a file",
    "engines": "simulator, transports",
    "recipes": "TOML ↔ arguments",
    "data": "tables and readers",
    "privacy": "noise, secure sums",
    "results": "run folders on disk",
    "registry": "names → constructors",
    "system": "processor, locks",
    "federation": "what a round is",
    "losses": "pure functions",
    "metrics": "pure functions",
}

Segment = tuple[str, str, str, int]


@dataclass
class Row:
    """A layer in the picture: boxes and the points where arrows pass through, from left to right."""

    names: list[str]
    x: dict[str, float] = field(default_factory=dict[str, float])


def layers() -> list[list[str]]:
    """The layers of the test, the lowest first.

    Raises:
        ValueError: no test has such a table.
    """
    for file in sorted((ROOT / "tests").rglob("test_package.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LAYERS" and node.value is not None:
                return [list(layer) for layer in ast.literal_eval(node.value)]
    raise ValueError("no tests/**/test_package.py has a table LAYERS")


def facts() -> dict[str, Any]:
    """Layers, lines of code by package, and numbers of imports by pair of packages ("a b": a imports from b)."""
    lines, imports = Counter[str](), Counter[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue  # the list of public names refers to everything
        text = path.read_text(encoding="utf-8")
        lines[package] += len(text.splitlines())
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        modules = {f"{n.module}." if n.module != "confed" else f"confed.{n.names[0].name}." for n in nodes}
        for module in modules:
            if module.startswith("confed.") and (other := module.split(".")[1]) != package:
                imports[f"{package} {other}"] += 1
    return {"layers": layers(), "lines": dict(sorted(lines.items())), "imports": dict(sorted(imports.items()))}


def is_current(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a picture of old facts still shows the new ones: same layers and arrows, numbers nearly the same."""

    def near(a: Mapping[str, int], b: Mapping[str, int], least: int) -> bool:
        pairs = [(a.get(key, 0), b.get(key, 0)) for key in {*a, *b}]
        return all(abs(x - y) <= max(TOLERANCE * max(x, y), least) for x, y in pairs)

    return (
        old["layers"] == new["layers"]
        and near(old["lines"], new["lines"], 200)
        and near(old["imports"], new["imports"], SHOWN)
    )


def trunks(found: Mapping[str, Any]) -> tuple[list[Row], list[Segment]]:
    """Rows from the top layer down, and the segments of arrows between neighbouring rows.

    An arrow over several layers passes through a point of each layer between, which all arrows to its target share.

    Returns:
        rows, and segments (from, to, target, imports).
    """
    level = {name: number for number, names in enumerate(found["layers"]) for name in names}
    rows = {number: Row(list(names)) for number, names in enumerate(found["layers"])}
    flow = Counter[tuple[str, str, str]]()
    for pair, count in found["imports"].items():
        source, target = pair.split()
        if count < SHOWN or target in UTILITIES:
            continue
        last = source
        for number in range(level[source] - 1, level[target], -1):
            point = f"{target}@{number}"
            if point not in rows[number].names:
                rows[number].names.append(point)
            flow[last, point, target] += count
            last = point
        flow[last, target, target] += count
    segments = [(*ends, count) for ends, count in sorted(flow.items())]
    return [rows[number] for number in sorted(rows, reverse=True)], segments


def order(rows: Sequence[Row], segments: Iterable[Segment]) -> None:
    """Places every row's nodes so that arrows are short: sweeps by the weighted mean of a node's neighbours."""
    near: dict[str, list[tuple[str, float]]] = {}
    for a, b, _, count in segments:
        near.setdefault(a, []).append((b, math.log2(1 + count)))
        near.setdefault(b, []).append((a, math.log2(1 + count)))
    for row in rows:
        spread(row)
    for sweep in range(24):
        for row in rows if sweep % 2 else rows[::-1]:
            at = {name: x for other in rows for name, x in other.x.items()}
            wanted = {}
            for name in row.names:
                ends = [(at[n], weight) for n, weight in near.get(name, [])]
                total = sum(weight for _, weight in ends)
                wanted[name] = sum(x * weight for x, weight in ends) / total if total else at[name]
            row.names.sort(key=lambda name: (wanted[name], name))
            spread(row)


def spread(row: Row) -> None:
    """Distributes a row's nodes over the width, in their order."""
    boxes = [name for name in row.names if "@" not in name]
    room = WIDTH - 2 * MARGIN - LABEL
    gap = 18.0
    size = min(BOX[1], (room - TRUNK * (len(row.names) - len(boxes)) - gap * (len(row.names) - 1)) / len(boxes))
    used = size * len(boxes) + TRUNK * (len(row.names) - len(boxes))
    gap = min(60.0, (room - used) / max(1, len(row.names) - 1))
    x = MARGIN + LABEL + (room - used - gap * (len(row.names) - 1)) / 2
    for name in row.names:
        width = TRUNK if "@" in name else size
        row.x[name] = x + width / 2
        x += width + gap


def box_width(row: Row) -> float:
    """Width of a row's boxes in pixels."""
    boxes = [name for name in row.names if "@" not in name]
    points = len(row.names) - len(boxes)
    return min(BOX[1], (WIDTH - 2 * MARGIN - LABEL - TRUNK * points - 18.0 * (len(row.names) - 1)) / len(boxes))


def draw(found: Mapping[str, Any]) -> str:
    """The picture as SVG, with the facts that it was drawn from."""
    rows, segments = trunks(found)
    order(rows, segments)
    top = {name: 40 + number * PITCH for number, row in enumerate(rows) for name in row.names}
    at = {name: x for row in rows for name, x in row.x.items()}
    size = {name: box_width(row) for row in rows for name in row.names}
    targets = sorted({target for _, _, target, _ in segments}, key=lambda name: (top[name], at[name]))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(targets)}
    height = 40 + (len(rows) - 1) * PITCH + HEIGHT + 44
    ports = ends(segments, at, size)
    parts = [HEAD.format(width=WIDTH, height=height, facts=html.escape(json.dumps(found, sort_keys=True)))]
    for number, row in enumerate(rows):
        y = 40 + number * PITCH
        parts.append(f'<rect class="layer" x="0" y="{y - 12}" width="{WIDTH}" height="{HEIGHT + 24}" rx="8"/>')
        parts.append(f'<text class="label" x="{MARGIN}" y="{y + 29}">layer {len(rows) - number}</text>')
        for name in row.names:
            if "@" in name:
                weight = sum(count for _, end, _, count in segments if end == name)
                stroke = f'stroke="{colour[name.partition("@")[0]]}" stroke-width="{line_width(weight)}"'
                parts.append(f'<path class="arrow" d="M{at[name]:.1f} {y}V{y + HEIGHT}" {stroke}/>')
    for a, b, target, count in segments:
        (x, z), y, end = ports[a, b], top[a] + HEIGHT, top[b]
        middle = (y + end) / 2
        tip = 0 if "@" in b else 7
        curve = f"M{x:.1f} {y}C{x:.1f} {middle} {z:.1f} {middle} {z:.1f} {end - tip}"
        stroke = f'stroke="{colour[target]}" stroke-width="{line_width(count)}"'
        title = f"<title>{a.partition('@')[0]} → {target}: {count} imports</title>" if "@" not in a else ""
        parts.append(f'<path class="arrow" d="{curve}" {stroke}>{title}</path>')
        if tip:
            parts.append(f'<path d="M{z - 5:.1f} {end - 8}h10l-5 8z" fill="{colour[target]}"/>')
    for row in rows:
        parts += [box(name, at[name], top[name], size[name], found["lines"].get(name, 0)) for name in row.names]
    note = f"An arrow: a package imports another, in {SHOWN} modules or more; system and registry are used everywhere."
    parts.append(f'<text class="note" x="{WIDTH / 2}" y="{height - 14}" text-anchor="middle">{note}</text>')
    return "\n".join([*filter(None, parts), "</svg>", ""])


def ends(
    segments: Sequence[Segment], at: Mapping[str, float], size: Mapping[str, float]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Where segments leave and meet boxes: side by side, in the order of their other ends."""
    found: dict[tuple[str, str], list[float]] = {(a, b): [at[a], at[b]] for a, b, _, _ in segments}
    for side in (0, 1):
        groups: dict[str, list[tuple[str, str]]] = {}
        for a, b, _, _ in segments:
            groups.setdefault((a, b)[side], []).append((a, b))
        for name, pairs in groups.items():
            if "@" in name:
                continue
            pairs.sort(key=lambda pair: at[pair[1 - side]])
            step = min(18.0, (size[name] - 24) / len(pairs))
            for number, pair in enumerate(pairs):
                found[pair][side] += step * (number - (len(pairs) - 1) / 2)
    return {pair: (x, z) for pair, (x, z) in found.items()}


def line_width(count: int) -> float:
    """Width of an arrow in pixels."""
    return round(0.6 + 0.75 * math.log2(count), 2)


def box(name: str, x: float, y: float, width: float, lines: int) -> str:
    """A package; nothing for a point that arrows pass through."""
    if "@" in name:
        return ""
    left = x - width / 2
    size = f"{lines / 1000:.1f} k lines"
    return (
        f'<g><rect class="box" x="{left:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="6"/>'
        f'<text class="name" x="{x:.1f}" y="{y + 18}" text-anchor="middle">{name}</text>'
        f'<text class="purpose" x="{x:.1f}" y="{y + 32}" text-anchor="middle">{PURPOSE.get(name, "")}</text>'
        f'<text class="lines" x="{x:.1f}" y="{y + 44}" text-anchor="middle">{size}</text></g>'
    )


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"
width="{width}" height="{height}" role="img"><title>Packages of confed by layer, with their imports</title>
<desc>{facts}</desc>
<style>
text {{ font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2430 }}
.name {{ font-size: 14px; font-weight: 600 }} .purpose {{ font-size: 11px }} .lines {{ font-size: 10px; fill: #667 }}
.label, .note {{ font-size: 12px; fill: #667 }}
.layer {{ fill: #f4f5f8 }} .box {{ fill: #fff; stroke: #8a90a0 }} .arrow {{ fill: none; stroke-opacity: .75 }}
</style>
<rect width="{width}" height="{height}" fill="#fff"/>"""


def drawn_from(picture: str) -> dict[str, Any]:
    """The facts that a picture was drawn from."""
    return json.loads(html.unescape(picture.partition("<desc>")[2].partition("</desc>")[0]))


def check() -> bool:
    """Whether the picture in the repository is current, and drawn by this script."""
    if not PICTURE.is_file():
        return False
    picture = PICTURE.read_text(encoding="utf-8")
    old = drawn_from(picture)
    return draw(old) == picture and is_current(old, facts())


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if check() else f"{PICTURE.name} is out of date: run python docs/draw_architecture.py")
    PICTURE.write_text(draw(facts()), encoding="utf-8")
