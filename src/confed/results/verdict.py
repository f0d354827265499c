"""Verdict of a study: which method is best, by how much, and whether that is more than noise."""

from confed.results import formats
from confed.results.compare import compare_runs
from confed.results.marks import is_bound
from confed.results.paired import LEVEL, MIN_SEEDS, Difference
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

    The best method is compared with every other one that is no bound, corrected by Holm's procedure: over seeds where
    there are at least :data:`~confed.results.paired.MIN_SEEDS`, else over test examples.
    """
    ranked = [run for run in study.runs if run.complete and not is_bound(run.summary)]
    if study.single or len({run.method for run in ranked}) < 2:
        return ""
    values = compare_runs(ranked).values
    sentences: list[str] = []
    for measure, words in VERDICTS.items():
        if measure == "personal_mean" and "deployed_mean" in values:
            continue
        means = {method: sum(of.values()) / len(of) for method, of in values.get(measure, {}).items()}
        if len(means) < 2:
            continue
        best = max(means, key=means.__getitem__)
        found = [d for d in compare_runs(ranked, [best]).differences if d.measure == measure]
        sentences.append(_sentence(study, words, best, means, found))
    return " ".join(sentences)


def _sentence(study: Study, words: str, best: str, means: dict[str, float], found: list[Difference]) -> str:
    """Who is best on one measure, by how much, and whom the tests cannot tell from it."""
    second = max((method for method in means if method != best), key=means.__getitem__)
    points = 100 * (means[best] - means[second])
    start = f"Best {words}: {study.labels[best]} ({formats.percent(means[best])} %)"
    tested = {d.method: p for d in found if (p := _p(d)) is not None}
    if not tested:
        return f"{start}, {points:.1f} points ahead of {study.labels[second]}; nothing is tested."
    level = [study.labels[d.method] for d in found if tested.get(d.method, 1.0) > LEVEL]
    kind = "over seeds" if min(len(d.seeds) for d in found) >= MIN_SEEDS else "on these test examples"
    if not level:
        return f"{start}, {points:.1f} points ahead of {study.labels[second]}, and more than noise {kind}."
    if len(level) == len(means) - 1:
        return f"{start}, but no difference to any other method is more than noise {kind}."
    return f"{start}; within noise {kind} of {formats.names(level)}, ahead of the other {len(means) - 1 - len(level)}."


def _p(difference: Difference) -> float | None:
    """The corrected p-value that counts: over seeds where there are enough of them, else over examples."""
    if len(difference.seeds) >= MIN_SEEDS:
        return difference.seeds_p
    return difference.bootstrap_p
