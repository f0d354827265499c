"""Dossiers of docs/dossier.md: the runs, their limits, what the dossiers say, and the processor time that they take.

    python benchmarks/dossiers.py within beyond --out runs/dossiers
    python benchmarks/dossiers.py benchmark

Of each a run folder with ``dossier/`` in it, and on standard output what its page says. ``benchmark`` is a run of the
built-in benchmark's size. ``--minutes`` is the dossier's; the default never cuts, whatever else the machine does.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from confed.recipes.recipe import load_recipe
from confed.release.dossier import dossier
from confed.release.limits import Release
from confed.release.page import figures_table
from confed.report.tables.table import to_markdown
from confed.runs.run import run

HEAD = ("study.methods=[]", "algorithm.name=fedavg", "model.trainable=head", "model.head=linear")
HARD = (
    "data.partition=dirichlet", "data.alpha=0.3", "data.new=none", "data.shots=6", "data.test_per_class=10",
    "data.validation_shots=2", "run.rounds=6", "local.epochs=5", "local.lr=0.1",
)  # fmt: skip
EXAMPLES: Mapping[str, tuple[str, Sequence[str], Release]] = {
    "within": (
        "prompts_scenes",
        HEAD,
        Release(membership_auc=0.65, membership_tpr=0.05, reconstruction=0.2, least_members=100),
    ),
    "beyond": (
        "prompts_scenes",
        (*HEAD, *HARD),
        Release(
            membership_auc=0.6, properties=0.3, labels=0.3, reconstruction=0.2, record_epsilon=8.0, least_members=100
        ),
    ),
    "benchmark": ("fedvqa_scenes", ("study.methods=[]", "algorithm.name=fedavg"), Release()),
}


def print_content(content: Mapping[str, Any]) -> None:
    """What the page says, as Markdown."""
    print(f"\n> {content['sentence']} {content['details']}\n\nTrained again: {content['same_bits']}\n")
    print(to_markdown(figures_table(content)).removeprefix("****").lstrip())
    for row in content["sent"]:
        print(f"- {row['site']}: {row['records']} records, rounds {row['rounds']}, {row['bytes']:,} bytes")
    print(f"- each time: {content['kinds']}")
    for row in content["gains"]:
        print(f"- {row['sentence']} Pooled {row['pooled']:.3f}.")
    for row in content["standing"]:
        print(f"- {row['site']}: norm {row['norm']:.3g}, cosine {row['cosine']:.2f}, moves {row['influence']}")
    for row in content["not_examined"]:
        print(f"- not examined: {row['what']}, {row['why']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=sorted(EXAMPLES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.names:
            recipe, settings, limits = EXAMPLES[name]
            folder = (given.out or Path(scratch)) / name
            began = time.process_time()
            run(load_recipe(recipe, settings), folder)
            trained = time.process_time()
            examined = dossier(folder, limits, minutes=given.minutes)
            seconds = time.process_time() - trained
            print(f"\n## {name}: {trained - began:.0f} s of processor time to train, {seconds:.0f} s for the dossier")
            print_content(examined.content)


if __name__ == "__main__":
    main()
