"""Does approximate forgetting leave what a run without the client leaves? A membership attack over five seeds.

Per seed: FedAvg on the built-in benchmark, setting C; one client is forgotten exactly (run again without it) and
approximately (:mod:`confed.unlearning.exact`, its defaults). The attack's AUC on that client, approximate against
exact, is tested for equivalence (TOST, paired over seeds) within a margin of 0.05, fixed beforehand; as a control the
same test is made of the run that never forgot. The figures to read are the two intervals.

    python benchmarks/forgetting.py [--epochs 2] [--client sports] [--seeds 5] [--folder DIR]
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from confed.metrics.statistics import tost
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.unlearning.exact import Approximation, forget

MARGIN = 0.05
COLUMNS = ("auc", "accuracy", "global_seen", "personal", "global_unseen")


def cell(root: Path, seed: int, epochs: int, client: str) -> dict[str, dict[str, float]]:
    """The figures of one seed: of the run with the client, of the one without, and of the approximation."""
    recipe = load_recipe(
        "fedvqa_scenes",
        [
            "study.methods=[]", "algorithm.name=fedavg", "run.rounds=4", "run.workers=1", "run.gallery=0",
            "run.evaluate_every=0", f"run.seed={seed}", f"local.epochs={epochs}",
        ],
    )  # fmt: skip
    whole = root / f"seed-{seed}"
    if not (whole / "summary.json").exists():
        run(recipe, whole, resume=whole.exists())
    began = time.perf_counter()
    exact = forget(whole, client, root / f"seed-{seed}-exact")
    exactly = time.perf_counter() - began
    began = time.perf_counter()
    near = forget(whole, client, root / f"seed-{seed}-approximate", approximate=Approximation())
    seconds = {"exact": exactly, "approximate": time.perf_counter() - began}
    return {"with the client": exact["original"], "exact": exact["result"], "approximate": near["result"]} | {
        "seconds": seconds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--client", default="sports")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    root = given.folder or Path(tempfile.mkdtemp(prefix="forgetting-"))
    cells = [cell(root, seed, given.epochs, given.client) for seed in range(given.seeds)]
    kinds = ("with the client", "exact", "approximate")
    print(f"{'':16}" + "".join(f"{column:>15}" for column in COLUMNS))
    for kind in kinds:
        print(f"{kind:16}" + "".join(f"{mean(c[kind][column] for c in cells):15.4f}" for column in COLUMNS))
    for kind in kinds:
        print(f"AUC per seed, {kind}: " + ", ".join(f"{c[kind]['auc']:.4f}" for c in cells))
    result = {"epochs": given.epochs, "client": given.client, "margin": MARGIN, "cells": cells, "tost": {}}
    for kind in ("approximate", "with the client"):
        test = tost([c[kind]["auc"] for c in cells], [c["exact"]["auc"] for c in cells], MARGIN)
        inside = test.low > -MARGIN and test.high < MARGIN
        p = "–" if test.p is None else f"{test.p:.2g}"
        print(
            f"{kind} - exact: difference {test.difference:+.4f}, 90 % interval [{test.low:+.4f}, {test.high:+.4f}], "
            f"p = {p}: {'within' if inside else 'not shown to be within'} {MARGIN}"
        )
        result["tost"][kind] = {"difference": test.difference, "low": test.low, "high": test.high, "p": test.p}
    (root / "forgetting.json").write_text(json.dumps(result, indent=1))
    print(f"figures: {root / 'forgetting.json'}")


if __name__ == "__main__":
    sys.exit(main())
