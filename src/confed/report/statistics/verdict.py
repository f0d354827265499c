"""Verdict of a study: which method is best, by how much, and whether that is more than noise."""

from collections.abc import Mapping, Sequence

from confed.report.statistics.comparison import compare_runs
from confed.report.statistics.paired import LEVEL, MIN_SEEDS, Difference
from confed.results import format as formats
from confed.results.headline import is_bound
from confed.results.runs import Study

__all__ = ["verdict"]

VERDICTS = {
    "deployed_mean": "deployed models",
    "personal_mean": "personal models on their own clients' data",
    "global_unseen_mean": "global model in unseen places",
    "C-AP": "C-AP",
}
"""Measures that a verdict is given on -> what they are called there; personal means only where nothing is deployed."""


def verdict(study: Study) -> str:
    """One sentence per measure, best method first; "" for a run on its own or with fewer than two ranked methods.

    The best method is compared with every other one that is no bound, over seeds where there are at least
    :data:`~confed.report.statistics.paired.MIN_SEEDS`, else over test examples. As it is chosen by the same results,
    p-values are multiplied by the number of all pairs of methods (Bonferroni), not only of those with the best.
    """
    ranked = [run for run in study.runs if run.complete and not is_bound(run.summary)]
    methods = tuple(dict.fromkeys(run.method for run in ranked))
    if study.single or len(methods) < 2:
        return ""
    first = compare_runs(ranked, methods[:1])
    found: dict[str, Sequence[Difference]] = {}
    sentences: list[str] = []
    for measure, words in VERDICTS.items():
        if measure == "personal_mean" and "deployed_mean" in first.values:
            continue
        means = {m: sum(of.values()) / len(of) for m, of in first.values.get(measure, {}).items()}
        if len(means) > 1:
            best = max(means, key=means.__getitem__)
            if best not in found:
                found[best] = first.differences if best == methods[0] else compare_runs(ranked, [best]).differences
            sentences.append(_sentence(first.labels, words, means, [d for d in found[best] if d.measure == measure]))
    return " ".join(sentences)


def _sentence(labels: Mapping[str, str], words: str, means: Mapping[str, float], found: Sequence[Difference]) -> str:
    """Best method on one measure: its lead, methods that tests cannot tell from it, and untested ones."""
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    start = f"Best {words}: {labels[best]} ({formats.percent(means[best])} %)"
    lead = f"{100 * (means[best] - means[second]):.1f} points ahead of {labels[second]}"
    with_best = {d.method: d for d in found}
    pairs = len(means) * (len(means) - 1) // 2
    p = {m: _p(with_best[m], pairs) if m in with_best else None for m in means if m != best}
    untested = [labels[m] for m, value in p.items() if value is None]
    # Where seeds are missing the difference over common ones may have another sign than that of the means.
    tested = {m: value for m, value in p.items() if value is not None}
    level = [labels[m] for m, value in tested.items() if value > LEVEL or with_best[m].points >= 0]
    ahead = [labels[m] for m in tested if labels[m] not in level]
    if len(untested) == len(p):
        percent = formats.percent(means[best])
        level = [labels[m] for m, mean in means.items() if formats.percent(mean) == percent]
        if len(level) > 1:
            return f"Best {words}: {formats.names(level)} are level ({percent} %); nothing is tested."
        return f"{start}, {lead}; nothing is tested."
    seeds = min(len(with_best[m].seeds) for m in tested)
    few = f"on these test examples, which says nothing of other seeds ({formats.counted(seeds, 'seed')})"
    kind = "over seeds" if seeds >= MIN_SEEDS else few
    end = f" Not tested: {formats.names(untested)}." if untested else ""
    if not level:
        others = "all" if not untested else formats.names(ahead)
        return f"{start}, {lead}, and ahead of {others} by more than noise {kind}.{end}"
    if not ahead:
        return f"{start}, but no difference to any other method is more than noise {kind}.{end}"
    more = f"ahead of {formats.names(ahead)} by more"
    return f"{start}; within noise of {formats.names(level)}, {more}, {kind}.{end}"


def _p(difference: Difference, pairs: int) -> float | None:
    """The p-value that counts, over seeds where there are enough of them, else over examples; None without one.

    Of rows that are equal in every seed, which have no p-value over seeds, it is 1: they are level.
    """
    test = difference.over_seeds if len(difference.seeds) >= MIN_SEEDS else difference.over_examples
    if test is None or test.p is None:
        return None if test is None or difference.points else 1.0
    return min(1.0, pairs * test.p)
