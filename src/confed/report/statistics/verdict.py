"""Verdict of a study: which method is best, by how much, and whether that is more than noise.

It reads the p-values of a comparison and computes none: whatever it says of a pair stands in the table of that pair.
"""

from collections.abc import Mapping, Sequence

from confed.report.statistics.comparison import Comparison
from confed.report.statistics.paired import LEVEL, MIN_SEEDS, Difference, against
from confed.results import format as formats
from confed.results.gates import POOLING
from confed.results.headline import is_bound
from confed.results.runs import Study, Summary
from confed.results.traits import traits_of

__all__ = ["verdict"]

UNSEEN = "global_unseen_mean"
VERDICTS = {
    "deployed_mean": "Deployed models",
    "personal_mean": "Personal models on their own clients' data",
    UNSEEN: "The global model in unseen places",
    "C-AP": "C-AP",
}
"""Measures that a verdict is given on -> what they are called there; personal means only where nothing is deployed."""


def verdict(study: Study, comparison: Comparison) -> str:
    """Two sentences per measure; "" for a run on its own or with fewer than two ranked methods.

    The first names the method with the highest mean, the second the methods that it is ahead of by more than noise:
    over seeds where there are at least :data:`~confed.report.statistics.paired.MIN_SEEDS`, else over test examples.
    Where the study has a centralised row without head-room over local training (over the reference, in unseen places),
    the second says that nothing can be judged.

    Args:
        study: what was read.
        comparison: of all its methods.
    """
    firsts = {run.method: run.summary for run in study.runs if run.complete}
    ranked = [method for method, summary in firsts.items() if not is_bound(summary)]
    if study.single or len(ranked) < 2:
        return ""
    sentences: list[str] = []
    for measure, words in VERDICTS.items():
        if measure == "personal_mean" and "deployed_mean" in comparison.values:
            continue
        values = comparison.values.get(measure, {})
        means = {method: sum(values[method].values()) / len(values[method]) for method in ranked if method in values}
        if len(means) > 1:
            best = max(means, key=means.__getitem__)
            pairs = [d for d in against(comparison.pairs, best) if d.measure == measure and d.method in means]
            reason = _no_headroom(comparison, firsts, measure)
            second = (
                f"Nothing can be judged here: {reason}." if reason else _tested(comparison.labels, best, means, pairs)
            )
            sentences += [f"{words}: {_highest(comparison.labels, means)}.", second]
    return " ".join(sentences)


def _highest(labels: Mapping[str, str], means: Mapping[str, float]) -> str:
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    percent = formats.percent(means[best])
    level = [labels[method] for method, mean in means.items() if formats.percent(mean) == percent]
    if len(level) > 1:
        return f"{_names(level)} share the highest mean ({percent} %)"
    lead = f"{100 * (means[best] - means[second]):.1f} points ahead of {labels[second]}"
    return f"{labels[best]} has the highest mean ({percent} %), {lead}"


def _at_most(p: float) -> str:
    return "p below 0.001" if p < 0.0005 else f"p at most {formats.p_value(p)}"


def _names(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, [formats.names(labels[:-1]), labels[-1]]))


def _tested(labels: Mapping[str, str], best: str, means: Mapping[str, float], pairs: Sequence[Difference]) -> str:
    """Which methods the best one is ahead of by more than noise, and which tests cannot tell from it."""
    seeds = min((len(pair.seeds) for pair in pairs), default=0)
    p = {pair.method: found for pair in pairs if (found := _p(pair, over_seeds=seeds >= MIN_SEEDS)) is not None}
    if not p:
        return "Whether that is more than noise is not tested."
    # Over the seeds that both have, the difference may have another sign than that of the means.
    ahead = [pair.method for pair in pairs if p.get(pair.method, 1.0) <= LEVEL and pair.points < 0]
    level = [method for method in p if method not in ahead]
    untested = [labels[method] for method in means if method != best and method not in p]
    parts: list[str] = []
    if ahead:
        who = _names([labels[method] for method in ahead]) if len(ahead) < len(means) - 1 else "every other method"
        parts.append(f"{labels[best]} is ahead of {who} ({_at_most(max(p[method] for method in ahead))})")
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
    """The corrected p-value over seeds or over examples, as tables have it; None without one.

    Of rows that are equal in every seed, which have no p-value over seeds, it is 1: they are level.
    """
    if not over_seeds:
        return pair.examples_p
    return 1.0 if pair.over_seeds is not None and not pair.over_seeds.sd and not pair.points else pair.seeds_p


def _no_headroom(comparison: Comparison, firsts: Mapping[str, Summary], measure: str) -> str:
    """Why a measure fails gate a of this study; "" where it passes, or where a row is missing.

    The gate is the measure's own: at the clients pooling has to be ahead of local training, in unseen places of the
    reference.
    """
    values = comparison.values[measure]
    central = next((method for method in values if is_bound(firsts[method])), "")
    if not central:
        return ""
    trained = firsts[central].get("trainable")
    like = [method for method in values if method != central and firsts[method].get("trainable") == trained]
    if measure == UNSEEN:
        lower = next((method for method in comparison.references if method in like), "")
    else:
        lower = next((method for method in like if not traits_of(firsts[method]).communicates), "")
    seeds = [seed for seed in values[central] if lower and seed in values[lower]]
    if not seeds:
        return ""
    points = 100 * sum(values[central][seed] - values[lower][seed] for seed in seeds) / len(seeds)
    if round(points, 9) >= POOLING:
        return ""
    names = comparison.labels[central], comparison.labels[lower]
    place = f"{points:.1f} points ahead of" if points >= 0 else f"{-points:.1f} points behind"
    return f"gate a fails, {names[0]} is {place} {names[1]} and at least {POOLING:g} ahead are needed"
