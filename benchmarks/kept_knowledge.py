"""What clients' own models still know of the other clients' data after local training, method by method.

Of a finished study whose clients share one set of answers (`fedvqa_own_answers`): every client's own model is asked
the test questions of its own client and of all others. Prints a CSV: accuracy in % of own data, of the others' data,
and of the global model on all clients' data, per row of the recipe and seed. With ``--tests`` the argument is such a
CSV: paired t-tests over seeds of the others' data, against the first row, with Holm's correction.

    confed compare fedvqa_own_answers --seeds 3 --out STUDY
    python benchmarks/kept_knowledge.py STUDY > kept.csv
    python benchmarks/kept_knowledge.py kept.csv --tests
"""

import argparse
import csv
import sys
from pathlib import Path
from statistics import fmean

from confed.inference.finished_run import FinishedRun
from confed.metrics.statistics import PairedT, holm, paired_t
from confed.results.folder import run_folders

COLUMNS = ("row", "seed", "own data (%)", "others' data (%)", "global (%)")


def accuracy(run: FinishedRun, client: str | None, places: list[str]) -> float | None:
    """Mean over places of a client's own model's accuracy, or of the global one's, in %; None without a global one."""
    if client is None and not run.global_file.is_file():
        return None
    model = run.model(client)
    right: list[float] = []
    for place in places:
        batch = run.batch(place, "test", sys.maxsize)
        right.append(float((model(batch).logits.argmax(1) == batch["label"]).float().mean()))
    return 100 * fmean(right)


def row(folder: Path) -> list[str | int | float | None]:
    """The figures of one run."""
    run = FinishedRun(folder)
    run.load()
    own: list[float | None] = [accuracy(run, client, [client]) for client in run.owners]
    others = [accuracy(run, client, [place for place in run.owners if place != client]) for client in run.owners]
    seed = run.recipe.run.seed
    means = [fmean(value for value in values if value is not None) for values in (own, others)]
    return [folder.parent.name, seed, *means, accuracy(run, None, list(run.owners))]


def tests(file: Path) -> None:
    """Prints how far each row of a CSV is from its first one on the others' data."""
    values: dict[str, dict[str, float]] = {}
    with file.open(encoding="utf-8", newline="") as content:
        for line in csv.DictReader(content):
            values.setdefault(line["row"], {})[line["seed"]] = float(line["others' data (%)"])
    first, *others = values
    found: dict[str, PairedT] = {}
    for name in others:
        seeds = [seed for seed in values[name] if seed in values[first]]
        found[name] = paired_t([values[name][s] for s in seeds], [values[first][s] for s in seeds])
    corrected = holm({name: test.p for name, test in found.items() if test.p is not None}).adjusted
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("row", "to", "difference (points)", "low (points)", "high (points)", "p"))
    for name, test in found.items():
        writer.writerow((name, first, test.difference, test.low, test.high, corrected.get(name)))


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
        if (folder / "summary.json").is_file() and any((folder / "models" / "personal").glob("*")):
            writer.writerow(row(folder))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
