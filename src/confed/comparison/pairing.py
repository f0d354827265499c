"""Scores of the same test examples in several runs, paired by the examples' names.

Rows of runs with the same examples in another order are put into one order, and other examples are refused. Where rows
have no names they are paired by their position, only where nothing can have reordered them: equal settings of the data,
and over seeds no modality that evaluations lose, since what is lost and hence the order depends on the seed.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from confed.comparison.records import Examples, Record, Resampled
from confed.comparison.refusals import OtherExamples, Pairs
from confed.metrics.statistics import Bootstrap, Kept, Swap, bootstrap_of, swap_test

BY_POSITION = (
    "Some predictions carry no names of examples (they were made by an earlier version): those are paired by position, "
    "and only where their sections [data] are equal and nothing reorders examples."
)


def paired_differences(pairs: Pairs, measure: str) -> dict[str, np.ndarray] | str:
    """Place -> paired differences of its examples, float64 (S, N), NaN where a seed has none; or why there are none."""
    sides = _same_places(pairs, measure)
    if isinstance(sides, str):
        return sides
    strata: dict[str, np.ndarray] = {}
    for place in sorted(sides[0][0]):
        seeds: list[Examples] = []
        for (record, reference), (a, b) in zip(pairs, sides, strict=True):
            order = aligned(
                a[place],
                b[place],
                lambda one=record, other=reference: _reorders(one, other),
                same_pool=record.data == reference.data,
            )
            if isinstance(order, str):
                return type(order)(f"{place}: {order} (seed {record.seed})")
            seeds.append(Examples(a[place].scores - b[place].scores[order], a[place].names))
        joined = over_seeds(seeds, [record for record, _ in pairs])
        if isinstance(joined, str):
            return f"{place}: {joined}"
        strata[place] = joined
    order = dict.fromkeys((*pairs[0][0].order, *strata))
    # A place without test examples has no value either.
    return {p: strata[p] for p in order if p in strata and strata[p].size} or "there are no test examples"


def _same_places(pairs: Pairs, measure: str) -> list[tuple[Mapping[str, Examples], Mapping[str, Examples]]] | str:
    """Examples by place of both runs of each pair, all at the same places; or why they are not."""
    sides = [(a.examples.get(measure, {}), b.examples.get(measure, {})) for a, b in pairs]
    both_sides = list(chain.from_iterable(sides))
    if not all(both_sides):
        return "predictions of both on test examples are missing"
    if any(examples.keys() != both_sides[0].keys() for examples in both_sides):
        return "they were tested at other places"
    return sides


def swapped(pairs: Pairs, measure: str, combine: Callable[[np.ndarray], float], seed: int) -> Swap | str:
    """Test over examples of a mean over places of what is no mean over examples; or why there is none."""
    sides = _same_places(pairs, measure)
    if isinstance(sides, str):
        return sides
    places: list[list[Kept]] = []
    for place in sorted(sides[0][0]):
        seeds: list[Kept] = []
        for (record, _), (a, b) in zip(pairs, sides, strict=True):
            names = a[place].names
            order = aligned(a[place], b[place], lambda: "predictions carry no names of examples")
            if isinstance(order, str) or names is None:
                return type(order)(f"{place}: {order} (seed {record.seed})") if isinstance(order, str) else "no names"
            seeds.append((a[place].scores, b[place].scores[order], names))
        places.append(seeds)
    return swap_test(places, combine, seed)


def by_position(pairs: Pairs, measure: str) -> bool:
    """Whether some rows of these runs have no names."""
    for record in chain.from_iterable(pairs):
        if any(rows.names is None for rows in record.examples.get(measure, {}).values()):
            return True
    return False


def aligned(
    base: Examples, other: Examples, reorders: Callable[[], str] = lambda: "", *, same_pool: bool = True
) -> np.ndarray | str:
    """The order, int64 (N,), in which ``other.scores`` are of ``base``'s examples; or why there is no such order."""
    if len(base.scores) != len(other.scores):
        return OtherExamples(f"other test examples, {len(base.scores)} and {len(other.scores)} of them")
    order = np.arange(len(base.scores))
    if base.names is None or other.names is None:
        if reason := reorders():
            return reason
    elif not np.array_equal(base.names, other.names):
        if len(np.unique(base.names)) < len(order):
            return "examples in another order, whose names are not unique"
        here, other_order = np.argsort(base.names), np.argsort(other.names)
        if not np.array_equal(base.names[here], other.names[other_order]):
            return OtherExamples("other test examples")
        order[here] = other_order
    hashed = base.answers is not None and other.answers is not None
    a, b = (base.answers, other.answers) if hashed else (base.truth, other.truth)
    if (hashed or same_pool) and a is not None and b is not None and not np.array_equal(a, b[order]):
        return "examples of the same names with other right answers"
    return order


def over_seeds(seeds: Sequence[Examples], records: Sequence[Record]) -> np.ndarray | str:
    """Rows of all seeds, float64 (S, N), with every example in one column, NaN where missing; or why there are none."""
    names = [rows.names for rows in seeds if rows.names is not None]
    if len(names) < len(seeds):
        return _unstackable(seeds, records) or np.stack([rows.scores for rows in seeds])
    if all(np.array_equal(names[0], seed_names) for seed_names in names):
        return np.stack([rows.scores for rows in seeds])
    if any(len(np.unique(seed_names)) < len(seed_names) for seed_names in names):
        return "seeds have other examples, or another order of them, and their names are not unique"
    every = np.unique(np.concatenate(names))
    scores = np.full((len(seeds), len(every)), np.nan)
    for row, seed_names, rows in zip(scores, names, seeds, strict=True):
        row[np.searchsorted(every, seed_names)] = rows.scores
    return scores


def paired_bootstrap(pairs: Pairs, measure: str) -> Bootstrap | str:
    """Mean difference over seeds of what is no mean, with its bootstrap over test examples; or why there is none."""
    both: list[tuple[Resampled, Resampled]] = []
    for record, reference in pairs:
        a, b = record.resampled(measure), reference.resampled(measure)
        if a is None or b is None:
            return "probabilities of both on test examples are missing"
        if a.names and b.names and a.members != b.members:
            return OtherExamples(f"other test examples (seed {record.seed})")
        if a.names and b.names and a.names != b.names:
            return f"test examples in another order (seed {record.seed})"
        if a.test_set != b.test_set:
            return f"test examples with other labels (seed {record.seed})"
        both.append((a, b))
    observed = float(np.mean([a.value - b.value for a, b in both]))
    resampled = np.mean([a.values - b.values for a, b in both], axis=0)
    # A test set that all seeds share is drawn once for all of them.
    sizes = {a.test_set: a.examples for a, _ in both}
    return bootstrap_of(observed, resampled, sum(sizes.values()))


def _unstackable(seeds: Sequence[Examples], records: Sequence[Record]) -> str:
    """Why rows of several seeds, some without names, may not be put together by position; "" if they may."""
    if reason := next(filter(None, (_reorders(records[0], record) for record in records)), ""):
        return reason
    if any(len(rows.scores) != len(seeds[0].scores) for rows in seeds):
        return "predictions carry no names of examples, and the seeds have other test examples"
    names = [rows.names for rows in seeds if rows.names is not None]
    if any(not np.array_equal(names[0], seed_names) for seed_names in names[1:]):
        return "some predictions carry no names of examples, and the others have other examples or another order"
    return ""


def _reorders(first: Record, second: Record) -> str:
    """Why the rows of two runs without names may stand in another order; "" if they cannot."""
    if first.data is None or second.data is None or first.data != second.data:
        return "predictions carry no names of examples, and the sections [data] differ"
    if first.seed != second.seed and first.reordered:
        return "predictions carry no names of examples, and what evaluations lose (data.missing) reorders them by seed"
    return ""
