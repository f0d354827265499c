"""Comparability of pairs of runs: the only module that refuses a pair, with the reason.

A refused pair keeps its values and loses every test: p-values, intervals, equivalence, ranks and relative improvement.
"""

from collections.abc import Iterable, Sequence

from confed.comparison.records import Methods, Record
from confed.metrics.scores import SCORES

SEVERAL = "score"  # what a metric is called where places have several

SHARES_OF_RIGHT = (*(name for name, score in SCORES.items() if score.of_right), SEVERAL)
"""Metrics that are the same share of right answers where every question has one."""


class OtherExamples(str):
    """Why two runs of one seed were not tested on the same examples: means of them are not tested over seeds either."""


Pairs = Sequence[tuple[Record, Record]]  # a record of each of two methods, seed by seed


def refusal(record: Record, reference: Record) -> str:
    """Why no difference between two runs of one seed may be tested; "" if it may."""
    return other_data(record, reference) or _other_metric(record, reference)


def refusal_of(pairs: Pairs) -> str:
    """The first reason among the pairs of all seeds; "" if all may be tested."""
    return next(filter(None, (refusal(*pair) for pair in pairs)), "")


def other_places(pairs: Pairs, measure: str) -> str:
    """Why the means of two methods are not of the same places; "" if they are, or if one of them has no values."""
    for record, reference in pairs:
        a, b = (one.of_places(measure).keys() for one in (record, reference))
        if a and b and a != b:
            only = sorted(a ^ b)
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            return f"the means are of other places (only one has {only[0]}{more}, seed {record.seed})"
    return ""


def refusals(methods: Methods, measures: Sequence[str]) -> dict[str, dict[str, str]]:
    """Method -> other method -> why the two may not be tested against each other; only those that may not."""
    refused: dict[str, dict[str, str]] = {}
    for a, records in methods.items():
        for b, others in methods.items():
            pairs = [(records[seed], others[seed]) for seed in records if seed in others]
            reasons = (refusal_of(pairs), *(other_places(pairs, measure) for measure in measures))
            if a != b and (reason := next(filter(None, reasons), "")):
                refused.setdefault(a, {})[b] = reason
    return refused


def other_data(record: Record, reference: Record) -> str:
    """Why values of two runs are not of the same data; "" if they may be."""
    a, b = ((one.data or {}).get("name") for one in (record, reference))
    if a and b and a != b:
        return f"the data differ ({a}, not {b})"
    if record.clients and reference.clients and not set(record.clients) & set(reference.clients):
        return "they have no client in common"
    return ""


def fails(records: Iterable[Record], measure: str) -> bool:
    """Whether a method's models are not shown to use their input: in at least half of the runs that tried controls."""
    blind = [record.blind[measure] for record in records if measure in record.blind]
    return bool(blind) and 2 * sum(blind) >= len(blind)


def blind_pair(records: Iterable[Record], others: Iterable[Record], measure: str) -> str:
    """Why no difference between two methods' models may be tested; "" if it may."""
    both = fails(records, measure) and fails(others, measure)
    return "neither model is shown to use its input" if both else ""


def _other_metric(record: Record, reference: Record) -> str:
    a, b = record.metrics, reference.metrics
    differ = [place for place in a if place in b and a[place] != b[place]]
    if record.several and reference.several:  # an older run does not say which place has which
        differ = [place for place in differ if SEVERAL not in (a[place], b[place])]
    # Where every score is 0 or 1, soft and strict accuracy are the same share of right answers; other metrics, such as
    # the share of answers that any annotator gave, are always 0 or 1 and yet no such share.
    same = all({a[place], b[place]} <= {*SHARES_OF_RIGHT} for place in differ)
    if not differ or (same and record.strict() and reference.strict()):
        return ""
    place = differ[0]
    return f"the metrics differ ({a[place]}, not {b[place]})"
