"""Results of tuning: trials, the files that hold them, and the chosen values in a recipe."""

import csv
import io
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from confed.federation.reading import FAULTS, read_bounded
from confed.recipes.recipe import Recipe
from confed.results.settings import flat
from confed.system.plain_text import cell_text

TUNING = "tuning.toml"  # recipe of a tuning, in its folder; not recipe.toml: that is no run folder


@dataclass(frozen=True)
class Trial:
    """One configuration of one row."""

    choice: Mapping[str, int]  # knob -> position among its values
    values: Mapping[str, Any]
    state: str  # "complete", "pruned" (stopped early) or "failed"
    scores: tuple[float, ...]  # validation score after each round; with several seeds the mean over them
    seconds: float  # how long it took
    error: str = ""
    by_seed: tuple[float, ...] = ()  # with several seeds, the last score of each

    @property
    def score(self) -> float | None:
        """The score after the last round; None if it did not get there."""
        return self.scores[-1] if self.state == "complete" else None


@dataclass(frozen=True)
class Tuned:
    """Result of tuning one row."""

    row: str
    label: str  # how tables write it
    trials: tuple[Trial, ...] = ()  # in order; the first is the recipe's own configuration
    error: str = ""  # why there are none, or no more
    failed: bool = False  # it broke on the way, instead of being refused beforehand
    questions: float = 0.0  # that a score is a mean over, see effective_questions; 0 if unknown

    @property
    def best(self) -> Trial | None:
        """The finished configuration with the highest score; the earliest of several."""
        scored = [trial for trial in self.trials if trial.score is not None]
        return max(scored, key=lambda trial: trial.score or 0.0, default=None)

    @property
    def lead(self) -> str:
        """How far the choice lies ahead of the next, and how many lie within noise; empty where there is none."""
        best = self.best
        others = [trial for trial in self.trials if trial.score is not None and trial is not best]
        if best is None or best.score is None or not others:
            return ""
        behind = sorted(best.score - (trial.score or 0.0) for trial in others)
        error = standard_error(best.score, self.questions)
        if error is None:
            return f"the next is {100 * behind[0]:.1f} points behind"
        apart = round(behind[0] * self.questions)
        text = (
            "the next is level"
            if behind[0] == 0
            else f"the next is {100 * behind[0]:.1f} points behind, about {apart} of {self.questions:,.0f} questions"
        )
        near = sum(gap <= error for gap in behind)
        if near:
            each = f"{near} of {len(others)} others" if len(others) > 1 else "the only other"
            text += f"; within noise (one standard error, {100 * error:.1f} points): {each}"
        return text


def effective_questions(sizes: Sequence[int]) -> float:
    """Effective sample size in questions of a mean over clients of means over their questions.

    With K clients of n_k questions, the variance of the mean is s^2 / K^2 * sum_k 1 / n_k, that of K^2 / sum_k 1 / n_k
    questions; this is all of them where clients have equally many.
    """
    nonempty = [size for size in sizes if size > 0]
    return len(nonempty) ** 2 / sum(1 / size for size in nonempty) if nonempty else 0.0


def standard_error(score: float, questions: float) -> float | None:
    """Standard error of a mean over questions of values from 0 to 1, at most; None where it is not known.

    sqrt(p (1 - p) / n) is exact for right and wrong, and an upper bound for values in between. Of a metric that is no
    mean over examples (average precision) it is a rough guide.
    """
    if questions <= 0 or not 0 <= score <= 1:
        return None
    return math.sqrt(score * (1 - score) / questions)


def merge(override: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A row's keywords with tuned values put in."""
    local = {k.removeprefix("local."): v for k, v in values.items() if k.startswith("local.")}
    method_values = {k: v for k, v in values.items() if not k.startswith("local.")}
    merged = {**override, **method_values}
    return {**merged, "local": {**override.get("local", {}), **local}} if local else merged


def scores_csv(rows: Sequence[Tuned]) -> str:
    """All scores as CSV, one line per configuration."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["method", "configuration", "values", "state", "score", "rounds", "seconds", "error", "seeds"])
    for tuned in rows:
        for number, trial in enumerate(tuned.trials):
            score = "" if trial.score is None else f"{trial.score:.6f}"
            rounds, by_seed = _numbers(trial.scores), _numbers(trial.by_seed)
            row = [tuned.row, number, in_words(trial.values), trial.state, score, rounds, trial.seconds, trial.error]
            row.append(by_seed)
            table.writerow([cell_text(str(value)) for value in row])
        if tuned.error:
            state = "failed" if tuned.failed else "refused"
            table.writerow([cell_text(tuned.row), "", "", state, "", "", "", cell_text(tuned.error), ""])
    return out.getvalue()


def _numbers(scores: Sequence[float]) -> str:
    return " ".join(f"{score:.6f}" for score in scores)


def in_words(values: Mapping[str, Any]) -> str:
    """Knobs and their values on one line."""
    return " ".join(f"{knob}={value}" for knob, value in values.items())


def tuned_toml(recipe: Recipe, rows: Sequence[Tuned], budget: int, seeds: int = 1) -> str:
    """The chosen values as a recipe's ``[methods.ROW]``, with comments on how they were found."""
    terms: dict[str, Any] = {"recipe": recipe.name, "seed": recipe.run.seed, "budget": budget}
    content: dict[str, Any] = {"tuning": {**terms, "seeds": seeds} if seeds > 1 else terms}
    # TOML has no null: a setting that is left to the method is left out.
    chosen: dict[str, dict[str, Any]] = {}
    for tuned in rows:
        if tuned.best:
            chosen[tuned.row] = {k: v for k, v in tuned.best.values.items() if v is not None}
    content["methods"] = {row: merge({}, values) for row, values in chosen.items()}
    head = "# Written by `confed tune`: chosen on the clients' validation data; test data had no part in it.\n"
    leads = "".join(f"# {tuned.row}: {tuned.lead}\n" for tuned in rows if tuned.lead)
    return f"{head}{leads}\n{tomli_w.dumps(content)}"


def read_tuned(path: Path) -> tuple[dict[str, dict[str, Any]], range]:
    """Content of ``tuned.toml``: row -> knob -> value, and the seeds it was chosen with; none where it does not say."""
    try:
        content = tomllib.loads(read_bounded(path).decode())
        rows = {str(row): flat(values) for row, values in content["methods"].items()}
        terms = content.get("tuning", {})
        first = int(terms.get("seed", 0))
        seeds = range(first, first + int(terms.get("seeds", 1))) if "seed" in terms else range(0)
    except (OSError, *FAULTS) as error:
        raise ValueError(f"{path} is no tuned.toml of `confed tune`: {error}") from error
    return rows, seeds


def apply(
    recipe: Recipe, tuned: Mapping[str, Mapping[str, Any]], explicit: Sequence[str] = ()
) -> tuple[Recipe, dict[str, dict[str, Any]]]:
    """A recipe with tuned values in its rows."""
    named = {override.partition("=")[0].strip().removeprefix("~") for override in explicit}
    overrides, used = dict(recipe.overrides), dict[str, dict[str, Any]]()
    for row in recipe.methods:
        main = recipe.method(row).sections["algorithm"]["name"] == recipe.sections["algorithm"]["name"]
        given = {f"methods.{row}.{knob}" for knob in tuned.get(row, {})}
        values = {
            knob: value
            for knob, value in tuned.get(row, {}).items()
            if knob not in (named if knob.startswith("local.") else ())
            and not (main and f"algorithm.{knob}" in named)
            and f"methods.{row}.{knob}" not in given & named
        }
        if values:
            overrides[row], used[row] = merge(overrides.get(row, {}), values), values
    return recipe.with_rows(recipe.methods, overrides), used
