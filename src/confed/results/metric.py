"""What the headline values of several runs measure: one metric, or several that may or may not be the same thing."""

from collections.abc import Iterable, Mapping, Sequence

from confed.comparison.refusals import SEVERAL, SHARES_OF_RIGHT
from confed.metrics.scores import SCORES, title_of
from confed.results.records import record_of
from confed.results.runs import RunResults

ANSWER_TYPES = ("yes/no", "number", "other")  # the types of VQA-v2, in the order in which its tables have them


def types_in_order(types: Iterable[str]) -> list[str]:
    """Types of question as tables have them: answer types in their usual order, others by name."""
    ordered = sorted(set(types))
    return [t for t in ANSWER_TYPES if t in ordered] if set(ordered) <= set(ANSWER_TYPES) else ordered


def metric_of(runs: Sequence[RunResults]) -> str:
    """The name of the runs' metric; "score" where they have several."""
    names = dict.fromkeys(run.summary.metric for run in runs if run.complete)
    return title_of(next(iter(names), "accuracy") if len(names) < 2 else SEVERAL)


def metric_note(runs: Sequence[RunResults]) -> str:
    """Whether runs with several metrics can be compared, in a sentence; the empty text if they have one."""
    complete = [run for run in runs if run.complete]
    names = list(dict.fromkeys(run.summary.metric for run in complete))
    if len(names) < 2:
        return ""
    of: dict[str, list[str]] = {}
    for name in names:
        of[name] = list(dict.fromkeys(run.label for run in complete if run.summary.metric == name))
    words = "; ".join(f"{name} of {', '.join(labels)}" for name, labels in of.items())
    if {*names} <= {*SHARES_OF_RIGHT} and all(record_of(run).strict() for run in complete):
        return f"Metrics have several names ({words}), but every score is 0 or 1: all are shares of right answers."
    return f"Warning: the metrics differ ({words}), so values in one column are not the same quantity."


def place_metric(run: RunResults, place: str, values: Mapping[str, object]) -> str:
    """Name of the headline metric at one place, where clients may have several ("score")."""
    if run.summary.metric != SEVERAL:
        return run.summary.metric
    if place in run.summary.metrics_of_places:
        return run.summary.metrics_of_places[place]
    typed = [key.partition("/")[0] for key in values if "/" in key]
    headline_metrics = [name for name, score in SCORES.items() if score.heads and name in values]
    if typed:
        return typed[0]
    return headline_metrics[0] if len(headline_metrics) == 1 else SEVERAL
