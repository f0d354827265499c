"""Comparability of pairs of runs: the only module that refuses a pair, with the reason.

A refused pair keeps its values and loses every test: p-values, intervals, equivalence, ranks and relative improvement.
"""

from collections.abc import Callable, Mapping, Sequence

from confed.results.metric import ONE_ANSWER, SEVERAL, metrics_of, strict_scores
from confed.results.runs import Run
from confed.results.summary import mapping
from confed.results.views import View


class OtherExamples(str):
    """Why two runs of one seed were not tested on the same examples: means of them are not tested over seeds either."""


def refusal(run: Run, reference: Run, strict: Callable[[Run], bool] = strict_scores) -> str:
    """Why no difference between two runs of one seed may be tested; "" if it may."""
    return other_data(run, reference) or _other_metric(run, reference, strict)


def refusal_of(pairs: Sequence[tuple[Run, Run]], strict: Callable[[Run], bool] = strict_scores) -> str:
    """The first reason among the pairs of all seeds; "" if all may be tested."""
    return next(filter(None, (refusal(a, b, strict) for a, b in pairs)), "")


def other_places(pairs: Sequence[tuple[Run, Run]], view: View) -> str:
    """Why the means of two methods are not of the same places; "" if they are, or if one of them has no values."""
    for run, reference in pairs:
        a, b = (one.summary.counted(view).keys() for one in (run, reference))
        if a and b and a != b:
            only = sorted(a ^ b)
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            return f"the means are of other places (only one has {only[0]}{more}, seed {run.seed})"
    return ""


def refusals(
    methods: Mapping[str, Mapping[int, Run]], strict: Callable[[Run], bool] = strict_scores
) -> dict[str, dict[str, str]]:
    """Method -> other method -> why the two may not be tested against each other; only those that may not."""
    refused: dict[str, dict[str, str]] = {}
    for a, runs in methods.items():
        for b, others in methods.items():
            pairs = [(runs[s], others[s]) for s in runs if s in others]
            reasons = (refusal_of(pairs, strict), *(other_places(pairs, view) for view in View))
            if a != b and (reason := next(filter(None, reasons), "")):
                refused.setdefault(a, {})[b] = reason
    return refused


def other_data(run: Run, reference: Run) -> str:
    """Why values of two runs are not of the same data; "" if they may be."""
    a, b = (mapping(one.recipe.get("data")).get("name") for one in (run, reference))
    if a and b and a != b:
        return f"the data differ ({a}, not {b})"
    if run.clients and reference.clients and not set(run.clients) & set(reference.clients):
        return "they have no client in common"
    return ""


def _other_metric(run: Run, reference: Run, strict: Callable[[Run], bool]) -> str:
    a, b = metrics_of(run), metrics_of(reference)
    # An older run with several metrics does not say which place has which.
    unknown = (SEVERAL,) if run.metric == reference.metric == SEVERAL else ()
    differ = [p for p in a if p in b and a[p] != b[p] and a[p] not in unknown and b[p] not in unknown]
    # Where every score is 0 or 1, soft and strict accuracy are the same share of right answers; other metrics, such as
    # the share of answers that any annotator gave, are always 0 or 1 and yet no such share.
    same = all(m in ONE_ANSWER for p in differ for m in (a[p], b[p]))
    if not differ or (same and strict(run) and strict(reference)):
        return ""
    place = differ[0]
    return f"the metrics differ ({a[place]}, not {b[place]})"
