"""The results of a sweep: one table, one figure (FedDAT's figure 6) and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.federation.checkpoint import write_atomically
from confed.metrics.statistics import mean
from confed.results import formats
from confed.results.compare import Comparison, compare_runs
from confed.results.difference_tables import p_cell
from confed.results.drawing import Drawing, Look, Pen, dress, looks, style
from confed.results.history import judged
from confed.results.labels import End, at_ends
from confed.results.paired import MEASURES, Difference
from confed.results.runs import Study, load
from confed.results.tables import spread_cell
from confed.results.writers import Cell, Column, Table, in_files
from confed.sweep import Point, Sweep, number_of, read_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Stage", "figures", "sweep_drawing", "sweep_results", "sweep_table", "write_sweep"]


@dataclass(frozen=True)
class Stage:
    """One value of the swept setting, with what its grid found.

    Attributes:
        point: the value, and the settings that go with it.
        study: the grid.
        comparison: of its methods.
    """

    point: Point
    study: Study
    comparison: Comparison

    @property
    def value(self) -> str:
        """The swept setting's value."""
        return next(iter(self.point.settings.values()))

    @property
    def clients(self) -> int:
        """How many clients took part."""
        return len(self.study.clients)

    @property
    def rounds(self) -> str:
        """The budget of communication rounds; a span where methods differ."""
        found = sorted({int(run.summary.get("rounds", 0)) for run in self.study.runs if run.complete})
        return "–".join(map(str, dict.fromkeys((found[0], found[-1])))) if found else formats.MISSING

    @property
    def measure(self) -> str:
        """What is judged: a key of :data:`confed.results.paired.MEASURES`."""
        return f"{judged(self.study)}_mean"

    def values(self, method: str) -> Mapping[int, float]:
        """A method's value for each seed, a fraction."""
        return self.comparison.values.get(self.measure, {}).get(method, {})

    def difference(self, method: str) -> Difference | None:
        """A method against the first reference."""
        wanted = (self.comparison.references[0], self.measure, method)
        found = (d for d in self.comparison.differences if (d.reference, d.measure, d.method) == wanted)
        return next(found, None)


def stages(root: Path, sweep: Sweep) -> list[Stage]:
    """The values that have a finished run, in order."""
    found: list[Stage] = []
    for point in sweep.points:
        try:
            study = load(root / point.folder)
        except ValueError:  # nothing was run yet, or everything was refused
            continue
        there = {run.method for run in study.runs if run.complete}
        if there:
            references = [name for name in sweep.references if name in there] or None
            found.append(Stage(point, study, compare_runs(study.runs, references, sweep.margin)))
    return found


def sweep_table(sweep: Sweep, found: Sequence[Stage]) -> Table:
    """A section per value, a row per method: mean and standard deviation over seeds, and the paired tests.

    Args:
        sweep: its index.
        found: its values.

    Raises:
        ValueError: no value has a finished run.
    """
    if not found:
        raise ValueError(f"the sweep over {sweep.key} has no finished run")
    columns = (
        Column(sweep.key, words=True),
        Column("clients"),
        Column("rounds", words=True),
        Column("method", words=True),
        Column("seeds"),
        Column("value", unit="%"),
        Column("difference", unit="points"),
        Column("95 % CI", "over seeds", words=True),
        Column("p uncorrected", "over seeds", detail=True),
        Column("p", "over seeds"),
        Column("95 % CI", "over examples", words=True),
        Column("p", "over examples"),
        Column("won:lost", "McNemar", words=True),
        Column("p", "McNemar"),
    )
    sections = tuple(
        tuple(_row(stage, method) for method in stage.study.methods if stage.values(method)) for stage in found
    )
    kinds = dict.fromkeys(MEASURES[stage.measure].words for stage in found)
    metric = found[0].comparison.metric
    title = f"{sweep.recipe} by {sweep.key}: test {metric} in % after the last round ({', '.join(kinds)})"
    return Table(title, columns, sections, tuple(_notes(found)))


def _row(stage: Stage, method: str) -> tuple[Cell, ...]:
    values, d = stage.values(method), stage.difference(method)
    start = (
        Cell(stage.value, number_of(stage.value)),
        Cell(str(stage.clients), stage.clients),
        Cell(stage.rounds),
        Cell(stage.comparison.labels[method]),
        Cell(str(len(values)), len(values)),
        spread_cell(list(values.values())),
    )
    if d is None:
        reference = method == stage.comparison.references[0]
        return (*start, Cell("reference" if reference else formats.MISSING), *(Cell("") for _ in range(7)))
    t, b, m = d.over_seeds, d.over_examples, d.discordant
    return (
        *start,
        Cell(formats.points(d.points) + ("*" if d.significant else ""), 100 * d.points),
        _interval(t.low, t.high) if t else Cell(formats.MISSING),
        p_cell(t.p if t else None),
        p_cell(d.seeds_p),
        _interval(b.low, b.high) if b else Cell(formats.MISSING),
        p_cell(d.bootstrap_p),
        Cell(f"{m.only_a}:{m.only_b}" if m else formats.MISSING),
        p_cell(d.mcnemar_p),
    )


def _interval(low: float, high: float) -> Cell:
    return Cell(f"[{formats.points(low)}, {formats.points(high)}]")


def _notes(found: Sequence[Stage]) -> list[str]:
    references = dict.fromkeys(stage.comparison.labels[stage.comparison.references[0]] for stage in found)
    notes = [
        "Value: mean over clients, then mean ± sd over seeds. Differences are to "
        f"{' or '.join(references)} of the same value, with Holm's correction over its methods.",
        "Round budgets: " + "; ".join(f"{_named(stage)}: {stage.rounds}" for stage in found) + ".",
    ]
    remarks = found[0].comparison.remarks  # they say how to read the tests, which are the same for all values
    warnings = (f"Warning, {_named(stage)}: {text}" for stage in found for text in stage.comparison.warnings)
    gaps = (f"{_named(stage)}: {text}" for stage in found for text in stage.study.failed)
    return [*notes, *remarks, *warnings, *gaps]


def _named(stage: Stage) -> str:
    """The value and what goes with it, in words."""
    return f"{', '.join(f'{k}={v}' for k, v in stage.point.settings.items())} ({stage.clients} clients)"


def sweep_drawing(sweep: Sweep, found: Sequence[Stage]) -> Drawing:
    """What is judged against the number of clients where this grows with the values, else against the values.

    Points are means over seeds, thin lines one standard deviation to either side; below each value is its budget of
    rounds.

    Args:
        sweep: its index.
        found: its values; at least one.
    """
    clients = [float(stage.clients) for stage in found]
    numbers = [number_of(stage.value) for stage in found]
    by_clients = len(found) > 1 and clients == sorted(set(clients))
    x = clients if by_clients else [float(i) if n is None else n for i, n in enumerate(numbers)]
    if not by_clients and None in numbers:
        x = [float(i) for i in range(len(found))]
    names = [str(stage.clients) if by_clients else stage.value for stage in found]
    ticks = [
        f"{name}\n{stage.rounds} round{'' if stage.rounds == '1' else 's'}"
        for name, stage in zip(names, found, strict=True)
    ]
    styles = _looks(found)

    def draw(figure: "Figure", pen: Pen) -> None:
        axes = figure.add_subplot()
        ends: list[End] = []
        for method, look in styles.items():
            at = [(a, list(stage.values(method).values())) for a, stage in zip(x, found, strict=True)]
            places = [a for a, values in at if values]
            moments = [mean(values) for _, values in at if values]
            heights = [100 * m.mean for m in moments]
            spread = [100 * m.sd if m.n > 1 else 0.0 for m in moments]
            axes.plot(places, heights, **style(look, pen, 4))
            axes.errorbar(places, heights, spread, fmt="none", color=pen(look.colour), linewidth=0.9, capsize=2)
            ends.append((look, places[-1], heights[-1]))
        metric, kind = found[0].comparison.metric, MEASURES[found[0].measure].words
        dress(axes, pen, "", "clients" if by_clients else sweep.key, f"{kind}, test {metric}, %")
        axes.set_xticks(x, ticks)
        axes.margins(x=0.06)
        at_ends(figure, [(axes, ends)], pen)

    return Drawing(f"sweep {sweep.recipe} {sweep.key}", max(6.4, 1.5 + 1.1 * len(found)), 4.2, draw)


def _looks(found: Sequence[Stage]) -> dict[str, Look]:
    """How each method with values looks, the same for all values of the setting."""
    firsts = {m: stage.study.of(m)[0] for stage in reversed(found) for m in stage.study.methods if stage.values(m)}
    order = dict.fromkeys(method for stage in found for method in stage.study.methods if method in firsts)
    return looks(replace(found[0].study, runs=tuple(firsts[method] for method in order)))


def sweep_results(sweep: Sweep, found: Sequence[Stage]) -> dict[str, Any]:
    """Everything for machines: for each value and method the value of every seed, and the tests.

    Args:
        sweep: its index.
        found: its values.
    """
    return {
        "recipe": sweep.recipe,
        "over": sweep.key,
        "points": [
            {
                "settings": dict(stage.point.settings),
                "folder": stage.point.folder,
                "clients": stage.clients,
                "rounds": stage.rounds,
                "measure": stage.measure,
                "reference": stage.comparison.references[0],
                "methods": {
                    method: _method_results(stage, method) for method in stage.study.methods if stage.values(method)
                },
            }
            for stage in found
        ],
    }


def _method_results(stage: Stage, method: str) -> dict[str, Any]:
    values, d = stage.values(method), stage.difference(method)
    summary = mean(list(values.values()))
    result: dict[str, Any] = {
        "label": stage.comparison.labels[method],
        "seeds": {str(seed): value for seed, value in values.items()},
        "mean": summary.mean,
        "sd": summary.sd if summary.n > 1 else None,
    }
    if d is not None:
        result["difference"] = {
            "mean": d.points,
            "seeds_p_uncorrected": d.over_seeds.p if d.over_seeds else None,
            "seeds_p": d.seeds_p,
            "examples_p": d.bootstrap_p,
            "mcnemar_p": d.mcnemar_p,
        }
    return result


def figures(root: Path, sweep: Sweep, found: Sequence[Stage]) -> list[Path]:
    """Writes the drawing as PNG and SVG into ``figures/`` of the sweep's folder."""
    drawing = sweep_drawing(sweep, found)
    folder = root / "figures"
    folder.mkdir(exist_ok=True)
    paths = [folder / "sweep.png", folder / "sweep.svg"]
    for path, content in zip(paths, (drawing.png(), drawing.svg()), strict=True):
        path.write_bytes(content)
    return paths


def write_sweep(root: Path) -> tuple[Table, list[Path]]:
    """Writes a sweep's table (``table.md``, ``.csv``, ``.tex``), figure, and ``results.json``.

    Args:
        root: a sweep's folder, finished or not.

    Returns:
        The table, and the files.

    Raises:
        ValueError: no value has a finished run.
    """
    sweep = read_sweep(root)
    found = stages(root, sweep)
    table = sweep_table(sweep, found)
    results = json.dumps(sweep_results(sweep, found), indent=1, ensure_ascii=False)
    paths: list[Path] = []
    for name, text in (in_files("table", table) | {"results.json": results}).items():
        write_atomically(root / name, text.encode())
        paths.append(root / name)
    return table, paths + figures(root, sweep, found)
