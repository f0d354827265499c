"""Paired differences between methods, over seeds and over test examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from confed.metrics.equivalence import Equivalence, tost
from confed.metrics.resampling import Bootstrap, bootstrap, bootstrap_seeds
from confed.metrics.statistics import (
    McNemar,
    PairedT,
    Wilcoxon,
    holm,
    mcnemar,
    mcnemar_by_client,
    paired_t,
    wilcoxon,
)
from confed.results.deployed import VIEWS
from confed.results.label_resamples import LabelResamples
from confed.results.runs import Run, counted
from confed.results.tables import LABELS, headline, is_bound

__all__ = [
    "LEVEL",
    "MARGIN",
    "MEASURES",
    "MIN_SEEDS",
    "REFERENCES",
    "Difference",
    "Measure",
    "Methods",
    "Scores",
    "corrected",
    "differences",
    "references_of",
    "values_of",
]

MIN_SEEDS = 5
"""With fewer seeds nothing is called significant at the level of seeds."""

LEVEL = 0.05
"""A corrected p-value up to this is called significant."""

MARGIN = 0.01
"""Differences smaller than this (one percentage point) are taken not to matter, unless told otherwise."""

REFERENCES = ("fedavg", "fedavg_ft", "adapter")
"""What methods are compared with, unless told otherwise."""


class Measure(NamedTuple):
    """A number that heads a run's results.

    Attributes:
        words: its name as people read it.
        view: the view of the predictions that it is a mean of; empty if it is no mean over examples.
        key: the key of its values per place in a run's summary; empty if it is no mean over places.
    """

    words: str
    view: str
    key: str


MEASURES: Mapping[str, Measure] = {
    # Of multi-label runs: no means over examples, so that their tests over examples resample the metric itself.
    **{name: Measure(name, "", "") for name in LABELS},
    "deployed_mean": Measure("deployed at each client", "deployed", "deployed"),
    "personal_mean": Measure("personal on own data", "personal", "personal"),
    "global_seen_mean": Measure("global on seen", "global", "global_seen"),
    "global_unseen_mean": Measure("global on unseen", "unseen", "global_unseen"),
}
"""Key of the summary -> measure."""

Methods = Mapping[str, Mapping[int, Run]]
"""Method -> seed -> run."""

Pair = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
"""Scores of two runs on the same examples: place -> score per example."""


@dataclass(frozen=True)
class Difference:
    """One method against a reference on one measure. P-values "after the correction" are Holm's, over methods.

    Attributes:
        reference: what the method is compared with.
        measure: key of :data:`MEASURES`.
        method: which method.
        seeds: the seeds that both have.
        points: mean difference over these seeds, a fraction.
        over_seeds: paired t-test over seeds; None with fewer than two.
        seeds_p: its p-value after the correction.
        equivalence: two one-sided tests over seeds; None with fewer than two.
        no_worse_p: p-value against "worse by the margin or more", after the correction.
        equivalence_p: p-value against "different by the margin or more", after the correction.
        over_examples: paired bootstrap over test examples; None without predictions of both.
        bootstrap_p: its p-value after the correction.
        over_both: paired bootstrap over seeds and examples; None without predictions or with one seed.
        discordant: McNemar's test over test examples; None without predictions or with soft scores.
        mcnemar_p: its p-value after the correction.
        by_place: place -> McNemar's test on its examples; empty where ``discordant`` is None.
        by_place_p: place -> p-value corrected over all methods and places of the measure.
        pairs: Wilcoxon's test over all pairs of place and seed, which are not independent; None if there are
            none.
    """

    reference: str
    measure: str
    method: str
    seeds: tuple[int, ...]
    points: float
    over_seeds: PairedT | None = None
    seeds_p: float | None = None
    equivalence: Equivalence | None = None
    no_worse_p: float | None = None
    equivalence_p: float | None = None
    over_examples: Bootstrap | None = None
    bootstrap_p: float | None = None
    over_both: Bootstrap | None = None
    discordant: McNemar | None = None
    mcnemar_p: float | None = None
    by_place: Mapping[str, McNemar] = field(default_factory=dict[str, McNemar])
    by_place_p: Mapping[str, float] = field(default_factory=dict[str, float])
    pairs: Wilcoxon | None = None

    @property
    def significant(self) -> bool:
        """Whether it is claimed to hold for other seeds: enough of them, and a small corrected p-value."""
        return self._claimed(self.seeds_p)

    @property
    def no_worse(self) -> bool:
        """Whether it is claimed, for other seeds, that the method does not lose the margin."""
        return self._claimed(self.no_worse_p)

    @property
    def equivalent(self) -> bool:
        """Whether it is claimed, for other seeds, that the two differ by less than the margin."""
        return self._claimed(self.equivalence_p)

    def _claimed(self, p: float | None) -> bool:
        return len(self.seeds) >= MIN_SEEDS and p is not None and p <= LEVEL


class Scores:
    """Scores per example of the runs, each file read once."""

    def __init__(self) -> None:
        self._read: dict[Path, dict[str, dict[str, np.ndarray]]] = {}
        self.labels = LabelResamples()

    def of(self, run: Run, view: str) -> dict[str, np.ndarray]:
        """Place -> score per example (N,), of one view; without clients that left before the end, as in means.

        The view "deployed" is that of the model which the run's method deploys.
        """
        if view == "deployed":
            view = VIEWS[run.summary["deploys"]]
        if run.folder not in self._read:
            views: dict[str, dict[str, np.ndarray]] = {}
            for key, value in run.predictions().items():
                start, _, rest = key.partition("/")
                place = rest.removesuffix("/correct")
                if rest.endswith("/correct") and value.ndim == 1 and place not in run.left:
                    views.setdefault(start, {})[place] = value.astype(np.float64)
            self._read[run.folder] = views
        return self._read[run.folder].get(view, {})

    def pair(self, run: Run, reference: Run, view: str) -> Pair | None:
        """Scores of the same examples; None if the two had other examples."""
        a, b = self.of(run, view), self.of(reference, view)
        if not a or a.keys() != b.keys() or any(len(a[place]) != len(b[place]) for place in a):
            return None
        return a, b


def references_of(methods: Methods, asked: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The methods that the others are compared with.

    Args:
        methods: what there is.
        asked: their names. By default FedAvg and FedAvg + FT as far as they are there, else the first method
            that is no bound.

    Raises:
        ValueError: a name is not among the methods, or none is given.
    """
    if asked is not None:
        names = tuple(dict.fromkeys([asked] if isinstance(asked, str) else asked))
        for name in names:
            if name not in methods:
                raise ValueError(f"reference must be one of {', '.join(methods)}, got {name!r}")
        if not names:
            raise ValueError(f"reference must name at least one of {', '.join(methods)}, got none")
        return names
    firsts = {method: next(iter(runs.values())) for method, runs in methods.items()}
    found: list[str] = []
    for name in REFERENCES:
        # A row of this name comes first; a variant of the method (another aggregation, say) only without it.
        same = (method for method, run in firsts.items() if run.summary.get("algorithm") == name)
        method = name if name in methods else next(same, None)
        if method:
            found.append(method)
    federated = (method for method, run in firsts.items() if not is_bound(run.summary))
    return tuple(found) or (next(federated, next(iter(methods))),)


def values_of(methods: Methods, measure: str) -> dict[str, dict[int, float]]:
    """Method -> seed -> value of a measure; methods without any are left out."""
    found: dict[str, dict[int, float]] = {}
    for method, runs in methods.items():
        seeds = {seed: headline(run.summary, measure) for seed, run in sorted(runs.items())}
        present = {seed: value for seed, value in seeds.items() if value is not None}
        if present:
            found[method] = present
    return found


def differences(
    methods: Methods, reference: str, margin: float = MARGIN, scores: Scores | None = None
) -> list[Difference]:
    """Every method against the reference on every measure that both have.

    In the order of measures, then methods. Each kind of test is corrected by Holm's procedure over the
    methods of one measure.

    Args:
        methods: what is compared.
        reference: one of them.
        margin: differences smaller than this do not matter, a fraction.
        scores: predictions read so far, shared by several calls.
    """
    scores = scores or Scores()
    found: list[Difference] = []
    for name, measure in MEASURES.items():
        values = values_of(methods, name)
        family: list[Difference] = []
        for method in values:
            seeds = [seed for seed in values[method] if seed in values.get(reference, {})]
            if method == reference or not seeds:
                continue
            runs = [(methods[method][seed], methods[reference][seed]) for seed in seeds]
            a, b = ([values[key][seed] for seed in seeds] for key in (method, reference))
            points = sum(x - y for x, y in zip(a, b, strict=True)) / len(seeds)
            pairs = _over_pairs(runs, measure.key) if measure.key else None
            difference = Difference(reference, name, method, tuple(seeds), points, pairs=pairs)
            if len(seeds) > 1:
                difference = replace(difference, over_seeds=paired_t(a, b), equivalence=tost(a, b, margin))
            order = [*runs[0][0].clients, *runs[0][0].scenes]
            if name in LABELS:
                both = scores.labels.over_both(runs, name)
                difference = replace(difference, over_examples=scores.labels.over_examples(runs, name), over_both=both)
            if measure.view:
                difference = _over_examples(difference, [scores.pair(*pair, measure.view) for pair in runs], order)
            family.append(difference)
        found += corrected(family)
    return found


def _over_pairs(runs: Sequence[tuple[Run, Run]], key: str) -> Wilcoxon | None:
    """Wilcoxon's test over pairs of place and seed."""
    tables = [(counted(a.summary, key), counted(b.summary, key)) for a, b in runs]
    pairs = [(a[place], b[place]) for a, b in tables for place in a if place in b]
    return wilcoxon(*zip(*pairs, strict=True)) if pairs else None


def _over_examples(difference: Difference, pairs: Sequence[Pair | None], order: Sequence[str]) -> Difference:
    """The same difference with its tests over examples, where every seed has its pair."""
    present = [pair for pair in pairs if pair is not None]
    if len(present) < len(pairs):
        return difference
    # By side (method, reference), then seed: the scores of all places in one row.
    flat = [[np.concatenate([pair[side][place] for place in sorted(pair[0])]) for pair in present] for side in (0, 1)]
    # A test set that all seeds share is drawn once, with each example's mean over seeds.
    shared = len({len(row) for row in flat[0]}) == 1
    combine = (lambda rows: np.mean(rows, axis=0)) if shared else np.concatenate
    difference = replace(
        difference,
        over_examples=bootstrap(combine(flat[0]), combine(flat[1])),
        over_both=bootstrap_seeds(flat[0], flat[1], shared=shared) if len(present) > 1 else None,
    )
    a, b = (np.concatenate(rows) for rows in flat)
    if not (np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()):
        return difference
    found = dict.fromkeys(place for pair in present for place in pair[0])
    places = [place for place in dict.fromkeys([*order, *found]) if place in found]
    of_place = [
        {place: np.concatenate([pair[side][place] for pair in present if place in pair[0]]) for place in places}
        for side in (0, 1)
    ]
    return replace(difference, discordant=mcnemar(a, b), by_place=mcnemar_by_client(*of_place))


def corrected(family: Sequence[Difference]) -> list[Difference]:
    """The same differences with Holm's correction within each kind of test.

    Args:
        family: the comparisons among which somebody may look for the best.
    """

    def adjusted(read: Callable[[Difference], float | None]) -> Mapping[str, float]:
        found = {str(i): p for i, d in enumerate(family) if (p := read(d)) is not None}
        return holm(found).adjusted

    seeds = adjusted(lambda d: d.over_seeds.p if d.over_seeds else None)
    no_worse = adjusted(lambda d: d.equivalence.no_worse_p if d.equivalence else None)
    equivalent = adjusted(lambda d: d.equivalence.p if d.equivalence else None)
    resampled = adjusted(lambda d: d.over_examples.p if d.over_examples else None)
    discordant = adjusted(lambda d: d.discordant.p if d.discordant else None)
    keys = {(i, place): f"{i} {place}" for i, d in enumerate(family) for place in d.by_place}
    places = holm({key: family[i].by_place[place].p for (i, place), key in keys.items()}).adjusted
    return [
        replace(
            d,
            seeds_p=seeds.get(str(i)),
            no_worse_p=no_worse.get(str(i)),
            equivalence_p=equivalent.get(str(i)),
            bootstrap_p=resampled.get(str(i)),
            mcnemar_p=discordant.get(str(i)),
            by_place_p={place: places[keys[i, place]] for place in d.by_place},
        )
        for i, d in enumerate(family)
    ]
