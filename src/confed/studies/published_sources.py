"""Published results, read from a results file, a run folder, a ``summary.json``, or the address of such a file."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
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

from confed.federation.file_names import Name, Title, file_name
from confed.federation.reading import check_entries, faults_of, read_bounded
from confed.recipes.recipe import Recipe, parse_recipe
from confed.results.folder import kind_of
from confed.results.runs import RunResults, load
from confed.results.summary import Summary, check_headline, number
from confed.runs.grants import check_grants
from confed.studies.published import BITS, DIGITS, FORMAT, MEANS, TABLE, check_digits, heads, row_in, row_of

MOST_BYTES = 256 * 2**20
"""Largest file that is read, here or from an address."""
MOST_SECONDS = 300.0
"""Longest time that fetching a file may take."""
_GRACE = 1.0
"""Seconds in which reading of the body may notice itself that time is up."""
_PREDICTIONS = re.compile(r"[\w%.,+=@() -]+\.safetensors")  # no separator of paths, and no colon of an address
_KEYS: Mapping[str, type] = {
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
    check_entries(row, _KEYS, source)
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
