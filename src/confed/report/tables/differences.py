"""Tables of paired differences between methods: overall, and per client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from confed.comparison.paired import Difference
from confed.report.tables.cells import mean_sd_cell, p_cell, percent_cell, points_cell
from confed.report.tables.table import Cell, Column, Table, pivot
from confed.results.records import words_of
from confed.system import format as formats

Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # measure -> method -> seed -> value

GAP = Cell("")


@dataclass(frozen=True)
class Line:
    """A method's results on a measure (seed -> fraction), beside its difference to a reference where there is one."""

    measure: str
    label: str
    values: Mapping[int, float]
    difference: Difference | None
    is_reference: bool

    @property
    def value_cell(self) -> Cell:
        """Mean and spread over seeds."""
        return mean_sd_cell([*self.values.values()])

    @property
    def difference_cell(self) -> Cell:
        """The difference in points, starred where it is significant."""
        difference = self.difference
        if difference is None:
            return Cell("reference" if self.is_reference else formats.MISSING)
        mark = "*" if difference.significant else ""
        return points_cell(difference.points, ", not tested" if difference.refused else mark)


def tested(read: Callable[[Difference], Cell | str | float | None]) -> Callable[[Line], Cell | str | float | None]:
    """What a column reads of a difference; an empty cell where there is none."""
    return lambda line: GAP if line.difference is None else read(line.difference)


def test_columns(
    group: str,
    test: Callable[[Difference], Any],
    p: Callable[[Difference], float | None],
    uncorrected: Callable[[Difference], float | None],
) -> tuple[Column, ...]:
    """The interval of a test and its p-values."""
    return (
        Column("95 % CI", group, words=True, read=tested(lambda d: _interval(test(d)))),
        Column("low", group, "points", detail=True, read=tested(lambda d: _bound(test(d), "low"))),
        Column("high", group, "points", detail=True, read=tested(lambda d: _bound(test(d), "high"))),
        Column("p uncorrected", group, detail=True, read=tested(lambda d: p_cell(uncorrected(d)))),
        Column("p", group, read=tested(lambda d: p_cell(p(d)))),
    )


def both_tests() -> tuple[Column, ...]:
    """The columns of the tests over seeds and over examples."""
    return (
        *test_columns("over seeds", lambda d: d.over_seeds, lambda d: d.seeds_p, lambda d: _p(d.over_seeds)),
        *test_columns(
            "over examples", lambda d: d.over_examples, lambda d: d.examples_p, lambda d: d.examples_p_uncorrected
        ),
    )


def difference_table(
    title: str,
    reference: str,
    labels: Mapping[str, str],
    values: Values,
    differences: Sequence[Difference],
    margin: float,
    notes: Sequence[str] = (),
) -> Table:
    """Every method against one reference, a section per measure."""
    by_key = {(difference.measure, difference.method): difference for difference in differences}
    numbers_of_seeds = set[int]()
    sections: list[list[Line]] = []
    for measure, of_methods in values.items():
        lines: list[Line] = []
        for method in labels:
            if method in of_methods:
                difference = by_key.get((measure, method))
                lines.append(Line(measure, labels[method], of_methods[method], difference, method == reference))
        sections.append(lines)
        numbers_of_seeds.update(map(len, of_methods.values()))
    return pivot(title, _columns(margin, len(numbers_of_seeds) < 2), *sections, notes=notes)


def client_table(labels: Mapping[str, str], differences: Sequence[Difference], reference: str) -> Table | None:
    """The sign-flip test for each client and unseen place, against one reference; None with only one place."""
    places = list(dict.fromkeys(chain.from_iterable(d.by_place for d in differences)))
    differences = [d for d in differences if d.by_place and d.reference == reference]
    if len(places) < 2 or not differences:
        return None
    columns = [
        Column("measure", words=True, read=lambda d: words_of(d.measure)),
        Column("method", words=True, read=lambda d: labels[d.method]),
    ]
    for place in places:
        columns += [
            Column("won:lost", place, words=True, read=partial(_won, place)),
            Column("p", place, read=lambda d, at=place: p_cell(d.by_place_p[at]) if at in d.by_place else GAP),
            Column(
                "p uncorrected", place, detail=True,
                read=lambda d, at=place: p_cell(d.by_place[at].p) if at in d.by_place else GAP,
            ),
        ]  # fmt: skip
    sections: dict[str, list[Difference]] = {}
    for difference in differences:
        sections.setdefault(difference.measure, []).append(difference)
    note = (
        "Sign-flip test on the questions of each place, each with its mean over seeds: won and lost count questions, "
        "each once. With one seed and answers right or wrong it is McNemar's exact test. p-values are multiplied by "
        "the number of pairs of methods and places of a measure (Bonferroni)."
    )
    title = f"Questions won and lost against {labels[reference]}, place by place"
    return pivot(title, columns, *sections.values(), notes=(note,))


class SeedValue(NamedTuple):
    """A value of one seed; without a place it is the mean over places."""

    measure: str
    method: str
    seed: int
    place: str
    value: float


def seed_table(
    labels: Mapping[str, str], values: Values, places: Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]]
) -> Table:
    """Every measure of every seed in a row of its own: the value, and below it those of each place it is a mean of."""
    columns = (
        Column("measure", words=True, read=lambda row: words_of(row.measure)),
        Column("method", words=True, read=lambda row: labels[row.method]),
        Column("row", words=True, read=lambda row: row.method),
        Column("seed", read=lambda row: row.seed),
        Column("place", words=True, read=lambda row: row.place),
        Column("value", unit="%", read=lambda row: percent_cell(row.value)),
    )
    sections: list[list[SeedValue]] = []
    for measure, of_methods in values.items():
        rows: list[SeedValue] = []
        for method in labels:
            of_places = places.get(measure, {}).get(method, {})
            for seed, value in sorted(of_methods.get(method, {}).items()):
                rows.append(SeedValue(measure, method, seed, "", value))
                for place, seeds in of_places.items():
                    if seed in seeds:
                        rows.append(SeedValue(measure, method, seed, place, seeds[seed]))
        sections.append(rows)
    return pivot("The value of every seed, and of each place", columns, *sections)


def _columns(margin: float, equal_seeds: bool) -> tuple[Column, ...]:
    group = f"p, margin {100 * margin:g}"

    def can_show(difference: Difference) -> Cell:
        points = difference.detectable
        return Cell(formats.MISSING if points is None else f"{100 * points:.1f}", _points(points))

    return (
        Column("measure", words=True, read=lambda line: words_of(line.measure)),
        Column("method", words=True, read=lambda line: line.label),
        Column("seeds", detail=equal_seeds, read=lambda line: len(line.values)),
        Column("value", unit="%", read=lambda line: line.value_cell),
        Column("difference", unit="points", read=lambda line: line.difference_cell),
        *both_tests(),
        Column("can show", "over seeds", "points", detail=True, read=tested(can_show)),
        Column("90 % low", "over seeds", "points", detail=True, read=tested(lambda d: _bound(d.equivalence, "low"))),
        Column("90 % high", "over seeds", "points", detail=True, read=tested(lambda d: _bound(d.equivalence, "high"))),
        Column(
            "no worse uncorrected", group, detail=True,
            read=tested(lambda d: p_cell(d.equivalence.no_worse_p if d.equivalence else None)),
        ),
        Column("no worse", group, read=tested(lambda d: p_cell(d.no_worse_p, d.no_worse))),
        Column("equal uncorrected", group, detail=True, read=tested(lambda d: p_cell(_p(d.equivalence)))),
        Column("equal", group, read=tested(lambda d: p_cell(d.equivalence_p, d.equivalent))),
        Column("not tested because", words=True, detail=True, read=tested(lambda d: d.refused or d.unpaired)),
    )  # fmt: skip


def _won(place: str, difference: Difference) -> str:
    """Questions won and lost at one place."""
    test = difference.by_place.get(place)
    return "" if test is None else f"{test.won}:{test.lost}"


def _p(test: Any) -> float | None:
    return None if test is None else test.p


def _points(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _interval(test: Any) -> str:
    """The interval of a test in points."""
    if test is None or test.low is None or test.high is None:
        return formats.MISSING
    return f"[{formats.points(test.low)}, {formats.points(test.high)}]"


def _bound(test: Any, end: str) -> Cell:
    """An end of the interval of a test, for CSV."""
    text = _interval(test)
    return Cell(text, None if text == formats.MISSING else _points(getattr(test, end)))
