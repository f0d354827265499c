"""False-positive rates of the tests of reports, and coverage of their intervals, where nothing or something differs.

``python benchmarks/level_of_tests.py [REPEATS]`` prints the tables of ``docs/how_it_works.md``. Answers are drawn: an
example has a chance to be answered by each of two methods, the chances of both from one distribution, the same for all
seeds. So no method is better, and a test at 5 % should find a difference in 5 % of repeats, whatever the places' sizes.
With an effect the first method also answers a part of what it would have got wrong.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from confed.metrics.label_resampling import resampled_class_precision, resampled_overall_f1
from confed.metrics.multilabel import class_average_precision, mean_over_classes
from confed.metrics.statistics import bootstrap_of, paired_t, wilcoxon
from confed.metrics.stratified import flip_interval, macro_mean, sign_flip

PATTERNS: Mapping[str, Sequence[int]] = {
    "3, 3, 300, 300": (3, 3, 300, 300),
    "4, 10, 30, 80, 200": (4, 10, 30, 80, 200),
    "5 × 5": (5,) * 5,
    "5 × 60": (60,) * 5,
    "20 × 8": (8,) * 20,
}
"""Places' numbers of test examples."""
SEEDS: Mapping[str, tuple[int, float]] = {"1": (1, 0.0), "3": (3, 0.0), "5": (5, 0.0), "5, a third missing": (5, 1 / 3)}
"""Numbers of seeds, and the share of examples that each seed lacks."""
LEVEL = 0.05
DRAWS = 500


@dataclass
class Rate:
    """How often something held, of how many repeats."""

    held: int = 0
    repeats: int = 0

    def add(self, held: bool) -> None:
        self.held += held
        self.repeats += 1

    @property
    def percent(self) -> float:
        """Share in percent; NaN without repeats."""
        return 100 * self.held / self.repeats if self.repeats else float("nan")


def answers(
    rng: np.random.Generator, sizes: Sequence[int], seeds: int, missing: float = 0.0, effect: float = 0.0
) -> list[np.ndarray]:
    """Differences of two methods at every place, float64 (S, N), NaN where a seed lacks an example."""
    strata: list[np.ndarray] = []
    for size in sizes:
        first, second = ((rng.random((seeds, size)) < rng.beta(1.5, 1, size)).astype(float) for _ in "ab")
        first[rng.random((seeds, size)) < effect] = 1.0
        differences = first - second
        if missing:
            lacks = rng.random((seeds, size)) < missing
            lacks[lacks.all(axis=1), 0] = False  # every seed has an example
            differences[lacks] = np.nan
        strata.append(differences)
    return strata


def true_difference(effect: float) -> float:
    """The mean that differences have: the share of wrong answers, 2/5, of which the effect is answered."""
    return 0.4 * effect


def bootstrap_within(strata: Sequence[np.ndarray], rng: np.random.Generator) -> tuple[float, float, float]:
    """p-value and interval of a bootstrap of examples within places, which reports do not use."""
    means = np.zeros(DRAWS)
    for d in strata:
        rows = rng.integers(d.shape[1], size=(DRAWS, d.shape[1]))
        drawn = np.nan_to_num(d)[:, rows].sum(axis=2) / np.maximum((~np.isnan(d))[:, rows].sum(axis=2), 1)
        means += drawn.mean(axis=0) / len(strata)
    found = bootstrap_of(macro_mean(strata), means, len(strata))
    return found.p, found.low, found.high


def over_examples(
    sizes: Sequence[int], seeds: int, missing: float, effect: float, repeats: int, bootstrap: bool = False
) -> dict[str, Rate]:
    """Rates of sign flips and their interval, and in a quarter of repeats of the bootstrap if it is asked for."""
    rng = np.random.default_rng([sum(sizes), seeds, round(100 * (missing + effect)), 7])
    names = ("flips", "flips cover", "no interval", "bootstrap", "bootstrap covers")
    rates = {name: Rate() for name in names}
    truth = true_difference(effect)
    for repeat in range(repeats):
        strata = answers(rng, sizes, seeds, missing, effect)
        rates["flips"].add(sign_flip(strata, repeat, DRAWS).p <= LEVEL)
        interval = flip_interval(strata, repeat, DRAWS)
        rates["no interval"].add(interval is None)
        if interval is not None:
            rates["flips cover"].add(interval.low - 1e-12 <= truth <= interval.high + 1e-12)
        if bootstrap and repeat % 4 == 0:
            p, low, high = bootstrap_within(strata, rng)
            rates["bootstrap"].add(p <= LEVEL)
            rates["bootstrap covers"].add(low <= truth <= high)
    return rates


def over_seeds(sizes: Sequence[int], seeds: int, repeats: int) -> dict[str, Rate]:
    """Rates of the paired t-test over seeds, and of Wilcoxon's over places and seeds, which reports do not use.

    Both methods have the same chance to answer an example, and every trained model is a little better or worse
    everywhere than its like.
    """
    rng = np.random.default_rng([sum(sizes), seeds, 8])
    rates = {name: Rate() for name in ("paired t", "t covers", "Wilcoxon")}
    for _ in range(repeats):
        places = np.zeros((seeds, len(sizes)))
        luck = rng.normal(0, 0.05, (2, seeds, 1))
        for column, size in enumerate(sizes):
            chance = rng.beta(1.5, 1, size)
            first, second = ((rng.random((seeds, size)) < chance + own).mean(axis=1) for own in luck)
            places[:, column] = first - second
        if not np.ptp(places.mean(axis=1).round(12)):
            continue
        test = paired_t(places.mean(axis=1), np.zeros(seeds))
        rates["paired t"].add(test.p is not None and test.p <= LEVEL)
        rates["t covers"].add(test.low <= 0 <= test.high)
        rates["Wilcoxon"].add(wilcoxon(places.reshape(-1), np.zeros(places.size)).p <= LEVEL)
    return rates


def of_labels(examples: int, classes: int, repeats: int) -> dict[str, Rate]:
    """Rates of the bootstrap of C-AP and of O-F1, of two models whose scores are equally noisy."""
    rng = np.random.default_rng([examples, classes, 9])
    rates = {name: Rate() for name in ("C-AP", "C-AP covers", "O-F1", "O-F1 covers")}
    for _ in range(repeats):
        truth = rng.random((examples, classes)) < rng.uniform(0.05, 0.4, classes)
        seen = 1.2 * truth + rng.normal(0, 1, truth.shape)
        both = [1 / (1 + np.exp(0.8 - seen - rng.normal(0, 0.7, truth.shape))) for _ in "ab"]
        positives = truth.sum(axis=0)
        precision = [mean_over_classes(class_average_precision(s, truth), positives, "zero") for s in both]
        resamplers: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
            "C-AP": lambda s, t=truth: resampled_class_precision(s, t, resamples=DRAWS),
            "O-F1": lambda s, t=truth: resampled_overall_f1(s, t, 0.5, resamples=DRAWS),
        }
        for name, resample in resamplers.items():
            found = bootstrap_of(precision[0] - precision[1], resample(both[0]) - resample(both[1]), examples)
            rates[name].add(found.p <= LEVEL)
            rates[f"{name} covers"].add(found.low <= 0 <= found.high)
    return rates


def lines(repeats: int) -> Iterator[str]:
    """The tables, in Markdown."""
    yield "| places' examples | seeds | flips | bootstrap | flips cover | with an effect | bootstrap covers |"
    yield "| :--- | :--- | ---: | ---: | ---: | ---: | ---: |"
    for (pattern, sizes), (words, (seeds, missing)) in product(PATTERNS.items(), SEEDS.items()):
        null = over_examples(sizes, seeds, missing, 0.0, repeats, bootstrap=True)
        effect = over_examples(sizes, seeds, missing, 0.3, repeats)
        shown = [null[name].percent for name in ("flips", "bootstrap", "flips cover")]
        shown += [effect["flips cover"].percent, null["bootstrap covers"].percent]
        yield f"| {pattern} | {words} | " + " | ".join("–" if np.isnan(x) else f"{x:.1f}" for x in shown) + " |"
    yield "\n| places' examples | seeds | paired t | its interval covers | Wilcoxon, places × seeds |"
    yield "| :--- | ---: | ---: | ---: | ---: |"
    for (pattern, sizes), seeds in product(PATTERNS.items(), (3, 5)):
        rates = over_seeds(sizes, seeds, repeats)
        yield f"| {pattern} | {seeds} | " + " | ".join(f"{rate.percent:.1f}" for rate in rates.values()) + " |"
    yield "\n| examples × labels | C-AP | C-AP covers | O-F1 | O-F1 covers |"
    yield "| :--- | ---: | ---: | ---: | ---: |"
    for examples, classes in ((60, 5), (300, 10)):
        rates = of_labels(examples, classes, repeats // 4)
        yield f"| {examples} × {classes} | " + " | ".join(f"{rate.percent:.1f}" for rate in rates.values()) + " |"


if __name__ == "__main__":
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
        print(line, flush=True)
