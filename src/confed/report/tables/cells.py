"""Table cells: values with their spread over seeds, and which of them tests do not tell from the best."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from confed.metrics.statistics import LEVEL, MIN_SEEDS, holm, mean, paired_t
from confed.report.tables.table import Cell, Mark
from confed.results import format as formats

__all__ = ["best_marks", "bold_note", "mean_sd_cell"]


def mean_sd_cell(values: Sequence[float | None], mark: Mark = "") -> Cell:
    """Mean and standard deviation over seeds of fractions, in percent; seeds without a value are left out."""
    there = [value for value in values if value is not None]
    if not there:
        return Cell(formats.MISSING)
    summary = mean(there)
    if summary.n == 1:
        return Cell(formats.percent(summary.mean), 100 * summary.mean, mark=mark)
    return Cell(formats.percent(summary.mean, summary.sd), 100 * summary.mean, 100 * summary.sd, mark)


def best_marks(
    values: Sequence[Mapping[int, float]],
    ranked: Sequence[int],
    refused: Callable[[int, int], object] = lambda i, j: False,
) -> list[Mark]:
    """The best mean and all that tests do not tell from it; no marks where the tests tell none from it.

    Paired t-tests over seeds with Holm's correction over all pairs with values, those that are not ranked or may not be
    tested too, as in :func:`confed.report.statistics.paired.all_pairs`. Fewer than five common seeds tell nothing.

    Args:
        values: of each method, by seed.
        ranked: positions of the methods that may be marked.
        refused: whether two positions may not be tested against each other.
    """
    marks: list[Mark] = [""] * len(values)
    pairs = list(combinations([i for i, own in enumerate(values) if own], 2))
    common = {(i, j): sorted(values[i].keys() & values[j].keys()) for i, j in pairs}
    if all(len(seeds) < MIN_SEEDS for seeds in common.values()):
        return marks
    p: dict[str, float] = {}
    for (i, j), seeds in common.items():
        if len(seeds) > 1 and not refused(i, j):
            test = paired_t([values[i][seed] for seed in seeds], [values[j][seed] for seed in seeds])
            p |= {} if test.p is None else {f"{i} {j}": test.p}
    adjusted = holm(p, tests=len(pairs)).adjusted
    apart = {(i, j) for (i, j), seeds in common.items()
             if len(seeds) >= MIN_SEEDS and adjusted.get(f"{i} {j}", 1.0) <= LEVEL}  # fmt: skip
    candidates = [i for i in ranked if values[i]]
    best = max(candidates, key=lambda i: mean([*values[i].values()]).mean, default=None)
    level = [i for i in candidates if best is not None and (min(i, best), max(i, best)) not in apart]
    for i in level if len(level) < len(candidates) else ():
        marks[i] = "best"
    return marks


def bold_note(rows: Sequence[Sequence[Cell]], family: str = "column") -> list[str]:
    """What bold means, as a note of a table; nothing where nothing is bold."""
    text = (
        f"Bold: the best mean, and those that paired t-tests over seeds do not tell from it (Holm over all pairs of "
        f"the {family}, at least {MIN_SEEDS} seeds); no bold where they tell none from it."
    )
    return [text] if any(cell.mark for row in rows for cell in row) else []
