"""Tracked runs: parameters, metrics by round and files of a run folder, under names that every tracking tool takes.

Only what runs write anyway is read, so tracking changes no number of a run and may begin at any time.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

from confed.results.folder import kind_of, read_jsonl
from confed.results.metric import place_metric
from confed.results.runs import RunResults, load
from confed.results.settings import flat
from confed.results.stored import POOLED, TRAINING
from confed.results.summary import WORST, Summary, average, number
from confed.results.views import EVALUATED, TESTED, View
from confed.results.watching import RunState, folders_of, states_of

Values = dict[str, float]

ByRound = Mapping[int, Mapping[str, Mapping[str, float]]]  # round -> place -> measure -> value
MANY_PLACES = 32  # with more clients or places than this only their means are tracked

FILES = ("recipe.toml", "summary.json", "report.html", "modalities.csv")
"""Files of a run or study that tools keep with it."""

COSTS = ("bytes_total", "seconds", "cpu_seconds", "peak_memory_bytes")

STUDY = "study"  # name of the tracked run that holds the files of a whole study


@dataclass(frozen=True)
class Names:
    """Names under which runs are tracked, where they are not those of the folder and the recipe."""

    project: str = ""  # instead of the recipe's name
    group: str = ""  # instead of the study folder's name
    name: str = ""  # of a run on its own, instead of its folder's


@dataclass(frozen=True)
class TrackedRun:
    """One run as tracking tools get it."""

    # A digest of its names and of the recipe that it began with: the same whenever and wherever the folder is read,
    # and another one where a folder's name is used again for another recipe.
    id: str
    project: str  # of the tool, by default the recipe's name
    group: str  # the study's name; empty for a run on its own
    name: str
    state: str
    # Key of the recipe -> value: a text, number or truth value.
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    # Round -> metric -> value; the metrics of the final test stand at the last round.
    rounds: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    # Round -> when it ended, in seconds since 1970, estimated from the age of the files.
    times: Mapping[int, float] = field(default_factory=dict[int, float])
    files: Sequence[Path] = ()  # those to be kept with the run

    @property
    def title(self) -> str:
        """The name with that of the group in front, if it has one."""
        return f"{self.group}/{self.name}" if self.group else self.name

    @property
    def over(self) -> bool:
        """Whether nothing will be added."""
        return self.state == "finished"

    @property
    def whole(self) -> "TrackedRun":
        """The same without the last round, which may lack its evaluation, unless the run is over."""
        if self.over or not self.rounds:
            return self
        last = max(self.rounds)
        return replace(self, rounds={r: values for r, values in self.rounds.items() if r != last})

    def without(self, logged: set[tuple[str, int]]) -> dict[int, Values]:
        """The values that are not ``logged`` yet, round by round; pairs are (metric, round)."""
        new: dict[int, Values] = {}
        for round, values in sorted(self.rounds.items()):
            if missing := {metric: value for metric, value in values.items() if (metric, round) not in logged}:
                new[round] = missing
        return new


def tracked_runs(folder: Path, names: Names | None = None, files: bool = True) -> list[TrackedRun]:
    """The runs of a run, study or sweep folder that have begun, finished or not, and the study itself for its files."""
    names, folder = names or Names(), folder.resolve()
    states = states_of(folder)
    single = kind_of(folder) in ("run", "federation")
    if names.name and not single:
        raise ValueError(f"a name is for a run on its own, {folder} holds {len(states)}; give a group for their study")
    runs = [
        _tracked(load(place).runs[0], state, names, "" if single else names.group or folder.name, files)
        for state, (_, place) in zip(states, folders_of(folder), strict=True)
        if state.state != "waiting" and (place / "recipe.toml").is_file()
    ]
    if files and not single and runs:
        runs.append(_study(folder, states, runs[0]))
    return runs


def _tracked(run: RunResults, state: RunState, names: Names, group: str, files: bool) -> TrackedRun:
    project = names.project or str(run.summary.recipe or run.recipe.get("name") or "confed")
    name = names.name or state.name
    rounds = _rounds(run)
    tags = {
        "method": run.label, "algorithm": run.summary.algorithm, "seed": str(run.seed),
        "metric": run.summary.metric, **{k: f"{v}" for k, v in run.summary.versions.items() if k == "confed"},
        **({"means over": run.summary.membership} if run.summary.membership else {}),
    }  # fmt: skip
    return TrackedRun(
        _digest(run.folder, project, group, name),
        project,
        group,
        name,
        state.state,
        {key: value if isinstance(value, str | int | float) else str(value) for key, value in flat(run.recipe).items()},
        tags,
        rounds,
        _times(run, rounds),
        _files(run.folder) if files else (),
    )


def _study(folder: Path, states: Sequence[RunState], first: TrackedRun) -> TrackedRun:
    """The study's own files, as a run without rounds."""
    over = all(state.state in ("finished", "failed") for state in states)
    id = _digest(folder, first.project, first.group, STUDY)
    state = "finished" if over else "running"
    return TrackedRun(id, first.project, first.group, STUDY, state, files=_files(folder))


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in FILES if (folder / name).is_file()]


def _digest(folder: Path, *names: str) -> str:
    # A recipe may be edited where that changes no number (workers, devices), and the run is the same.
    began = next((f for f in (folder / "begun.toml", folder / "recipe.toml") if f.is_file()), None)
    recipe = began.read_bytes() if began else b""
    return blake2b(b"\0".join([recipe, *(name.encode() for name in names)]), digest_size=8).hexdigest()


def _rounds(run: RunResults) -> dict[int, Values]:
    """Metrics by round, in ascending order."""
    rounds: dict[int, Values] = {}
    measured = {view: run.records.measured(view) for view in (*EVALUATED, TRAINING, POOLED)}
    for facts in run.records.rounds:
        rounds.setdefault(int(facts["round"]), {}).update(_training(measured[TRAINING], facts))
    for facts in run.records.evaluations:
        rounds.setdefault(int(facts["round"]), {}).update(_evaluated(run, facts, measured))
    for line in run.timings:
        times = {f"time/{key}": number(line.get(key)) for key in ("seconds", "evaluation_seconds")}
        rounds.setdefault(int(line["round"]), {}).update({k: v for k, v in times.items() if v is not None})
    # Privacy spent by a site of a federation, whose journal stands beside its run folder.
    for line in read_jsonl(run.folder.parent / "privacy.jsonl") if run.summary.is_site else ():
        if (epsilon := number(line.get("epsilon"))) is not None:
            rounds.setdefault(int(line["round"]), {})["privacy/epsilon"] = epsilon
    if run.complete and (tested := _tested(run.summary)):
        rounds.setdefault(max(rounds, default=run.summary.rounds), {}).update(tested)
    return {r: rounds[r] for r in sorted(rounds)}


def _training(measured: ByRound, facts: Mapping[str, Any]) -> Values:
    """Losses, traffic, failures, and privacy spent, of one round."""
    clients = measured.get(facts["round"], {})

    def column(name: str) -> dict[str, float]:
        return {client: of[name] for client, of in clients.items() if name in of}

    losses = _by_place("train/loss", column("loss"))
    for key in ("bytes_up", "bytes_down"):
        losses[f"traffic/{key}"] = sum(column(key).values())
    losses["train/failed_clients"] = float(len(facts.get("errors") or ()))
    if (clock := number(facts.get("clock"))) is not None:
        losses["time/clock"] = clock
    spent = column("epsilon")
    return losses | ({"privacy/epsilon": max(spent.values())} if spent else {})


def _evaluated(run: RunResults, facts: Mapping[str, Any], measured: Mapping[str, ByRound]) -> Values:
    """Means over places of every metric, and the headline metric of each place."""
    result: Values = {}
    split = str(facts.get("split", "validation"))
    for view in EVALUATED:
        places = measured[view].get(facts["round"], {})
        headline = {p: x for p, v in places.items() if (x := v.get(place_metric(run, p, v))) is not None}
        metrics = set[str]().union(*places.values())
        for metric in sorted(metric for metric in metrics if "/" not in metric):
            mean = average([values.get(metric) for values in places.values()])
            result |= {} if mean is None else {f"{split}/{view}/{metric}": mean}
        if headline:
            result |= _by_place(f"{split}/{view}/{run.summary.metric}", headline)
    for view, pooled in measured[POOLED].get(facts["round"], {}).items():
        result |= {f"{split}/{portable(view)}/{portable(metric)}": value for metric, value in pooled.items()}
    return result


def _tested(summary: Summary) -> Values:
    """Headline values, places, and costs of a finished run."""
    names = (View.PERSONAL.mean, WORST, View.SEEN.mean, View.UNSEEN.mean)
    metrics = {f"test/{name}": value for name in names if (value := summary.cost(name)) is not None}
    for view in (*TESTED, View.DEPLOYED):
        places = _by_place(f"test/{view}", summary.values(view))
        metrics |= {name: value for name, value in places.items() if name != f"test/{view}"}
    for name, view in product(summary.measures, TESTED):
        metrics |= _by_place(f"test/{portable(name)}/{view}", summary.measured(name, view))
    costs = {f"cost/{name}": summary.cost(name) for name in COSTS}
    return metrics | {name: value for name, value in costs.items() if value is not None}


def _by_place(name: str, values: Mapping[str, float]) -> Values:
    """The mean under the name itself, and each place's value below, unless there are many."""
    mean = average(list(values.values()))
    metrics = {} if mean is None else {name: mean}
    return metrics | ({f"{name}/{portable(p)}": v for p, v in values.items()} if len(values) <= MANY_PLACES else {})


def _times(run: RunResults, rounds: Mapping[int, Values]) -> dict[int, float]:
    """When each round ended: the history has no dates, but its file and the length of each round are known."""
    history = run.folder / "metrics.jsonl"
    end = (history if history.is_file() else run.folder).stat().st_mtime
    seconds: dict[int, float] = {}
    for round in sorted(rounds, reverse=True):
        seconds[round] = end
        end -= sum(rounds[round].get(f"time/{key}", 0.0) for key in ("seconds", "evaluation_seconds"))
    return seconds


def portable(name: str) -> str:
    """A name in letters, digits, ``_``, ``-``, ``.`` and spaces; other characters become their code point."""
    return re.sub(r"[^\w.\- ]", lambda sign: f"_x{ord(sign[0]):X}_", name)
