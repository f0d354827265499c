"""Results files of the documentation's tables, made from the CSV files of finished studies.

``python docs/make_results.py`` writes ``docs/results/NAME.json`` for each table NAME that ``confed compare RECIPE``
made, and the list of all tables in ``docs/tables.md``; ``confed reproduce docs/results/NAME.json --method ROW`` makes a
row again. ``--check`` writes nothing, says what is not as the CSV files and commands give it, and exits with 1.

Commands stand in ``docs/results/commands.toml``. A table that is not listed there but is called like a packaged recipe
was made by that recipe. Figures come from ``NAME_seeds.csv`` (of each seed), else ``NAME_compare.csv``, else
``NAME_table.csv`` (means and standard deviations over seeds). What no CSV file has is not made up: there are no digests
of data, history, predictions and models, and no versions. Settings are what the command gives today; where a file is
there already, ``--check`` says which of its settings the command no longer gives.

Verdicts on the papers' claims in ``docs/results.md``, and cells that sentences quote, come from ``make_claims.py``.
"""

import csv
import itertools
import json
import re
import shlex
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confed.recipes.recipe import Recipe, load_recipe, packaged_recipes
from confed.results.settings import flat
from confed.results.summary import Summary
from confed.runs.same_recipe import INDIFFERENT
from confed.studies.published import MEANS, TABLE, stated
from confed.studies.study import Grid, points_of_models
from confed.studies.tuned import read_tuned

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from make_claims import remade  # noqa: E402

DIGITS = 10
"""Significant digits of numbers in CSV files."""
PARTS = re.compile(r"_(?:table(?:-\w+)?|compare|seeds)$")
MEASURES: Mapping[str, tuple[str, str]] = {
    "personal on own data": ("personal_mean", "personal"),
    "global on seen": ("global_seen_mean", "global_seen"),
    "global on unseen": ("global_unseen_mean", "global_unseen"),
    "deployed at each client": ("deployed_mean", ""),
}
"""Measure of a CSV file -> figure of a run, and that of each place; what is deployed at a place is not a figure."""
AVERAGES: Mapping[str, str] = {
    "personal average": "personal_mean", "unseen average": "global_unseen_mean", "deployed average": "deployed_mean",
}  # fmt: skip
UNJUDGED = {*INDIFFERENT, "run.controls"}
"""Settings that change no figure of a table."""
LABELS = re.compile(r"(?:(personal|unseen) )?([CO]-(?:AP|P|R|F1))")

Spread = tuple[float, float | None, int]
"""Mean, standard deviation and number of seeds."""


@dataclass
class Row:
    """What CSV files have of a row: figure -> mean and deviation, and seed -> figure -> value."""

    means: dict[str, Spread] = field(default_factory=dict)
    seeds: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A command that made tables.

    Attributes:
        text: as it is given.
        without: why there is no results file; empty if there is one.
        model: of a sweep over models.
        labels: row in CSV files -> method.
    """

    text: str
    without: str = ""
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def commands(folder: Path) -> dict[str, Command]:
    """Table -> its command: what is listed, and what is called like a recipe."""
    listed = tomllib.loads((folder / "commands.toml").read_text(encoding="utf-8"))
    found = {name: Command(entry.pop("command"), **entry) for name, entry in listed.items()}
    for name in sorted({PARTS.sub("", path.stem) for path in folder.glob("*.csv")} & {*packaged_recipes()}):
        tuned = f" --tuned docs/results/{name}_tuned.toml" if (folder / f"{name}_tuned.toml").is_file() else ""
        found.setdefault(name, Command(f"confed compare {name}{tuned}"))
    return found


def command_of(stem: str, known: Mapping[str, Command]) -> str | None:
    """The table that a CSV file belongs to: the longest name with which it begins."""
    fits = [name for name in known if stem == name or stem.startswith((f"{name}_", f"{name}-"))]
    return max(fits, key=len, default=None)


def read(folder: Path, name: str) -> dict[str, Row]:
    """Label of each row -> what the CSV files of a table have of it."""
    found: dict[str, Row] = {}
    for line in rows_of(folder / f"{name}_seeds.csv"):
        if (figure := _figure(line["measure"], line["place"])) and line["value (%)"]:
            row = found.setdefault(line["method"], Row())
            row.seeds.setdefault(int(line["seed"]), {})[figure] = shifted(line["value (%)"])
    for row in found.values():
        for figure in dict.fromkeys(itertools.chain.from_iterable(row.seeds.values())):
            values = [of[figure] for of in row.seeds.values() if figure in of]
            spread = statistics.stdev(values) if len(values) > 1 else None
            row.means[figure] = (
                rounded(statistics.fmean(values)),
                None if spread is None else rounded(spread),
                len(values),
            )
    if found:
        return found
    for line in rows_of(folder / f"{name}_compare.csv"):
        if (figure := _figure(line["measure"], "")) and line["value (%)"]:
            spread = line.get("value sd (%)", "")
            value = (shifted(line["value (%)"]), shifted(spread) if spread else None, int(line.get("seeds") or 0))
            found.setdefault(line["method"], Row()).means.setdefault(figure, value)
    return found or _averages(rows_of(folder / f"{name}_table.csv"))


def _averages(lines: list[dict[str, str]]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for line in lines:
        for column, text in line.items():
            heading = column.removesuffix(" (%)")
            figure = AVERAGES.get(heading) or (_figure(heading, "") if LABELS.fullmatch(heading) else "")
            if figure and text:
                spread = line.get(f"{heading} sd (%)", "")
                value = (shifted(text), shifted(spread) if spread else None, 0)
                found.setdefault(line["method"], Row()).means[figure] = value
    return found


def _figure(measure: str, place: str) -> str:
    """Name of a figure in results files; empty for what they do not have."""
    if match := LABELS.fullmatch(measure):
        return "" if place else f"multilabel/{match[1] or 'global'}/{match[2]}"
    mean, of = MEASURES.get(measure, ("", ""))
    return mean if not place else f"{of}/{place}" if of else ""


def shifted(text: str) -> float:
    """Percent as a fraction with the same digits."""
    return float(f"{float(text):.{DIGITS}g}e-2")


def rounded(value: float) -> float:
    """A number with as many digits as the CSV files have."""
    return float(f"{value:.{DIGITS}g}")


def option(words: list[str], name: str, default: str = "") -> str:
    """An option's value, taken away from a command's words."""
    if name not in words:
        return default
    at = words.index(name)
    _, value = words.pop(at), words.pop(at)
    return value


def recipe_of(command: Command) -> tuple[Recipe, int]:
    """The recipe of a command, with all rows that it may have, and its number of seeds (0 if it does not say).

    Raises:
        ValueError: it is no ``confed compare RECIPE``.
    """
    words = shlex.split(command.text.partition("; ")[0])
    if words[:2] != ["confed", "compare"]:
        raise ValueError(f"must be `confed compare RECIPE`, got {command.text!r}")
    del words[:2]
    name, methods = words.pop(0), option(words, "--methods")
    seeds, tuned = int(option(words, "--seeds", "0")), option(words, "--tuned")
    headline, models = option(words, "--headline"), option(words, "--models")
    while option(words, "--reference") or option(words, "--relative"):
        pass
    values = read_tuned(DOCS.parent / tuned)[0] if tuned else None
    recipe = load_recipe(name, words)
    # The CSV files say which rows there are.
    named = [row for row in methods.split(",") if row not in ("", "all")]
    rows = ",".join(dict.fromkeys([*named, *recipe.table, *recipe.methods, *recipe.overrides])) or "all"
    if models:
        grid = Grid(name, words, rows, headline, values, points=points_of_models(recipe, [command.model]))
        return grid.recipes[command.model][0], seeds
    return Grid(name, words, rows, headline, values).rows()[0], seeds


def table(folder: Path, name: str, command: Command) -> dict[str, Any]:
    """Content of a table's results file.

    Raises:
        ValueError: a row of the CSV files is none of the recipe's, or their number of seeds is not known.
    """
    recipe, seeds = recipe_of(command)
    first = recipe.run.seed
    named = {command.labels.get(label, label): row for label, row in read(folder, name).items()}
    labels = {row: recipe.label(row) for row in reversed(recipe.methods)}
    by_label = {label: row for row, label in labels.items()} | {row: row for row in labels}
    rows: list[dict[str, Any]] = []
    for label, values in named.items():
        if label not in by_label:
            raise ValueError(f"{name}: no row of {command.text!r} is called {label!r}")
        method = by_label[label]
        numbers = sorted(values.seeds) or list(range(first, first + (_seeds(values) or seeds)))
        if not numbers:
            raise ValueError(f"{name}: the command must say --seeds, for no CSV file does")
        rows.append(
            {
                "method": method,
                "label": label if label != method else labels[method],
                **({"deploys": _deploys(recipe, method, values.means)} if "deployed_mean" in values.means else {}),
                "seeds": numbers,
                "resolved": tomllib.loads(_published(recipe.method(method)).with_run(seed=numbers[0]).to_toml()),
                "metrics": {key: _stated(*value, len(numbers)) for key, value in values.means.items() if _is_mean(key)},
                "figures": {str(seed): of for seed, of in values.seeds.items()} or _of_single(values, numbers),
            }
        )
    shared = {
        key: section
        for key, section in rows[0]["resolved"].items()
        if all(row["resolved"].get(key) == section for row in rows)
    }
    for row in rows:
        row["resolved"] = {key: section for key, section in row["resolved"].items() if key not in shared}
    return {
        "format": TABLE,
        "recipe": recipe.name,
        "command": command.text,
        "files": sorted(path.name for path in folder.glob("*.csv") if PARTS.sub("", path.stem) == name),
        "digits": DIGITS,
        "resolved": shared,
        "rows": rows,
    }


def _published(recipe: Recipe) -> Recipe:
    """A row's recipe as its table was made: one client after the other, where the command does not say otherwise."""
    return recipe.with_run(batch_clients=1) if recipe.run.batch_clients == "auto" else recipe


def _deploys(recipe: Recipe, method: str, means: Mapping[str, Spread]) -> str:
    """What a row deploys at a client: the key of the model whose values the CSV files repeat, else as recipes say."""
    for key in ("global_seen", "personal"):
        if f"{key}_mean" in means and means[f"{key}_mean"] == means["deployed_mean"]:
            return key
    algorithm = recipe.method(method).sections["algorithm"]["name"]
    heads = Summary({"algorithm": algorithm}).global_model == "with own parts"
    return recipe.deploys(method) or ("global_seen" if heads else "personal")


def _is_mean(figure: str) -> bool:
    """Whether a figure is judged, and not only shown: one of a place is not."""
    return figure in MEANS or figure.startswith("multilabel/")


def _seeds(row: Row) -> int:
    return max(n for _, _, n in row.means.values())


def _stated(average: float, sd: float | None, known: int, seeds: int) -> dict[str, Any]:
    """A figure over seeds, with numbers of as many digits as the CSV files have."""
    figure = stated(average, sd if sd is not None else 0.0, known or seeds if sd is not None else 1)
    return {
        key: [rounded(end) for end in value] if isinstance(value, list) else value and rounded(value)
        for key, value in figure.items()
    }


def _of_single(row: Row, seeds: list[int]) -> dict[str, dict[str, float]]:
    """Of a single seed the means are its own values."""
    return {str(seeds[0]): {key: value for key, (value, _, _) in row.means.items()}} if len(seeds) == 1 else {}


def text_of(content: Mapping[str, Any]) -> str:
    """JSON with a line for each key, row and figure."""
    lines: list[str] = []
    for key, value in content.items():
        if key != "rows":
            lines.append(f" {_json(key)}: {_json(value)}")
            continue
        rows = [",\n".join(f"   {_json(k)}: {_json(v)}" for k, v in row.items()) for row in value]
        lines.append(' "rows": [\n' + ",\n".join(f"  {{\n{row}\n  }}" for row in rows) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a results file says otherwise than CSV files and command; settings that are new since are no difference."""
    for key in ("recipe", "command", "files", "digits"):
        if before.get(key) != now[key]:
            yield f"{key}: {before.get(key)!r}, now {now[key]!r}"
    there, here = ({row["method"]: row for row in content.get("rows", ())} for content in (before, now))
    if [*there] != [*here]:
        yield f"rows: {', '.join(there)}, now {', '.join(here)}"
    texts: dict[str, list[str]] = {}
    for method in [method for method in here if method in there]:
        for key in ("label", "deploys", "seeds", "metrics", "figures"):
            if there[method].get(key) != here[method].get(key):
                texts.setdefault(f"{key} are not those of the CSV files", []).append(method)
        old, new = (flat({**of["resolved"], **row[method]["resolved"]}) for of, row in ((before, there), (now, here)))
        for setting, value in old.items():
            if setting not in UNJUDGED and (setting not in new or new[setting] != value):
                text = f"{setting} is {value!r}, and {new.get(setting)!r} by the command today"
                texts.setdefault(text, []).append(method)
    yield from (f"{', '.join(methods)}: {text}" for text, methods in texts.items())


def made(folder: Path) -> dict[str, dict[str, Any]]:
    """Table -> content of its results file, of all that have one.

    Raises:
        ValueError: a CSV file has no command.
    """
    known = commands(folder)
    for path in sorted(folder.glob("*.csv")):
        if command_of(path.stem, known) is None:
            raise ValueError(f"{path.name}: no command in docs/results/commands.toml, and no recipe is called so")
    return {name: table(folder, name, command) for name, command in sorted(known.items()) if not command.without}


def page(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The list of all tables, in Markdown."""
    known = commands(folder)
    without = [name for name in known if name not in files]
    seeds = [name for name in files if f"{name}_seeds.csv" in files[name]["files"]]
    intro = (
        "Written by `python docs/make_results.py` from [commands.toml](results/commands.toml). Of "
        f"{len(known)} tables {len(files)} have a results file: `confed reproduce docs/results/NAME.json --method ROW` "
        f"makes a row again ([how](reproducing.md#tables-of-this-documentation)). {len(seeds)} of them have the "
        f"value of each seed, the other files means and deviations over seeds. {len(without)} tables have none and say "
        "why. All were made one client after the other (`run.batch_clients=1`), as `confed reproduce` does."
    )
    lines = ["# Commands of all tables", "", textwrap.fill(intro, 120, break_on_hyphens=False, break_long_words=False)]
    groups = {
        "With a results file": [(name, known[name].text, _about(files[name])) for name in files],
        "Without": [(name, known[name].text, known[name].without) for name in without],
    }
    for heading, rows in groups.items():
        last = "rows, seeds" if heading != "Without" else "why"
        lines += ["", f"## {heading}", "", f"| table | command | {last} |", "| :--- | :--- | :--- |"]
        lines += [f"| {name} | `{text}` | {about} |" for name, text, about in sorted(rows)]
    return "\n".join(lines) + "\n"


def _about(content: Mapping[str, Any]) -> str:
    counts = sorted({len(row["seeds"]) for row in content["rows"]})
    return f"{len(content['rows'])}, {' or '.join(map(str, counts))}"


def main(arguments: list[str]) -> int:
    """The command: the exit status."""
    folder, wrong = DOCS / "results", 0
    files = made(folder)
    listing = page(folder, files)
    if "--check" not in arguments:
        for name, content in files.items():
            (folder / f"{name}.json").write_text(text_of(content), encoding="utf-8")
        (DOCS / "tables.md").write_text(listing, encoding="utf-8")
        for path, _, text in remade():
            path.write_text(text, encoding="utf-8")
        return 0
    for name, content in files.items():
        path = folder / f"{name}.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for text in differences(before, json.loads(text_of(content))) if before else ["missing"]:
            print(f"docs/results/{name}.json: {text}; see docs/make_results.py")
            wrong += 1
    if (DOCS / "tables.md").read_text(encoding="utf-8") != listing:
        print("docs/tables.md is not what docs/make_results.py writes")
        wrong += 1
    for path, before, after in remade():
        pairs = zip(before.splitlines(), after.splitlines(), strict=False)
        line = next((number for number, (now, new) in enumerate(pairs, start=1) if now != new), 0)
        print(f"{path.name}:{line}: is not what claims/ and the CSV files give; run python docs/make_results.py")
        wrong += 1
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
