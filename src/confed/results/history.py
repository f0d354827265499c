"""What happened during a run, round by round."""

from collections.abc import Mapping, Sequence

from confed.results.deployed import VIEWS, is_shown
from confed.results.runs import Run, Study, average, number, numbers

__all__ = [
    "Curve", "evaluations", "judged", "loss", "means", "of_place", "over_seeds", "seconds_until", "sent_until",
]  # fmt: skip

Curve = Mapping[int, float]
"""Round -> value; round 0 is before training."""

Rounds = Mapping[int, Mapping[str, float]]
"""Round -> place -> value."""


def evaluations(run: Run, view: str) -> dict[int, dict[str, float]]:
    """Headline metric of every place after each evaluated round, on validation data where there are any.

    Args:
        run: the run.
        view: "personal", "global" or "unseen"; unseen places have test data only. "deployed" is one of the first two,
            the one that the run's method deploys; nothing where the study has no such column.
    """
    if view == "deployed":
        if not is_shown(run.summary):
            return {}
        view = VIEWS[run.summary["deploys"]]
    splits = [line.get("split") for line in run.evaluations]
    split = "validation" if "validation" in splits or not splits else splits[0]
    found: dict[int, dict[str, float]] = {}
    for line in run.evaluations:
        if line.get("split") == split or view == "unseen":
            places = line.get(view) or {}
            values = {str(place): number(metrics.get(run.metric)) for place, metrics in places.items()}
            present = {place: value for place, value in values.items() if value is not None}
            if present:
                found[int(line["round"])] = present
    return found


def judged(study: Study) -> str:
    """The view that the methods of a study are judged by: "deployed" where there is one, else "personal"."""
    return "deployed" if any(is_shown(run.summary) for run in study.runs) else "personal"


def means(rounds: Rounds) -> Curve:
    """Mean over places."""
    return {r: sum(places.values()) / len(places) for r, places in rounds.items()}


def of_place(rounds: Rounds, place: str) -> Curve:
    """One place."""
    return {r: places[place] for r, places in rounds.items() if place in places}


def loss(run: Run) -> Curve:
    """Training loss, mean over the clients that took part."""
    values = {int(line["round"]): average(list(numbers(line.get("loss")).values())) for line in run.rounds}
    return {r: value for r, value in values.items() if value is not None}


def sent_until(run: Run) -> Curve:
    """Bytes sent by all clients and the server up to each round, and 0 before the first."""
    total, found = 0.0, {0: 0.0}
    for line in sorted(run.rounds, key=lambda line: int(line["round"])):
        total += sum(sum(numbers(line.get(key)).values()) for key in ("bytes_up", "bytes_down"))
        found[int(line["round"])] = total
    return found


def seconds_until(run: Run) -> Curve:
    """Seconds of training up to each round (evaluation is not counted), and 0 before the first; empty if unknown."""
    total, found = 0.0, {0: 0.0}
    for line in sorted(run.timings, key=lambda line: int(line["round"])):
        total += number(line.get("seconds")) or 0.0
        found[int(line["round"])] = total
    return found if len(found) > 1 else {}


def over_seeds(curves: Sequence[Curve]) -> dict[int, float]:
    """Mean over the curves, for the rounds that all non-empty ones have."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return {}
    shared = set(curves[0]).intersection(*curves[1:])
    return {r: sum(curve[r] for curve in curves) / len(curves) for r in sorted(shared)}
