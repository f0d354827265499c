"""Repetition of a published result, and the verdict: equal, within the interval, or different and where."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confed.results.runs import RunResults, load
from confed.results.settings import flat
from confed.runs.same_recipe import INDIFFERENT
from confed.studies.published import BITS, Published, heads, row_of, same, seed_differences
from confed.studies.runner import run_single
from confed.system.events import Progress, ignore
from confed.system.packages import packages
from confed.system.processor import machine_differences

Word = Literal["equal bits", "equal figures", "within the interval", "different"]
_EQUAL: tuple[Word, ...] = ("equal bits", "equal figures")
_LISTED = 5  # differences of a kind that a verdict names


@dataclass(frozen=True)
class Figure:
    """A figure of the published run and of its repetition."""

    published: float  # value of the same seed, or the mean over seeds where the seed's own is not published
    found: float | None  # value of the repetition; None where it has none
    # where one more run of the published row is expected; None where none is stated, such as of a single run's worst
    interval: tuple[float, float] | None
    mean_of: int = 1  # number of seeds that the published value is a mean over; 1 for the seed's own
    digits: int | None = None  # significant digits of the published value; None for all

    @property
    def inside(self) -> bool | None:
        """Whether the repetition has the published value, or one inside the interval; None where there is none."""
        if self.found is None or same(self.published, self.found, self.digits):
            return self.found is not None
        return None if self.interval is None else self.interval[0] <= self.found <= self.interval[1]


@dataclass(frozen=True)
class Verdict:
    """What a repetition showed."""

    word: Word
    label: str
    seed: int
    folder: Path
    compared: tuple[str, ...]  # bit by bit; empty where the published result has no digests, and figures alone were
    figures: Mapping[str, Figure]  # means on test data
    where: tuple[str, ...] = ()  # the differences, the first ones in time first; empty for equal bits and figures
    causes: tuple[str, ...] = ()  # what else differs: settings, data, code, packages, instruction set
    digits: int | None = None  # significant digits of the published figures that were compared; None for all


def repeat(
    published: Published, seed: int, folder: Path, overrides: Sequence[str] = (), progress: Progress = ignore
) -> Verdict:
    """One run of a published row again."""
    recipe = published.recipe(seed, [*overrides])
    if folder.exists():
        raise ValueError(f"{folder} exists already; give another folder with --out")
    run_single(recipe, folder, progress)
    (run,) = load(folder).runs
    return judge(published, run)


def judge(published: Published, run: RunResults) -> Verdict:
    """Verdict on a run that repeats one of a published row; one without that seed is a ValueError."""
    run = replace(run, deploys=published.row.get("deploys", ""))
    before, (now,) = published.run(run.seed), row_of([run])["runs"]
    if not before["figures"] and len(published.seeds) == 1:  # a mean over one seed is that seed's figure
        means = {key: figure["mean"] for key, figure in published.row["metrics"].items()}
        before = {**before, "figures": means}
    compared = tuple(name for name in BITS if name in before["digests"] and name in now["digests"])
    other_bits = [name for name in compared if before["digests"][name] != now["digests"][name]]
    digits: int | None = published.row.get("digits")
    other_figures = [
        key for key, value in before["figures"].items() if not same(value, now["figures"].get(key), digits)
    ]
    figures = _judged(published, before["figures"], now["figures"], digits)
    verdicts = {key: figure.inside for key, figure in figures.items()}
    word: Word = "different"
    if compared and not other_bits and not other_figures:
        word = "equal bits"
    elif not compared and before["figures"] and not other_figures:
        word = "equal figures"
    elif False not in verdicts.values() and any(f.interval and f.inside for f in figures.values()):
        word = "within the interval"
    where = () if word in _EQUAL else tuple(_differences(published, run, before, now, other_bits, other_figures))
    where += tuple(_reasons(figures, before["figures"])) if word == "different" else ()
    causes = tuple(_causes(published, run, before, now))
    return Verdict(word, published.row["label"], run.seed, run.folder, compared, figures, where, causes, digits)


def _judged(
    published: Published, before: Mapping[str, float], now: Mapping[str, float], digits: int | None
) -> dict[str, Figure]:
    """The figures that are judged, of the same seed; against means over seeds where nothing is known of the seed."""
    stated: Mapping[str, Any] = published.row["metrics"]
    count = 1 if before else len(published.seeds)
    values = before or {key: figure["mean"] for key, figure in stated.items()}
    return {key: Figure(values[key], now.get(key), _interval(stated.get(key)), count, digits) for key in heads(values)}


def _reasons(figures: Mapping[str, Figure], before: Mapping[str, float]) -> Iterator[str]:
    """Why a repetition is different, as far as the figures that differ do not say so."""
    if not before:
        outside: list[str] = []
        for key, figure in figures.items():
            if figure.inside is False:
                expected = f"expected of one run where the mean of {figure.mean_of} is {_number(figure.published)}"
                outside.append(f"{key}: {_number(figure.found)}, outside what is {expected}")
        yield from _some(outside)
    if not any(figure.inside is False for figure in figures.values()):
        yield "no figure has an interval in which another run is expected: what is not equal cannot be judged further"


def _interval(figure: Any) -> tuple[float, float] | None:
    ends = figure.get("one_run") if isinstance(figure, Mapping) else None
    return (float(ends[0]), float(ends[1])) if isinstance(ends, Sequence) and len(ends) == 2 else None


def _differences(
    published: Published,
    run: RunResults,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    other_bits: Sequence[str],
    other_figures: Sequence[str],
) -> Iterator[str]:
    if "history" in other_bits:
        yield _first_line(before["history"], now["history"])
    published_predictions, here = published.predictions.get(run.seed, {}), run.predictions()
    changed: list[str] = []
    for key in published_predictions:
        if key in here and key.endswith("/prediction") and (text := _changed(published_predictions[key], here[key])):
            changed.append(f"predictions of {key.removesuffix('/prediction')}: {text}")
    yield from _some(changed)
    if "predictions" in other_bits and not changed:
        yield "predictions: other bits" + ("" if published_predictions else " (the published ones are not here)")
    values, repeated = before["figures"], now["figures"]
    yield from _some([f"{k}: {_number(repeated.get(k))}, published {_number(values[k])}" for k in other_figures])
    if "models" in other_bits:
        yield "trained models: other bits"


def _some(texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:_LISTED]
    if len(texts) > _LISTED:
        yield f"and {len(texts) - _LISTED} more like these"


def _first_line(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """The first line of the history that differs: its round, and the first value, if one of those listed does."""
    for one, other in zip(before, now, strict=False):
        if one.get("digest") == other.get("digest"):
            continue
        when = f"first in round {other['round']} ({'training' if other['event'] == 'round' else 'on validation data'})"
        for name, places in other["values"].items():
            recorded = one.get("values", {}).get(name, {})
            for place, value in places.items():
                if place in recorded and recorded[place] != value:
                    return f"{when}: {name} of {place!r} {value!r}, published {recorded[place]!r}"
        return f"{when}: not in the values that are listed"
    if len(before) != len(now):
        return f"the history has {len(now)} lines, the published one {len(before)}"
    return "history: other bits"


def _changed(one: np.ndarray, other: np.ndarray) -> str:
    if one.shape != other.shape:
        return f"{len(other)} examples, published {len(one)}"
    count = int((one != other).any(axis=tuple(range(1, one.ndim))).sum())
    return f"{count} of {len(one)} examples" if count else ""


def _causes(published: Published, run: RunResults, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    changed = {
        key: values
        for key, values in seed_differences(published.row["resolved"], run.recipe).items()
        if key not in INDIFFERENT and (key in flat(published.row["resolved"]) or values[1] is not None)
    }
    yield from (f"setting {key}: {new!r}, published {old!r}" for key, (old, new) in changed.items())
    for name, what in (("data", "data: not the same examples"), ("code", "confed: not the same source code")):
        if name in before["digests"] and name in now["digests"] and before["digests"][name] != now["digests"][name]:
            yield what
    differences = machine_differences(now, before)  # "here, not there"
    recorded_packages, here = published.row["packages"], packages()
    for name in sorted({*recorded_packages, *here}):
        if recorded_packages and here and recorded_packages.get(name) != here.get(name):
            differences.setdefault(name, f"{here.get(name, 'none')}, not {recorded_packages.get(name, 'none')}")
    yield from (f"{name}: {text}" for name, text in differences.items())


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "none"
