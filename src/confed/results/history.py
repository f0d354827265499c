"""What happened during a run, round by round."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from confed.comparison.refusals import SEVERAL
from confed.results import stored
from confed.results.metric import metric_of, place_metric
from confed.results.runs import RunResults, StudyResults
from confed.results.stored import TRAINING
from confed.results.summary import VALIDATION, average, number
from confed.results.views import View

POOLED = "C-AP-binned"
"""What curves of multi-label runs show: means over labels add up over clients through counts only."""

Curve = Mapping[int, float]  # round -> value; round 0 is before training
Rounds = Mapping[int, Mapping[str, float]]  # round -> place -> value


def evaluations(run: RunResults, view: str) -> dict[int, dict[str, float]]:
    """Headline metrics of every place after each evaluated round, on validation data where there are any."""
    if view == "deployed":
        if run.summary.deploys is None:
            return {}
        view = run.summary.deploys.evaluated
    splits = {int(facts["round"]): facts.get("split") for facts in run.records.evaluations}
    split = "validation" if "validation" in splits.values() or not splits else next(iter(splits.values()))
    if run.summary.metric != SEVERAL:
        scores = run.records.by_round(view, run.summary.metric)
    else:
        scores = {}
        for round_of, places in run.records.measured(view).items():
            named = {place: metrics.get(place_metric(run, place, metrics)) for place, metrics in places.items()}
            scores[round_of] = {place: value for place, value in named.items() if value is not None}
    return {r: of for r, of in scores.items() if of and (view == "unseen" or splits[r] == split)}


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
    """Whether no method of a study makes models of the clients' own, so that the global one stands in their place."""
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
    for round_of, views in run.records.by_round(stored.POOLED, POOLED).items():
        unseen = {name.partition("/")[2]: value for name, value in views.items() if name.startswith("unseen/")}
        tests = [value for name, value in unseen.items() if name != VALIDATION] or list(unseen.values())
        value = average(tests) if view == "unseen" else views.get(view)
        if value is not None:
            pooled[round_of] = value
    return pooled


def means(rounds: Rounds) -> dict[int, float]:
    """Mean over places."""
    return {r: sum(places.values()) / len(places) for r, places in rounds.items()}


def of_place(rounds: Rounds, place: str) -> Curve:
    """One place."""
    return {r: places[place] for r, places in rounds.items() if place in places}


def loss(run: RunResults) -> Curve:
    """Training loss, mean over the clients that took part."""
    return means(run.records.by_round(TRAINING, "loss"))


def validation_loss(run: RunResults) -> Curve:
    """Loss on the clients' validation data, mean over clients: of what is deployed, of personal models, or global."""
    deployed = [] if run.summary.deploys is None else [run.summary.deploys.evaluated]
    losses: dict[int, float] = {}
    for view in ("global", "personal", *deployed):  # the last one that was evaluated in a round counts
        losses |= means(run.records.by_round(view, "loss"))
    validated = {facts["round"] for facts in run.records.evaluations if facts.get("split") == "validation"}
    return {r: value for r, value in sorted(losses.items()) if r in validated}


def sent_until(run: RunResults) -> Curve:
    """Bytes sent by all clients and the server up to each round, and 0 before the first."""
    sent = {int(facts["round"]): 0.0 for facts in run.records.rounds}
    for direction in ("bytes_up", "bytes_down"):
        for round_of, clients in run.records.by_round(TRAINING, direction).items():
            sent[round_of] += sum(clients.values())
    return _added_up(sent)


def seconds_until(run: RunResults) -> Curve:
    """Seconds of training up to each round (evaluation is not counted), and 0 before the first; empty if unknown."""
    seconds = {int(line["round"]): number(line.get("seconds")) or 0.0 for line in run.timings}
    return _added_up(seconds) if seconds else {}


def _added_up(amounts: Curve) -> Curve:
    """Round -> the sum of the amounts up to it."""
    rounds = sorted(amounts)
    return dict(zip([0, *rounds], accumulate(map(amounts.__getitem__, rounds), initial=0.0), strict=True))


def over_seeds(curves: Sequence[Curve]) -> dict[int, float]:
    """Mean over the curves, for the rounds that all non-empty ones have."""
    curves = [curve for curve in curves if curve]
    means_of: dict[int, float] = {}
    for r in sorted(set(curves[0]).intersection(*curves[1:]) if curves else ()):
        means_of[r] = sum(curve[r] for curve in curves) / len(curves)
    return means_of
