"""What tuning found: its trials, the files it leaves, and putting the chosen values into a recipe."""

import csv
import io
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from confed.plain_text import cell_text
from confed.recipe import Recipe
from confed.results.settings import flat

__all__ = ["Trial", "Tuned", "apply", "in_words", "merge", "read_tuned", "scores_csv", "tuned_toml"]


@dataclass(frozen=True)
class Trial:
    """One configuration of one row.

    Attributes:
        choice: knob -> position among its values.
        values: knob -> value.
        state: "complete", "pruned" (stopped early) or "failed".
        scores: validation score after each round.
        seconds: how long it took.
        error: what went wrong.
    """

    choice: Mapping[str, int]
    values: Mapping[str, Any]
    state: str
    scores: tuple[float, ...]
    seconds: float
    error: str = ""

    @property
    def score(self) -> float | None:
        """The score after the last round; None if it did not get there."""
        return self.scores[-1] if self.state == "complete" else None


@dataclass(frozen=True)
class Tuned:
    """What tuning found for one row.

    Attributes:
        row: its name.
        label: how tables write it.
        trials: in order; the first is the recipe's own configuration.
        error: why there are none, or no more.
        failed: it broke on the way, instead of being refused beforehand.
    """

    row: str
    label: str
    trials: tuple[Trial, ...] = ()
    error: str = ""
    failed: bool = False

    @property
    def best(self) -> Trial | None:
        """The finished configuration with the highest score; the earliest of several."""
        there = [trial for trial in self.trials if trial.score is not None]
        return max(there, key=lambda trial: trial.score or 0.0, default=None)


def merge(override: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A row's keywords with tuned values put in."""
    local = {k.removeprefix("local."): v for k, v in values.items() if k.startswith("local.")}
    own = {k: v for k, v in values.items() if not k.startswith("local.")}
    merged = {**override, **own}
    return {**merged, "local": {**override.get("local", {}), **local}} if local else merged


def scores_csv(found: Sequence[Tuned]) -> str:
    """All scores as CSV, one line per configuration."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["method", "configuration", "values", "state", "score", "rounds", "seconds", "error"])
    for tuned in found:
        for number, trial in enumerate(tuned.trials):
            score = "" if trial.score is None else f"{trial.score:.6f}"
            rounds = " ".join(f"{score:.6f}" for score in trial.scores)
            row = [tuned.row, number, in_words(trial.values), trial.state, score, rounds, trial.seconds, trial.error]
            table.writerow([cell_text(str(value)) for value in row])
        if tuned.error:
            state = "failed" if tuned.failed else "refused"
            table.writerow([cell_text(tuned.row), "", "", state, "", "", "", cell_text(tuned.error)])
    return out.getvalue()


def in_words(values: Mapping[str, Any]) -> str:
    """Knobs and their values on one line."""
    return " ".join(f"{knob}={value}" for knob, value in values.items())


def tuned_toml(recipe: Recipe, found: Sequence[Tuned], budget: int) -> str:
    """The chosen values as a recipe's ``[methods.ROW]``, and how they were found."""
    content: dict[str, Any] = {"tuning": {"recipe": recipe.name, "seed": recipe.run.seed, "budget": budget}}
    # TOML has no null: a setting that is left to the method is left out.
    chosen = {tuned.row: {k: v for k, v in tuned.best.values.items() if v is not None} for tuned in found if tuned.best}
    content["methods"] = {row: merge({}, values) for row, values in chosen.items()}
    head = "# Written by `confed tune`: chosen on the clients' validation data; test data had no part in it.\n\n"
    return head + tomli_w.dumps(content)


def read_tuned(path: Path) -> tuple[dict[str, dict[str, Any]], int | None]:
    """What ``tuned.toml`` holds: row -> knob -> value, and the seed it was chosen with.

    Raises:
        ValueError: there is no such file, or it is not one of ``confed tune``'s.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = {str(row): flat(values) for row, values in content["methods"].items()}
    except (OSError, tomllib.TOMLDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no tuned.toml of `confed tune`: {error}") from error
    return rows, content.get("tuning", {}).get("seed")


def apply(
    recipe: Recipe, tuned: Mapping[str, Mapping[str, Any]], explicit: Sequence[str] = ()
) -> tuple[Recipe, dict[str, dict[str, Any]]]:
    """A recipe with tuned values in its rows.

    Args:
        recipe: with rows as its methods.
        tuned: row -> knob -> value, of :func:`read_tuned`.
        explicit: overrides of the command line, which win.

    Returns:
        The recipe, and row -> the tuned values in use.
    """
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
