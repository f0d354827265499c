"""What happened during a run, round by round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confed.results.metric import metric_of, place_metric
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import VALIDATION, average, number, numbers
from confed.results.views import View

POOLED = "C-AP-binned"
"""What curves of multi-label runs show: means over labels add up over clients through counts only."""

Curve = Mapping[int, float]
"""Round -> value; round 0 is before training."""

Line = Mapping[str, Any]
"""A line of ``metrics.jsonl`` or ``timings.jsonl``."""

Rounds = Mapping[int, Mapping[str, float]]
"""Round -> place -> value."""


def evaluations(run: RunResults, view: str) -> dict[int, dict[str, float]]:
    """Headline metric of every place after each evaluated round, on validation data where there are any.

    Places may have different metrics, as where clients have different tasks: each has values of its own metrics.
    """
    if view == "deployed":
        if run.summary.deploys is None:
            return {}
        view = run.summary.deploys.evaluated
    splits = [line.get("split") for line in run.evaluations]
    split = "validation" if "validation" in splits or not splits else splits[0]
    scores_by_round: dict[int, dict[str, float]] = {}
    for line in run.evaluations:
        if line.get("split") == split or view == "unseen":
            places = (line.get(view) or {}).items()
            values = numbers({place: metrics.get(place_metric(run, str(place), metrics)) for place, metrics in places})
            if values:
                scores_by_round[int(line["round"])] = values
    return scores_by_round


def judged(study: StudyResults) -> View:
    """The view that the methods of a study are judged by: what is deployed where there is such a column."""
    has_deployed = any(run.summary.deploys is not None for run in study.runs)
    return View.DEPLOYED if has_deployed else View.PERSONAL


def judged_words(study: StudyResults) -> str:
    """The same for a reader: "global" where no method gives clients models of their own, or labels are judged so."""
    labelled = {_label_view(run) for run in study.runs if run.summary.is_labelled}
    if labelled:
        return "personal" if labelled == {"personal"} else "global"
    return "global" if nobody_has_own(study) else judged(study)


def nobody_has_own(study: StudyResults) -> bool:
    """Whether no method of a study makes models of the clients' own: where these are asked for stands the global one.

    A centralised model is not a personal one either.
    """
    summaries = [run.summary for run in study.runs]
    nobodys = [summary.without_personal for summary in summaries]
    return any(nobodys) and all(summary.without_personal or summary.is_bound for summary in summaries)


def no_global(study: StudyResults) -> bool:
    """Whether no method of a study makes a global model."""
    return all(run.summary.without_global for run in study.runs)


def curve(run: RunResults, view: str) -> Curve:
    """The headline metric's mean over places; of a multi-label run the average precision of all places together."""
    if not run.summary.is_labelled:
        return means(evaluations(run, view))
    return _pooled(run, view)


def judged_curve(study: StudyResults, run: RunResults) -> Curve:
    """The curve of what a run is judged by: deployed or personal models; of a multi-label run its headline view."""
    return curve(run, _label_view(run) if run.summary.is_labelled else judged(study))


def curve_metric(study: StudyResults) -> str:
    """What :func:`curve` has the values of."""
    return POOLED if any(run.summary.is_labelled for run in study.runs) else metric_of(study.runs)


def _label_view(run: RunResults) -> str:
    return (run.summary.label_view or "global").partition("/")[0]


def _pooled(run: RunResults, view: str) -> Curve:
    pooled: dict[int, float] = {}
    for line in run.evaluations:
        views = {name: numbers(values).get(POOLED) for name, values in (line.get("pooled") or {}).items()}
        unseen = {name.partition("/")[2]: value for name, value in views.items() if name.startswith("unseen/")}
        tests = [value for name, value in unseen.items() if name != VALIDATION] or list(unseen.values())
        value = average(tests) if view == "unseen" else views.get(view)
        if value is not None:
            pooled[int(line["round"])] = value
    return pooled


def means(rounds: Rounds) -> dict[int, float]:
    """Mean over places."""
    return {r: sum(places.values()) / len(places) for r, places in rounds.items()}


def of_place(rounds: Rounds, place: str) -> Curve:
    """One place."""
    return {r: places[place] for r, places in rounds.items() if place in places}


def loss(run: RunResults) -> Curve:
    """Training loss, mean over the clients that took part."""
    values = {int(line["round"]): average(list(numbers(line.get("loss")).values())) for line in run.rounds}
    return {r: value for r, value in values.items() if value is not None}


def validation_loss(run: RunResults) -> Curve:
    """Loss on the clients' validation data, mean over clients: of what is deployed, of personal models, or global."""
    deployed = [] if run.summary.deploys is None else [run.summary.deploys.evaluated]
    losses: dict[int, float] = {}
    for line in run.evaluations:
        places = next((line[view] for view in (*deployed, "personal", "global") if line.get(view)), {})
        value = average([number(metrics.get("loss")) for metrics in places.values()])
        if line.get("split") == "validation" and value is not None:
            losses[int(line["round"])] = value
    return losses


def sent_until(run: RunResults) -> Curve:
    """Bytes sent by all clients and the server up to each round, and 0 before the first."""

    def sent(line: Line) -> float:
        return sum(sum(numbers(line.get(key)).values()) for key in ("bytes_up", "bytes_down"))

    return _added_up(run.rounds, sent)


def seconds_until(run: RunResults) -> Curve:
    """Seconds of training up to each round (evaluation is not counted), and 0 before the first; empty if unknown."""
    return _added_up(run.timings, lambda line: number(line.get("seconds")) or 0.0) if run.timings else {}


def _added_up(lines: Sequence[Line], amount: Callable[[Line], float]) -> Curve:
    """Round -> what the lines up to it amount to."""
    total, totals = 0.0, {0: 0.0}
    for line in sorted(lines, key=lambda line: int(line["round"])):
        total += amount(line)
        totals[int(line["round"])] = total
    return totals


def over_seeds(curves: Sequence[Curve]) -> dict[int, float]:
    """Mean over the curves, for the rounds that all non-empty ones have."""
    curves = [curve for curve in curves if curve]
    means_of: dict[int, float] = {}
    for r in sorted(set(curves[0]).intersection(*curves[1:]) if curves else ()):
        means_of[r] = sum(curve[r] for curve in curves) / len(curves)
    return means_of
