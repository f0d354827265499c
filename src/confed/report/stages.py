"""Values of a swept setting with what their studies found, and differences corrected over all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from confed.comparison.paired import Difference, against, corrected
from confed.report.comparison import Comparison, compare_runs
from confed.report.tables.relative import BySeed, mean_improvement, no_mean
from confed.results.history import judged
from confed.results.runs import StudyResults, load
from confed.results.sweep import Point, Sweep
from confed.system import format as formats


@dataclass(frozen=True)
class Stage:
    """One value of the swept setting, with what its grid found.

    Attributes:
        point: the value, and the settings that go with it.
        differences: method -> it against the first reference, with Holm's correction over all pairs of methods of all
            values of the sweep, as a reader may look for the best of them.
    """

    point: Point
    study: StudyResults
    comparison: Comparison
    differences: Mapping[str, Difference] = field(default_factory=dict[str, Difference])

    @property
    def value(self) -> str:
        """The swept setting's value."""
        return next(iter(self.point.settings.values()))

    def line(self, by: str) -> str:
        """Name of the value's line in the figure; "" where there is one line per method."""
        return self.point.settings.get(by, "")

    @property
    def clients(self) -> int:
        """Number of clients that took part."""
        return len(self.study.clients)

    @property
    def rounds(self) -> str:
        """The budget of communication rounds; a span where methods differ."""
        found = sorted({run.summary.rounds for run in self.study.runs if run.complete})
        return "–".join(map(str, dict.fromkeys((found[0], found[-1])))) if found else formats.MISSING

    @property
    def measure(self) -> str:
        """Measure that is compared: a key of :data:`confed.results.records.OUTCOMES`."""
        return judged(self.study).mean

    def values(self, method: str) -> Mapping[int, float]:
        """A method's value for each seed, a fraction."""
        return self.comparison.values.get(self.measure, {}).get(method, {})

    def _with_reference(self, method: str) -> tuple[BySeed, BySeed] | None:
        """Values of a method and of the first reference, client by client; None where they are not compared."""
        of, reference = self.comparison.clients_of, self.comparison.references[0]
        refused = reference in self.comparison.refused.get(method, {})
        if method == reference or method not in of or reference not in of or refused:
            return None
        return of[method], of[reference]

    def improvement(self, method: str) -> Mapping[int, float]:
        """Relative improvement of a method over the first reference: seed -> mean over clients.

        Empty where a client would be left out; :meth:`no_improvement` then says why.
        """
        improvements = self._with_reference(method)
        return {} if improvements is None else mean_improvement(*improvements)

    def no_improvement(self, method: str) -> str:
        """Why there is no improvement relative to the first reference, as a sentence; "" where there is one."""
        improvements = self._with_reference(method)
        reference = self.comparison.labels[self.comparison.references[0]]
        return "" if improvements is None else no_mean(*improvements, reference)


def stages(root: Path, sweep: Sweep) -> list[Stage]:
    """The values that have a finished run, in order."""
    stage_list: list[Stage] = []
    for point in sweep.points:
        try:
            study = load(root / point.folder)
        except ValueError:  # nothing was run yet, or everything was refused
            continue
        complete_methods = {run.method for run in study.runs if run.complete}
        if complete_methods:
            references = [name for name in sweep.references if name in complete_methods] or None
            stage_list.append(Stage(point, study, compare_runs(study.runs, references, sweep.margin)))
    return _corrected(stage_list)


def _corrected(found: Sequence[Stage]) -> list[Stage]:
    """The same values with their differences, corrected together."""
    stage_pairs = [[pair for pair in stage.comparison.pairs if pair.measure == stage.measure] for stage in found]
    tests = sum(math.comb(len(stage.comparison.values.get(stage.measure, {})), 2) for stage in found)
    together = iter(corrected(list(chain.from_iterable(stage_pairs)), tests))
    stages: list[Stage] = []
    for stage, pairs in zip(found, stage_pairs, strict=True):
        tested = against([*islice(together, len(pairs))], stage.comparison.references[0])
        stages.append(replace(stage, differences={pair.method: pair for pair in tested}))
    return stages
