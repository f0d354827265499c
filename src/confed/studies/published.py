"""Results files: a row of a table with everything that a leaderboard, or a repetition, needs of it, as JSON.

A row is one method with one or more seeds. ``NAME.json`` holds it, ``NAME.safetensors`` beside it what each seed
predicted on each test example, so that methods of different files can be compared in pairs. ``docs/reproducing.md``
describes the keys; :data:`FORMAT` changes with them.

Such a file is made of the CSV files of a finished study whose runs are gone: it has no digests of data, history,
predictions and models, and its figures have the digits of the CSV files. ``docs/reproducing.md`` describes the keys;
:data:`TABLE` changes with them.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

import numpy as np
import tomli_w
from safetensors.numpy import save

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import Name, Title, file_name
from confed.federation.reading import check_entries, faults_of, read_bounded
from confed.metrics.statistics import mean
from confed.recipes.recipe import Recipe, parse_recipe
from confed.results.folder import RunFolder, kind_of
from confed.results.metric import place_metric
from confed.results.runs import RunResults, StudyResults, load
from confed.results.settings import flat
from confed.results.stored import TRAINING
from confed.results.summary import WORST, Summary, average, check_headline, deploys, number, numbers
from confed.results.views import EVALUATED, TESTED, View
from confed.runs.digests import result_digests
from confed.runs.grants import check_grants

MOST_BYTES = 256 * 2**20  # largest file that is read, here or from an address
MOST_SECONDS = 300.0  # longest time that fetching a file may take
_GRACE = 1.0  # seconds in which reading of the body may notice itself that time is up
_PREDICTIONS = re.compile(r"[\w%.,+=@() -]+\.safetensors")  # no separator of paths, and no colon of an address
_SOURCE_KEYS: Mapping[str, type] = {
    "method": str, "label": str, "recipe": str, "metric": str, "seeds": list, "metrics": dict, "resolved": dict,
    "packages": dict, "runs": list,
}  # fmt: skip
_RUN_KEYS: Mapping[str, type] = {
    "seed": int, "figures": dict, "digests": dict, "versions": dict, "machine": dict, "history": list,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A published row."""

    source: str  # where it was read
    row: Mapping[str, Any]  # content of a results file
    # seed -> content of the run's predictions.safetensors, where that is known
    predictions: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict[int, Mapping[str, np.ndarray]])
    folder: Path | None = None  # of the run, where it is a run folder

    @property
    def places(self) -> list[Path]:
        """The folder that the row came in; none for an address."""
        return [] if _is_address(self.source) else [Path(self.source).parent, *filter(None, [self.folder])]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the row's runs."""
        return [run["seed"] for run in self.row["runs"]]

    @property
    def name(self) -> str:
        """Recipe and method as the name of a folder; one that is too long for that is a ValueError."""
        return file_name("-".join(filter(None, (self.row["recipe"], self.row["method"]))))

    def run(self, seed: int) -> Mapping[str, Any]:
        """The entry of a seed; a fault is a ValueError."""
        for run in self.row["runs"]:
            if run["seed"] == seed:
                return run
        raise ValueError(f"{self.source} has no seed {seed}; it has {', '.join(map(str, self.seeds))}")

    def recipe(self, seed: int, overrides: list[str]) -> Recipe:
        """The recipe of a seed's run, to be computed on this machine."""
        self.run(seed)
        with faults_of(f"{self.source}: resolved", "a recipe"):
            text = tomli_w.dumps(dict(self.row["resolved"]))
        here = [f"run.seed={seed}", 'run.engine="local"', 'run.address=""']  # never another's cluster
        if "batch_clients" not in self.row["resolved"]["run"]:  # of a version without a choice
            here.append("run.batch_clients=1")
        recipe = parse_recipe(text, self.row["recipe"], [*here, *overrides])
        check_grants(recipe, self.source, *self.places, given=overrides)
        if recipe.run.seed != seed:
            raise ValueError(f"run.seed must be that of the published run, {seed}, got {recipe.run.seed}; use --seed")
        return recipe


def read_published(source: str, method: str = "") -> Published:
    """A published row from wherever it is; an address that cannot be fetched is a RuntimeError."""
    if _is_address(source):
        return _of_text(_fetched(source), source, method, lambda name: _fetched(urljoin(source, quote(name))))
    path = Path(source)
    if path.name == "summary.json" and (path.parent / "recipe.toml").is_file():
        path = path.parent
    if path.is_dir():
        return _wanted(_of_folder(path), method)
    if not path.is_file():
        raise ValueError(f"no published result at {source!r}: give a results file, a run folder or its summary.json")
    return _of_text(
        read_bounded(path, MOST_BYTES), source, method, lambda name: read_bounded(path.parent / name, MOST_BYTES)
    )


def _is_address(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def _wanted(published: Published, method: str) -> Published:
    if method not in ("", published.row["method"], published.row["label"]):
        raise ValueError(f"{published.source} is a row of {published.row['method']}, not of {method}")
    return published


def _of_folder(folder: Path) -> Published:
    kind = kind_of(folder)
    if kind in ("study", "sweep"):
        first = next((run.folder for run in load(folder).runs if run.complete), None) if kind == "study" else None
        raise ValueError(
            f"{folder} is a {kind}: give one of its runs{'' if first is None else f', such as {first}'}, or a results "
            "file that `confed compare STUDY --results DIR` writes"
        )
    if kind == "federation":
        raise ValueError(f"{folder} was made by sites of a federation, whose data are not here; it cannot be repeated")
    if kind != "run":
        raise ValueError(f"{folder} is no run folder (recipe.toml)")
    (run,) = load(folder).runs
    if not run.complete:
        raise ValueError(f"{folder} is not finished: `confed resume {folder}` goes on with it")
    return Published(str(folder), row_of([run]), {run.seed: run.predictions()}, folder)


def _of_text(content: bytes, source: str, method: str, beside: Callable[[str], bytes]) -> Published:
    with faults_of(source, "a results file or a summary.json"):
        content_read = json.loads(content)
        if not isinstance(content_read, dict):
            raise TypeError(f"it holds {type(content_read).__name__}, no object")
        if content_read.get("format") == TABLE:
            return _of_row(row_in(content_read, method, source), source, beside)
        if "format" in content_read:
            return _wanted(_of_row(content_read, source, beside), method)
        if "algorithm" not in content_read:
            raise KeyError("format")
        if not isinstance(content_read.get("resolved"), dict):
            raise ValueError(
                f"{source}: this summary has no resolved recipe (confed 0.2.0 writes it); give the run folder, which "
                "has recipe.toml"
            )
        trained, label = str(content_read["algorithm"]), str(content_read.get("label", content_read["algorithm"]))
        seed, resolved = int(content_read["seed"]), content_read["resolved"]
        # The summary alone has no folder.
        run = RunResults(Path(source) / "no folder", trained, label, seed, Summary(content_read), resolved)
        row = row_of([run])
        _check_run(row["runs"][0], source)
        return _wanted(Published(source, row), method)


def _of_row(row: Mapping[str, Any], source: str, beside: Callable[[str], bytes]) -> Published:
    if row["format"] != FORMAT:
        raise ValueError(
            f"{source} has the format {str(row['format'])[:40]!r}; this version reads {FORMAT!r} and {TABLE!r}"
        )
    check_entries(row, _SOURCE_KEYS, source)
    for key, kind in (("recipe", Name), ("method", Name), ("label", Title)):
        kind(row[key].replace(":", "."), f"{source}: {key}")  # a method may be "module:attribute"
    _check_figures(row["metrics"], f"{source}: metrics")
    check_headline(row.get("deploys", ""), f"{source}: deploys")
    check_digits(row.get("digits", DIGITS), source)
    if not row["runs"]:
        raise ValueError(f"{source} has no runs")
    for position, run in enumerate(row["runs"]):
        _check_run(run, f"{source}: runs[{position}]", row["metrics"] if "digits" in row else {}, len(row["runs"]))
    seeds = [run["seed"] for run in row["runs"]]
    if seeds != row["seeds"] or len(set(seeds)) < len(seeds):
        raise ValueError(f"{source}: seeds must be those of its runs, each once, got {str(row['seeds'])[:80]}")
    predictions = row.get("predictions")
    if predictions is None:
        return Published(source, row)
    check_entries(predictions, {"file": str, "sha256": str}, f"{source}: predictions")
    if not _PREDICTIONS.fullmatch(predictions["file"]):
        raise ValueError(
            f"{source}: predictions must lie beside it, as NAME.safetensors, got {predictions['file'][:80]!r}"
        )
    try:
        content = beside(predictions["file"])
    except (OSError, RuntimeError):
        return Published(source, row)  # the row stands without them
    if sha256(content).hexdigest() != predictions["sha256"]:
        raise ValueError(f"{predictions['file']} beside {source} is not the file that belongs to it (another SHA-256)")
    return Published(source, row, _by_seed(content, predictions["file"], row["seeds"]))


def _by_seed(content: bytes, name: str, seeds: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load as load_tensors

    arrays: dict[int, dict[str, np.ndarray]] = {seed: {} for seed in seeds}
    with faults_of(name, "a safetensors file of predictions"):
        try:
            tensors = load_tensors(content)
        except SafetensorError as error:
            raise TypeError(str(error)) from error
        for key, values in tensors.items():
            if not values.ndim:
                raise TypeError(f"{key} has no examples")
            whose, _, rest = key.partition("/")
            for seed in seeds if whose == "all" else [int(whose.removeprefix("seed-"))]:
                arrays[seed][rest] = values
    return arrays


def _check_run(run: Any, where: str, means: Mapping[str, Any] | None = None, seeds: int = 1) -> None:
    """One entry of "runs", down to what a verdict reads: a fault that is found later costs a whole run."""
    check_entries(run, _RUN_KEYS, where)
    for key, value in run["figures"].items():
        if number(value) is None:
            raise ValueError(f"{where}: figures: {key} must be a finite number, got {str(value)[:40]!r}")
    check_entries(run["digests"], dict.fromkeys(run["digests"], str), f"{where}: digests")
    if not set(BITS) & set(run["digests"]):
        _check_judged(run["figures"], where, means or {}, seeds)
    for position, line in enumerate(run["history"]):
        place = f"{where}: history[{position}]"
        check_entries(line, {}, place)
        values = line.get("values", {})
        check_entries({"values": values}, {"values": dict}, place)
        check_entries(values, dict.fromkeys(values, dict), f"{place}: values")


def _check_judged(figures: Mapping[str, float], where: str, means: Mapping[str, Any], seeds: int) -> None:
    """A repetition without digests needs a figure to be judged by: its seed's, or a mean and where one run may lie."""
    if not figures and not means:
        raise ValueError(f"{where} has neither figures nor digests of {', '.join(BITS)}: there is nothing to compare")
    judged = heads(figures or means)
    if not judged:
        raise ValueError(
            f"{where}: none of its figures is judged: one must be {', '.join(MEANS)} or multilabel/VIEW/METRIC, got "
            f"{', '.join(figures or means)[:80]}"
        )
    if not figures and seeds > 1 and all(means[key].get("one_run") is None for key in judged):
        raise ValueError(
            f"{where} has no figures of its own, and no mean over the {seeds} seeds has one_run, where one run may "
            "lie: there is nothing to judge it by"
        )


def _check_figures(figures: Mapping[str, Any], where: str) -> None:
    check_entries(figures, dict.fromkeys(figures, dict), where)
    for key, figure in figures.items():
        if number(figure.get("mean")) is None:
            raise ValueError(f"{where}: {key}: mean must be a finite number, got {str(figure.get('mean'))[:40]!r}")
        ends = figure.get("one_run")
        if ends is not None and not (isinstance(ends, list) and len(ends) == 2 and None not in map(number, ends)):
            raise ValueError(f"{where}: {key}: one_run must be null or two finite numbers, got {str(ends)[:40]!r}")
        if ends is not None and not ends[0] <= figure["mean"] <= ends[1]:
            raise ValueError(
                f"{where}: {key}: one_run must hold the mean, low <= mean <= high, got {ends[0]:g} <= "
                f"{figure['mean']:g} <= {ends[1]:g}"
            )


class _WebOnly(HTTPRedirectHandler):
    """Redirections that stay within http and https; those of the library may lead to ftp."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise ValueError(f"it leads to {newurl[:80]!r}, which is no http or https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(address: str) -> bytes:
    """Content of an address, within bounds of size and time, which the library sets between two bytes only."""
    contents: list[bytes | str] = []

    def work() -> None:
        try:
            contents.append(_read(address))
        except RuntimeError as error:
            contents.append(str(error))
        except (OSError, ValueError, HTTPException) as error:
            why = str(error) or type(error).__name__
            contents.append(f"{address} cannot be fetched: {why[:300]}")

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(MOST_SECONDS + _GRACE)
    content = contents[0] if contents else f"{address} takes longer than {MOST_SECONDS:g} s"
    if isinstance(content, str):
        raise RuntimeError(content)
    return content


def _read(address: str) -> bytes:
    deadline, content = time.monotonic() + MOST_SECONDS, bytearray()
    with build_opener(_WebOnly).open(address, timeout=30) as answer:
        while chunk := answer.read1(2**20):  # what has come, so that slow senders meet the deadline
            content += chunk
            if len(content) > MOST_BYTES:
                raise RuntimeError(f"{address} is larger than {MOST_BYTES // 2**20} MB")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{address} takes longer than {MOST_SECONDS:g} s")
        if answer.length:  # which `read1` does not tell
            raise ValueError(f"it ends {answer.length} bytes early")
    return bytes(content)


FORMAT = "confed-results/1"  # what the key "format" of a results file says
CONFIDENCE = 0.95  # of all intervals
MEANS = (View.PERSONAL.mean, WORST, View.SEEN.mean, View.UNSEEN.mean, View.DEPLOYED.mean)
"""Figures of a run as a whole, each where its method has it."""
BITS = ("history", "predictions", "models")
"""Digests of a run that are equal where its results are the same to the last bit."""
LISTED = 100  # places that a line of the history lists


def write_rows(
    studies: StudyResults | Sequence[tuple[str, StudyResults]], folder: Path, command: str = ""
) -> list[Path]:
    """Results files of studies, one for each method, or of single runs; those that differ in the seed are a row."""
    given = [("", studies)] if isinstance(studies, StudyResults) else studies
    for _, study in given:
        if not any(run.complete for run in study.runs):
            raise ValueError(f"{study.folder} has no finished run, so there is no row to write")
    rows = _rows(given)
    made = {name: row_of(runs) for name, runs in rows.items()}
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, row in made.items():
        tensors = _shared({run.seed: run.predictions() for run in rows[name]})
        content = save(tensors, {"format": FORMAT})
        if tensors:
            row["predictions"] = {"file": f"{name}.safetensors", "sha256": sha256(content).hexdigest()}
            write_atomically(folder / f"{name}.safetensors", content)
        row["commands"] = {**({"made": command} if command else {}), "repeat": f"confed reproduce {name}.json"}
        write_atomically(folder / f"{name}.json", _text(row).encode())
        written.append(folder / f"{name}.json")
    return written


def _rows(studies: Sequence[tuple[str, StudyResults]]) -> dict[str, list[RunResults]]:
    """File name -> the runs of a row; single runs that differ in the seed alone are one row."""
    rows: dict[str, list[RunResults]] = {}
    single: set[str] = set()
    for model, study in studies:
        runs_by_row: dict[str, list[RunResults]] = {}
        for run in filter(lambda run: run.complete, study.runs):
            name = file_name("-".join(filter(None, (study.recipe or "run", model, run.method))))
            runs_by_row.setdefault(name, []).append(run)
        for name, runs in runs_by_row.items():
            first, other = rows.get(name, runs)[0], runs[0]
            joined = study.single and name in single and other.seed not in {run.seed for run in rows[name]}
            differing = seed_differences(first.recipe, other.recipe)
            if name in rows and (differing or not joined):
                why = f": {next(iter(differing))} is not the same" if differing else ""
                raise ValueError(
                    f"{first.folder} and {other.folder} would both be written as {name}.json{why}; give another "
                    "folder to each (--results)"
                )
            rows[name] = [*rows.get(name, []), *runs]
            single |= {name} if study.single else set()
    return rows


def row_of(runs: Sequence[RunResults]) -> dict[str, Any]:
    """Content of a results file: finished runs of one method that differ in the seed alone."""
    first = runs[0]
    for run in runs[1:]:
        if differences := seed_differences(first.recipe, run.recipe):
            key, (one, other) = next(iter(differences.items()))
            raise ValueError(f"{run.folder}: a row is one setting, and {key} is {other} here, {one} in {first.folder}")
    figures = {run.seed: _figures(run) for run in runs}
    common = [key for key in figures[first.seed] if _in_all(key, figures.values())]
    alone = _example_intervals(first) if len(runs) == 1 else {}
    stated_figures: dict[str, dict[str, Any]] = {}
    for key in common:
        stated_figures[key] = _stated([of_seed[key] for of_seed in figures.values()], alone.get(key))
    return {
        "format": FORMAT,
        "method": first.method,
        "label": first.label,
        "recipe": first.summary.recipe,
        "metric": first.summary.metric,
        **({"deploys": first.deploys} if first.deploys else {}),
        "seeds": [run.seed for run in runs],
        "metrics": stated_figures,
        "resolved": first.recipe,
        "packages": first.summary.packages,
        "runs": [
            _entry(run.seed, figures[run.seed], _digests(run), run.summary.versions, run.summary.machine, _history(run))
            for run in runs
        ],
    }


def _entry(
    seed: int, figures: Mapping[str, float], digests: Mapping[str, str] | None = None,
    versions: Mapping[str, Any] | None = None, machine: Mapping[str, Any] | None = None,
    history: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """A seed's entry of "runs"."""
    more = {"digests": digests or {}, "versions": versions or {}, "machine": machine or {}, "history": [*history]}
    return {"seed": seed, "figures": figures, **more}


def _in_all(key: str, mappings: Iterable[Mapping[str, object]]) -> bool:
    return all(key in mapping for mapping in mappings)


def _shared(of: Mapping[int, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Predictions of several seeds as "seed-N/KEY", and what all seeds have alike, such as names, as "all/KEY"."""
    shared: dict[str, np.ndarray] = {}
    for key, array in next(iter(of.values())).items():
        if _in_all(key, of.values()) and all(np.array_equal(array, arrays[key]) for arrays in of.values()):
            shared[f"all/{key}"] = array
    for seed, arrays in of.items():
        shared |= {f"seed-{seed}/{key}": array for key, array in arrays.items() if f"all/{key}" not in shared}
    return shared


def seed_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings, by key, in which two resolved recipes differ beside the name and the seed."""
    a, b = flat(one), flat(other)
    return {
        key: (a.get(key), b.get(key))
        for key in dict.fromkeys([*a, *b])
        if key not in ("name", "run.seed") and a.get(key) != b.get(key)
    }


def _figures(run: RunResults) -> dict[str, float]:
    """Name -> value on test data: means, single places as "personal/NAME", and metrics over all labelled examples."""
    summary = run.summary
    figures = {key: value for key in MEANS if (value := summary.cost(key)) is not None}
    # Where the study says what is deployed: its other rows must not decide, as a repetition has none.
    if run.deploys and (value := average([*summary.counted(deploys(summary, run.deploys)).values()])) is not None:
        figures[View.DEPLOYED.mean] = value
    for view in TESTED:
        figures |= {f"{view}/{place}": value for place, value in summary.values(view).items()}
    for view, values in summary.labelled.items():
        if view not in ("clients", "co_occurrence"):
            figures |= {f"multilabel/{view}/{name}": value for name, value in numbers(values).items()}
    return figures


def _stated(values: Sequence[float], alone: tuple[float, float] | None) -> dict[str, Any]:
    """A figure over seeds; of a single one with the interval over examples, if there is one."""
    over_seeds = mean(values)
    figure = stated(over_seeds.mean, over_seeds.sd, over_seeds.n)
    return figure if over_seeds.n > 1 or alone is None else figure | {"one_run": [*alone]}


def stated(average: float, sd: float, n: int) -> dict[str, Any]:
    """A figure over seeds: mean, standard deviation, the interval of the mean and that of one more run."""
    if n < 2:
        return {"mean": average, "sd": None, "interval": None, "one_run": None}
    from scipy import stats

    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    ends = {"interval": t * sd / math.sqrt(n), "one_run": t * sd * math.sqrt(1 + 1 / n)}
    return {"mean": average, "sd": sd} | {key: [average - half, average + half] for key, half in ends.items()}


def _example_intervals(run: RunResults) -> dict[str, tuple[float, float]]:
    """Normal intervals of a single run's figures over its test examples, as far as they are means of these."""
    scores = {key: values for key, values in run.predictions().items() if key.endswith("/correct") and len(values) > 1}
    intervals: dict[str, tuple[float, float]] = {}
    for view in TESTED:
        errors: dict[str, float] = {}
        for place, value in run.summary.values(view).items():
            place_scores = scores.get(f"{view.evaluated}/{place}/correct", np.zeros(0)).astype(np.float64)
            if len(place_scores) and math.isclose(float(place_scores.mean()), value, abs_tol=1e-6):
                errors[place] = float(place_scores.std(ddof=1)) / math.sqrt(len(place_scores))
                intervals[f"{view}/{place}"] = _around(value, errors[place])
        counted, mean_value = run.summary.counted(view), run.summary.cost(view.mean)
        if mean_value is not None and counted and counted.keys() <= errors.keys():
            error = math.sqrt(sum(errors[place] ** 2 for place in counted)) / len(counted)
            intervals[view.mean] = _around(mean_value, error)
    return intervals


def _around(value: float, error: float) -> tuple[float, float]:
    from scipy import stats

    half = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
    return value - half, value + half


def _digests(run: RunResults) -> dict[str, str]:
    """Those of the summary; of an older one those of the files that are there."""
    file_digests = result_digests(RunFolder(run.folder)) if run.folder.is_dir() else {}
    return file_digests | {str(key): str(value) for key, value in run.summary.digests.items()}


def _history(run: RunResults) -> list[dict[str, Any]]:
    """Lines of a run's history: the digest of each, and losses and headline values of up to :data:`LISTED` places."""
    measured = {view: run.records.measured(view) for view in EVALUATED}
    return [
        {
            "event": line.get("event"),
            "round": line.get("round"),
            "digest": line["digest"],
            "values": _values(run, line, measured),
        }
        for line in sorted(
            [*run.records.rounds, *run.records.evaluations], key=lambda line: (line["round"], line["event"] != "round")
        )
    ]


def _values(
    run: RunResults, line: Mapping[str, Any], measured: Mapping[str, Mapping[int, Mapping[str, Mapping[str, float]]]]
) -> dict[str, dict[str, float]]:
    if line.get("event") != "evaluation":
        losses = run.records.by_round(TRAINING, "loss").get(line["round"], {})
        return {"loss": dict(list(losses.items())[:LISTED])}
    values: dict[str, dict[str, float]] = {}
    for view in EVALUATED:
        places = measured[view].get(line["round"], {})
        for place, metrics in list(places.items())[:LISTED]:
            for name in (place_metric(run, place, metrics), "loss"):
                if (value := number(metrics.get(name))) is not None:
                    values.setdefault(f"{view} {name}", {})[place] = value
    return values


def _text(row: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and for each run and figure."""
    lines: list[str] = []
    for key, value in row.items():
        text = _json(value)
        if key == "metrics":
            text = "{\n" + ",\n".join(f"  {_json(name)}: {_json(figure)}" for name, figure in value.items()) + "\n }"
        elif key == "runs":
            text = "[\n" + ",\n".join(f"  {_json(run)}" for run in value) + "\n ]"
        lines.append(f" {_json(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Results files of whole tables: rows that share a recipe, with means and --------------------------------------

TABLE = "confed-table/1"  # what the key "format" of a table's results file says
DIGITS = 17  # most significant digits that a figure may be said to have: those of a float
_KEYS: Mapping[str, type] = {"recipe": str, "command": str, "digits": int, "resolved": dict, "rows": list}
_ROW_KEYS: Mapping[str, type] = {
    "method": str, "label": str, "resolved": dict, "seeds": list, "metrics": dict, "figures": dict,
}  # fmt: skip


def row_in(table: Mapping[str, Any], method: str, source: str) -> dict[str, Any]:
    """One row of a table's file in the form of a results file of its own."""
    check_entries(table, _KEYS, source)
    if not table["rows"]:
        raise ValueError(f"{source} has no rows")
    for position, row in enumerate(table["rows"]):
        check_entries(row, _ROW_KEYS, f"{source}: rows[{position}]")
    chosen = next((row for row in table["rows"] if method in ("", row["method"], row["label"])), None)
    if chosen is None:
        raise ValueError(f"{source} has no row {method!r}; it has {', '.join(row['method'] for row in table['rows'])}")
    of_seeds = chosen["figures"]
    if of_seeds and set(of_seeds) != {str(seed) for seed in chosen["seeds"]}:
        listed, available = (", ".join(map(str, names))[:80] for names in (chosen["seeds"], of_seeds))
        whose = f"{source}: figures of {chosen['method'][:40]}"
        raise ValueError(f"{whose} must be those of its seeds {listed}, or none, got {available}")
    return {
        "format": FORMAT,
        **{key: chosen[key] for key in ("method", "label", "seeds", "metrics")},
        **({"deploys": chosen["deploys"]} if "deploys" in chosen else {}),
        "metric": "",
        "recipe": table["recipe"],
        "resolved": {**table["resolved"], **chosen["resolved"]},
        "packages": {},
        "digits": table["digits"],
        "runs": [_entry(seed, of_seeds.get(str(seed), {})) for seed in chosen["seeds"]],
    }


def heads(figures: Mapping[str, Any]) -> list[str]:
    """The figures that are judged: means; of labelled examples those over all of them in the first view."""
    labelled = [key for key in figures if key.startswith("multilabel/")]
    first = "/".join(labelled[0].split("/")[:2]) + "/" if labelled else ""
    return [key for key in figures if key in MEANS] + [key for key in labelled if key.startswith(first)]


def check_digits(digits: Any, source: str) -> None:
    """Check of the number of significant digits that a file says its figures have."""
    if isinstance(digits, bool) or not isinstance(digits, int) or not 1 <= digits <= DIGITS:
        raise ValueError(f"{source}: digits must be a whole number from 1 to {DIGITS}, got {str(digits)[:40]!r}")


def same(one: float | None, other: float | None, digits: int | None) -> bool:
    """Whether two figures are equal, as far as the published one has digits (0 has none), to half of its last unit."""
    if one is None or other is None or digits is None or one == 0 or not math.isfinite(one):
        return one == other
    unit = 10.0 ** (math.floor(math.log10(abs(one))) + 1 - digits)
    return abs(one - other) <= 0.5000001 * unit
