"""Whether the attention of a model lies on the thing that is asked about (BiCSL's figure 5), run by run.

Of finished runs on the built-in scenes dealt at random (`bicsl_scenes`), whose regions are the 4 x 4 cells in which
things stand. Questions that name one thing (its colour, size or place, or which thing has a colour) have one right
cell. Prints a CSV, a line per run, in % of the clients' test questions: how often the right cell has the largest
weight, its mean share of all weights (chance: 6.25 both), the share on cells that hold anything, and the first two
with the question replaced by another one about the same picture that names a thing in another cell. With ``--tests``
the argument is such a CSV: a paired t-test over seeds of right against replaced questions, row by row.

    confed compare bicsl_scenes --methods bicsl,central --seeds 5 --out STUDY
    python benchmarks/attended_cells.py STUDY > cells.csv
    python benchmarks/attended_cells.py cells.csv --tests
"""

import argparse
import csv
import sys
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confed.datasets.scenes.graph import CELLS, objects
from confed.datasets.scenes.making import SETTINGS, Knobs, Made
from confed.datasets.scenes.presets import PRESETS
from confed.datasets.scenes.questions import parse
from confed.federation.specs import Attends
from confed.inference.finished_run import FinishedRun
from confed.metrics.statistics import paired_t
from confed.results.folder import run_folders

MEASURES = ("largest", "share", "things", "largest, replaced", "share, replaced")
COLUMNS = ("row", "seed", "questions", *(f"{name} (%)" for name in MEASURES))
BY_NOUN, BY_COLOUR = ("qcolor", "qsize", "qpos"), ("qnoun",)


def tests_of(run: FinishedRun) -> dict[str, Made]:
    """Client -> its test questions with what stands in their pictures, generated again from the recipe."""
    data: dict[str, Any] = dict(run.recipe.sections["data"])
    if data.pop("name") != "scenes" or data.get("preset") != "random":
        raise ValueError(f"{run.folder}: the runs must have data.name = 'scenes' and data.preset = 'random'")
    known = {field.name for field in fields(Knobs)}
    knobs = Knobs(
        conflict=SETTINGS["C"].conflict, wording=False, train=1, validation=1, test=1, unseen=(), clients=2, alpha=0.5,
        questions_per_picture=4, test_seed=0, seed=run.recipe.run.seed,
    )  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in data.items() if name in known}
    knobs = replace(knobs, **given)
    made = {client: roles["test"] for client, roles in PRESETS["random"].make(knobs).items()}
    for client, table in made.items():
        if list(table.examples.questions) != list(run.dataset.clients[client].test.questions):
            raise ValueError(f"{run.folder}: the test questions of {client} are not those of the recipe")
    return made


def asked_cell(made: Made, row: int) -> int | None:
    """The cell of the one thing that a question names; None where it names none or several."""
    program = parse(made.examples.questions[row])
    there = objects(made.tags, int(made.examples.image_index[row]))
    if program.family in BY_NOUN:
        cells = [thing.cell for thing in there if thing.noun == program.arguments[0]]
    elif program.family in BY_COLOUR:
        cells = [thing.cell for thing in there if thing.colour == program.arguments[0]]
    else:
        return None
    return cells[0] if len(cells) == 1 else None


def measured(run: FinishedRun) -> list[float]:
    """The figures of a run's global model, over the questions of all clients."""
    model, found = run.model(None).model, defaultdict[str, list[Tensor]](list)
    if not isinstance(model, Attends):
        raise TypeError(f"{run.folder}: expected a model with attention over regions, got {type(model).__name__}")
    for client, made in tests_of(run).items():
        batch = run.batch(client, "test", sys.maxsize)
        cells = {row: cell for row in range(len(made.examples)) if (cell := asked_cell(made, row)) is not None}
        rows, others = [], []
        for row, cell in cells.items():
            picture = made.examples.image_index[row]
            other = [r for r, c in cells.items() if made.examples.image_index[r] == picture and c != cell]
            if other:
                rows.append(row)
                others.append(other[0])
        right = torch.tensor([cells[row] for row in rows])
        things = torch.from_numpy(made.tags.noun[made.examples.image_index[np.array(rows)]] > 0)
        own = {key: value[rows] for key, value in batch.items()}
        replaced = own | {key: batch[key][others] for key in ("text", "text_mask")}
        for name, questions in (("", own), (", replaced", replaced)):
            with torch.inference_mode():
                weights = model.attention(questions).double()
            if weights.shape[1] != CELLS:
                raise ValueError(f"{run.folder}: expected weights of {CELLS} cells, got {weights.shape[1]}")
            shares = weights / weights.sum(1, keepdim=True)
            found["largest" + name].append((shares.argmax(1) == right).double())
            found["share" + name].append(shares.gather(1, right[:, None])[:, 0])
            if not name:
                found["things"].append((shares * things).sum(1))
    means = {name: 100 * float(torch.cat(parts).mean()) for name, parts in found.items()}
    number = sum(map(len, found["largest"]))
    return [number, *(means[name] for name in MEASURES)]


def tests(file: Path) -> None:
    """Prints, row by row, how much further attention lies on the right cell with the right question."""
    lines = defaultdict[str, list[dict[str, str]]](list)
    with file.open(encoding="utf-8", newline="") as content:
        for line in csv.DictReader(content):
            lines[line["row"]].append(line)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("row", "measure", "difference (points)", "low (points)", "high (points)", "p"))
    for row, seeds in lines.items():
        for name in ("largest", "share"):
            right, other = ([float(line[f"{name}{kind} (%)"]) for line in seeds] for kind in ("", ", replaced"))
            test = paired_t(right, other)
            writer.writerow((row, name, test.difference, test.low, test.high, test.p))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--tests", action="store_true")
    given = parser.parse_args()
    if given.tests:
        tests(given.study)
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for folder in run_folders(given.study):
        if (folder / "summary.json").is_file():
            run = FinishedRun(folder)
            run.load()
            writer.writerow([folder.parent.name, run.recipe.run.seed, *measured(run)])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
