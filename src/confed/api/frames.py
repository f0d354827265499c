"""Results of a run as pandas data frames."""

from itertools import product
from typing import TYPE_CHECKING

from confed.results.history import curve, loss
from confed.results.metric import metric_of
from confed.results.runs import Run
from confed.results.summary import number, numbers
from confed.results.views import EVALUATED, View
from confed.system.packages import pandas

if TYPE_CHECKING:
    from pandas import DataFrame


def history_frame(run: Run) -> "DataFrame":
    """A row per round; see :attr:`confed.api.run.Run.history`."""
    columns: dict[str, dict[int, float]] = {"loss": dict(loss(run))}
    columns |= {view: dict(curve(run, view)) for view in EVALUATED}
    for key in ("bytes_up", "bytes_down"):
        columns[key] = {int(line["round"]): sum(numbers(line.get(key)).values()) for line in run.rounds}
    columns["seconds"] = {
        int(line["round"]): value for line in run.timings if (value := number(line.get("seconds"))) is not None
    }
    frame = pandas().DataFrame({name: values for name, values in columns.items() if values})
    frame = frame.sort_index().rename_axis("round")
    return frame.astype({name: "Int64" for name in frame.columns if name.startswith("bytes")})


def evaluations_frame(run: Run) -> "DataFrame":
    """A row per evaluated round, view, place and metric; see :attr:`confed.api.run.Run.evaluations`."""
    rows: list[tuple[int, str, str, str, float]] = []
    for line in run.evaluations:
        for view in EVALUATED:
            for place, metrics in (line.get(view) or {}).items():
                for metric, value in numbers(metrics).items():
                    rows.append((int(line["round"]), view, str(place), metric, value))
    return pandas().DataFrame(rows, columns=["round", "view", "place", "metric", "value"])


def results_frame(run: Run) -> "DataFrame":
    """A row per client and unseen place; see :attr:`confed.api.run.Run.results`."""
    summary = run.summary
    personal, seen, unseen = (summary.values(view) for view in (View.PERSONAL, View.SEEN, View.UNSEEN))
    examples = summary.examples
    rows = {
        place: {
            "kind": "unseen" if place in run.scenes else "client",
            "personal": personal.get(place),
            "global": seen.get(place, unseen.get(place)),
            "train": examples.get(place, {}).get("train"),
            "test": examples.get(place, {}).get("test"),
        }
        for place in dict.fromkeys((*run.clients, *personal, *seen, *run.scenes))
    }
    for name, view in product(summary.measures, (View.PERSONAL, View.SEEN, View.UNSEEN)):
        for place, value in summary.measured(name, view).items():
            rows[place][f"{name} personal" if view is View.PERSONAL else f"{name} global"] = value
    frame = pandas().DataFrame.from_dict(rows, orient="index").rename_axis("place")
    if summary.without_personal:
        frame = frame.drop(columns="personal")
    if summary.without_global:
        frame = frame.drop(columns="global")
    frame.attrs["metric"] = metric_of([run])
    return frame.astype({"train": "Int64", "test": "Int64"})
