"""Tables of paired differences between methods: overall, and per client."""

from collections.abc import Mapping, Sequence
from itertools import chain

from confed.comparison.paired import Difference
from confed.metrics.equivalence import Equivalence
from confed.metrics.resampling import Bootstrap
from confed.metrics.statistics import PairedT
from confed.metrics.stratified import Interval
from confed.metrics.swaps import Swap
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, Table
from confed.results.records import words_of
from confed.system import format as formats

Values = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Measure -> method -> seed -> value."""


def difference_table(
    title: str,
    reference: str,
    labels: Mapping[str, str],
    values: Values,
    found: Sequence[Difference],
    margin: float,
    notes: Sequence[str] = (),
) -> Table:
    """Every method against one reference, a section per measure."""
    by_key = {(difference.measure, difference.method): difference for difference in found}
    columns = _columns(margin, len({len(seeds) for of in values.values() for seeds in of.values()}) < 2)
    items: list[tuple[tuple[Cell, ...], ...]] = []
    for measure, of in values.items():
        items.append(
            tuple(
                _row(
                    measure,
                    labels[method],
                    of[method],
                    by_key.get((measure, method)),
                    method == reference,
                    len(columns),
                )
                for method in labels
                if method in of
            )
        )
    sections = tuple(items)
    return Table(title, columns, sections, tuple(notes))


def client_table(labels: Mapping[str, str], found: Sequence[Difference], reference: str) -> Table | None:
    """The sign-flip test for each client and unseen place: who was won and lost against one reference.

    None without predictions, or if there is only one place.
    """
    places = list(dict.fromkeys(chain.from_iterable(d.by_place for d in found)))
    found = [d for d in found if d.by_place and d.reference == reference]
    if len(places) < 2 or not found:
        return None
    columns = (
        Column("measure", words=True),
        Column("method", words=True),
        *chain.from_iterable(
            (Column("won:lost", place, words=True), Column("p", place), Column("p uncorrected", place))
            for place in places
        ),
    )
    columns = tuple(Column(c.title, c.group, words=c.words, detail=c.title == "p uncorrected") for c in columns)
    sections: list[tuple[tuple[Cell, ...], ...]] = []
    for measure in dict.fromkeys(d.measure for d in found):
        rows: list[tuple[Cell, ...]] = []
        for d in (d for d in found if d.measure == measure):
            cells = list(chain.from_iterable(_won(d, place) for place in places))
            rows.append((Cell(words_of(measure)), Cell(labels[d.method]), *cells))
        sections.append(tuple(rows))
    notes = (
        "Sign-flip test on the questions of each place, each with its mean over seeds: won and lost count questions, "
        "each once. With one seed and answers right or wrong it is McNemar's exact test. p-values are multiplied by "
        "the number of pairs of methods and places of a measure (Bonferroni).",
    )
    return Table(f"Questions won and lost against {labels[reference]}, place by place", columns, tuple(sections), notes)


def seed_table(
    labels: Mapping[str, str], values: Values, places: Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]]
) -> Table:
    """Every measure of every seed in a row of its own: the value, and below it those of each place it is a mean of."""
    columns = (
        Column("measure", words=True),
        Column("method", words=True),
        Column("row", words=True),
        Column("seed"),
        Column("place", words=True),
        Column("value", unit="%"),
    )

    def row(measure: str, method: str, seed: int, place: str, value: float) -> tuple[Cell, ...]:
        start = (Cell(words_of(measure)), Cell(labels[method]), Cell(method), Cell(str(seed), seed))
        return (*start, Cell(place), Cell(formats.percent(value), 100 * value))

    sections = tuple(
        tuple(
            seed_rows
            for method in labels
            for seed, value in sorted(of.get(method, {}).items())
            for seed_rows in (
                row(measure, method, seed, "", value),
                *(
                    row(measure, method, seed, place, seeds[seed])
                    for place, seeds in places.get(measure, {}).get(method, {}).items()
                    if seed in seeds
                ),
            )
        )
        for measure, of in values.items()
    )
    return Table("The value of every seed, and of each place", columns, sections)


def p_cell(p: float | None, star: bool = False) -> Cell:
    """A p-value, starred where it is claimed to be significant."""
    return Cell(formats.p_value(p) + ("*" if star else ""), p)


def _row(
    measure: str,
    label: str,
    values: Mapping[int, float],
    found: Difference | None,
    is_reference: bool,
    width: int,
) -> tuple[Cell, ...]:
    start = (
        Cell(words_of(measure)),
        Cell(label),
        Cell(str(len(values)), len(values)),
        mean_sd_cell(list(values.values())),
    )
    if found is None:
        gap = Cell("reference" if is_reference else formats.MISSING)
        return (*start, gap, *(Cell("") for _ in range(width - len(start) - 1)))
    t, e = found.over_seeds, found.equivalence
    mark = "*" if found.significant else ""
    mark = ", not tested" if found.refused else mark
    return (
        *start,
        Cell(formats.points(found.points) + mark, 100 * found.points),
        *_interval(t),
        p_cell(t.p if t else None),
        p_cell(found.seeds_p),
        *_interval(found.over_examples),
        p_cell(found.examples_p_uncorrected),
        p_cell(found.examples_p),
        Cell(
            formats.MISSING if found.detectable is None else f"{100 * found.detectable:.1f}", _points(found.detectable)
        ),
        *_interval(e)[1:],
        p_cell(e.no_worse_p if e else None),
        p_cell(found.no_worse_p, found.no_worse),
        p_cell(e.p if e else None),
        p_cell(found.equivalence_p, found.equivalent),
        Cell(found.refused or found.unpaired),
    )


def _columns(margin: float, equal_seeds: bool) -> tuple[Column, ...]:
    group = f"p, margin {100 * margin:g}"
    return (
        Column("measure", words=True),
        Column("method", words=True),
        Column("seeds", detail=equal_seeds),
        Column("value", unit="%"),
        Column("difference", unit="points"),
        *_test_columns("over seeds"),
        *_test_columns("over examples"),
        Column("can show", "over seeds", "points", detail=True),
        Column("90 % low", "over seeds", "points", detail=True),
        Column("90 % high", "over seeds", "points", detail=True),
        Column("no worse uncorrected", group, detail=True),
        Column("no worse", group),
        Column("equal uncorrected", group, detail=True),
        Column("equal", group),
        Column("not tested because", words=True, detail=True),
    )


def _test_columns(group: str) -> tuple[Column, ...]:
    return (
        Column("95 % CI", group, words=True),
        Column("low", group, "points", detail=True),
        Column("high", group, "points", detail=True),
        Column("p uncorrected", group, detail=True),
        Column("p", group),
    )


def _won(difference: Difference, place: str) -> tuple[Cell, Cell, Cell]:
    """Questions won and lost at one place, its corrected and its uncorrected p-value."""
    test = difference.by_place.get(place)
    if test is None:
        return Cell(""), Cell(""), Cell("")
    return Cell(f"{test.won}:{test.lost}"), p_cell(difference.by_place_p[place]), p_cell(test.p)


def _points(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _interval(test: PairedT | Interval | Bootstrap | Swap | Equivalence | None) -> tuple[Cell, Cell, Cell]:
    if test is None or test.low is None or test.high is None:
        return Cell(formats.MISSING), Cell(formats.MISSING), Cell(formats.MISSING)
    text = f"[{formats.points(test.low)}, {formats.points(test.high)}]"
    return Cell(text), Cell(text, 100 * test.low), Cell(text, 100 * test.high)
