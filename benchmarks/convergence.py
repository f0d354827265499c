"""How fast rows converge (FedDAT's figure 5; the multimodal Transformer's figures 3 and 4), tested over seeds.

Of a finished study that was evaluated after every round (``run.evaluate_every=1``). Prints a CSV, three lines per row:
the mean over all rounds of its curve of validation data, the first round with 95 % of the last value, and the round
from which on the curve stays within a point of its last value. Each is a mean over seeds, with the difference to the
reference, its 95 % interval and a paired t-test over the seeds that both have (no correction).

    confed compare feddat_scene_equal run.evaluate_every=1 --methods adapter,feddat --seeds 5 --out STUDY
    python benchmarks/convergence.py STUDY --reference adapter > convergence.csv
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from confed.metrics.statistics import paired_t
from confed.report.figures.results import judged_curves
from confed.results.history import Curve
from confed.results.runs import load

SHARE, NEAR = 0.95, 0.01
MEASURES = ("mean over rounds", "first round with 95 %", "settled from round")


def measured(curve: Curve) -> tuple[float, float, float]:
    """The three measures of one curve, the first in points.

    Args:
        curve: round -> validation result, a fraction; at least two rounds.
    """
    rounds = sorted(curve)
    last = curve[rounds[-1]]
    there = next(round for round in rounds if curve[round] >= SHARE * last)
    away = [round for round in rounds if abs(curve[round] - last) > NEAR]
    settled = next(round for round in rounds if not away or round > away[-1])
    return 100 * statistics.fmean(curve.values()), float(there), float(settled)


def compared(own: Mapping[int, float], other: Mapping[int, float]) -> list[str]:
    """Difference, its interval and the p-value over the seeds of both; empty where there are fewer than two."""
    seeds = sorted(own.keys() & other.keys())
    differences = [own[seed] - other[seed] for seed in seeds]
    if len(differences) < 2:
        return [f"{differences[0]:.4f}" if differences else "", "", "", ""]
    found = paired_t([own[seed] for seed in seeds], [other[seed] for seed in seeds])
    p = "" if found.p is None else f"{found.p:.4f}"  # differences without spread
    return [f"{found.difference:.4f}", f"{found.low:.4f}", f"{found.high:.4f}", p]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--reference", required=True, help="row that the others are compared with")
    arguments = parser.parse_args()
    study = load(arguments.study)
    curves = judged_curves(study)
    if arguments.reference not in curves:
        parser.error(f"--reference must be a row with curves, one of {', '.join(curves)}, got {arguments.reference!r}")
    seeds = {row: [run.seed for run in study.of(row)] for row in curves}
    found = {row: [measured(curve) for curve in of_row if len(curve) > 1] for row, of_row in curves.items()}
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["row", "measure", "seeds", "value", "sd", "difference", "low", "high", "p"])
    for row, values in found.items():
        for number, measure in enumerate(MEASURES):
            own = {seed: value[number] for seed, value in zip(seeds[row], values, strict=True)}
            other = {
                seed: value[number]
                for seed, value in zip(seeds[arguments.reference], found[arguments.reference], strict=True)
            }
            spread = f"{statistics.stdev(own.values()):.4f}" if len(own) > 1 else ""
            test = [""] * 4 if row == arguments.reference else compared(own, other)
            table.writerow(
                [study.labels[row], measure, len(own), f"{statistics.fmean(own.values()):.4f}", spread, *test]
            )


if __name__ == "__main__":
    main()
