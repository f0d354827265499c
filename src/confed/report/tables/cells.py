"""Table cells: values with their spread over seeds, and which of them tests do not tell from the best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from operator import attrgetter

from confed.data.picture_tables import by_place
from confed.metrics.statistics import LEVEL, MIN_SEEDS, holm, mean, paired_t
from confed.report.tables.table import Cell, Mark, Row
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import Summary
from confed.system import format as formats

SIGN = "‡"  # behind the values of clients and places without all their examples


def signed(cell: Cell, sign: str) -> Cell:
    """A cell with a footnote's sign behind its text."""
    return replace(cell, text=f"{cell.text} {sign}")


def percent_cell(value: float | None) -> Cell:
    """A fraction in percent."""
    return Cell(formats.percent(value), None if value is None else 100 * value)


def points_cell(value: float | None, after: str = "") -> Cell:
    """A difference of fractions in points, with its sign."""
    return Cell(formats.points(value) + after, None if value is None else 100 * value)


def p_cell(p: float | None, star: bool = False) -> Cell:
    """A p-value, starred where it is claimed to be significant."""
    return Cell(formats.p_value(p) + ("*" if star else ""), p)


def mean_sd_cell(values: Sequence[float | None], mark: Mark = "") -> Cell:
    """Mean and standard deviation over seeds of fractions, in percent; seeds without a value are left out."""
    measured = [value for value in values if value is not None]
    if not measured:
        return Cell(formats.MISSING)
    summary = mean(measured)
    if summary.n == 1:
        return replace(percent_cell(summary.mean), mark=mark)
    return Cell(formats.percent(summary.mean, summary.sd), 100 * summary.mean, 100 * summary.sd, mark)


def left_out_note(summaries: Iterable[Summary]) -> list[str]:
    """Footnote on the mark, with the largest number of missing examples; nothing where none is missing."""
    most: dict[str, dict[str, int]] = {}
    for summary in summaries:
        for place, roles in summary.left_out.items():
            place_counts = most.setdefault(place, {})
            for role, count in roles.items():
                place_counts[role] = max(count, place_counts.get(role, 0))
    return [f"{SIGN} Without examples whose pictures cannot be read: {by_place(most)}."] if most else []


def left_clients_note(summaries: Iterable[Summary]) -> list[str]:
    """Why a mean over clients is not that of the cells beside it, if it is not."""
    summaries = list(summaries)
    names = dict.fromkeys(chain.from_iterable(summary.left for summary in summaries))
    left = [f"Left before the last round and in no mean: {', '.join(names)}."] if names else []
    return left + missing_sites_note(summaries)


def missing_sites_note(summaries: Iterable[Summary]) -> list[str]:
    """Over which sites of a federation the means are, and why others are in none; nothing where all are."""
    notes: dict[str, None] = {}
    for summary in summaries:
        if sites := summary.membership:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in summary.missing_sites.items())
            notes[f"{summary.label}: every mean over clients is over {sites} (not evaluated: {reasons})."] = None
    return [*notes]


def summaries_of(methods: Sequence[tuple[str, Sequence[Summary]]]) -> list[Summary]:
    """The summaries of all methods."""
    return list(chain.from_iterable(summaries for _, summaries in methods))


def finished(study: StudyResults) -> dict[str, list[RunResults]]:
    """Method -> its runs that came to their end."""
    return {method: list(filter(attrgetter("complete"), study.of(method))) for method in study.methods}


def uneven_note(seeds: Mapping[str, int], what: str) -> list[str]:
    """How many seeds each method has, where these differ."""
    each = ", ".join(f"{label} {number}" for label, number in seeds.items())
    return [f"{what} differ: {each}."] if len(set(seeds.values())) > 1 else []


def over_seeds(seeds: int) -> str:
    """Words of a title about the spread of its values; none for one seed."""
    return f", mean ± sd over {seeds} seeds" if seeds > 1 else ""


def of_recipe(name: str, title: str) -> str:
    """A title with the recipe's name in front, where there is one."""
    return f"{name}: {title}" if name else title


def best_marks(
    values: Sequence[Mapping[int, float]],
    ranked: Sequence[int],
    refused: Callable[[int, int], object] = lambda i, j: False,
) -> list[Mark]:
    """The best mean and all that tests do not tell from it; no marks where the tests tell none from it.

    Paired t-tests over seeds with Holm's correction over all pairs with values, those that are not ranked or may not be
    tested too, as in :func:`confed.comparison.paired.all_pairs`. Fewer than five common seeds tell nothing.
    """
    marks: list[Mark] = [""] * len(values)
    pairs = list(combinations([i for i, row_values in enumerate(values) if row_values], 2))
    common = {(i, j): sorted(values[i].keys() & values[j].keys()) for i, j in pairs}
    if all(len(seeds) < MIN_SEEDS for seeds in common.values()):
        return marks
    p: dict[str, float] = {}
    for (i, j), seeds in common.items():
        if len(seeds) > 1 and not refused(i, j):
            test = paired_t([values[i][seed] for seed in seeds], [values[j][seed] for seed in seeds])
            p |= {} if test.p is None else {f"{i} {j}": test.p}
    adjusted = holm(p, tests=len(pairs)).adjusted
    apart: set[tuple[int, int]] = set()
    for (i, j), seeds in common.items():
        if len(seeds) >= MIN_SEEDS and adjusted.get(f"{i} {j}", 1.0) <= LEVEL:
            apart.add((i, j))
    candidates = [i for i in ranked if values[i]]
    best = max(candidates, key=lambda i: mean([*values[i].values()]).mean, default=None)
    level = [i for i in candidates if best is not None and (min(i, best), max(i, best)) not in apart]
    for i in level if len(level) < len(candidates) else ():
        marks[i] = "best"
    return marks


def bold_note(rows: Sequence[Row], family: str = "column") -> list[str]:
    """What bold means, as a note of a table; nothing where nothing is bold."""
    text = (
        f"Bold: the best mean, and those that paired t-tests over seeds do not tell from it (Holm over all pairs of "
        f"the {family}, at least {MIN_SEEDS} seeds); no bold where they tell none from it."
    )
    return [text] if any(cell.mark for cell in chain.from_iterable(rows)) else []
