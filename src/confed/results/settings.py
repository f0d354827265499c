"""Telling runs apart by their resolved recipes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from confed.comparison.records import distinct_labels
from confed.federation.old_keys import RENAMED
from confed.results.runs import RunResults

# What must agree for two runs to differ in nothing but the algorithm.
_FAIR = (
    "data.", "model.", "local.", "task.",
    "run.rounds", "run.cohort", "run.sampling", "run.joins", "run.leaves", "run.without", "run.async.",
)  # fmt: skip


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys: ``{"local": {"lr": 0.1}}`` becomes ``{"local.lr": 0.1}``."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, Mapping) else {RENAMED.get(name, name): value}
    return values


def differing_keys(run: RunResults, reference: RunResults) -> dict[str, str]:
    """Keys outside ``[algorithm]`` in which two runs differ, but for their seeds -> "value, not value"."""
    if not run.recipe or not reference.recipe:
        return {}
    mine, other = flat(run.recipe), flat(reference.recipe)
    keys = [key for key in dict.fromkeys([*mine, *other]) if key.startswith(_FAIR)]
    for section in ("task", "model"):
        if mine.get(f"{section}.name") != other.get(f"{section}.name"):  # another constructor has other keywords
            keys = [key for key in keys if key == f"{section}.name" or not key.startswith(f"{section}.")]
    if run.seed != reference.seed:
        keys = [key for key in keys if key.rpartition(".")[2] != "seed"]
    # A key that an older run did not have yet, and that is empty in a newer one, is the same setting.
    differ = [key for key in keys if _stated(mine, key) != _stated(other, key)]
    return {key: f"{mine.get(key, 'unset')}, not {other.get(key, 'unset')}" for key in differ}


def named_apart(runs: Sequence[RunResults]) -> list[RunResults]:
    """The runs with method names that tell them apart: by hyper-parameters, else by folder."""
    named = list(runs)
    for method in dict.fromkeys(run.method for run in runs):
        settings = {
            i: flat(run.recipe.get("algorithm", {}))
            for i, run in enumerate(runs)
            if run.method == method and run.recipe
        }
        differing: list[str] = []
        for key in dict.fromkeys(chain.from_iterable(settings.values())):
            if len({repr(values.get(key)) for values in settings.values()}) > 1:
                differing.append(key)
        for i, values in settings.items() if differing else ():
            named[i] = _suffixed(runs[i], ", ".join(f"{key}={values.get(key)}" for key in differing))
    taken = Counter((run.method, run.seed) for run in named)
    clashing = {method for (method, _), times in taken.items() if times > 1}
    told_apart: list[RunResults] = []
    for run in named:
        folder = run.folder.resolve()  # a run on its own is known by its folder, one in a study by the study's
        place = folder.parent.parent.name if folder.name == f"seed-{run.seed}" else folder.name
        told_apart.append(_suffixed(run, place) if run.method in clashing else run)
    return told_apart


def tuning_note(runs: Sequence[RunResults]) -> str:
    """Which values tuning chose and for which methods it did not, in a sentence; the empty text if it chose none."""
    labels = distinct_labels({run.method: run.label for run in runs})
    words: dict[str, str] = {}
    for run in runs:
        if run.tuned:
            words[labels[run.method]] = ", ".join(f"{key}={value}" for key, value in run.tuned.items())
    others = [labels[run.method] for run in runs if not run.tuned]
    sentence = "; ".join(f"{label} {values}" for label, values in words.items())
    without = f" Not tuned: {', '.join(others)}." if others else ""
    return f"Tuned on validation data: {sentence}.{without}" if words else ""


def _suffixed(run: RunResults, suffix: str) -> RunResults:
    return replace(run, method=f"{run.method} ({suffix})", label=f"{run.label} ({suffix})")


def _stated(settings: Mapping[str, Any], key: str) -> Any:
    value = settings.get(key)
    return None if value == "" else value
