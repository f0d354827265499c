"""Verdict of a comparison: which method is best, by how much, and whether the data could show it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from confed.comparison.paired import (
    LEVEL,
    MARGIN,
    MIN_SEEDS,
    Difference,
    Outcomes,
    against,
    all_pairs,
    baseline_methods,
    values_of,
)
from confed.comparison.records import Outcome, Record, Role, distinct_labels
from confed.comparison.refusals import fails
from confed.system import format as formats

POOLING = 5.0  # points that centralised training has to be ahead of local training by, for a difference to be judged


@dataclass(frozen=True)
class Compared:
    """Result of :func:`compare`.

    Attributes:
        methods: method -> seed -> record.
        references: the methods that the others are compared with.
        values: measure -> method -> seed -> value, of measures that some method has.
        pairs: one per measure and pair of methods that share a seed: the family that p-values are corrected over.
    """

    methods: Mapping[str, Mapping[int, Record]]
    references: tuple[str, ...]
    values: Mapping[str, Mapping[str, Mapping[int, float]]]
    pairs: tuple[Difference, ...]

    @property
    def roles(self) -> dict[str, Role]:
        """What each method is among the others."""
        return {method: next(iter(records.values())).role for method, records in self.methods.items()}

    @property
    def labels(self) -> dict[str, str]:
        """Method -> its name as people write it."""
        firsts = {method: next(iter(records.values())) for method, records in self.methods.items()}
        return distinct_labels({method: record.label or method for method, record in firsts.items()})

    @property
    def blind(self) -> tuple[tuple[str, str], ...]:
        """Outcome and method of models that are not shown to use their input."""
        blind: list[tuple[str, str]] = []
        for measure, values in self.values.items():
            blind += [(measure, method) for method in values if fails(self.methods[method].values(), measure)]
        return tuple(blind)

    def against(self, reference: str) -> list[Difference]:
        """Every other method against one."""
        return against(self.pairs, reference)

    def verdict(self, words: Mapping[str, str] | None = None, by_reference: Collection[str] = ()) -> str:
        """Two sentences per measure; "" with fewer than two methods that are no bounds.

        The first names the method with the highest mean, the second the methods that it is ahead of by more than noise:
        over seeds where there are at least :data:`MIN_SEEDS`, else over test examples. Where pooling all data is not
        ahead of training alone, the second says that nothing can be judged.

        Args:
            words: measures that are judged -> what they are called; all under their own names by default.
            by_reference: measures at which pooling has to be ahead of the first reference instead.
        """
        roles = self.roles
        ranked = [method for method, role in roles.items() if not role.bound]
        sentences: list[str] = []
        for measure, name in (words or {measure: measure for measure in self.values}).items():
            values = self.values.get(measure, {})
            means = {method: _mean(values[method]) for method in ranked if method in values}
            if len(means) < 2:
                continue
            best = max(means, key=means.__getitem__)
            pairs = [d for d in self.against(best) if d.measure == measure and d.method in means]
            reason = self._no_headroom(measure, measure in by_reference)
            judged = f"Nothing can be judged here: {reason}." if reason else _tested(self.labels, best, means, pairs)
            sentences += [f"{name}: {_highest(self.labels, means)}.", judged]
        return " ".join(sentences) if len(ranked) > 1 else ""

    def _no_headroom(self, measure: str, by_reference: bool) -> str:
        """Why nothing can be judged on a measure (gate a); "" where it can, or where a row is missing."""
        values, roles = self.values[measure], self.roles
        central = next((method for method in values if roles[method].bound), "")
        if not central:
            return ""
        trainable = roles[central].trainable
        like = [method for method in values if method != central and roles[method].trainable == trainable]
        if by_reference:
            lower = next((method for method in self.references if method in like), "")
        else:
            lower = next((method for method in like if roles[method].alone), "")
        seeds = [seed for seed in values[central] if lower and seed in values[lower]]
        if not seeds:
            return ""
        points = 100 * sum(values[central][seed] - values[lower][seed] for seed in seeds) / len(seeds)
        if round(points, 9) >= POOLING:
            return ""
        place = f"{points:.1f} points ahead of" if points >= 0 else f"{-points:.1f} points behind"
        names = self.labels[central], self.labels[lower]
        return f"gate a fails, {names[0]} is {place} {names[1]} and at least {POOLING:g} ahead are needed"


def compare(
    records: Sequence[Record],
    measures: Outcomes | None = None,
    reference: str | Sequence[str] | None = None,
    margin: float = MARGIN,
) -> Compared:
    """Comparison of methods over the records of their runs.

    Args:
        records: one per method and seed.
        measures: what they are compared by; by default all that some record has values of, as means over places.
        reference: the methods that others are compared with; by default those that are references by their role.
        margin: differences smaller than this are taken not to matter, a fraction.

    Raises:
        ValueError: no record, a margin outside (0, 1), or an unknown reference.

    Example:
        >>> import numpy as np
        >>> from confed.comparison import Examples, Record, compare
        >>> rng, names = np.random.default_rng(0), np.arange(200)
        >>> def record(method, seed, share):
        ...     right = (rng.random(200) < share).astype(float)
        ...     return Record(method, seed, {"accuracy": {"ward": Examples(right, names)}})
        >>> runs = [record("mine", seed, 0.8) for seed in range(5)] + [record("other", seed, 0.6) for seed in range(5)]
        >>> compared = compare(runs)
        >>> [difference] = compared.against("other")
        >>> round(100 * difference.points), difference.significant
        (16, True)
        >>> compared.verdict().partition(".")[0]
        'accuracy: mine has the highest mean (78'
    """
    if not records:
        raise ValueError("records must hold at least one, got none")
    if not 0 < margin < 1:
        raise ValueError(f"margin must lie between 0 and 1 (0.01 is one percentage point), got {margin}")
    methods: dict[str, dict[int, Record]] = {}
    for record in records:
        methods.setdefault(record.method, {})[record.seed] = record
    if measures is None:
        names = chain.from_iterable((*record.values, *record.examples) for record in records)
        measures = {name: Outcome(name) for name in dict.fromkeys(names)}
    values = {measure: values_of(methods, measure) for measure in measures}
    present = {measure: of_methods for measure, of_methods in values.items() if of_methods}
    pairs = tuple(all_pairs(methods, measures, margin))
    return Compared(methods, baseline_methods(methods, reference), present, pairs)


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values)


def _highest(labels: Mapping[str, str], means: Mapping[str, float]) -> str:
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    percent = formats.percent(means[best])
    level = [labels[method] for method, mean in means.items() if formats.percent(mean) == percent]
    if len(level) > 1:
        return f"{_names(level)} share the highest mean ({percent} %)"
    lead = f"{100 * (means[best] - means[second]):.1f} points ahead of {labels[second]}"
    return f"{labels[best]} has the highest mean ({percent} %), {lead}"


def _names(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, [formats.names(labels[:-1]), labels[-1]]))


def _tested(labels: Mapping[str, str], best: str, means: Mapping[str, float], pairs: Sequence[Difference]) -> str:
    """Which methods the best one is ahead of by more than noise, and which tests cannot tell from it."""
    seeds = min((len(pair.seeds) for pair in pairs), default=0)
    p = {pair.method: p_value for pair in pairs if (p_value := _p(pair, over_seeds=seeds >= MIN_SEEDS)) is not None}
    if not p:
        return "Whether that is more than noise is not tested."
    # Over the seeds that both have, the difference may have another sign than that of the means.
    ahead = [pair.method for pair in pairs if p.get(pair.method, 1.0) <= LEVEL and pair.points < 0]
    level = [method for method in p if method not in ahead]
    untested = [labels[method] for method in means if method != best and method not in p]
    parts: list[str] = []
    if ahead:
        who = _names([labels[method] for method in ahead]) if len(ahead) < len(means) - 1 else "every other method"
        largest = max(p[method] for method in ahead)
        at_most = "p below 0.001" if largest < 0.0005 else f"p at most {formats.p_value(largest)}"
        parts.append(f"{labels[best]} is ahead of {who} ({at_most})")
    if level:
        who = _names([labels[method] for method in level]) if len(level) < len(means) - 1 else "any other method"
        least = formats.p_value(min(p[method] for method in level))
        shown = [pair.detectable for pair in pairs if pair.method in level and pair.detectable is not None]
        power = f"; a true difference of {100 * max(shown):.1f} points would show in 4 of 5 cases" if shown else ""
        parts.append(f"the difference of {labels[best]} to {who} may be noise (p at least {least}{power})")
    if untested:
        parts.append(f"{_names(untested)} {'is' if len(untested) == 1 else 'are'} not tested")
    few = f"On these test examples ({formats.counted(seeds, 'seed')}, others may differ)"
    return f"{f'Over {seeds} seeds' if seeds >= MIN_SEEDS else few} {'; '.join(parts)}."


def _p(pair: Difference, over_seeds: bool) -> float | None:
    """The corrected p-value over seeds or over examples; 1 for rows equal in every seed, None without one."""
    if not over_seeds:
        return pair.examples_p
    return 1.0 if pair.over_seeds is not None and not pair.over_seeds.sd and not pair.points else pair.seeds_p
